"""How long a decision of the adaptive policy stands before it is asked for again. To ask costs time, too.

Knows rows by their ids and answers by what they were; why they were given is the policy's business.
"""

from collections.abc import Callable, Iterable, Sequence

from .base import Wish

REST = 8  # steps for which "nobody guesses" stands unless the rows change
LONG_REST = 32  # and when it was the answer again and again
LONGEST = 128  # steps after which it is asked for again though nothing was learnt: texts grow, and costs change
SETTLED = 2  # steps without guesses after which they take what they do where nobody ever guesses
HOLD = 4  # steps for which each row's number of guesses stands
LISTEN_EVERY = 4  # steps of a rest, its last one included, that say what such a step costs, ...
LISTEN_RARELY = 32  # ... or fewer, down to one of these, ...
LISTENING_S = 30e-6  # ... so that listening, which takes so many seconds, ...
LISTENING_SHARE = 0.003  # ... takes no more of the time
WEIGHING_S = 30e-6  # seconds that it takes to ask for one row
DEAR = 0.04  # share of a step from which asking is worth avoiding

Answer = list[tuple[int, int]]
"""(proposer, guesses) of each row of a step."""
NOBODY: tuple[int, int] = (-1, 0)


def is_dear(num_rows: int, step_s: float) -> bool:
    """Whether to ask takes long against a step of step_s seconds. Where it does not, every one is worth a new decision."""
    return num_rows * WEIGHING_S > DEAR * step_s


def listening_period(step_s: float) -> int:
    """Steps of step_s seconds each, of which one is listened to."""
    return max(LISTEN_EVERY, min(int(LISTENING_S / (LISTENING_SHARE * step_s)), LISTEN_RARELY))


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

    def pass_by(self, num_steps: int) -> None:
        """So many of its steps are over."""
        self.steps_left = max(0, self.steps_left - num_steps)

    def be_short(self) -> None:
        """Guessing pays: the next rest is no habit."""
        self._next = REST

    def forget(self, request_id: str) -> None:
        self._rows.discard(request_id)


class Closed:
    """Rows that nobody guesses for, as long as nothing is learnt that could change it: they need not be weighed again.

    Of rows that nobody has guessed for yet one is worth what another is, so that what holds for one holds for newcomers.
    """

    def __init__(self) -> None:
        self._rows: set[str] = set()
        self._has_unknown = False
        self._num_learnt = 0
        self._until = -1  # step

    def begin(self, rows: Iterable[str], num_learnt: int, step: int, is_known: Callable[[str], bool]) -> None:
        """num_learnt: drafts that estimates rest on. is_known: whether somebody has guessed for that row."""
        self._rows = set(rows)
        self._has_unknown = not all(map(is_known, self._rows))
        self._num_learnt, self._until = num_learnt, step + LONGEST

    def end(self) -> None:
        self._until = -1

    def confirm(self, num_learnt: int) -> None:
        """What was learnt since speaks for it."""
        self._num_learnt = num_learnt

    def covers(self, wishes: Sequence[Wish], num_learnt: int, step: int, is_known: Callable[[str], bool]) -> bool:
        """A prediction is worth a question, and so are much fewer rows: each token costs them less."""
        if num_learnt != self._num_learnt or step > self._until or 4 * len(wishes) < 3 * len(self._rows):
            return False
        for wish in wishes:
            request = wish.request
            if request.request_id not in self._rows and (not self._has_unknown or request.prediction or is_known(request.request_id)):
                return False
        return True


class Hold:
    """Steps for which the latest answer is given again."""

    def __init__(self) -> None:
        self.answer: Answer = []
        self._steps_left = 0
        self._rows: list[str] = []

    def begin(self, wishes: Sequence[Wish], answer: Answer, step_s: float) -> None:
        """step_s: seconds of a step."""
        self._steps_left = HOLD if is_dear(len(wishes), step_s) else 0
        self._rows, self.answer = [wish.request.request_id for wish in wishes], answer

    def end(self) -> None:
        self._steps_left = 0

    def take(self, wishes: Sequence[Wish], budget: int) -> bool:
        """Whether the answer stands for this step too: it has the same rows, all of them decode, and there is room."""
        if not self._steps_left or len(wishes) != len(self._rows) or sum(ceiling for _, ceiling in self.answer) > budget:
            return False
        for wish, request_id, (_, ceiling) in zip(wishes, self._rows, self.answer, strict=True):
            if wish.request.request_id != request_id or wish.num_scheduled != 1 or wish.chain < ceiling:
                return False
        self._steps_left -= 1
        return True
