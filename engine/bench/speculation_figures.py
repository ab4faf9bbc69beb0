"""What turns with and without speculation say when they are laid side by side: speed-up, acceptance, costs, and what became of the gain.

With mu accepted guesses a target pass, speculation commits mu + 1 tokens where there was one. What it costs is measured against the
target's step without speculation, and the factors between mu + 1 and the speed-up multiply to exactly what was measured.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .interleaved import Series, Spread
from .speculation_turn import Answer, Step, Turn


@dataclass(frozen=True)
class Setting:
    """A method with k guesses a row: always so many, or at most so many where the engine decides."""

    method: str
    k: int
    adaptive: bool = False

    @property
    def label(self) -> str:
        return self.method if not self.k else f"{self.method}, adaptive" if self.adaptive else f"{self.method}, k={self.k}"


OFF = Setting("off", 0)


@dataclass(frozen=True)
class RequestFigures:
    """One request with and without speculation, in the last round."""

    tokens: int
    baseline_s: float
    speculative_s: float
    acceptance_rate: float | None
    mean_accepted_length: float
    decode_share: float  # without speculation

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.speculative_s


@dataclass(frozen=True)
class Figures:
    """One setting against no speculation, so many requests at a time. Ratios are taken round by round; the middle one counts."""

    setting: Setting
    concurrency: int
    baseline: Spread  # tokens/s without speculation
    speculative: Spread  # and with it
    speedup: Spread
    acceptance_rate: float | None  # accepted / drafted; None = nothing was guessed
    acceptance_per_position: tuple[float, ...]  # share of the drafts whose guess 1, 2, ... was accepted
    mu: float  # accepted guesses a target pass, passes without a draft included
    guesses: float  # a target pass
    draft_cost_ratio: float  # drafting for a pass / the target's part of a pass without speculation
    verify_cost_ratio: float  # the target's part of a pass / the same
    bookkeeping_ratio: float  # everything else for a pass / the same
    plain_bookkeeping_ratio: float  # ... and without speculation
    decode_share: float  # of a request's time without speculation
    same_answers: float  # share of the answers that are the same, token for token
    rounds: int
    passes_a_step: float = 1.0  # for all rows together
    requests: tuple[RequestFigures, ...] = ()

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a target pass."""
        return 1.0 + self.mu

    @property
    def believable(self) -> float:
        """The speed-up, but never more than so many tokens a pass and so many passes a step can save: the rest is the machine's noise."""
        between = self.plain_bookkeeping_ratio * (1 - 1 / self.passes_a_step)
        return min(self.speedup.median, self.mean_accepted_length * (1 + between))

    @property
    def relative_error(self) -> float:
        """Standard error of the speed-up's median, from the middle half of the rounds as if they were normally distributed."""
        return 0.93 * (self.speedup.high - self.speedup.low) / math.sqrt(self.rounds) / self.speedup.median

    @property
    def published(self) -> float:
        """Speed-up by the formula that guides print, (1 + mu) / ((1 + mu) c + 1): c is what one guess costs, verifying is free."""
        length, cost = self.mean_accepted_length, self.draft_cost_ratio / self.guesses if self.guesses else 0.0
        return length / (length * cost + 1)

    @property
    def predicted(self) -> float:
        """Speed-up that mu and the measured costs of drafting and verifying leave: (1 + mu) / (draft cost + verify cost)."""
        return self.mean_accepted_length / (self.draft_cost_ratio + self.verify_cost_ratio)

    @property
    def drafting_factor(self) -> float:
        return 1 / (1 + self.draft_cost_ratio)

    @property
    def verification_factor(self) -> float:
        """For verifying more than one token a row."""
        return (1 + self.draft_cost_ratio) / (self.verify_cost_ratio + self.draft_cost_ratio)

    @property
    def bookkeeping_factor(self) -> float:
        networks = self.verify_cost_ratio + self.draft_cost_ratio
        return networks * (1 + self.plain_bookkeeping_ratio) / (networks + self.bookkeeping_ratio)

    @property
    def rest_factor(self) -> float:
        """Prompts, which nobody speeds up, and batches that empty sooner."""
        of_steps = self.mean_accepted_length * self.drafting_factor * self.verification_factor * self.bookkeeping_factor
        return self.speedup.median / of_steps


def compare(setting: Setting, concurrency: int, plain: Sequence[Turn], speculative: Sequence[Turn]) -> Figures:
    """The turns of one setting and those without speculation in the same rounds."""
    off, on = _rates(plain), _rates(speculative)
    answers = [answer for turn in speculative for answer in turn.answers]
    steps = [step for turn in speculative for step in turn.decoding]
    drafts, drafted = sum(a.drafts for a in answers), sum(a.drafted for a in answers)
    passes = sum(step.passes for step in steps)
    same = [a.token_ids == b.token_ids for x, y in zip(plain, speculative, strict=True) for a, b in zip(x.answers, y.answers, strict=True)]
    target = _per_pass(plain, lambda step: step.target_s)

    def cost(turns: Sequence[Turn], seconds: Callable[[Step], float]) -> float:
        return _per_pass(turns, seconds).over(target).median

    return Figures(
        setting, concurrency, off.spread, on.spread, on.over(off),
        sum(a.accepted for a in answers) / drafted if drafted else None,
        tuple(count / drafts for count in _reached(answers)) if drafts else (),
        sum(step.tokens for step in steps) / passes - 1,
        sum(step.drafted for step in steps) / passes,
        cost(speculative, lambda step: step.draft_s),
        cost(speculative, lambda step: step.target_s),
        cost(speculative, lambda step: step.bookkeeping_s),
        cost(plain, lambda step: step.bookkeeping_s),
        statistics.median(turn.decode_share for turn in plain),
        sum(same) / len(same), len(plain), sum(step.rounds for step in steps) / len(steps),
        tuple(_request(a, b) for a, b in zip(plain[-1].answers, speculative[-1].answers, strict=True)),
    )


def _rates(turns: Sequence[Turn]) -> Series:
    return Series(tuple(turn.tokens / turn.seconds for turn in turns))


def _per_pass(turns: Sequence[Turn], seconds: Callable[[Step], float]) -> Series:
    """Mean over the passes of steps that only decode, one value a turn: a step in rounds has many."""
    return Series(tuple(sum(map(seconds, turn.decoding)) / sum(step.rounds for step in turn.decoding) for turn in turns))


def _reached(answers: Sequence[Answer]) -> list[int]:
    """Drafts of which at least 1, 2, ... guesses were accepted."""
    longest = max((len(answer.histogram) for answer in answers), default=0)
    return [sum(sum(answer.histogram[depth:]) for answer in answers) for depth in range(1, longest)]


def _request(plain: Answer, speculative: Answer) -> RequestFigures:
    rate = speculative.accepted / speculative.drafted if speculative.drafted else None
    length = len(speculative.token_ids) / max(speculative.passes, 1)
    return RequestFigures(
        len(plain.token_ids), plain.seconds, speculative.seconds, rate, length, plain.decode_s / max(plain.seconds, 1e-9)
    )
