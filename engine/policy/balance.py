"""What guessing promised and what it took: the policy's own record, which corrects it where its estimates are wrong together.

Sums of seconds that fade with every step. Knows no row and takes no decision.
"""

BELIEF = 0.98  # fade of promises and of what became of them, with each step that had guesses
FORGIVEN = 0.95  # of both, that stays when nobody guesses any more: things change
MOST = 1.25  # that disappointment may ask for: what promises much more is worth another try
DOUBTED_STEPS = 8.0  # plain steps' time that has to be behind a disappointment
RECENT = 0.99  # fade of the speed-up's two sums with each step


class Balance:
    """Of one engine, or of one kind of guesses."""

    def __init__(self, most: float = MOST) -> None:
        """most: that disappointment may ask for."""
        self._most = most
        self._promised = self._took = 0.0  # seconds that steps with guesses should have taken, and did
        self._plain = self._all = 0.0  # seconds that the latest tokens would have taken without guesses, and did

    @property
    def speedup(self) -> float | None:
        """Of the latest steps against no speculation, by the cost table; None = nothing is known."""
        return self._plain / self._all if self._all else None

    def disappointment(self, plain_step_s: float) -> float:
        """How much longer guessing took than it was expected to, lately: 1 = not at all.

        Estimates of costs and of chances are each a little wrong, and where guessing hardly pays their errors decide.
        """
        doubt = DOUBTED_STEPS * plain_step_s
        return min(self._most, max(1.0, (self._took + doubt) / (self._promised + doubt)))

    def forgive(self) -> None:
        """Guessing was not worth it: what was promised and taken counts that much less."""
        self._promised, self._took = FORGIVEN * self._promised, FORGIVEN * self._took

    def settle(self, num_tokens: int, promised_rate: float, took_s: float) -> None:
        """A step with guesses brought num_tokens; promised_rate: tokens a second."""
        self._promised = BELIEF * self._promised + num_tokens / promised_rate
        self._took = BELIEF * self._took + took_s

    def add(self, plain_s: float, took_s: float) -> None:
        """A step took took_s; its tokens would have taken plain_s one by one."""
        self._plain = RECENT * self._plain + plain_s
        self._all = RECENT * self._all + took_s
