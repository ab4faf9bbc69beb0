"""How long a decision of the adaptive policy stands before it is asked for again. To ask costs time, too.

Knows rows by their ids and answers by what they were; why they were given is the policy's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .speculation_policy import Wish

REST = 8  # steps for which "nobody guesses" stands unless the rows change
LONG_REST = 32  # and when it was the answer again and again
HOLD = 4  # steps for which each row's number of guesses stands
WEIGHING_S = 30e-6  # seconds that it takes to ask for one row
DEAR = 0.04  # share of a step from which asking is worth avoiding

Answer = list[tuple[int, int]]
"""(proposer, guesses) of each row of a step."""


class Rest:
    """Steps in which nobody guesses because nobody was to in the latest one that was weighed."""

    def __init__(self) -> None:
        self.steps_left = 0
        self._next = REST
        self._rows: set[str] = set()

    def covers(self, num_rows: int) -> bool:
        return self.steps_left > 0 and num_rows <= len(self._rows)  # rows that ended are no longer in there: as many means nobody new

    def admit(self, wishes: Sequence[Wish]) -> bool:
        """Whether newcomers rest too, for a few steps: to weigh each arrival alone would cost more than it brings.

        One that brings a prediction is worth a decision at once.
        """
        if self.steps_left <= 0 or any(wish.request.prediction for wish in wishes):
            return False
        self._rows.update(wish.request.request_id for wish in wishes)
        self.steps_left = min(self.steps_left, REST)
        return True

    def begin(self, rows: Iterable[str], steps: int | None = None) -> None:
        """For so many steps; None: as many as the last time, and again as many, or few if there are new rows."""
        before, self._rows = self._rows, set(rows)
        if not self._rows <= before:
            self._next = REST
        self.steps_left = self._next if steps is None else steps
        if steps is None:
            self._next = min(2 * self._next, LONG_REST)

    def end(self) -> None:
        self.steps_left = 0

    def be_short(self) -> None:
        """Guessing pays: the next rest is no habit."""
        self._next = REST

    def forget(self, request_id: str) -> None:
        self._rows.discard(request_id)


class Hold:
    """Steps for which the latest answer is given again."""

    def __init__(self) -> None:
        self.answer: Answer = []
        self._steps_left = 0
        self._rows: list[str] = []

    def begin(self, wishes: Sequence[Wish], answer: Answer, step_s: float) -> None:
        """step_s: seconds of a step. Where that is long, every one is worth a new decision."""
        self._steps_left = HOLD if len(wishes) * WEIGHING_S > DEAR * step_s else 0
        self._rows, self.answer = [wish.request.request_id for wish in wishes], answer

    def end(self) -> None:
        self._steps_left = 0

    def take(self, wishes: Sequence[Wish], budget: int) -> bool:
        """Whether the answer stands for this step too: it has the same rows, all of them decode, and there is room."""
        if not self._steps_left or len(wishes) != len(self._rows) or sum(ceiling for _, ceiling in self.answer) > budget:
            return False
        for wish, request_id, (_, ceiling) in zip(wishes, self._rows, self.answer, strict=True):
            if wish.request.request_id != request_id or wish.num_scheduled != 1 or wish.room < ceiling:
                return False
        self._steps_left -= 1
        return True
