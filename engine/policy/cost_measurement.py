"""Measures at start what steps cost: the target by tokens and context, each proposer by depth and rows.

Runs real steps over the engine's own networks and caches, with books of its own that are thrown away: nothing of it is seen
afterwards. Times are those that the core reports of every step later on. Decides nothing and keeps no file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

from tqdm import tqdm

from ...kernels.batch_lists import BatchLists
from ...kernels.layout import RaggedBatch
from ...kernels.rounds import RoundsExecutor
from ...proposers.base import Proposer
from ...proposers.proposer_set import ProposerSet
from ..core import EngineCore
from ..rounds import Lookups
from ..shaped_steps import Filler, Sample, ShapedSteps
from .costs import LADDER, CostFigures
from .drafted_rounds import DRAFTED_STEP_S
from .rounds_choice import FEWEST_ROUNDS, STEP_S

BUDGET_S = 2.5
"""For everything; a network so slow that the least there is to measure takes longer is measured all the same."""
TARGET_SHARE, CONTEXT_SHARE = 0.55, 0.65  # of the budget, at the end of these parts; drafting has the rest
COARSE = (1, 4, 8, 2, 16, 32, 64, 128, 256, 512)  # numbers of tokens in the order of their worth
LEAST = 2  # of them are measured in any case
TOKENS_PER_ROW = 8  # up to here one row with guesses, behind it several: as real steps are
VISITS = 3  # to each number, far apart: what disturbs one hardly disturbs all
SAMPLES = 2  # in one visit
LEAD = 3  # steps of one token before those: steps without guesses mostly follow others like them, which leave the caches as they want them
SHORT_S = 0.01  # steps above this read more than caches hold
SLOW_S = 0.25  # a step as long as this is hardly disturbed: one sample a visit
PREPARING = 2  # steps of one shape, at most, in which something may be compiled or recorded for all that come later
LONG_CONTEXT = 1024
PASS_CONTEXT, MOST_PASS = 128, 64
PASSES_S = 0.3  # for passes alone, besides the budget
DRAFT_CONTEXT = 32
DRAFT_ROWS = 8
MIDDLE_DEPTH = 4
DRAFT_SAMPLES = 3


class _Budget:
    """Seconds left, shown as a bar."""

    def __init__(self, seconds: float, bar: tqdm[Any]) -> None:
        self._seconds = seconds
        self._bar = bar
        self._started = time.perf_counter()
        self.is_steady = False  # a long step stayed long: then no other prepares anything

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is spent."""
        return share * self._seconds - (time.perf_counter() - self._started)

    def forgive(self, seconds: float) -> None:
        """That time went into something that is needed anyway."""
        self._started += seconds

    def show(self) -> None:
        self._bar.update(min(self._seconds, time.perf_counter() - self._started) - self._bar.n)


def measure(
    open_core: Callable[[ProposerSet], EngineCore], proposers: Sequence[Proposer], text: Sequence[int], budget_s: float = BUDGET_S
) -> CostFigures | None:
    """What steps cost now; None if the cache is too small to run any.

    open_core: a core with books of its own over the engine's networks and caches, prefix caching on. text: token ids of
    something said, as long as it is at hand; it is repeated. Call before anything else runs.
    """
    text = (list(text) * (1 + LONG_CONTEXT * 2 // len(text)))[: LONG_CONTEXT * 2]
    bar: tqdm[Any] = tqdm(
        desc="measuring step times", total=budget_s, delay=0.5, leave=False, dynamic_ncols=True, disable=None,  # unless on a terminal
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.1f} of {total:.1f} s",
    )
    with bar:
        budget = _Budget(budget_s, bar)
        steps = ShapedSteps(open_core(ProposerSet([Filler()])), text, budget.show)
        started = time.perf_counter()
        passes = _passes(steps.core, text, STEP_S if Lookups.among(proposers).drafting is None else DRAFTED_STEP_S)
        budget.forgive(time.perf_counter() - started)  # it has a limit of its own
        target = _target(steps, budget)
        if 1 not in target:
            return None
        slope = _per_context_token(steps, budget, target[1])
        guessing = [p for p in proposers if p.max_tokens]
        drafts: dict[str, Mapping[tuple[int, int], float]] = {}
        for index, proposer in enumerate(guessing):
            alone = ShapedSteps(open_core(ProposerSet([proposer])), text, budget.show, verifies=False)
            if grid := _draft(alone, proposer.max_tokens, budget, len(guessing) - index):
                drafts[proposer.name] = grid
    return CostFigures(target, slope, drafts, passes)


def _passes(core: EngineCore, text: Sequence[int], step_s: float) -> dict[int, float] | None:
    """Seconds of passes by numbers of tokens, one behind the other; None if nobody makes them so, or several take longer than step_s.

    Into the first blocks of the cache, which are nobody's yet.
    """
    executor, kv, size = core.runner.executor, core.runner.kv, core.scheduler.kv.block_size
    tables = range(min(kv.num_blocks, core.scheduler.needs.max_model_len // size, -(-(PASS_CONTEXT + MOST_PASS) // size)))
    context = min(PASS_CONTEXT, len(tables) * size // 2)
    if not tables or not isinstance(executor, RoundsExecutor) or executor.state_layers:
        return None

    def batch(first: int, tokens: int) -> RaggedBatch:
        lists = BatchLists(size, query_start_loc=[0, tokens], seq_lens=[first + tokens], num_causal=[tokens], tables=[tables])
        lists.token_ids, lists.tree_mask, lists.positions = [*text[:tokens]], [0] * tokens, [*range(first, first + tokens)]
        lists.logits_indices = [*range(tokens)]
        lists.add_slots(tables, first, first + tokens)
        return lists.batch()

    def taken(tokens: int) -> float:
        ragged, seconds = batch(context, tokens), list[float]()
        for _ in range(1 + SAMPLES):  # the first finds the caches full of other things
            started = time.perf_counter()
            executor.run(ragged, kv)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    if taken(1) * FEWEST_ROUNDS > step_s:
        return None
    executor.run(batch(0, context), kv)  # new memory may hold what is no number, and then all tokens have the same experts
    started = time.perf_counter()
    found: dict[int, float] = {}
    for visit in range(VISITS):
        for tokens in LADDER if not visit else [*found]:
            spent = time.perf_counter() - started
            if tokens <= min(MOST_PASS, len(tables) * size - context) and (spent < (visit + 1) * PASSES_S / VISITS or len(found) < LEAST):
                found[tokens] = min(found.get(tokens, math.inf), taken(tokens))
    return _rising(found)


def _target(steps: ShapedSteps, budget: _Budget) -> dict[int, float]:
    """Seconds by numbers of tokens: as many of the ladder's as there is time for, each several times."""
    config, size = steps.core.scheduler.config, steps.core.scheduler.kv.block_size
    most = min(config.max_num_batched_tokens, config.max_num_seqs * TOKENS_PER_ROW)
    context = size if steps.core.scheduler.needs.max_model_len > 4 * size else 0
    samples: dict[int, list[float]] = {}

    def visit(tokens: int) -> None:
        num_rows = -(-tokens // TOKENS_PER_ROW)
        _start(steps, num_rows, context, budget)
        for _ in range(LEAD if tokens == 1 else 0):
            if (before := _settled(steps, [0], budget)) is None or before.seconds > SHORT_S:
                break
        for _ in range(SAMPLES):
            sample = _settled(steps, [(tokens + row) // num_rows - 1 for row in range(num_rows)], budget)
            if sample is None:
                return steps.stop()  # the cache or the model's length leaves no room
            samples.setdefault(sample.num_tokens, []).append(sample.seconds)
            if sample.seconds > SLOW_S:
                return
        if tokens == 1:
            steps.stop()  # the row has grown: in a small cache others would find no room behind it

    def expected(tokens: int) -> float:
        """Of a visit, at most."""
        if not samples:
            return 0.0
        near = max((known for known in samples if known <= tokens), default=min(samples))  # a tight budget cuts what was asked for
        seconds = median_low(samples[near]) * max(tokens, near) / near
        return 2 * seconds if seconds > SLOW_S else (1 + SAMPLES) * seconds

    _start(steps, 1, context, budget)  # the first step of a process is no measure of the others
    for tokens in (*COARSE, *(tokens for tokens in LADDER if tokens not in COARSE)):
        if tokens <= most and (len(samples) < LEAST or expected(tokens) < budget.left(TARGET_SHARE / 2)):
            visit(tokens)
    for _ in range(VISITS - 1):
        for tokens in sorted(samples):
            if expected(tokens) < budget.left(TARGET_SHARE):
                visit(tokens)
    steps.stop()
    # A plain step that seems dear makes every guess look cheap, and then hardly another plain one comes that would tell better.
    return _rising({tokens: min(seconds) if tokens == 1 else median_low(seconds) for tokens, seconds in samples.items()})


def _per_context_token(steps: ShapedSteps, budget: _Budget, plain: float) -> float:
    """Seconds more for each token in the cache, from one row with a short text and with a long one; 0 if there is no time or room.

    plain: seconds of a step of one token.
    """
    scheduler, size = steps.core.scheduler, steps.core.scheduler.kv.block_size
    room = min(LONG_CONTEXT, scheduler.needs.max_model_len - 4 * size, (scheduler.kv.pool.num_blocks - 4) * size)
    context = room // size * size
    if context < 8 * size or 8 * plain > budget.left(CONTEXT_SHARE):
        return 0.0
    _start(steps, 1, size, budget)
    steps.stop()
    steps.lengthen(context)
    seconds: dict[int, list[float]] = {size: [], context: []}
    for _ in range(VISITS):
        if 2 * (1 + SAMPLES) * plain > budget.left(CONTEXT_SHARE) and seconds[context]:
            break
        for length, taken in seconds.items():
            _start(steps, 1, length, budget)
            taken += [sample.seconds for sample in (steps.step([0]) for _ in range(SAMPLES)) if sample is not None]
    steps.stop()
    if not all(seconds.values()):
        return 0.0
    return max(0.0, min(seconds[context]) - min(seconds[size])) / (context - size)  # what disturbs only ever adds


def _draft(steps: ShapedSteps, most: int, budget: _Budget, num_left: int) -> dict[tuple[int, int], float]:
    """(k, rows) -> seconds of one proposer, for all k and rows that are in it at all. num_left: proposers that share what is left."""
    size, max_rows = steps.core.scheduler.kv.block_size, steps.core.scheduler.config.max_num_seqs
    context = min(-(-DRAFT_CONTEXT // size) * size, steps.core.scheduler.needs.max_model_len // (2 * size) * size)
    few, many = (1,), tuple({1, min(DRAFT_ROWS, max_rows)})
    ends, middle = tuple({1, most}), tuple({1, min(MIDDLE_DEPTH, most), most})
    grid: dict[tuple[int, int], float] = {}
    before, seconds = budget.left(), budget.left() / num_left
    _start(steps, 1, context, budget)  # once for all: the others find it in the cache
    for depths, rows in ((ends, few), (ends, many), (middle, many)):
        spent = before - budget.left()
        if grid and 3 * spent > seconds - spent:
            break
        cells = {(k, r): _draft_seconds(steps, k, r, context, budget) for r in rows for k in depths if (k, r) not in grid}
        found = {key: cell for key, cell in cells.items() if cell is not None}
        if len(found) < len(cells):
            break  # no room for so much, or the proposer is broken
        grid.update(found)
    steps.stop()
    return dict(sorted(grid.items()))


def _draft_seconds(steps: ShapedSteps, depth: int, num_rows: int, context: int, budget: _Budget) -> float | None:
    _start(steps, num_rows, context, budget)
    taken: list[float] = []
    for _ in range(DRAFT_SAMPLES):
        sample = _settled(steps, [depth] * num_rows, budget)
        if sample is None or any(health.num_failures for health in steps.core.proposers.stats()):
            return None
        taken.append(sample.draft_seconds)
        if sample.seconds > SLOW_S:
            break
    return median_low(taken)


def _start(steps: ShapedSteps, num_rows: int, context: int, budget: _Budget) -> None:
    """Rows for the steps that come. Their prompts' pass may prepare something, too."""
    started = time.perf_counter()
    steps.start(num_rows, context)
    took = time.perf_counter() - started
    if took > SLOW_S and not budget.is_steady:
        budget.forgive(took)


def _settled(steps: ShapedSteps, depths: Sequence[int], budget: _Budget) -> Sample | None:
    """A step of that shape; not one in which kernels were compiled or a graph was recorded, which takes long and happens once."""
    sample = steps.step(depths)
    if sample is None or sample.whole_s <= SLOW_S or budget.is_steady:
        return sample
    first_s, spent = sample.whole_s, 0.0
    for _ in range(PREPARING):
        spent += sample.whole_s
        again = steps.step(depths)
        if again is None:
            return sample
        sample = again
        if sample.whole_s < first_s / 2:
            budget.forgive(spent)
            return sample
    budget.is_steady = True
    return sample


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Disturbances only ever make a step slower: what more tokens took is the most that fewer can cost."""
    rising: dict[int, float] = {}
    least = math.inf
    for tokens in sorted(seconds, reverse=True):
        least = rising[tokens] = min(least, seconds[tokens])
    return dict(sorted(rising.items()))
