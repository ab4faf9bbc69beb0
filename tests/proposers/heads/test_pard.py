"""PARD in training: a draft model learns its masks, and the exported model guesses in the engine as in one whole forward."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saying import Made, heard
from tiny_models import save_tokenizer
from torch import Tensor
from training_heads import TinyTarget, Training, check_documents_apart, document, llama_config, made_once, rounded, texts
from transformers import LlamaForCausalLM

from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.request import Request, SamplingParams
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.training.block_attention import Blocks
from foretoken.proposers.training.heads.pard import Pard, PardSettings
from foretoken.proposers.training.packing import Packed
from foretoken.proposers.training.target import Shape, write_model

ROWS = 300                           # of the tokenizer; the texts use the first of them


class Whole(TinyTarget):
    """With a tokenizer, and a draft model beside it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(5)
        super().__init__(folder / "target", LlamaForCausalLM(llama_config(vocab_size=ROWS)))
        self.tokenizer = save_tokenizer(self.folder)
        self.draft = folder / "draft"
        write_model(Shape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48).build(ROWS), self.tokenizer, self.draft)


target = made_once(Whole)


@pytest.fixture(scope="module")
def trained(target: Whole, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pard, Training]:
    head = Pard(target.frozen, PardSettings(target.draft, num_tokens=4))
    return head, Training(head, tmp_path_factory.mktemp("training"), lr=3e-2)


def recomputed(head: Pard, text: Sequence[int], count: int) -> Tensor:
    """[count, V] behind a text, from one ordinary causal forward over it and its masks."""
    tokens = [*text, *[head.mask_token] * (count - 1)]
    whole = document(tokens)
    none = Blocks(whole, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), causal=True)
    with torch.no_grad():
        return head(whole, none)[len(text) - 1 :] @ head.model.lm_head.weight.T


def drafts(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Made]:
    found = heard(pytest.MonkeyPatch(), engine.core.proposers.proposers[1])
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
        engine.core.add_request(Request(str(number), list(prompt), params, 0.0, 20, seed=number))
    while engine.core.has_work:
        engine.core.step(0.0)
    assert not any(proposer.num_failures for proposer in engine.core.proposers.stats())
    return found


def test_it_learns_and_its_export_guesses_as_it_does(target: Whole, trained: tuple[Pard, Training], tmp_path: Path) -> None:
    head, training = trained
    print(training.before, training.after)
    assert training.after["loss"] < 0.7 * training.before["loss"]
    assert training.after["accuracy_1"] > 0.6 and training.after["accuracy_3"] > 0.3

    rounded(head)
    head.export(tmp_path / "head")
    target.tokenizer.save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["pard_token"] == ROWS and config["vocab_size"] == ROWS + 1 and config["architectures"] == ["LlamaForCausalLM"]
    entry = {"model": str(tmp_path / "head"), "num_speculative_tokens": 4, "adaptive": False, "quantization": "none"}
    speculative = parse_speculative_config(entry)
    assert [type(entry).__name__ for entry in speculative.proposers] == ["PardConfig"]
    model = ModelConfig(str(target.folder), dtype="float32", executor="torch")
    engine = boot(EngineConfig(model, CacheConfig(num_blocks=64), SchedulerConfig(64, 8, 64), speculative))
    seen = drafts(engine, texts(3, 9, seed=3))
    assert len(seen) > 20 and max(len(guesses) for _, guesses in seen) == 4
    for text, guesses in seen:
        scores = recomputed(head, text, len(guesses))[:, :ROWS]
        chosen = scores[torch.arange(len(guesses)), torch.tensor(guesses)]
        assert float((scores.max(-1).values - chosen).max()) < 1e-3


def test_the_loss_is_the_published_one(target: Whole) -> None:
    """Without dropping, mask d behind token i guesses token i + d + 1 as in a forward of the text up to i and d masks."""
    head = Pard(target.frozen, PardSettings(target.draft, num_tokens=4, min_retention=1.0))
    text = texts(1, 12, seed=5)[0]
    batch = document(text)
    batch.learn[:4] = False
    losses = head.loss(batch)
    total, counts = 0.0, [0] * 4
    for last in range(11):
        logs = recomputed(head, text[: last + 1], 4).log_softmax(-1)
        for depth in range(1, 5):
            label = last + depth
            if 4 <= label < 12 and (depth == 1 or last + 2 >= 4):
                total -= float(logs[depth - 1, text[label]])
                counts[depth - 1] += 1
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-4)
    assert losses.weight == sum(counts) and [losses.metrics[f"accuracy_{depth}"][1] for depth in range(1, 5)] == counts


def test_far_guesses_are_dropped_by_their_share(target: Whole) -> None:
    head = Pard(target.frozen, PardSettings(target.draft, num_tokens=8))
    size = 20_000
    batch = Packed(torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool), (0, size), number=3)
    blocks = head.masks(batch)
    shares = blocks.offsets.bincount() / size
    torch.testing.assert_close(shares, torch.tensor([0.7, 0.49, 0.343, 0.2401, 0.2, 0.2, 0.2]), rtol=0.05, atol=0.0)
    assert torch.equal(blocks.places, head.masks(batch).places)
    assert not torch.equal(blocks.lengths[:100], head.masks(replace(batch, number=4)).lengths[:100])


def test_documents_do_not_see_each_other(target: Whole) -> None:
    check_documents_apart(Pard(target.frozen, PardSettings(target.draft, num_tokens=4, min_retention=1.0)))


def test_a_draft_of_fewer_tokens_is_refused(target: Whole, tmp_path: Path) -> None:
    write_model(Shape(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16).build(50), target.tokenizer, tmp_path)
    with pytest.raises(ValueError, match="has 50 tokens, the target has 300"):
        Pard(target.frozen, PardSettings(tmp_path))
