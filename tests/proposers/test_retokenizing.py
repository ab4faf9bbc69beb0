"""A draft that reads its own tokens: its blocks, its memory of the text, its way back into the target's tokens."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hash_model import HashModel
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from foretoken.engine.config import ModelConfig
from foretoken.engine.model import load_model
from foretoken.kernels.layout import ForwardOutput, KVTensors, RaggedBatch
from foretoken.proposers.base import DraftContext, DraftRow, Draw
from foretoken.proposers.retokenizing import RetokenizingProposer

DEMO = Path(__file__).parents[2] / "engine" / "demo_model"
TEXT = "The quick brown fox, naïve as ever, jumps over the lazy dog: 日本語 and 🙂 are there too.\n\tdef add(a, b):\n    return a + b\n" * 3
WORDS = "the lazy dog jumps over the quick brown fox and the fox jumps over the lazy dog " * 6


def byte_level(vocab_size: int, *special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny_models.byte_level([TEXT], vocab_size, special), eos_token=special[0])


def sentencepiece(vocab_size: int) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space in front of every text, which is dropped when it is decoded, and `▁` for spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # words, so that training is quick
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([WORDS], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


class Reciting(HashModel):
    """Knows a text by heart and goes on from wherever it is: a perfect draft."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        super().__init__(len(tokenizer) + 5)  # padded
        self.tokenizer: Any = tokenizer
        self._text = text
        self._adds_space = self.tokenizer.tokenize("a")[0].startswith("▁")
        self._seen: list[tuple[int, ...]] = []
        self.num_read = 0

    def _visible(self, batch: RaggedBatch, kv: Any, flat: int) -> tuple[int, ...]:
        self._seen.append(super()._visible(batch, kv, flat))
        return self._seen[-1]

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        self._seen = []
        self.num_read += len(batch.token_ids)
        super().run(dataclasses.replace(batch, full_logits=torch.zeros(0, dtype=torch.int64)), kv)
        tokens = torch.tensor([self._next(seen) for seen in self._seen], dtype=torch.int64)
        logits = torch.nn.functional.one_hot(tokens, self.vocab_size).float() * 5
        return ForwardOutput(tokens, torch.ones(len(tokens)), logits[batch.full_logits] if len(batch.full_logits) else None)

    def _next(self, seen: tuple[int, ...]) -> int:
        for count in range(len(seen), max(len(seen) - 4, 0), -1):  # to where a character ends
            said = self.tokenizer.decode(seen[:count])
            if self._text.startswith(said):
                rest = self._text[len(said) :]
                ids = self.tokenizer.encode(rest.removeprefix(" ") if self._adds_space else rest)
                if len(ids) > len(seen) - count:
                    return ids[len(seen) - count]
        return self.vocab_size - 1


def proposer_of(target: PreTrainedTokenizerFast, model: Reciting, most: int = 6) -> RetokenizingProposer:
    return RetokenizingProposer("d", model, model.allocate(300, 4), target, model.tokenizer, most, 4000)


def row(name: str, tokens: list[int], ceiling: int = 4) -> DraftRow:
    return DraftRow(name, tokens, 1, len(tokens), ceiling, 0, (), (0,), Draw(0.0, 0, 0))


def ask(proposer: RetokenizingProposer, *rows: DraftRow, budget: int = 1000) -> list[list[int]]:
    draft = proposer.propose(DraftContext(rows, budget, 4))
    proposer.check()
    return [draft.token_ids[a:b] for a, b in zip(draft.start_loc, draft.start_loc[1:], strict=False)]


def share_right(guesses: list[int], truth: list[int]) -> float:
    """Leading right ones among them. The last one may be half a word, where the draft's chain ends."""
    right = next((i for i, (a, b) in enumerate(zip(guesses, truth, strict=False)) if a != b), len(guesses))
    return right / max(len(guesses) - 1, 1) if right < len(guesses) else float(right > 0)


TOKENIZERS = {"bytes": lambda: byte_level(330, "<|end|>", "<|user|>"), "few bytes": lambda: byte_level(270, "<|stop|>")}


@pytest.mark.parametrize(("target_name", "draft_name"), [("bytes", "few bytes"), ("few bytes", "bytes"), ("bytes", "bytes")])
def test_who_knows_the_text_guesses_the_targets_next_tokens(target_name: str, draft_name: str) -> None:
    """At every place but those in the middle of a character, and cheaply: the text is not read again and again."""
    target, draft = TOKENIZERS[target_name](), TOKENIZERS[draft_name]()
    text = target.encode(TEXT)
    model = Reciting(draft, TEXT)
    proposer = proposer_of(target, model)
    rates: list[float] = []
    for length in range(3, len(text) - 10):
        (guesses,) = ask(proposer, row("r", text[:length]))
        if str(target.decode(text[:length])).endswith("\ufffd"):
            assert not guesses
        else:
            rates.append(share_right(guesses, text[length:]))
    assert sum(rates) > 0.8 * len(rates) and len(rates) > 80
    assert model.num_read < 12 * len(text)  # a chain at each of them included


@torch.no_grad()
def test_guesses_are_those_of_the_draft_alone_with_the_whole_text(tiny_draft: Path) -> None:
    """The oracle: transformers generates from the whole text, and the target's tokenizer splits the result."""
    target, draft = (AutoTokenizer.from_pretrained(folder) for folder in (DEMO / "target", tiny_draft))
    executor = load_model(ModelConfig(str(tiny_draft), executor="torch", dtype="float32"), lambda line: None).executor
    network: Any = AutoModelForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32)
    proposer = RetokenizingProposer("d", executor, executor.allocate(200, 4), target, draft, 5, 500)
    text = target.encode("Once upon a time there was a little dog who liked to run and to bark. " * 8)
    num_guessed = 0
    for length in range(5, len(text), 9):
        said = target.decode(text[:length])
        ids = torch.tensor([draft.encode(said)])
        added: str = draft.decode(network.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0, ids.shape[1] :])
        (guesses,) = ask(proposer, row("r", text[:length]))
        assert target.decode(guesses) == added.split("\ufffd")[0][: len(target.decode(guesses))]
        num_guessed += len(guesses)
    assert num_guessed > 20 and proposer._readings["r"].num_fixed > len(text) - 90


@pytest.mark.parametrize("reads_bytes", [True, False])
def test_spaces_survive_tokenizers_that_add_and_drop_them(reads_bytes: bool) -> None:
    pair = byte_level(330, "<|end|>"), sentencepiece(80)
    draft, target = pair if reads_bytes else pair[::-1]
    text, recited = target.encode(WORDS), draft.encode(WORDS)
    proposer = proposer_of(target, Reciting(draft, WORDS))
    rates = [share_right(guesses, text[n:]) for n in range(5, len(text) - 8) for guesses in ask(proposer, row("r", text[:n]))]
    assert sum(rates) > 0.85 * len(rates) and len(rates) > 80
    reading = proposer._readings["r"]
    assert reading.num_fixed > 0 and reading.cached == recited[: len(reading.cached)]


def test_special_tokens_of_one_side_only_are_not_text() -> None:
    target, draft = byte_level(330, "<|end|>", "<|user|>", "<|both|>"), byte_level(270, "<|stop|>", "<|both|>")
    ids = [*target.encode("<|user|>"), *target.encode("The quick<|both|> brown fox")]
    proposer = proposer_of(target, Reciting(draft, "The quick<|both|> brown fox, na<|stop|>!"), 8)
    (guesses,) = ask(proposer, row("r", ids, ceiling=8))
    assert target.decode(guesses) == ", na"


def test_an_end_that_both_know_is_guessed() -> None:
    target, draft = byte_level(330, "<|end|>"), byte_level(270, "<|stop|>", "<|end|>")
    proposer = proposer_of(target, Reciting(draft, "The quick brown<|end|>"), 8)
    (guesses,) = ask(proposer, row("r", target.encode("The quick"), ceiling=8))
    assert target.decode(guesses) == " brown<|end|>"


def test_ids_of_a_padded_vocabulary_are_not_text() -> None:
    """Prompts given as ids may have some that the target's tokenizer has no name for."""
    target, draft = byte_level(330, "<|end|>"), byte_level(270, "<|stop|>")
    text = target.encode(TEXT)[:90]
    proposer = proposer_of(target, Reciting(draft, TEXT))
    (guesses,) = ask(proposer, row("r", [*text, *[len(target) + 3] * 24]))
    assert target.decode([*text, *guesses]) == TEXT[: len(target.decode([*text, *guesses]))] and guesses


def test_a_small_budget_reads_a_long_text_in_several_steps() -> None:
    target, draft = byte_level(330, "<|end|>"), byte_level(270, "<|stop|>")
    text = target.encode(TEXT)[:60]
    model = Reciting(draft, TEXT)
    slow, quick = (RetokenizingProposer("d", model, model.allocate(60, 4), target, draft, 4, 500) for _ in range(2))
    steps = 1
    while not (got := ask(slow, row("r", text), budget=9)[0]):
        steps += 1
        assert steps < 20
    assert steps > 2 and got == ask(quick, row("r", text))[0]


def test_doubt_ends_a_chain() -> None:
    target = draft = byte_level(330, "<|end|>")
    model = Reciting(draft, TEXT)
    sure, unsure = (RetokenizingProposer("d", model, model.allocate(60, 4), target, draft, 4, 500, t) for t in (0.0, 0.5))
    assert [len(ask(p, row("r", target.encode(TEXT)[:20]))[0]) for p in (sure, unsure)] == [4, 1]


def test_without_room_nothing_is_guessed_and_nothing_is_lost() -> None:
    tokenizer = byte_level(330, "<|end|>")
    text = tokenizer.encode(TEXT)
    model = Reciting(tokenizer, TEXT)
    small = RetokenizingProposer("d", model, model.allocate(8, 4), tokenizer, tokenizer, 4, 500)
    a, b = row("a", text[:16]), row("b", text[:17])
    first = ask(small, a, b)
    assert first[0] and not first[1]
    small.forget("a")
    small.forget("never seen")
    assert ask(small, b)[0]
    short = RetokenizingProposer("d", model, model.allocate(8, 4), tokenizer, tokenizer, 4, max_model_len=10)
    assert ask(short, a) == [[]]
