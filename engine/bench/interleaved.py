"""Measuring on machines whose speed drifts: cases take turns in rounds, and what is compared is compared round by round.

A machine that slows down for a second slows all cases of that round alike, so ratios hold where absolute figures do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Case = TypeVar("Case")
Turn = TypeVar("Turn")


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and the quarter below and above which the outer ones lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: tuple[float, ...]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Series:
    """One case's values, one a round."""

    values: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.values)

    def scaled(self, factor: float) -> Series:
        return Series(tuple(value * factor for value in self.values))

    def rate(self, numerator: float = 1.0) -> Series:
        """Seconds -> so many a second."""
        return Series(tuple(numerator / value for value in self.values))

    def over(self, other: Series) -> Spread:
        """Ratios round by round."""
        return Spread.of(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))


def take_turns(cases: Mapping[Case, Callable[[], float]], rounds: int, on_turn: Callable[[], object] = lambda: None) -> dict[Case, Series]:
    """What each case returned in its turns, as a series."""
    return {case: Series(tuple(found)) for case, found in keep_turns(cases, rounds, on_turn).items()}


def keep_turns(
    cases: Mapping[Case, Callable[[], Turn]], rounds: int, on_turn: Callable[[], object] = lambda: None
) -> dict[Case, list[Turn]]:
    """Run all cases in every round, and keep what each returned. A first round that does not count finds the mistakes and warms up.

    Every second round runs backwards: what one case leaves in the caches is not always the same neighbour's advantage.
    """
    kept: dict[Case, list[Turn]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case in list(cases) if number % 2 else reversed(list(cases)):
            turn = cases[case]()
            if number:
                kept[case].append(turn)
            on_turn()
    return kept


def seconds_of(run: Callable[[], object], at_least_s: float) -> float:
    """Seconds of one run: the middle of as many as fill at_least_s, after one that does not count."""
    run()
    times: list[float] = []
    while not times or sum(times) < at_least_s:
        times.append(timed(run))
    return statistics.median(times)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
