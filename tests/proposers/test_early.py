"""Chains that were begun before anybody saw what the target said are those that would have been guessed afterwards."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from as_on_a_gpu import bind_as_on_a_gpu
from fake_graphs import FakeRecorder
from random_drafters import write

from foretoken import LLM
from foretoken.kernels.matching import Guesses, match
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback, RowUnderWay, UnderWay
from foretoken.proposers.learned import LearnedProposer

METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    "eagle": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    "mtp": {"num_speculative_tokens": 3},
}
SIZE = 16
OPTIONS: dict[str, Any] = {"executor": "torch", "dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 256, "max_num_seqs": 8}


class Text:
    """A request whose target says whatever it likes: as much of a draft as chance wants, then something else."""

    def __init__(self, name: str, rng: random.Random, vocab_size: int, blocks: list[int]) -> None:
        self.name, self.vocab_size, self.blocks = name, vocab_size, blocks
        self.token_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 20))]
        self.num_prompt = len(self.token_ids)
        self.draw = Draw(rng.choice([0.0, 0.9]), rng.randrange(99), 0)
        self.num_computed = 0
        self.ceiling = self.asked = 4

    def row(self) -> DraftRow:
        length = len(self.token_ids)
        return DraftRow(self.name, self.token_ids, self.num_prompt, length, self.ceiling, 0, self.blocks, (0,), self.draw)


def guesses(draft: Draft, row: int) -> tuple[list[int], list[float]]:
    start, end = draft.start_loc[row : row + 2]
    return draft.token_ids[start:end], [] if draft.confidence is None else draft.confidence[start:end]


class Pair:
    """A drafter that begins early beside one that does not, in the same steps."""

    def __init__(self, engines: tuple[LLM, LLM], seed: int, width: int = 64) -> None:
        self.early, self.late = map(drafter, engines)
        self.width = width
        self.late.early = None
        assert self.early.early is not None
        self.chains = self.early.early
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.num_compared = 0

    def step(self, texts: list[Text], begins: bool = True, is_repeated: bool = False) -> None:
        """Guess, let the target say something, tell. is_repeated: at first it said something else at the end, and its step failed."""
        context = DraftContext([text.row() for text in texts], 1000, SIZE)
        draft, expected = self.early.propose(context), self.late.propose(context)
        assert draft.filled == expected.filled
        for i, text in enumerate(texts):
            (tokens, likely), (others, as_likely) = guesses(draft, i), guesses(expected, i)
            assert tokens == others[: len(tokens)] and likely == pytest.approx(as_likely[: len(tokens)], rel=1e-4)
            # What was begun for fewer stays as long as that.
            assert len(tokens) == len(others) or len(tokens) == text.asked < text.ceiling
            text.asked = text.ceiling
            self.num_compared += len(tokens)
        drafts, scheduled, starts = self._plan(texts, draft)
        emitted = [self._said(text, tokens) for text, tokens in zip(texts, drafts, strict=True)]
        states = torch.randn(starts[-1], self.width, generator=self.generator)
        hidden = {boundary: states + boundary for boundary in self.early.needs.hidden}
        if begins:
            first = [[*said[:-1], (said[-1] + 1) % 300] for said in emitted] if is_repeated else emitted
            self.early.begin(self._under_way(texts, drafts, scheduled, starts, first, hidden))
        accepted = [list(range(len(said) - 1)) for said in emitted]
        for text, said in zip(texts, emitted, strict=True):
            text.num_computed = len(text.token_ids) + len(said) - 1
            text.token_ids += said
        feedback = Feedback(
            [text.name for text in texts], [text.num_computed for text in texts], list(map(len, drafts)), accepted, emitted,
            [False] * len(texts), hidden, starts, scheduled, [text.token_ids for text in texts],
        )
        self.early.observe(feedback)
        self.late.observe(feedback)
        self.early.check()

    def _plan(self, texts: list[Text], draft: Draft) -> tuple[list[list[int]], list[int], list[int]]:
        """Drafts, some of them cut; known tokens computed; first flat token of each row."""
        drafts: list[list[int]] = []
        for start, end in zip(draft.start_loc, draft.start_loc[1:], strict=False):
            drafts.append(draft.token_ids[start : end - (self.rng.random() < 0.2)])
        scheduled = [len(text.token_ids) - text.num_computed for text in texts]
        starts = [0]
        for known, tokens in zip(scheduled, drafts, strict=True):
            starts.append(starts[-1] + known + len(tokens))
        return drafts, scheduled, starts

    def _said(self, text: Text, draft: list[int]) -> list[int]:
        kept = self.rng.choice([0, len(draft), self.rng.randint(0, len(draft))])
        other = self.rng.randrange(text.vocab_size)
        if kept < len(draft) and other == draft[kept]:
            other = (other + 1) % text.vocab_size
        return [*draft[:kept], other]

    def _under_way(
        self, texts: list[Text], drafts: list[list[int]], scheduled: list[int], starts: list[int], emitted: list[list[int]], hidden: Any
    ) -> UnderWay:
        """What a device would have: the target's token at each node is what makes it say just that."""
        argmax: list[int] = []
        for tokens, said in zip(drafts, emitted, strict=True):
            argmax += [*said, *[0] * (len(tokens) + 1 - len(said))]
        guesses = Guesses.of([(tokens, range(-1, len(tokens) - 1), False) for tokens in drafts])
        answer = match(torch.tensor(argmax), torch.ones(len(argmax)), None, guesses)
        rows = [
            RowUnderWay(text.name, text.token_ids, text.blocks, text.draw, tokens, i, starts[i] + scheduled[i] - 1)
            for i, (text, tokens) in enumerate(zip(texts, drafts, strict=True))
        ]
        return UnderWay(rows, answer, hidden, SIZE)


@pytest.fixture(params=METHODS)
def engines(
    request: pytest.FixtureRequest, deep_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LLM, LLM]]:
    method: str = request.param
    config = {"method": method, "model": str(write(method, deep_target, tmp_path / "draft")), **METHODS[method], "adaptive": False}
    bind_as_on_a_gpu(monkeypatch, FakeRecorder)
    with LLM(deep_target, config, **OPTIONS) as early, LLM(deep_target, config, **OPTIONS) as late:
        yield early, late


def drafter(llm: LLM) -> LearnedProposer:
    (proposer,) = (p for p in llm._running().core.proposers.proposers if isinstance(p, LearnedProposer))
    return proposer


def test_early_guesses_are_those_that_come_late(engines: tuple[LLM, LLM]) -> None:
    """Rows come and go, drafts are cut, ceilings change, blocks are given back, and steps come between."""
    for seed in range(4):
        pair, rng = Pair(engines, seed), random.Random(seed)
        early, late, chains = pair.early, pair.late, pair.chains
        assert early.num_places_ahead == 2 * early.max_tokens + 1
        texts = [Text(f"{seed}-{i}", rng, 300, list(range(16 * i, 16 * i + 12))) for i in range(5)]
        before = chains.num_begun, chains.num_used
        for turn in range(14):
            running = texts[: 3 + (turn > 4)] if turn < 9 else texts[1:]
            for text in running:
                text.ceiling = rng.choice([4, 4, 4, 2, 0])
            if turn == 6:
                running[0].blocks[-3:] = [90, 91, 92]  # given back and got anew, behind all that is used
            if turn == 7:
                early.forget(running[1].name)
                late.forget(running[1].name)
            pair.step(running, begins=turn % 5 != 3)
        begun, used = chains.num_begun - before[0], chains.num_used - before[1]
        assert pair.num_compared > 40 and begun >= used > 15
        for text in texts:
            early.forget(text.name)
            late.forget(text.name)


def test_what_was_begun_elsewhere_is_not_used(engines: tuple[LLM, LLM]) -> None:
    """The row gave back the blocks behind its tokens, to which a part of some chains was written, and got others."""
    pair = Pair(engines, seed=1)
    text = Text("r", random.Random(2), 300, list(range(12)))
    for turn in range(24):
        pair.step([text])
        kept = (len(text.token_ids) - 1) // SIZE + 1
        first = 20 if turn % 2 else 40
        text.blocks[kept:] = range(first + kept, first + 12)
    assert 5 < pair.chains.num_used < pair.chains.num_begun - 2


def test_what_was_begun_behind_other_tokens_is_not_used(engines: tuple[LLM, LLM]) -> None:
    pair = Pair(engines, seed=3)
    text = Text("r", random.Random(4), 300, list(range(12)))
    text.draw = Draw(0.0, 0, 0)
    for _ in range(4):
        pair.step([text])
    for _ in range(6):
        pair.step([text], is_repeated=True)
        used = pair.chains.num_used
        pair.step([text])
        assert pair.chains.num_used == used


def test_nobody_begins_where_the_host_has_to_know(deep_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, p/q rules, and executors that are waited for."""
    draft = {"method": "eagle", "model": str(write("eagle", deep_target, tmp_path / "draft")), "adaptive": False}
    with LLM(deep_target, draft, **OPTIONS) as llm:
        assert drafter(llm).num_places_ahead == 0 == llm._running().core.proposers.num_places_ahead
    bind_as_on_a_gpu(monkeypatch)
    tree = {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}
    drawn = {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"}
    for settings in (tree, drawn):
        with LLM(deep_target, {**draft, **settings}, **OPTIONS) as llm:
            assert drafter(llm).num_places_ahead == 0
    with LLM(deep_target, {**draft, "rejection_sample_method": "standard"}, **OPTIONS) as llm:
        assert drafter(llm).num_places_ahead > 0 == llm._running().core.scheduler.needs.guessing_lookahead, "places are kept for nothing"
    with LLM(deep_target, draft, **OPTIONS) as llm:
        assert llm._running().core.scheduler.needs.guessing_lookahead == drafter(llm).num_places_ahead > 0
