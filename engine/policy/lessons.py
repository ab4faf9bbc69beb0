"""What became of guesses, until it is learnt from: that can wait until somebody asks for an estimate.

Owns the steps that are not learnt from yet. The estimates are those of expectations.py.
"""

from collections.abc import Collection, Mapping

from ...proposers.base import FORCED
from ..plan import StepPlan, Verdict
from .expectations import Asked, Expectations

ROWS = 32  # of a step, at most, teach something, in turn: as much is known then as the next step can use


class Lessons:
    """Of one engine."""

    def __init__(self, expectations: Expectations, scouts: Collection[int]) -> None:
        self.num_learnt = 0  # drafts of those who are no scouts that the estimates rest on
        self._expectations = expectations
        self._scouts = scouts
        self._steps: list[tuple[Mapping[str, Asked], StepPlan, Verdict, int]] = []

    def __len__(self) -> int:
        """Steps that are not learnt from yet."""
        return len(self._steps)

    def add(self, asked: Mapping[str, Asked], plan: StepPlan, verdict: Verdict, step: int) -> None:
        """asked: by request. Nobody changes it any more."""
        self._steps.append((asked, plan, verdict, step))

    def replace(self, asked: Mapping[str, Asked], plan: StepPlan, verdict: Verdict, step: int) -> None:
        """`add`, where steps come faster than they can be learnt from: the latest of many rows teaches as much as there is time for."""
        if len(asked) > ROWS:
            self._steps.clear()
        self.add(asked, plan, verdict, step)

    def learn(self) -> None:
        for asked_of, plan, verdict, step in self._steps:
            num_asked, turn = len(asked_of), step * ROWS
            for row, said in zip(plan.rows, verdict.rows, strict=True):
                asked = asked_of.get(row.request.request_id)
                if asked is None:
                    continue
                turn += 1
                if said.error is None and (num_asked <= ROWS or turn % num_asked < ROWS):
                    source = self._expectations.learn(asked, row, said, step)
                    self.num_learnt += source != FORCED and source not in self._scouts
        self._steps.clear()
