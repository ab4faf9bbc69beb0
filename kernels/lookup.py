"""Prompt lookup behind a step whose end the host has not seen: what followed a text's last tokens before, found on the device.

The known tokens of every row lie on the device, by cache slot; those that the step has just emitted stand in matching.py's answer. What is
found is what proposers/ngram.py finds when the host has seen them. `looked_up` is the reference of triton/lookup.py. Knows no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch_lists import packed_tables
from .record import record
from .upload import upload_packed


@record
class Lookup:
    """One row that is looked up, on the host. `length`: its tokens known before the step."""

    answer: int  # its row of matching's answer
    length: int
    table: array[int]  # blocks of the known tokens


@dataclass(frozen=True)
class Lookups:
    """R rows, on the device, and how they are looked up."""

    values: Tensor  # [R, 2] int32: answer, length
    tables: Tensor  # [R, B] int32
    most_known: int  # the greatest length
    least: int  # tokens that have to be the same, at least ...
    most: int  # ... and at most: the more the better
    latest: bool  # of places with equally many the last one counts, else the first
    count: int  # guesses
    block_size: int

    @classmethod
    def of(
        cls, rows: Sequence[Lookup], device: torch.device, block_size: int, sizes: tuple[int, int], latest: bool, count: int
    ) -> Lookups:
        """Under way there: one copy."""
        width = max(len(row.table) for row in rows)
        tables = np.frombuffer(packed_tables([row.table for row in rows], width), np.int32).reshape(-1, width)
        values, moved = upload_packed([np.array([[row.answer, row.length] for row in rows], np.int32), tables.copy()], device)
        return cls(values, moved, max(row.length for row in rows), *sizes, latest, count, block_size)


def lookup(rows: Lookups, texts: Tensor, answer: Tensor) -> Tensor:
    """[R, count] int64 what may come next. texts [slots] int32; answer: of matching, on its device.

    Behind the end of the text, and where nothing is found, there are zeros. A row that emits nothing is looked up as it was.
    """
    if answer.is_cuda:
        from .triton import lookup as kernels  # Triton is there only where torch is built for GPUs

        return kernels.looked_up(rows, texts, answer)
    return looked_up(rows, texts, answer)


def looked_up(rows: Lookups, texts: Tensor, answer: Tensor) -> Tensor:
    """The reference."""
    answers, lengths = rows.values.long().unbind(1)
    emitted = answer[answers].long()
    ends = (lengths + emitted[:, 0])[:, None]
    place = torch.arange(rows.most_known + answer.shape[1] // 2, device=answer.device)
    known = rows.tables.long()[:, (place // rows.block_size).clamp(max=rows.tables.shape[1] - 1)]
    nth = (place - lengths[:, None]).clamp(0, answer.shape[1] // 2 - 1)
    before = texts[known * rows.block_size + place % rows.block_size].long()
    text = torch.where(place < lengths[:, None], before, emitted.gather(1, 1 + nth))

    behind = ends.new_zeros(ends.shape)  # the place behind the best match, 0 = none
    for n in range(rows.least, rows.most + 1):
        if n >= text.shape[1]:
            break
        tail = text.gather(1, (ends - n + place[:n]).clamp(min=0))
        found = (text.unfold(1, n, 1) == tail[:, None]).all(-1)
        stops = place[: found.shape[1]] + n
        found = found & (stops < ends)
        best = torch.where(found, stops, 0).amax(1) if rows.latest else torch.where(found, stops, text.shape[1]).amin(1)
        behind = torch.where(found.any(1)[:, None], best[:, None], behind)
    places = behind + torch.arange(rows.count, device=answer.device)
    return torch.where((behind > 0) & (places < ends), text.gather(1, places.clamp(max=text.shape[1] - 1)), 0)
