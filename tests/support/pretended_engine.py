"""A pretended engine, which runs a drafter over requests whose target says what the test wants, and texts and answers for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from eagle_reference import Target
from native_only import native_only
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Feedback
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.loading import LoadedProposer, Opening

NUM_BLOCKS = 400
GREEDY = Draw(0.0, 0, 0)
TORCH = Execution(torch.float32, prefer_native=False)
NATIVE = Execution(torch.float32)
EXECUTIONS = [pytest.param(TORCH, id="torch"), pytest.param(NATIVE, id="native", marks=native_only)]
VOCAB = 59  # of the pretended targets


@dataclass
class Request:
    tokens: list[int]
    num_prompt: int
    table: list[int]
    computed: int = 0  # tokens with committed states
    filled: int = 0
    draw: Draw = GREEDY


@dataclass(frozen=True)
class Guess:
    """What was drafted for a row that had this text."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    probs: Tensor | None

    @classmethod
    def of(cls, draft: Draft, row: int, text: Sequence[int]) -> Guess:
        start, end = draft.start_loc[row], draft.start_loc[row + 1]
        confidence = draft.confidence or [1.0] * len(draft.token_ids)
        probs = None if draft.probs is None else draft.probs[start:end]
        return cls(list(text), draft.token_ids[start:end], draft.parents[start:end], confidence[start:end], probs)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        return [*self.path(self.parents[node]), node] if node >= 0 else []


def chosen(guess: Guess, probs: Tensor) -> list[float]:
    """Of the probabilities [guesses, V], those of the guesses."""
    return probs[range(len(guess.tokens)), guess.tokens].tolist()


Choose = Callable[[str, Guess], tuple[Sequence[int], int]]
"""(request, its guesses) -> accepted path of nodes, and the token behind it."""


def text(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def at_random(seed: int, vocab: int = VOCAB) -> Choose:
    """Accepts a random part of each chain."""
    rng = random.Random(seed)

    def choose(request_id: str, guess: Guess) -> tuple[Sequence[int], int]:
        return range(rng.randint(0, len(guess.tokens))), rng.randrange(vocab)

    return choose


def accept(count: int, then: int = 7) -> Choose:
    return lambda request_id, guess: (range(min(count, len(guess.tokens))), then)


def block_size(execution: Execution) -> int:
    """Small blocks show more edges; natively there is one size."""
    return 16 if execution.prefer_native else 4


def opened(loaded: LoadedProposer, execution: Execution, return_probs: bool = False) -> LearnedProposer:
    """With caches of its own."""
    size = block_size(execution)
    caches = [executor.allocate(NUM_BLOCKS, size) for executor in loaded.executors]
    return cast(LearnedProposer, loaded.open(Opening(loaded.name, caches, NUM_BLOCKS, size, return_probs)))


class PretendedEngine:
    """Steps over requests whose target says what the test wants, and has states that depend on the whole text."""

    def __init__(self, proposer: LearnedProposer, target: Target, block_size: int) -> None:
        self.proposer, self.target, self.block_size = proposer, target, block_size
        self.requests: dict[str, Request] = {}
        self.filled: dict[str, int] = {}
        self._next_block = 0

    def add(self, request_id: str, prompt: Sequence[int], shared: Sequence[int] = (), draw: Draw = GREEDY) -> Request:
        """shared: blocks of the prompt's beginning that another request has filled."""
        count = (len(prompt) + 160) // self.block_size - len(shared)
        table = [*shared, *range(self._next_block, self._next_block + count)]
        self._next_block += count
        known = len(shared) * self.block_size
        self.requests[request_id] = Request(list(prompt), len(prompt), table, known, known, draw)
        return self.requests[request_id]

    def step(
        self,
        choose: Choose,
        ceiling: int | Mapping[str, int] = 4,
        chunk: int = 1000,
        order: Sequence[str] | None = None,
        asks: bool = True,
        ingest: int = 1000,
    ) -> dict[str, Guess]:
        """One step over all requests. ceiling: of each, or of all; asks False: the proposer is not asked at all."""
        names = list(self.requests) if order is None else list(order)
        afters = {name: min(len(r.tokens), r.computed + chunk) for name in names for r in [self.requests[name]]}
        rows = [self._row(name, afters[name], ceiling if isinstance(ceiling, int) else ceiling[name]) for name in names]
        draft = self.proposer.propose(DraftContext(rows, ingest, self.block_size)) if asks else Draft.empty(len(rows))
        self.filled.update({name: n for (_, name), n in draft.filled.items()})
        guesses = {name: Guess.of(draft, i, self.requests[name].tokens) for i, name in enumerate(names)}
        self._finish(names, afters, guesses, choose)
        self.proposer.check()
        return guesses

    def _row(self, name: str, after: int, ceiling: int) -> DraftRow:
        r = self.requests[name]
        return DraftRow(name, r.tokens, r.num_prompt, after, ceiling, 0, r.table, (r.filled,), r.draw)

    def _finish(self, names: Sequence[str], afters: Mapping[str, int], guesses: Mapping[str, Guess], choose: Choose) -> None:
        hidden: dict[int, list[Tensor]] = {boundary: [] for boundary in self.proposer.needs.hidden}
        accepted: list[list[int]] = []
        emitted: list[list[int]] = []
        committed: list[int] = []
        scheduled: list[int] = []
        starts = [0]
        for name in names:
            request, guess = self.requests[name], guesses[name]
            texts = [request.tokens[: i + 1] for i in range(request.computed, afters[name])]
            texts += [request.tokens + [guess.tokens[n] for n in guess.path(node)] for node in range(len(guess.tokens))]
            for boundary, states in hidden.items():
                states += [self.target.state(text, boundary) for text in texts]
            starts.append(starts[-1] + len(texts))
            scheduled.append(afters[name] - request.computed)
            path, more = choose(name, guess) if afters[name] == len(request.tokens) else ((), None)
            accepted.append(list(path))
            emitted.append([guess.tokens[node] for node in path] + ([] if more is None else [more]))
            request.tokens += emitted[-1]
            request.computed = afters[name] + len(path)
            committed.append(request.computed)
        self.proposer.observe(
            Feedback(
                request_ids=names, num_committed=committed, num_drafted=[len(guesses[name].tokens) for name in names], accepted=accepted,
                emitted=emitted, finished=[False] * len(names),
                hidden={boundary: torch.stack(states) for boundary, states in hidden.items()}, query_start_loc=starts,
                num_scheduled=scheduled,
            )
        )
