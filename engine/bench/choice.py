"""Which of the measured settings to use: the simplest one that is within 2 %, or within the noise, of the fastest; or none.

Knows figures only. A fixed k is judged as it would be served: switched off above the number of requests up to which it pays.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .speculation_figures import OFF, Figures, Setting

TOLERANCE = 0.02  # two settings so near to each other are the same to a user
SIMPLE = ("off", "ngram", "suffix", "ngram_cache", "lookahead")  # no network, the simplest first; every other method has one


@dataclass(frozen=True)
class Score:
    """Geometric mean of a setting's speed-ups over the numbers of requests, and its standard error."""

    value: float
    error: float


Scores = Mapping[Setting, Score]


def by_setting(found: Sequence[Figures]) -> dict[Setting, list[Figures]]:
    """Each setting's figures, few requests at a time first."""
    grouped: dict[Setting, list[Figures]] = defaultdict(list)
    for figures in sorted(found, key=lambda one: one.concurrency):
        grouped[figures.setting].append(figures)
    return grouped


def pays_up_to(mine: Sequence[Figures]) -> int:
    """The most requests at a time at which one setting is no loss, nor is it at any fewer; 0 if it is one at the fewest already."""
    paying = 0
    for figures in sorted(mine, key=lambda one: one.concurrency):
        if figures.believable < 1 - TOLERANCE:
            break
        paying = figures.concurrency
    return paying


def score(mine: Sequence[Figures]) -> Score:
    limit = math.inf if mine[0].setting.adaptive else pays_up_to(mine)
    counting = [f for f in mine if f.concurrency <= limit]  # above, nothing is guessed
    value = math.exp(math.fsum(math.log(f.believable) for f in counting) / len(mine))
    return Score(value, value * math.hypot(*(f.relative_error for f in counting)) / len(mine))


def scores(found: Sequence[Figures]) -> dict[Setting, Score]:
    return {setting: score(mine) for setting, mine in by_setting(found).items()}


def choose(scored: Scores) -> Setting:
    """OFF where nothing is faster than that by 2 %, and by more than its noise."""
    known = {OFF: Score(1.0, 0.0), **scored}
    best = max(known.values(), key=lambda one: one.value)
    enough = best.value - max(TOLERANCE * best.value, best.error)
    return min((setting for setting in known if known[setting].value >= enough), key=_complexity)


def survivors(scored: Scores, at_least: int) -> list[Setting]:
    """The better half, as many as at_least if there are so many: the best first."""
    ranked = sorted(scored, key=lambda setting: (-scored[setting].value, _complexity(setting)))
    return ranked[: max(at_least, math.ceil(len(ranked) / 2))]


def _complexity(setting: Setting) -> tuple[int, bool, int, str]:
    """What to prefer where speed is the same: less to load, then k that looks after itself, then fewer guesses."""
    rank = SIMPLE.index(setting.method) if setting.method in SIMPLE else len(SIMPLE)
    return rank, not setting.adaptive, setting.k, setting.method
