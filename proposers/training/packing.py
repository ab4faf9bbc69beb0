"""Documents packed end to end into flat files, and the batches read off them. Owns where a batch begins; knows no text and no model.

A packed file pair is plain little-endian: NAME.ids (uint16 or uint32 tokens), NAME.bounds (int64: where documents begin, and the end)
and NAME.learn (uint8 per token: only READ, to LEARN or to UNLEARN). A position in the data is a count of batches, so training resumes
exactly where it stopped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

READ, LEARN, UNLEARN = 0, 1, 2


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether it is to be learned (an answer) or only read (a prompt), or what should not have been said."""

    token_ids: np.ndarray            # [L] unsigned
    learn: np.ndarray                # [L] uint8: READ, LEARN or UNLEARN

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Packed:
    """Whole documents end to end: N tokens. Attention and shifted labels stop at `bounds`."""

    token_ids: Tensor                # [N] int64
    learn: Tensor                    # [N] bool: the token is to be learned
    bounds: tuple[int, ...]          # where documents begin, and N
    number: int = 0                  # of the batch in its stream: seeds whatever chance its loss needs
    unlearn: Tensor | None = None    # [N] bool: the token should not have been said; None = there is none such

    def to(self, device: torch.device) -> Packed:
        unlearn = None if self.unlearn is None else self.unlearn.to(device)
        return replace(self, token_ids=self.token_ids.to(device), learn=self.learn.to(device), unlearn=unlearn)

    @property
    def positions(self) -> Tensor:
        """[N] int64: each token's place in its document."""
        return torch.arange(self.bounds[-1], device=self.token_ids.device) - self._per_token(self.bounds[:-1])

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """The tokens `distance` places later, [N] int64, and [N] float32: 1 where there is one in the document to be learned."""
        later = (torch.arange(self.bounds[-1], device=self.token_ids.device) + distance).clamp_max(self.bounds[-1] - 1)
        return self.token_ids[later], self.inside(distance) * self.learn[later]

    def inside(self, distance: int) -> Tensor:
        """[N] float32: 1 where the same document has a token `distance` places later."""
        places = torch.arange(self.bounds[-1], device=self.token_ids.device)
        return (places + distance < self._per_token(self.bounds[1:])).float()

    def _per_token(self, per_document: Sequence[int]) -> Tensor:
        repeats = torch.tensor(self.bounds).diff()
        return torch.tensor(per_document).repeat_interleave(repeats).to(self.token_ids.device)


class PackedFile:
    """One packed file, read where it lies."""

    def __init__(self, path: Path):
        self.bounds = np.fromfile(path.with_suffix(".bounds"), dtype=np.int64)
        self.learn = np.memmap(path.with_suffix(".learn"), dtype=np.uint8, mode="r")
        size = path.with_suffix(".ids").stat().st_size // max(1, len(self.learn))
        self.token_ids = np.memmap(path.with_suffix(".ids"), dtype={2: np.uint16, 4: np.uint32}[size], mode="r")


class PackedStream:
    """Packed files, one after another, as batches of whole documents of at most `batch_tokens` tokens (longer documents are cut)."""

    def __init__(self, paths: Sequence[Path], batch_tokens: int):
        self.batches = [
            (file, batch) for file in map(PackedFile, paths) for batch in _batches(file.bounds.tolist(), batch_tokens)
        ]
        if not self.batches:
            raise ValueError(f"{', '.join(map(str, paths))}: no documents of at least two tokens")

    def thin(self, tokens: float) -> None:
        """Leave batches of about `tokens` tokens, evenly taken from all files; all of them if there are no more."""
        count = min(len(self.batches), math.ceil(tokens / mean_tokens(self)))
        self.batches = [self.batches[number * len(self.batches) // count] for number in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Packed:
        """Batch `index`; the stream begins again at its end."""
        file, documents = self.batches[index % len(self.batches)]
        parts = [slice(start, end) for start, end in documents]
        ids = np.concatenate([file.token_ids[part] for part in parts]).astype(np.int64)
        learn = np.concatenate([file.learn[part] for part in parts])
        bounds = np.cumsum([0, *(end - start for start, end in documents)])
        unlearn = torch.from_numpy(learn == UNLEARN) if UNLEARN in learn else None
        return Packed(torch.from_numpy(ids), torch.from_numpy(learn == LEARN), tuple(bounds.tolist()), index, unlearn)


def _batches(bounds: Sequence[int], batch_tokens: int) -> Iterable[list[tuple[int, int]]]:
    batch: list[tuple[int, int]] = []
    room = batch_tokens
    for start, end in zip(bounds, bounds[1:], strict=False):
        end = min(end, start + batch_tokens)
        if end - start < 2:          # nothing to predict in it
            continue
        if end - start > room:
            yield batch
            batch, room = [], batch_tokens
        batch.append((start, end))
        room -= end - start
    if batch:
        yield batch


def mean_tokens(stream: PackedStream) -> float:
    """Tokens per batch."""
    return sum(end - start for _, batch in stream.batches for start, end in batch) / len(stream.batches)


def write(path: Path, documents: Iterable[Document], vocab_size: int) -> int:
    """Write the three files beside `path`, the bounds only once the others are whole; returns the number of tokens. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    bounds = [0]
    with path.with_suffix(".ids").open("wb") as ids, path.with_suffix(".learn").open("wb") as learn:
        for document in documents:
            ids.write(document.token_ids.astype(dtype).tobytes())  # tofile would lose the end on a full disk, and say nothing
            learn.write(document.learn.astype(np.uint8).tobytes())
            bounds.append(bounds[-1] + len(document))
    partial = path.with_suffix(".partial")
    partial.write_bytes(np.array(bounds, dtype=np.int64).tobytes())
    os.replace(partial, path.with_suffix(".bounds"))
    return bounds[-1]
