"""What a step costs: seconds of the target by tokens and context, and of each proposer by depth and rows.

Measured once, then corrected by what real steps take. Knows no request; never reads a clock. Where the figures are kept
between starts is in cost_file.py, how they are measured in cost_measurement.py.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

LADDER = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
)
"""Numbers of tokens worth measuring: dense where speculation decides, and on both sides of the widths of registers and tiles."""

GAIN = 0.1  # share of a surprise that is believed of what was seen before
DRIFT_GAIN = 0.03  # and of everything else
MEASURED = 4.0  # observations that a measurement counts as
OUTLIER = 0.4  # in log seconds: a stolen core is no news unless it stays
DOUBT = 0.2  # in log seconds: less says nothing of more; twice in a row to the same side, and the estimate wants to be looked at again
STREAK = 4  # such surprises to the same side after which the biggest is news
REACH = 1.25  # numbers of tokens within this factor learn from an observation too, if they have not been seen themselves


@dataclass(frozen=True)
class CostFigures:
    """Measured seconds, as they are kept in a file. Keys ascend."""

    target: Mapping[int, float]  # tokens -> seconds of a step, drafting excluded, at a short context
    per_context_token: float = 0.0  # seconds more for each token of context, over all rows
    draft: Mapping[str, Mapping[tuple[int, int], float]] | None = None  # proposer -> (k, rows) -> seconds
    passes: Mapping[int, float] | None = None  # tokens -> seconds of a pass alone, one behind the other; None = nobody makes such

    def __post_init__(self) -> None:
        drafting = (seconds for grid in (self.draft or {}).values() for seconds in grid.values())
        seconds = [*self.target.values(), *(self.passes or {}).values(), *drafting]
        if not self.target or not all(math.isfinite(s) and s >= 0 for s in (*seconds, self.per_context_token)):
            raise ValueError("a cost is missing, negative or not finite")
        if any(s == 0 or tokens < 1 for curve in (self.target, self.passes or {}) for tokens, s in curve.items()):
            raise ValueError("a step of the target takes time and has at least one token")


class Machine:
    """How much slower it is than when it was measured, by every table that it does the work of."""

    slowness: float = 1.0


class TargetCost:
    """Seconds of a target step. Between measured numbers of tokens a straight line, behind the last one its slope."""

    def __init__(self, figures: CostFigures, max_tokens: int, machine: Machine | None = None) -> None:
        """machine: shared with other tables, so that what one finds out of it holds for all."""
        self._machine = machine or Machine()
        self._per_context_token = figures.per_context_token
        self._curve = _interpolated(figures.target, max_tokens)  # [max_tokens + 1], index = tokens
        self._seen = [MEASURED if tokens in figures.target else 0.0 for tokens in range(max_tokens + 1)]
        self._streaks = [0] * (max_tokens + 1)  # observations in a row that were much dearer (above 0) or cheaper than expected
        self._doubts = [False] * (max_tokens + 1)
        self.max_tokens = max_tokens

    def seconds(self, num_tokens: float, context: int = 0) -> float:
        """num_tokens may be an expectation: 3.5 is half way between 3 and 4. context: tokens in the cache, over all rows."""
        return self.at(context)(num_tokens)

    def at(self, context: int) -> Callable[[float], float]:
        """`seconds` by tokens at one context, for those who ask often; good until the next observation."""
        curve, most, slowness = self._curve, self.max_tokens, self._machine.slowness
        of_context = slowness * self._per_context_token * context

        def seconds(num_tokens: float) -> float:
            low = int(num_tokens)
            if low >= most:
                return slowness * curve[-1] * num_tokens / most + of_context
            base = curve[low]
            return slowness * (base + (num_tokens - low) * (curve[low + 1] - base)) + of_context

        return seconds

    def in_doubt(self, num_tokens: int) -> bool:
        """Whether the latest steps of so many tokens took much longer, or less long, than expected."""
        return num_tokens <= self.max_tokens and self._doubts[num_tokens]

    def disturbance(self, num_tokens: int, context: int, seconds: float) -> float:
        """How many times as long as expected a step took, if it is too many to be news of the step: somebody else had the cores then,
        and would have had them in another step, too. Else 1."""
        expected = self.seconds(num_tokens, context)
        return seconds / expected if seconds > math.exp(OUTLIER) * expected > 0 else 1.0

    def observe(self, num_tokens: int, context: int, seconds: float) -> None:
        """A decode step took this long. Durations of 0 or less are no news."""
        expected = self.seconds(num_tokens, context)
        if seconds <= 0 or expected <= 0 or num_tokens > self.max_tokens:
            return
        surprise = math.log(seconds / expected)
        side = 1 if surprise > 0 else -1
        before = self._streaks[num_tokens]
        is_news = abs(surprise) > DOUBT  # what is small says nothing of what is large
        self._streaks[num_tokens] = (before + side if side * before > 0 else side) if is_news else 0
        streak = abs(self._streaks[num_tokens])
        self._doubts[num_tokens] = streak > 1
        if abs(surprise) > OUTLIER and streak < STREAK:
            return
        seen, curve = self._seen, self._curve
        # To each part what it has in the whole: else a slope that was measured while something disturbed could never be put right.
        by_context = self._machine.slowness * self._per_context_token * context / expected
        gain = max(GAIN, 1.0 / (MEASURED + seen[num_tokens])) * (1.0 - by_context)
        most = OUTLIER * max(1, streak - STREAK)
        surprise = max(-most, min(most, surprise, 1.0))
        self._machine.slowness *= 1.0 + DRIFT_GAIN * surprise * (1.0 - by_context)
        self._per_context_token *= 1.0 + GAIN * by_context * surprise
        curve[num_tokens] *= 1.0 + gain * surprise
        for tokens in range(math.ceil(num_tokens / REACH), min(self.max_tokens, int(num_tokens * REACH)) + 1):
            if seen[tokens] < MEASURED and tokens != num_tokens:
                near = 1.0 - abs(tokens - num_tokens) / ((REACH - 1.0) * num_tokens)
                curve[tokens] *= 1.0 + gain * surprise * near / (1.0 + seen[tokens])
        seen[num_tokens] += 1.0
        self._keep_rising(num_tokens)

    def _keep_rising(self, num_tokens: int) -> None:
        """More tokens hardly cost less, or the noise of two estimates would invent guesses that pay for themselves: they meet half way."""
        curve, known = self._curve, self._curve[num_tokens]
        for tokens in range(num_tokens + 1, self.max_tokens + 1):
            if curve[tokens] >= known:
                break
            curve[tokens] += (known - curve[tokens]) / 2
        for tokens in range(num_tokens - 1, 0, -1):
            if curve[tokens] <= known:
                break
            curve[tokens] += (known - curve[tokens]) / 2

    def figures(self) -> dict[int, float]:
        """Seconds at the ladder's numbers as they are known now."""
        return {tokens: self._machine.slowness * self._curve[tokens] for tokens in LADDER if tokens <= self.max_tokens}

    @property
    def per_context_token(self) -> float:
        return self._machine.slowness * self._per_context_token


class DraftCost:
    """Seconds of one proposer's call by the deepest draft in it and the number of rows that want one."""

    def __init__(self, grid: Mapping[tuple[int, int], float] | None = None) -> None:
        """grid: (k, rows) -> seconds. Without one, drafting counts as free until it was seen."""
        self._depths = sorted({k for k, _ in grid}) if grid else []
        self._rows = sorted({rows for _, rows in grid}) if grid else []
        self._grid = dict(grid or {})
        self._seen: dict[tuple[int, int], float] = {}
        self._cache: dict[tuple[int, int], float] = {}
        self._ratio = 1.0

    def seconds(self, depth: int, num_rows: int) -> float:
        if depth == 0 or num_rows == 0:
            return 0.0
        known = self._cache.get((depth, num_rows))
        if known is None:
            known = self._cache[depth, num_rows] = self._seen.get((depth, num_rows)) or self._estimate(depth, num_rows)
        return known

    def observe(self, depth: int, num_rows: int, seconds: float) -> None:
        if seconds <= 0 or depth == 0 or num_rows == 0:
            return
        expected = self.seconds(depth, num_rows)
        if expected <= 0:  # the first news of an unmeasured proposer
            self._seen[depth, num_rows] = seconds
        else:
            surprise = max(-OUTLIER, min(OUTLIER, math.log(seconds / expected)))
            self._seen[depth, num_rows] = expected * math.exp(GAIN * surprise)
            self._ratio *= math.exp(GAIN / 2 * surprise)
        self._cache.clear()

    def figures(self) -> dict[tuple[int, int], float]:
        return {key: self._seen.get(key, self._ratio * seconds) for key, seconds in self._grid.items()} or dict(self._seen)

    def _estimate(self, depth: int, num_rows: int) -> float:
        """By the measured grid: a straight line in both directions. Unmeasured: as the nearest call that was seen, by depth."""
        if self._grid:
            by_rows = [_line(self._depths, [self._grid[k, rows] for k in self._depths], depth) for rows in self._rows]
            return self._ratio * _line(self._rows, by_rows, num_rows)
        if not self._seen:
            return 0.0
        near = min(self._seen, key=lambda key: abs(math.log(key[0] / depth)) + abs(math.log(key[1] / num_rows)))
        return self._seen[near] * max(1.0, depth / near[0])


class CostTable:
    """The costs of one engine: the target's steps and its passes alone, and, in the set's order, each proposer's."""

    def __init__(self, figures: CostFigures, proposers: Sequence[str], max_tokens: int) -> None:
        machine = Machine()
        self.target = TargetCost(figures, max_tokens, machine)
        drafts = figures.draft or {}
        self.drafts = [DraftCost(drafts.get(name)) for name in proposers]
        self.passes = TargetCost(figures if not figures.passes else replace(figures, target=figures.passes), max_tokens, machine)
        self._names = tuple(proposers)
        self._has_passes = bool(figures.passes)

    def figures(self) -> CostFigures:
        """As they are known now, for the next start."""
        drafts = {name: cost.figures() for name, cost in zip(self._names, self.drafts, strict=True)}
        full = {name: grid for name, grid in drafts.items() if _is_full(grid)}
        return CostFigures(self.target.figures(), self.target.per_context_token, full, self.passes.figures() if self._has_passes else None)


def _is_full(grid: Mapping[tuple[int, int], float]) -> bool:
    return bool(grid) and len(grid) == len({k for k, _ in grid}) * len({rows for _, rows in grid})


def _interpolated(seconds: Mapping[int, float], max_tokens: int) -> list[float]:
    xs = sorted(seconds)
    ys = [seconds[x] for x in xs]
    return [_line(xs, ys, tokens) for tokens in range(max_tokens + 1)]


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """The value at x of the line through the points. Flat before the first; behind the last, the last two rungs' slope, never falling."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i] + max(slope, 0.0) * (x - xs[i]) if x > xs[i] else ys[i - 1] + slope * (x - xs[i - 1])
