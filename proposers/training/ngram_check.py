"""How often an n-gram cache is right in answers that it was not counted in, and how sure it was. Counts nothing, writes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.ngram_table import NgramTable
from .packing import LEARN, PackedFile

MOST_TOKENS = 50_000                 # that are looked at: a second's work, and sure to a third of a percent
EDGES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)


@dataclass(frozen=True)
class Check:
    """Of T tokens of answers, each with the table's chance for the token it would have guessed there; 0 where it knows none."""

    chances: NDArray[np.float64]     # [T]
    right: NDArray[np.bool_]         # [T]

    @property
    def share_right(self) -> float:
        return float(self.right.mean())

    @property
    def share_expected(self) -> float:
        return float(self.chances.mean())

    def lines(self) -> Iterable[str]:
        """For a person: the shares, then how often it is right where it is how sure."""
        tokens = len(self.right)
        yield (
            f"in {tokens:,} tokens of held-out answers it guesses {self.share_right:.1%} right, and expects {self.share_expected:.1%}; "
            "by how sure it is:"
        )
        yield "  of the tokens   expected right   right"
        for low, high in zip(EDGES, EDGES[1:], strict=False):
            here = (self.chances > low) & (self.chances <= high)
            if here.any():
                yield f"{here.mean():15.1%}{self.chances[here].mean():17.1%}{self.right[here].mean():8.1%}"


def check(table: NgramTable, answers: PackedFile, most: int = MOST_TOKENS) -> Check | None:
    """Looks at the first `most` learned tokens that have one before them; None if there are none."""
    token_ids = answers.token_ids.tolist()
    starts = np.repeat(answers.bounds[:-1], np.diff(answers.bounds))
    places = np.flatnonzero((answers.learn == LEARN) & (np.arange(len(starts)) > starts))[:most]
    if not len(places):
        return None
    chances, right = np.zeros(len(places)), np.zeros(len(places), np.bool_)
    for i, (place, start) in enumerate(zip(places.tolist(), starts[places].tolist(), strict=True)):
        guess = table.next(token_ids[max(start, place - table.max_n) : place])
        if guess is not None:
            right[i], chances[i] = guess[0] == token_ids[place], guess[1]
    return Check(chances, right)
