"""How likely guesses are to be kept: moving estimates by depth, of every row and of each proposer over all rows.

A row starts from its proposer's average and leaves it as evidence comes in; evidence fades with every draft and every step, so
that a change in mid-request is followed. Knows no cost and takes no decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .base import Shape

ROW_FADE = 0.95  # of a row's evidence with each draft
IDLE_FADE = 0.985  # of a row's evidence with each step in which it had no draft
IDLE_WEIGHT = 3.0  # drafts of evidence that stay
AVERAGE_FADE = 0.97  # of a proposer's evidence with each draft of any row: traffic changes
ROW_WEIGHT = 10.0  # drafts that the proposer's average is worth to a row
AVERAGE_WEIGHT = 4.0  # drafts that the first opinion is worth to a proposer
FIRST_OPINION = 0.7  # hopeful: a proposer that is never asked teaches nothing
DOUBT = 1.5  # standard errors by which it may be better than what little was seen of it
HEREDITY = 0.5  # of what a row is better or worse at one depth, expected at the next
LOWEST, HIGHEST = 0.005, 0.995
NEGLIGIBLE = 0.01  # chance below which a guess is no candidate


@dataclass(slots=True)
class Worth:
    """What a row's draft is expected to bring, by number of guesses asked for: index 0 is one guess."""

    accepted: Sequence[float]  # chance that guess i is made and kept; their sum is the tokens gained
    made: Sequence[float]  # chance that guess i is made at all: the tokens to verify
    is_whole: bool = False  # all of them or none are asked for
    chances: list[float] = field(init=False)
    """Chance that guess i, if it is made, is kept, or that of a guess before it if that is less; ends where it is negligible.
    Where all or none are asked for, what one is worth on average."""

    def __post_init__(self) -> None:
        if self.is_whole:
            self.chances = [sum(self.accepted) / max(sum(self.made), LOWEST)] * len(self.made)
            return
        self.chances = []
        worst = 1.0
        for accepted, made in zip(self.accepted, self.made, strict=True):
            chance = accepted / made if made > 0 else 0.0
            if chance < worst:  # of a tree, a node may be worth more than the one before
                worst = chance
            if worst < NEGLIGIBLE:
                break
            self.chances.append(worst)


class _Evidence:
    """Faded counts by depth."""

    __slots__ = ("asked", "made", "reached", "kept")

    def __init__(self, depth: int) -> None:
        self.asked = [0.0] * depth  # drafts long enough that guess i could follow, and wanted
        self.made = [0.0] * depth
        self.reached = [0.0] * depth  # guesses i whose parent was kept
        self.kept = [0.0] * depth

    def add(self, wanted: int, made: int, kept: Sequence[float], reached: int, fade: float) -> None:
        depth = len(self.asked)
        counts, counts_made = self.asked, self.made
        for i in range(min(wanted, made + 1, depth)):
            counts[i] = fade * counts[i] + 1.0
            counts_made[i] = fade * counts_made[i] + (i < made)
        counts, counts_kept = self.reached, self.kept
        for i in range(min(reached, depth)):
            counts[i] = fade * counts[i] + 1.0
            counts_kept[i] = fade * counts_kept[i] + kept[i]

    def fade(self, by: float) -> None:
        """Down to IDLE_WEIGHT and no further: one lucky or unlucky draft after a long pause is no proof."""
        if not self.reached or self.reached[0] <= IDLE_WEIGHT:
            return
        by = max(by, IDLE_WEIGHT / self.reached[0])
        for counts in (self.asked, self.made, self.reached, self.kept):
            counts[:] = [by * count for count in counts]


class ProposerAcceptance:
    """One proposer's chances, over all rows and row by row."""

    def __init__(self, depth: int, is_whole: bool = False, shape: Shape | None = None) -> None:
        """depth: the most guesses of one draft. is_whole: as of `Needs`; then every node of a draft is worth as much as any other."""
        self.depth, self.is_whole, self.shape = depth, is_whole, shape or Shape()
        self._has_seen_whole = False
        self._average = _Evidence(depth)
        self._rows: dict[str, _Row] = {}
        self._prior: tuple[list[float], list[float]] | None = None
        self._expected: Worth | None = None

    def observe(
        self, request_id: str, wanted: int, made: int, drafted: int, accepted: Sequence[int], is_chain: bool, step: int
    ) -> None:
        """What became of a draft. wanted: guesses asked for, of which `made` came and `drafted` were verified.

        accepted: indices into the draft.
        """
        self.shape.see(is_chain)
        if self.shape.branches:  # a node is kept or not whatever became of the one before it in the list
            path = set(accepted)
            kept, reached = [i in path for i in range(drafted)], drafted
            if self.is_whole:
                if wanted < self.depth and self._has_seen_whole:
                    return  # where there is no room for all, others are kept
                self._has_seen_whole = wanted >= self.depth
                kept = [len(path) / drafted] * drafted if drafted else []
        else:
            kept, reached = [True] * len(accepted) + [False], min(drafted, len(accepted) + 1)
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = _Row(_Evidence(self.depth), step)
        idle = step - row.step - 1
        if idle > 0:
            row.evidence.fade(IDLE_FADE**idle)
        row.evidence.add(wanted, made, kept, reached, ROW_FADE)
        row.step, row.worth = step, None
        self._average.add(wanted, made, kept, reached, AVERAGE_FADE)
        self._prior = self._expected = None

    def worth(self, request_id: str) -> Worth:
        """What this row may expect now; of an unknown row, what the proposer's average says."""
        row = self._rows.get(request_id)
        if row is None:
            return self.expected()
        if row.worth is None:
            row.worth = self._of(row.evidence)
        return row.worth

    def last_step(self, request_id: str) -> int:
        """When the row had a draft last; -1 = never."""
        row = self._rows.get(request_id)
        return -1 if row is None else row.step

    def expected(self) -> Worth:
        """What a row that nobody knows may expect."""
        if self._expected is None:
            self._expected = self._worth(*self._priors())
        return self._expected

    def hoped(self) -> Worth:
        """The same of a proposer that may only have been unlucky: as good as at first thought, or as what was seen leaves likely.

        Of a tree the average: many nodes say more than a chain that ends with its first miss.
        """
        if self.shape.branches:
            return self.expected()
        keep, make = self._priors()
        spread = [DOUBT * math.sqrt(p * (1.0 - p) / (n + AVERAGE_WEIGHT)) for p, n in zip(keep, self._average.reached, strict=True)]
        return self._worth([max(p, min(FIRST_OPINION, p + s)) for p, s in zip(keep, spread, strict=True)], make)

    @property
    def num_seen(self) -> float:
        """Drafts that the proposer's average rests on, faded."""
        return self._average.reached[0] if self.depth else 0.0

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def _priors(self) -> tuple[list[float], list[float]]:
        if self._prior is None:
            e = self._average
            keep: list[float] = []
            make: list[float] = []
            opinion, made = FIRST_OPINION, 1.0
            for num_kept, num_reached, num_made, num_asked in zip(e.kept, e.reached, e.made, e.asked, strict=True):
                opinion = (num_kept + AVERAGE_WEIGHT * opinion) / (num_reached + AVERAGE_WEIGHT)
                made = (num_made + AVERAGE_WEIGHT * made) / (num_asked + AVERAGE_WEIGHT)
                keep.append(opinion)
                make.append(made)
            self._prior = keep, make
        return self._prior

    def _of(self, e: _Evidence) -> Worth:
        keeps: list[float] = []
        makes: list[float] = []
        shift = 0.0
        for prior_keep, prior_make, num_kept, num_reached, num_made, num_asked in zip(
            *self._priors(), e.kept, e.reached, e.made, e.asked, strict=True
        ):
            opinion = prior_keep + shift
            opinion = HIGHEST if opinion > HIGHEST else LOWEST if opinion < LOWEST else opinion
            keep = (num_kept + ROW_WEIGHT * opinion) / (num_reached + ROW_WEIGHT)
            if not self.shape.branches:
                shift = HEREDITY * (keep - prior_keep)
            keeps.append(keep)
            makes.append((num_made + ROW_WEIGHT * prior_make) / (num_asked + ROW_WEIGHT))
        return self._worth(keeps, makes)

    def _worth(self, keep: Sequence[float], make: Sequence[float]) -> Worth:
        accepted: list[float] = []
        made: list[float] = []
        survival = exists = 1.0
        for p, e in zip(keep, make, strict=True):
            exists *= e
            survival = p if self.shape.branches else survival * p
            accepted.append(survival * exists)
            made.append(exists)
        return Worth(accepted, made, self.is_whole)


class _Row:
    __slots__ = ("evidence", "step", "worth")

    def __init__(self, evidence: _Evidence, step: int) -> None:
        self.evidence = evidence
        self.step = step  # of its latest draft
        self.worth: Worth | None = None


class Calibration:
    """What a drafter's own probabilities are worth: share of guesses kept among those it was about as sure of."""

    NUM_BINS = 10
    FADE = 0.995  # of a bin's evidence with each guess in it
    WEIGHT = 8.0  # guesses that the drafter's word is worth in a bin

    def __init__(self) -> None:
        self._seen = [0.0] * self.NUM_BINS
        self._kept = [0.0] * self.NUM_BINS

    def observe(self, confidence: float, kept: bool) -> None:
        """A guess whose parent was kept. confidence: in [0, 1]."""
        i = min(int(confidence * self.NUM_BINS), self.NUM_BINS - 1)
        self._seen[i] = self.FADE * self._seen[i] + 1.0
        self._kept[i] = self.FADE * self._kept[i] + kept

    def chance(self, confidence: float) -> float:
        i = min(int(confidence * self.NUM_BINS), self.NUM_BINS - 1)
        return (self._kept[i] + self.WEIGHT * confidence) / (self._seen[i] + self.WEIGHT)
