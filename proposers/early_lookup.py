"""Prompt lookup that a device begins behind a step whose end the host has not seen, so that the target's next pass need not wait for it.

When the step is over the host looks up as ever, and finds the same. Owns what is known on the device of each row's text.
"""

from array import array
from collections.abc import Mapping

import numpy as np
import torch

from ..kernels.lookup import Lookup, Lookups, lookup
from ..kernels.upload import upload_packed
from .base import ChainsAhead, RowUnderWay, UnderWay
from .config import NgramConfig


class EarlyLookups:
    """Of one proposer."""

    def __init__(self, config: NgramConfig, num_places: int) -> None:
        """num_places: of the target's cache."""
        self.num_places_ahead = 2 * config.num_speculative_tokens + 1  # a whole draft is accepted, and one more fed behind its extra token
        self._config = config
        self._texts: torch.Tensor | None = None
        self._num_places = num_places
        self._sent: dict[str, tuple[int, array[int]]] = {}  # known tokens that are there, and the blocks that they were sent for

    def begin(self, step: UnderWay, wanted: Mapping[str, int]) -> ChainsAhead | None:
        """wanted: request id -> guesses, of the rows that go on. Waits for nothing."""
        rows = [row for row in step.rows if row.request_id in wanted]
        if not rows:
            return None
        device, config = step.answer.device, self._config
        with torch.inference_mode():
            if self._texts is None:
                self._texts = torch.zeros(self._num_places, dtype=torch.int32, device=device)
            self._send(rows, step.block_size, self._texts)
            asked = [Lookup(row.answer, *self._sent[row.request_id]) for row in rows]
            sizes = config.prompt_lookup_min, config.prompt_lookup_max
            count = config.num_speculative_tokens
            found = lookup(Lookups.of(asked, device, step.block_size, sizes, config.match == "latest", count), self._texts, step.answer)
        return ChainsAhead({row.request_id: (place, min(wanted[row.request_id], count)) for place, row in enumerate(rows)}, found)

    def forget(self, request_id: str) -> None:
        self._sent.pop(request_id, None)

    def _send(self, rows: list[RowUnderWay], block_size: int, texts: torch.Tensor) -> None:
        """What is not there yet: mostly the tokens of the step before. Where a row's blocks were exchanged for others, from there on."""
        slots: list[np.ndarray] = []
        tokens: list[array[int]] = []
        for row in rows:
            length = len(row.token_ids)
            start, before = self._sent.get(row.request_id, (0, array("i")))
            table = array("i", row.block_table[: -(-length // block_size)])
            if table[: len(before)] != before:
                start = min(start, block_size * next(i for i, block in enumerate(before) if block != table[i]))
            places = np.arange(start, length)
            slots.append(np.frombuffer(table, np.int32)[places // block_size].astype(np.int64) * block_size + places % block_size)
            tokens.append(array("i", row.token_ids[start:length]))
            self._sent[row.request_id] = length, table
        said = [np.frombuffer(part, np.int32) for part in tokens]
        texts.index_copy_(0, *upload_packed([np.concatenate(slots), np.concatenate(said)], texts.device))
