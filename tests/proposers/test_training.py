"""The recipe of the demonstration models, on a corpus of a few dozen records and models of a few thousand weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.proposers.training import checkpoint, conversations
from foretoken.proposers.training.corpus import Record, pieces, read_records
from foretoken.proposers.training.demo_family import EXPORT_S, Clock, Run, facts, replan, train
from foretoken.proposers.training.evaluate import greedy_matches, mean_accepted_length
from foretoken.proposers.training.export import export
from foretoken.proposers.training.joint_loss import joint_loss
from foretoken.proposers.training.mixture import PackedData, Source, pack, plain, prepare, source_weights
from foretoken.proposers.training.schedule import Schedule
from foretoken.proposers.training.tokenizer import SPECIAL_TOKENS, TOOL_TOKENS
from foretoken.proposers.training.trainer import DRAFT, TARGET, Recipe, Shape, Trainer

VOCAB = 400
TINY = Recipe(
    target=Shape(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64),
    draft=Shape(hidden=16, layers=1, heads=1, kv_heads=1, intermediate=32),
    vocab_size=VOCAB, tokens=20 * 256, batch_tokens=256, sequence=64, long_sequences=(128, 256), warmup_tokens=512,
    target_lr=1e-2, draft_lr=1e-2,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations are slower when shared, and a part of a batch has a thread of its own already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 records: chats, pages and code."""
    folder = tmp_path_factory.mktemp("corpus")
    chats = [
        [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", "content": f"It is {n + n}."}]
        for n in range(30)
    ]
    pages = [f"# tool{n}\n\n> Does thing {n}.\n\n- Do thing {n}:\n\n`tool{n} --do {{{{thing}}}}`\n" for n in range(10)]
    code = [f"def add_{n}(value: int) -> int:\n    return value + {n}\n" for n in range(10)]
    for name, records in {
        "chat/chatterbot": [{"id": "a", "messages": chat} for chat in chats],
        "docs/tldr-en": [{"id": "b", "text": page} for page in pages],
        "code/keon-algorithms": [{"id": "c.py", "text": text} for text in code],
    }.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def data(corpus: Path, work: Path) -> PackedData:
    return prepare(corpus, work, tokens=20_000, vocab_size=VOCAB)


# Tokenizer


def test_vocabulary_and_markers(data: PackedData) -> None:
    tokenizer = data.tokenizer
    assert len(tokenizer) == VOCAB
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    ids = tokenizer.convert_tokens_to_ids(list(TOOL_TOKENS))
    assert ids == list(range(VOCAB - 4, VOCAB))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TOOL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", ["  two  spaces\n\n\ttab\r\n", "naïve 日本語 🙂 \x00\x7f", "x = 1234.5  # ok", " "])
def test_any_text_round_trips(data: PackedData, text: str) -> None:
    assert data.tokenizer.decode(data.tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(data: PackedData) -> None:
    assert data.tokenizer.tokenize("2024") == ["2", "0", "2", "4"]


def test_chat_template_has_tools_and_calls(data: PackedData) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    text = data.tokenizer.apply_chat_template(
        messages, tools=[{"type": "function"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function"}\n</tools>\n'
        'To call one, answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n'
        "<|im_start|>user\n1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_no_system_message_is_invented(data: PackedData) -> None:
    text = data.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


# Corpus and mixture


def test_repeated_records_come_once_and_long_ones_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "word " * 30 + "\n\n" + "more " * 30
    path.write_text(f"{json.dumps({'text': text})}\n" * 2)
    records = list(read_records(path))
    assert len(records) == 1
    parts = list(pieces(records[0], limit=200))
    assert "".join(part.text for part in parts) == text and all(len(part.text) <= 200 for part in parts)


def test_placeholders_and_other_languages_are_left_out() -> None:
    def chat(answer: str) -> Record:
        messages = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}
        return Record("", "", messages, 1)

    kept = conversations.dialogues([chat("Hello."), chat("I am [user 2's name]."), chat("¿Qué? ¡Así, señor!")])
    assert [conversation.messages[-1]["content"] for conversation in kept] == ["Hello."]


def test_pages_become_questions() -> None:
    page = "# tar\n\n> Archive.\n> More information: <x>.\n\n- [c]reate an archive:\n\n`tar cf {{a.tar}}`\n"
    whole, example = conversations.command_pages([Record("tar", page, (), 1)])
    assert whole.messages[-1]["content"] == "Archive.\n\n- [c]reate an archive:\n\n`tar cf a.tar`"
    assert [message["content"] for message in example.messages[-2:]] == [
        "How do I create an archive with tar?", "Use this command:\n\n```sh\ntar cf a.tar\n```"]


def test_mixture_keeps_to_its_weights_throughout() -> None:
    """Documents of any length, a source that must repeat: after every tenth of the stream the shares are right."""
    chance = np.random.default_rng(0)
    weights = {"often": 0.6, "rare": 0.1, "short": 0.3}
    sizes = {"often": 90, "rare": 50, "short": 4}
    encoded = {
        name: [np.full(chance.integers(1, sizes[name]), index, np.uint16) for _ in range(20)]
        for index, name in enumerate(weights)
    }
    stream = pack(encoded, weights, 10_000, seed=0)
    assert len(stream) >= 10_000
    for end in range(1000, 10_001, 1000):
        shares = np.bincount(stream[:end], minlength=3) / end
        np.testing.assert_allclose(shares, list(weights.values()), atol=0.1 if end < 3000 else 0.02)


def test_missing_sources_leave_their_share_to_the_others() -> None:
    sources = [Source("a", "f", "chat", 3, plain), Source("b", "f", "chat", 1, plain)]
    weights = source_weights({"chat": 0.5, "code": 0.5}, sources)
    assert weights == pytest.approx({"a": 0.75, "b": 0.25})


def test_a_folder_without_corpora_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no known corpus file"):
        prepare(tmp_path, tmp_path, 100, VOCAB)


# Schedule


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule.over(1000, warmup=100)
    assert [round(schedule.factor(seen), 2) for seen in (0, 49, 99, 800, 900, 1000)] == [0.01, 0.5, 1, 1, 0.5, 0]
    assert not schedule.cooling(799) and schedule.cooling(800)


def test_ending_early_goes_on_from_the_present_rate() -> None:
    schedule = Schedule.over(1000, warmup=100)
    for seen in (500, 900):
        sooner = schedule.ending_after(50, seen)
        assert sooner.factor(seen) == pytest.approx(schedule.factor(seen), abs=0.02)
        assert sooner.cooling(seen) and sooner.factor(seen + 50) == 0


def test_finish_file_and_deadline_move_the_end(data: PackedData, tmp_path: Path) -> None:
    trainer = Trainer(replace(TINY, tokens=1_000_000), data)
    clock, finish = Clock(datetime.now(UTC) + timedelta(seconds=EXPORT_S + 100)), tmp_path / "finish"
    clock.rate = 100.0
    replan(trainer, clock, finish)
    assert 9_000 < trainer.schedule.total <= 10_000

    finish.write_text("512\n")
    replan(trainer, clock, finish)
    replan(trainer, clock, finish)                     # the deadline, which is later, does not take it back
    assert trainer.schedule.total == 512 and not finish.exists()

    resumed = Trainer(trainer.recipe, data)
    resumed.load(trainer.state())
    assert resumed.schedule == trainer.schedule and resumed.finishing
    shortened = Trainer(replace(trainer.recipe, tokens=1000), data)
    shortened.load(trainer.state())
    assert shortened.schedule.total == 1000


def test_time_spent_exporting_does_not_count_as_slow_training() -> None:
    clock = Clock(None)
    clock.rate = 100.0
    clock.restart()
    assert clock.rate == 100.0 and clock.tokens_left() is None


# Training


def test_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    shapes = (700, 8), (700, 4), (11, 8), (11, 4)                           # two chunks of tokens
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    labels = torch.randint(0, 11, (700,))
    target_hidden, draft_hidden, target_head, draft_head = tensors
    loss = joint_loss(target_hidden, draft_hidden, target_head, draft_head, labels, distillation=0.7, count=700)

    target_logits, draft_logits = target_hidden @ target_head.T, draft_hidden @ draft_head.T
    target_loss = torch.nn.functional.cross_entropy(target_logits, labels)
    draft_loss = torch.nn.functional.cross_entropy(draft_logits, labels)
    distilled = torch.nn.functional.cross_entropy(draft_logits, target_logits.detach().softmax(-1))
    (target_loss + 0.3 * draft_loss + 0.7 * distilled).backward()
    assert (loss.target, loss.draft) == pytest.approx((target_loss.item(), draft_loss.item()), abs=1e-5)
    grads = loss.target_hidden_grad, loss.draft_hidden_grad, loss.target_head_grad, loss.draft_head_grad
    for tensor, grad in zip(tensors, grads, strict=True):
        torch.testing.assert_close(grad, tensor.grad, atol=1e-6, rtol=1e-4)


def test_parts_of_a_batch_add_up(data: PackedData) -> None:
    whole, parts = (Trainer(replace(TINY, half=False, workers=workers), data) for workers in (1, 3))
    assert whole.step() == pytest.approx(parts.step(), abs=1e-5)
    for one, other in zip(whole.parameters, parts.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_training_lowers_both_losses_and_resumes_bit_for_bit(data: PackedData, tmp_path: Path) -> None:
    """20 steps at a stretch, and 20 with a kill in the stable phase and another in the cool-down."""
    straight = Trainer(TINY, data)
    losses = [straight.step() for _ in range(20)]
    for model in (0, 1):
        assert losses[-1][model] < losses[0][model] - 0.5

    for steps in (9, 8, 3):
        trainer = Trainer(TINY, data)
        if (tmp_path / "checkpoint.safetensors").exists():
            trainer.load(checkpoint.load(tmp_path / "checkpoint.safetensors"))
        for _ in range(steps):
            trainer.step()
        checkpoint.save(tmp_path / "checkpoint.safetensors", trainer.state())
    assert trainer.progress.seen == straight.progress.seen == TINY.tokens
    assert trainer.progress.cooldown_seen == straight.progress.cooldown_seen == TINY.tokens // 5
    assert all(torch.equal(one, other) for one, other in zip(trainer.parameters, straight.parameters, strict=True))


def test_a_whole_run_exports_models_that_transformers_loads(data: PackedData, work: Path, tmp_path: Path) -> None:
    trainer = Trainer(TINY, data)
    train(trainer, Run(work, tmp_path, log_s=0.0, export_at_s=()))
    assert "chat" in (tmp_path / "README.md").read_text()
    prompt = data.tokenizer("What is")["input_ids"]
    for name, trained in zip(("target", "draft"), trainer.models, strict=True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == [2, 0]
        for one, other in zip(model.parameters(), trained.parameters(), strict=True):
            assert torch.equal(one, other.bfloat16())
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer("What is")["input_ids"] == prompt
        assert tokenizer.chat_template == data.tokenizer.chat_template


def test_an_export_says_when_it_is_early(data: PackedData, work: Path, tmp_path: Path) -> None:
    trainer = Trainer(TINY, data)
    (work / "notes.md").write_text("It rained.")
    export(trainer.models, data, facts(trainer, work, final=False), work, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "early export" in card and "It rained." in card
    assert not list(tmp_path.rglob("*.partial"))


def test_shipped_shapes_are_small_enough() -> None:
    with torch.device("meta"):
        target, draft = (shape.build(8192).num_parameters() for shape in (TARGET, DRAFT))
    assert target <= 8_000_000 and draft <= 1_100_000
    assert 2 * (target + draft) < 18_000_000           # bytes; tokenizers and card stay under 2 MB more


# Evaluation


@pytest.mark.parametrize(("matches", "k", "expected"), [
    ([1, 1, 0, 1, 1], 3, 2.5),                         # two kept and one of the target's; then two kept, at the end
    ([0, 0, 0], 3, 1.0),
    ([1, 1, 1, 1, 1, 1, 1, 1], 3, 4.0),
    ([], 3, 0.0),
])
def test_mean_accepted_length(matches: list[bool], k: int, expected: float) -> None:
    assert mean_accepted_length([matches], k) == expected


def test_a_model_agrees_with_itself(data: PackedData) -> None:
    target = Trainer(replace(TINY, half=False), data).target
    assert all(greedy_matches(target, target, [1, 30, 31], new_tokens=8))
