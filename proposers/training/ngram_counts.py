"""What follows short runs of tokens in the answers of a target, counted: from a packed file to the tables of an n-gram cache.

Only learned tokens count as followers; the runs before them may reach back into the prompt, never into another document. Knows no
folders.

A run is kept for what the table would say without it: by the longest shorter run that is kept. Both are scored by the quadratic rule
(Brier 1950), 2 c r - c^2 for a token that is said with chance c and is right with chance r: the mean of what guessing it is worth over
all costs of a guess. It is highest for who knows r, so it pays to say something else as well as to be less sure of the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..ngram_cache_checkpoint import Followed
from .packing import LEARN, PackedFile

LEAST_HELP = 0.1                     # of a run, in tokens; less is not worth its bytes
MOST_HELP = 1e12                     # more than any run has

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class CountLimits:
    """Which runs are kept."""

    max_n: int = 4                   # tokens of the longest
    min_count: int = 3               # times that a run was followed by anything; rarer ones say nothing that can be relied on
    max_runs: int = 100_000          # of all lengths; the most helpful ones


@dataclass(frozen=True)
class _Said:
    """What each of E runs says."""

    token_ids: Ints                  # [E]
    chances: Floats                  # [E]


@dataclass(frozen=True)
class _Counted:
    """All E runs of one length that came often enough, and the P different pairs of one of them and a token that followed it."""

    runs: Ints                       # [E, n] token ids
    shorter: Ints                    # [E] place, among the runs of one token less, of the same run without its first token
    keys: Ints                       # [P] ascending: place of the run * vocabulary + token
    counts: Ints                     # [P]
    vocab_size: int

    @cached_property
    def run_of(self) -> Ints:
        """[P] places of the pairs' runs."""
        return self.keys // self.vocab_size

    @cached_property
    def seen(self) -> Ints:
        """[E] times that each run was followed by anything."""
        return self._per_run(self.counts)

    @cached_property
    def said(self) -> _Said:
        """By all places where each run stands."""
        return self.likeliest(self.counts)

    def likeliest(self, counts: Ints) -> _Said:
        """By some of the places: counts is [P]. Of a run without any, the chance is that of something never seen."""
        order = np.lexsort((-counts, self.run_of))
        best = order[np.flatnonzero(np.diff(self.run_of[order], prepend=-1))]        # the first pair of each run
        return _Said(self.keys[best] % self.vocab_size, chance_of(counts[best], self._per_run(counts)))

    def place(self, runs: Ints, token_ids: Ints) -> Ints:
        """[...] of pairs, in `keys`; -1 where there is no such pair."""
        wanted = runs * self.vocab_size + token_ids
        found = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[found] == wanted, found, -1)

    def _per_run(self, counts: Ints) -> Ints:
        return np.bincount(self.run_of, counts, len(self.runs)).astype(np.int64)


def count_runs(answers: PackedFile, limits: CountLimits, counted: Callable[[], object] = lambda: None) -> list[Followed]:
    """By length, from 1 to max_n. counted: called after each."""
    levels: list[_Counted] = []
    for level in _levels(answers, limits):
        levels.append(level)
        counted()
    said = [level.said for level in levels]
    kept: list[Bools] = []
    for _ in range(2):               # once more beside what the shorter runs say when they need not speak for the longer ones
        kept = _kept(levels, said, limits.max_runs)
        said = _decided(levels, kept)
    found = [
        Followed(level.runs[mine], one.token_ids[mine], one.chances[mine]) for level, mine, one in zip(levels, kept, said, strict=True)
    ]
    return [*found, *(Followed(np.zeros((0, n), int), np.zeros(0, int), np.zeros(0)) for n in range(len(found) + 1, limits.max_n + 1))]


def chance_of(hits: Ints, seen: Ints) -> Floats:
    """How likely what followed `hits` of `seen` times is to follow again.

    The likeliest token was chosen because it came so often, so one time of it proves nothing; measured on held-out answers.
    """
    return np.maximum(hits - 1, 0.5) / (seen + 1)


def _levels(answers: PackedFile, limits: CountLimits) -> Iterator[_Counted]:
    """By length, as long as any run comes often enough."""
    token_ids = answers.token_ids.astype(np.int64)
    vocab_size = int(token_ids.max(initial=0)) + 1
    before = np.arange(len(token_ids)) - np.repeat(answers.bounds[:-1], np.diff(answers.bounds))     # tokens before each in its document
    at = np.flatnonzero(answers.learn == LEARN)      # places of followers, ...
    run = np.zeros(len(at), np.int64)                # ... and which run stands before each: first the empty one
    for n in range(1, limits.max_n + 1):
        room = before[at] >= n
        at, run = at[room], run[room]
        _, first, longer, seen = np.unique(
            run * vocab_size + token_ids[at - n], return_index=True, return_inverse=True, return_counts=True)
        often = seen >= limits.min_count
        if not often.any():
            return
        first = first[often]
        runs, shorter = token_ids[at[first][:, None] - np.arange(n, 0, -1)], run[first]
        inside = often[longer]
        at, run = at[inside], (np.cumsum(often) - 1)[longer[inside]]
        keys, counts = np.unique(run * vocab_size + token_ids[at], return_counts=True)
        yield _Counted(runs, shorter, keys, counts, vocab_size)


def _kept(levels: Sequence[_Counted], said: Sequence[_Said], most: int) -> list[Bools]:
    """Which runs are kept of each length: those that help enough to be at most `most`."""
    kept = _helpful(levels, said, LEAST_HELP)
    if sum(map(np.count_nonzero, kept)) <= most:
        return kept
    low, high = LEAST_HELP, MOST_HELP
    while high > 1.001 * low:        # to a thousandth: what the last runs help hardly differs
        middle = (low * high) ** 0.5
        tried = _helpful(levels, said, middle)
        if sum(map(np.count_nonzero, tried)) <= most:
            high, kept = middle, tried
        else:
            low = middle
    return kept


def _helpful(levels: Sequence[_Counted], said: Sequence[_Said], least: float) -> list[Bools]:
    """Which runs help at least so much, each beside what the shorter ones that are kept say in its place. said: by kept ones."""
    kept: list[Bools] = []
    token_ids, sure = np.zeros(1, np.int64), np.zeros(1)     # what is said before the longest: by the empty run nothing
    for level, mine in zip(levels, said, strict=True):
        token_ids, sure = token_ids[level.shorter], sure[level.shorter]
        place = level.place(np.arange(len(level.runs)), token_ids)
        right = chance_of(np.where(place >= 0, level.counts[place], 0), level.seen)
        helps = level.seen * (level.said.chances**2 - sure * (2 * right - sure)) >= least
        token_ids, sure = np.where(helps, mine.token_ids, token_ids), np.where(helps, mine.chances, sure)
        kept.append(helps)
    return kept


def _decided(levels: Sequence[_Counted], kept: Sequence[Bools]) -> list[_Said]:
    """What each run says, by the places where it decides: where no longer one is kept, which is where it will be asked.

    Without this a short run is too sure of itself: it counts what the longer ones know better. One that never decides says what it
    does by all of its places.
    """
    found: list[_Said] = []
    above: _Counted | None = None
    decided = np.zeros(0, np.int64)                  # of the counts of `above`, those that it or a longer run decides
    for level, mine in zip(reversed(levels), reversed(kept), strict=True):
        longer = np.zeros(len(level.keys), np.int64)
        if above is not None:
            np.add.at(longer, level.place(above.shorter[above.run_of], above.keys % above.vocab_size), decided)
        left = level.counts - longer
        some = np.isin(np.arange(len(level.runs)), level.run_of[left > 0])
        here, all_over = level.likeliest(left), level.said
        found.append(_Said(np.where(some, here.token_ids, all_over.token_ids), np.where(some, here.chances, all_over.chances)))
        decided = np.where(mine[level.run_of], level.counts, longer)
        above = level
    return found[::-1]
