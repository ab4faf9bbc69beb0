"""From scores to guesses: what is drawn, from which distribution, under whose noise, and what a pass is given."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from elsewhere import Elsewhere, FarExecutor, there
from hash_model import HashKV
from plain_executor import PlainExecutor
from torch import Tensor

from foretoken.kernels.layout import ForwardOutput, KVTensors, RaggedBatch, StateRoom
from foretoken.kernels.noise import Purpose, keys, sample, step_stream, stream
from foretoken.proposers.base import DraftRow, Draw
from foretoken.proposers.drafting import Feed
from foretoken.proposers.guessing import (
    FEATURE,
    ChainGuesser,
    Drawing,
    Guesser,
    Guesses,
    Network,
    ParallelGuesser,
    length_of_chain,
    single_tokens,
)

VOCAB = 11  # the target's
SUBSET = (1, 3, 4, 8, 10)
WIDTHS = {"same": (VOCAB, None), "wider": (VOCAB + 6, None), "narrower": (VOCAB - 4, None), "mapped": (len(SUBSET), SUBSET)}


class Scoring(PlainExecutor):
    """An executor whose scores are a function of a token and its position. Keeps every pass that it was given."""

    max_model_len = 500

    def __init__(self, vocab_size: int = VOCAB, token_ids: Sequence[int] | None = None) -> None:
        self.vocab_size = vocab_size
        self.token_ids = None if token_ids is None else torch.tensor(token_ids)
        self.passes: list[tuple[RaggedBatch, Mapping[str, Tensor] | None]] = []

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> HashKV:
        return HashKV(num_blocks, block_size)

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size

    def scores(self, token: int, position: int) -> Tensor:
        """[vocab_size], by column."""
        generator = torch.Generator().manual_seed(1000 * position + token)
        return 1.5 * torch.randn(self.vocab_size, generator=generator)

    def by_token(self, token: int, position: int) -> Tensor:
        """[VOCAB], what a draft may say at all."""
        scores = self.scores(token, position)
        if self.token_ids is None:
            return torch.cat([scores, torch.full((VOCAB,), -torch.inf)])[:VOCAB]
        return torch.full((VOCAB,), -torch.inf).index_put((self.token_ids,), scores)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        self.passes.append((batch, inputs))
        wanted = batch.logits_indices
        if not len(wanted):
            return ForwardOutput(wanted, torch.zeros(0), None)
        pairs = zip(batch.token_ids[wanted].tolist(), batch.positions[wanted].tolist(), strict=True)
        scores = torch.stack([self.scores(*pair) for pair in pairs])
        best = scores.argmax(-1)
        return ForwardOutput(best if self.token_ids is None else self.token_ids[best], scores.amax(-1), scores[batch.full_logits])


def feed(index: int, tokens: Sequence[int], count: int, start: int = 0, temperature: float = 0.0, seed: int = 0) -> Feed:
    row = DraftRow(f"r{index}", tokens, 1, len(tokens), 9, 0, range(8), (0,), Draw(temperature, seed, 0))
    return Feed(index, row, start, len(tokens), count)


def guesser_of(kind: str, model: Scoring, drawing: Drawing, **settings: Any) -> Guesser:
    network = Network(model, model.allocate(8, 4))
    return ChainGuesser(network, drawing, **settings) if kind == "chain" else ParallelGuesser(network, drawing, mask_token=0)


def guess(guesser: Guesser, *feeds: Feed) -> Guesses:
    return guesser.guess(feeds, None, 4)


def read_at(kind: str, tokens: Sequence[int], guesses: Sequence[int], i: int) -> tuple[int, int]:
    """The token and the position whose scores decide guess i."""
    position = len(tokens) - 1 + i
    return (tokens[-1] if i == 0 else guesses[i - 1] if kind == "chain" else 0), position


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_the_best_are_guessed_if_nobody_samples(kind: str, width: str) -> None:
    model = Scoring(*WIDTHS[width])
    rows = feed(0, [1, 2, 3], 4, temperature=0.9), feed(1, [5], 0), feed(2, [4, 4], 2, start=1)
    for return_probs in (False, True):
        guesses = guess(guesser_of(kind, model, Drawing(VOCAB, return_probs=return_probs)), *rows)
        assert [len(tokens) for tokens in guesses.token_ids] == [4, 0, 2]
        for row, tokens in zip(rows, guesses.token_ids, strict=True):
            for i, token in enumerate(tokens):
                assert token == int(model.by_token(*read_at(kind, row.row.token_ids, tokens, i)).argmax())
        if return_probs:  # one-hot: the best was no draw from anything wider
            assert guesses.probs is not None and guesses.probs.shape == (6, VOCAB)
            assert guesses.probs.argmax(-1).tolist() == [*guesses.token_ids[0], *guesses.token_ids[2]]
            assert guesses.probs.sum() == 6 and guesses.probs.amax() == 1
        else:
            assert guesses.probs is None


@pytest.mark.parametrize("return_probs", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_sampled_guesses_use_the_noise_of_their_position_and_token_ids(kind: str, width: str, return_probs: bool) -> None:
    """TARGET: a target with these scores says the same. DRAFT: the p/q rules need other noise, and what was drawn from."""
    model = Scoring(*WIDTHS[width])
    guesser = guesser_of(kind, model, Drawing(VOCAB, samples=True, return_probs=return_probs))
    rows = feed(0, [1, 2, 3], 4, temperature=0.8, seed=7), feed(1, [6], 2), feed(2, [4, 4], 3, temperature=1.3, seed=9)
    guesses = guess(guesser, *rows)
    at = 0
    for row, tokens in zip(rows, guesses.token_ids, strict=True):
        draw = row.row.draw
        for i, token in enumerate(tokens):
            scores = model.by_token(*read_at(kind, row.row.token_ids, tokens, i))
            known = len(row.row.token_ids)
            noise = step_stream(draw.seed, 0, known, Purpose.DRAFT) if return_probs else stream(draw.seed, 0)
            under = keys([noise], [known + i])
            expected = int(sample(scores[None] / draw.temperature, under)) if draw.temperature else int(scores.argmax())
            assert token == expected
            if return_probs:
                assert guesses.probs is not None
                one_hot = torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()
                drawn_from = torch.softmax(scores / draw.temperature, -1) if draw.temperature else one_hot
                torch.testing.assert_close(guesses.probs[at], drawn_from)
            at += 1
    assert at == 9 and (guesses.probs is None) != return_probs


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_what_is_drawn_follows_the_probs(kind: str) -> None:
    model = Scoring(len(SUBSET), SUBSET)
    guesser = guesser_of(kind, model, Drawing(VOCAB, samples=True, return_probs=True))
    guesses = guess(guesser, *(feed(seed, [1, 2], 2, temperature=1.5, seed=seed) for seed in range(900)))
    assert guesses.probs is not None
    torch.testing.assert_close(guesses.probs.sum(-1), torch.ones(1800))
    first, second = [tokens[0] for tokens in guesses.token_ids], [tokens[1] for tokens in guesses.token_ids if tokens[0] == 4]
    for said, probs in ((first, guesses.probs[0]), (second, guesses.probs[2 * first.index(4) + 1])):
        counts = Counter(said)
        assert set(counts) <= set(SUBSET)
        distance = sum(abs(counts[i] / len(said) - probs[i].item()) for i in range(VOCAB)) / 2
        assert distance < 1.8 / len(said) ** 0.5


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_confidence_is_the_share_of_the_guess(kind: str) -> None:
    model = Scoring(VOCAB + 6)
    row = feed(0, [1, 2, 3], 4, temperature=0.5, seed=3)
    guesses = guess(guesser_of(kind, model, Drawing(VOCAB, samples=True)), row)
    (tokens,), (likely,) = guesses.token_ids, guesses.confidence or [[]]
    for i, (token, p) in enumerate(zip(tokens, likely, strict=True)):
        scores = model.by_token(*read_at(kind, row.row.token_ids, tokens, i))
        assert p == pytest.approx(torch.softmax(scores, -1)[token].item(), abs=1e-5)


def test_length_of_chain() -> None:
    assert length_of_chain([0.9, 0.8, 0.3, 0.9], 0.5) == 3  # the one that is doubted stays
    assert length_of_chain([0.9, 0.8], 0.5) == 2
    assert length_of_chain([0.1], 0.5) == 1
    assert length_of_chain([0.1, 0.0], 0.0) == 2
    assert length_of_chain([], 0.5) == 0


def test_a_doubted_guess_is_the_last_and_takes_its_probs_along() -> None:
    model = Scoring()
    rows = [feed(i, [3, i], 4, temperature=1.0, seed=i) for i in range(9)]
    drawing = Drawing(VOCAB, samples=True, return_probs=True)
    whole, cut = (guess(guesser_of("chain", model, drawing, confidence_threshold=t), *rows) for t in (0.0, 0.25))
    assert whole.confidence is not None and whole.probs is not None and cut.probs is not None
    probs: list[Tensor] = []
    for i, tokens in enumerate(whole.token_ids):
        count = length_of_chain(whole.confidence[i], 0.25)
        assert cut.token_ids[i] == tokens[:count] and cut.in_place[i] == tokens[: min(count, 3)]
        assert whole.in_place[i] == tokens[:3]  # the last one was never fed
        probs.append(whole.probs[4 * i : 4 * i + count])
    torch.testing.assert_close(cut.probs, torch.cat(probs))
    assert len({len(tokens) for tokens in cut.token_ids}) > 2


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_rows_that_only_read_are_read(kind: str) -> None:
    model = Scoring()
    guesses = guess(guesser_of(kind, model, Drawing(VOCAB)), feed(0, [1, 2, 3], 0), feed(1, [4, 5], 0, start=1))
    assert guesses.token_ids == [[], []] and guesses.probs is None
    ((batch, _),) = model.passes
    assert batch.token_ids.tolist() == [1, 2, 3, 5] and not len(batch.logits_indices)


@pytest.mark.parametrize("mask_state", [None, torch.tensor([7.0, 7.0])])
def test_masks_stand_behind_the_known_tokens_with_a_state(mask_state: Tensor | None) -> None:
    """encode is given every token's state, masks included, in the order of the batch."""
    model = Scoring()
    network = Network(model, model.allocate(8, 4), encode=lambda states: states * 2)
    feeds = [feed(0, [1, 2, 3], 3, start=1), feed(1, [4, 5], 0), feed(2, [6], 1)]
    states = torch.arange(10.0).view(5, 2)
    guesses = ParallelGuesser(network, Drawing(VOCAB), 9, mask_state).guess(feeds, states, 4)
    assert [len(tokens) for tokens in guesses.token_ids] == [3, 0, 1] and not any(guesses.in_place)
    ((batch, inputs),) = model.passes
    assert batch.token_ids.tolist() == [2, 3, 9, 9, 4, 5, 6] and batch.positions.tolist() == [1, 2, 3, 4, 0, 1, 0]
    assert batch.logits_indices.tolist() == [1, 2, 3, 6]
    own = [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18]]
    mask = own[1] if mask_state is None else [14, 14]
    assert inputs is not None and inputs[FEATURE].tolist() == [*own[:2], mask, mask, *own[2:]]


def test_entries_made_of_guessed_states_do_not_stay() -> None:
    model = Scoring()
    network = Network(model, model.allocate(8, 4), encode=lambda states: states)
    guesses = ChainGuesser(network, Drawing(VOCAB)).guess([feed(0, [1, 2], 3)], torch.ones(2, 4), 4)
    assert guesses.in_place == [[]] and len(guesses.token_ids[0]) == 3
    assert model.passes[0][1] is not None and model.passes[0][1][FEATURE].shape == (2, 4)


def test_single_tokens_are_rows_of_their_own() -> None:
    batch = single_tokens([7, 8, 9]).batch()
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3] and batch.logits_indices.tolist() == [0, 1, 2]
    assert batch.slot_mapping.tolist() == [-1, -1, -1] and batch.num_causal.tolist() == [1, 1, 1]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_guesses_are_picked_where_the_scores_are(width: str, samples: bool) -> None:
    model = Scoring(*WIDTHS[width])
    rows = feed(0, [1, 2, 3], 4, temperature=0.8, seed=7), feed(1, [6], 0), feed(2, [4, 4], 3), feed(3, [5], 2, temperature=1.3)
    for return_probs in (False, True):
        drawing = Drawing(VOCAB, samples, return_probs)
        expected = guess(guesser_of("parallel", model, drawing), *rows)
        with Elsewhere() as device:
            found = guess(ParallelGuesser(Network(FarExecutor(model), model.allocate(8, 4)), drawing, mask_token=0), *rows)
        assert (found.token_ids, found.confidence) == (expected.token_ids, expected.confidence)
        if return_probs:
            assert found.probs is not None and expected.probs is not None and torch.equal(found.probs, expected.probs)
        else:
            assert device.to_host == [9] * 4  # the pass's best and their scores; tokens and their probabilities


def test_the_state_of_masks_is_moved_once() -> None:
    model = Scoring()
    network = Network(FarExecutor(model), model.allocate(8, 4), encode=lambda states: states)
    with Elsewhere() as device:
        guesser = ParallelGuesser(network, Drawing(VOCAB), 9, torch.ones(2))
        for _ in range(3):
            guesser.guess([feed(0, [1, 2], 3), feed(1, [4], 2)], there(torch.zeros(3, 2)), 4)
        assert device.to_device == [2]
