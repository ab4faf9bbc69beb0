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


def take_turns(cases: Mapping[Case, Callable[[], float]], rounds: int, on_turn: Callable[[], None] = lambda: None) -> dict[Case, Series]:
    """Run all cases in every round, and keep what each returned. A first round that does not count finds the mistakes and warms up.

    Every second round runs backwards: what one case leaves in the caches is not always the same neighbour's advantage.
    """
    values: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case in list(cases) if number % 2 else reversed(list(cases)):
            value = cases[case]()
            if number:
                values[case].append(value)
            on_turn()
    return {case: Series(tuple(found)) for case, found in values.items()}


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
