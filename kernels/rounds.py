"""Several passes in one call, each over what the one before it said: plain data in and out. Knows no requests.

A row's guesses are what its own text, or a prediction of it, says next; those that the target would have said are kept, and the next
round goes on behind them. proposers/ngram.py and proposers/prediction.py say what is guessed, engine/verifier.py what is kept.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import sampling
from .layout import KVTensors
from .record import record

_POINTERS = ("text", "table", "prediction", "stops")
_INTEGERS = (
    "num_prompt", "num_known", "most_new", "num_blocks", "num_places", "num_stops", "num_predicted", "cursor", "is_lost", "num_followed",
    "predicted_k", "lookup_k", "lookup_min", "lookup_max", "latest", "num_new", "has_ended", "has_failed",
)  # fmt: skip

ROW = np.dtype([(name, np.uint64) for name in _POINTERS] + [(name, np.int32) for name in _INTEGERS] + [("sampling", sampling.ROW)])
"""One row: the struct RoundsRow of native/network.h, which says what each field means. Who fills in an address keeps what it points to."""

FROM_PREDICTION, FROM_TEXT = 0, 1

RECORD = np.dtype([(name, np.int32) for name in ("row", "source", "first", "drafted", "accepted", "emitted")])
"""One guess and what became of it: the struct RoundsDraft."""


@record
class RoundsOutput:
    """What the rounds of a call did; the tokens are in the rows' texts."""

    drafts: NDArray[np.void]  # [n] of RECORD, round by round
    seconds: NDArray[np.float32]  # [rounds] that each pass took
    tokens: NDArray[np.int32]  # [rounds] that it computed


class RoundsExecutor(Protocol):
    """A network that can stay inside one call for several rounds."""

    def run_rounds(
        self, rows: NDArray[np.void], kv: KVTensors, most_rounds: int, most_tokens: int, interrupt: NDArray[np.int32]
    ) -> RoundsOutput:
        """At most so many rounds over rows [R] of ROW, which are changed in place, each of at most so many tokens (at least R).

        Ends with the round in which a row ends, fails or has no place left, or in which `interrupt` [1] is no longer 0: another thread
        may write it at any time.
        """
        ...
