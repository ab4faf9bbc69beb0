"""What a table's own chances are worth: of what it expects to be accepted, the share that is. By row, leaning on all rows.

Knows no cost and takes no decision.
"""

from dataclasses import dataclass

FADE = 0.98  # of everybody's evidence with each step
ROW_FADE = 0.95  # of a row's with each draft
WEIGHT = 8.0  # expected tokens that the table's word is worth
ROW_WEIGHT = 4.0  # expected tokens that everybody's share is worth to a row


@dataclass(slots=True)
class _Evidence:
    """Tokens. Both fade."""

    expected: float = 0.0
    accepted: float = 0.0

    def add(self, expected: float, accepted: float, fade: float) -> None:
        self.expected = fade * self.expected + expected
        self.accepted = fade * self.accepted + accepted

    def share(self, prior: float, weight: float) -> float:
        return (self.accepted + weight * prior) / (self.expected + weight)


class TableTrust:
    """Of one table in one engine."""

    def __init__(self) -> None:
        self._all = _Evidence()
        self._rows: dict[str, _Evidence] = {}

    def of(self, request_id: str) -> float:
        """Above 0. A table that is asked no more is trusted again little by little; a row by what it is tried with."""
        share = self._all.share(1.0, WEIGHT)
        row = self._rows.get(request_id)
        return share if row is None else row.share(share, ROW_WEIGHT)

    def observe(self, request_id: str, expected: float, accepted: float) -> None:
        """Of one draft; `step` has been called for its step."""
        self._all.expected += expected
        self._all.accepted += accepted
        self._rows.setdefault(request_id, _Evidence()).add(expected, accepted, ROW_FADE)

    def step(self) -> None:
        """One more step, whether anything was guessed in it or not."""
        self._all.add(0.0, 0.0, FADE)

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
