"""Is speculation ever slower? The same answers with it and without, pair by pair, over kinds of work and numbers of requests at once.

Both sides are whole engines in one process that take turns, so that a machine that slows down slows both. Knows tokens, not texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..request import SamplingParams
from .interleaved import keep_turns, timed

if TYPE_CHECKING:
    from ..llm import LLM

FEWEST_PAIRS = 6  # that have a 95 % interval of their median
AT_LEAST = 3  # requests of a turn, one after another if fewer may run at once: a single short one is over before it can be timed
OFF, ADAPTIVE = "off", "adaptive"


@dataclass(frozen=True)
class Workload:
    """A kind of work."""

    name: str
    prompts: Sequence[Sequence[int]]  # token ids; turns take them in order, and begin again at the end
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    predictions: Sequence[str | Sequence[int]] = ()  # of each prompt, what its answer will largely repeat; none = no prompt has one
    is_known: bool = False  # each answer is its own prediction: no guesses could be better

    def turn(self, number: int, size: int) -> tuple[list[list[int]], list[SamplingParams]]:
        """Prompts and parameters of one turn. The same number gives the same texts on both sides, and no other does."""
        places = range(number * size, (number + 1) * size)
        asked = [place % len(self.prompts) for place in places]
        params = [
            SamplingParams(
                temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, seed=place,
                prediction=self.predictions[number] if self.predictions else None)
            for place, number in zip(places, asked, strict=True)
        ]
        return [list(self.prompts[number]) for number in asked], params


@dataclass(frozen=True)
class Turn:
    seconds: float
    token_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class Comparison:
    """One kind of work at one number of requests."""

    workload: str
    batch: int
    pairs: int
    median: float  # of the speed-ups, pair by pair: seconds without over seconds with speculation
    low: float  # 95 % interval of the median; of fewer pairs than FEWEST_PAIRS, the lowest
    high: float
    tokens_per_s: float  # with speculation, median
    mean_accepted_length: float  # tokens per pass that had a draft
    guessed_share: float  # of the tokens, those that were accepted guesses
    same: bool  # whether all texts were the same, token by token


def compare(
    engines: Mapping[str, LLM], workload: Workload, batch: int, pairs: int, on_turn: Callable[[], object] = lambda: None
) -> Comparison:
    """engines: OFF and ADAPTIVE."""
    if workload.is_known:
        workload = replace(workload, predictions=_answers(engines[OFF], workload))
    size, taken = max(batch, AT_LEAST), dict.fromkeys(engines, 0)
    before = engines[ADAPTIVE].stats()

    def take(name: str) -> Turn:
        prompts, params = workload.turn(taken[name], size)
        taken[name] += 1
        token_ids: list[list[int]] = []
        return Turn(timed(lambda: token_ids.extend(_generate(engines[name], prompts, params, batch))), token_ids)

    turns = keep_turns({name: partial(take, name) for name in (OFF, ADAPTIVE)}, pairs, on_turn)
    after = engines[ADAPTIVE].stats()
    ratios = sorted(off.seconds / on.seconds for off, on in zip(turns[OFF], turns[ADAPTIVE], strict=True))
    low, high = median_interval(pairs)
    drafts, accepted = after.num_drafts - before.num_drafts, after.num_accepted_tokens - before.num_accepted_tokens
    return Comparison(
        workload.name, batch, pairs, _middle(ratios), ratios[low], ratios[high],
        _middle(sorted(turn.num_tokens / turn.seconds for turn in turns[ADAPTIVE])),
        1 + accepted / max(drafts, 1),
        accepted / max(1, after.generation_tokens - before.generation_tokens),
        all(off.token_ids == on.token_ids for off, on in zip(turns[OFF], turns[ADAPTIVE], strict=True)),
    )


def median_interval(count: int) -> tuple[int, int]:
    """Places, in ascending order, of the values between which the median of the whole lies with a probability of 95 % or more.

    That value i is below it is a coin's toss for each of them, whatever their distribution. With fewer than FEWEST_PAIRS: all of them,
    and the probability is lower.
    """
    chance, low = 0.5**count, 0
    total = chance
    while low + 1 < count // 2:
        chance = math.comb(count, low + 1) * 0.5**count
        if 2 * (total + chance) > 0.05:
            break
        total += chance
        low += 1
    return low, count - 1 - low


def _answers(llm: LLM, workload: Workload) -> list[list[int]]:
    """To all prompts, in order; where tokens are drawn, a prompt's first."""
    return _generate(llm, *replace(workload, predictions=()).turn(0, len(workload.prompts)), len(workload.prompts))


def _generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], batch: int) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[start:start + batch], params[start:start + batch], use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


def _middle(ascending: Sequence[float]) -> float:
    half = len(ascending) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2
