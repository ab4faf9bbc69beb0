"""Sampling on a GPU from the same description that the native library takes: rows of sampling.ROW in, token ids out.

Owns the way from addresses on the host to tensors on the device: everything in few copies, lists that places share only once.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..upload import upload_packed
from .edits import Edits, edit_logits
from .sampling import Places, choose


def sample(logits: Tensor, logits_rows: NDArray[np.int64], rows: NDArray[np.void]) -> Tensor:
    """[N] int64 on the device: a token for each of rows [N] of sampling.ROW, which reads logits[logits_rows[i]] (its own field
    `logits` is not looked at). -1: the logits have NaN or no finite best. Nothing here waits for the device.

    Every place gets its token, whether or not its parent has the guess.
    """
    count, vocab_size = len(rows), logits.shape[1]
    has_edits = bool(((rows["allowed"] != 0) | (rows["num_banned"] > 0) | (rows["num_bias"] > 0) | (rows["seen"] != 0)).any())
    wide = [np.arange(count) if has_edits else logits_rows, rows["key"], rows["top_p"].view(np.int64)]
    narrow = [rows["temperature"].view(np.int32), rows["log_min_p"].view(np.int32), rows["top_k"]]
    wide_parts = upload_packed([part.astype(np.int64, copy=False) for part in wide], logits.device)
    narrow_parts = upload_packed(narrow, logits.device)
    places = Places(
        logits_rows=wide_parts[0],
        keys=wide_parts[1],
        temperature=narrow_parts[0].view(torch.float32),
        top_k=narrow_parts[2],
        top_p=wide_parts[2].view(torch.float64),
        log_min_p=narrow_parts[1].view(torch.float32),
    )
    if has_edits:
        (originals,) = upload_packed([logits_rows], logits.device)
        logits = edit_logits(logits, originals, _edits(rows, vocab_size, logits.device))
    return choose(logits, places)


def _edits(rows: NDArray[np.void], vocab_size: int, device: torch.device) -> Edits:
    words = -(-vocab_size // 32)
    allowed = _Lists()
    allowed_ranges = allowed.add(rows["allowed"], np.where(rows["allowed"] != 0, words, 0))
    banned, bias, seen = _Lists(), _Lists(1), _Lists(1)
    banned_ranges = banned.add(rows["banned"], rows["num_banned"])
    bias_ranges = bias.add(rows["bias_ids"], rows["num_bias"], rows["bias"])
    seen_ranges = seen.add(rows["seen"], np.where(rows["seen"] != 0, rows["num_seen"], 0), rows["counts"])
    paths = np.full((len(rows), max(1, int(rows["path_length"].max()))), -1, np.int32)
    for path, address, length in zip(paths, rows["path"].tolist(), rows["path_length"].tolist(), strict=True):
        path[:length] = _read(address, length)
    parts = upload_packed(
        [
            np.where(rows["allowed"] != 0, allowed_ranges[:, 0] // words, -1).astype(np.int32),
            allowed.values(0),
            banned_ranges,
            banned.values(0),
            bias_ranges,
            bias.values(0),
            bias.values(1),
            seen_ranges,
            seen.values(0),
            seen.values(1),
            paths,
            *(rows[name].view(np.int32) for name in ("repetition", "frequency", "presence")),
        ],
        device,
    )
    floats = {6, 9, 11, 12, 13}
    parts = [part.view(torch.float32) if i in floats else part for i, part in enumerate(parts)]
    return Edits(parts[0], parts[1].view(-1, words), *parts[2:])


class _Lists:
    """Arrays of 4-byte numbers at addresses on the host, one behind the other; each is read once. Some have companions as long."""

    def __init__(self, num_companions: int = 0) -> None:
        self._arrays: list[list[NDArray[np.int32]]] = [[] for _ in range(1 + num_companions)]
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._end = 0

    def add(self, addresses: NDArray[np.uint64], lengths: NDArray[np.int32], *companions: NDArray[np.uint64]) -> NDArray[np.int32]:
        """[n, 2] int32: where each list begins and ends."""
        ranges = np.zeros((len(addresses), 2), np.int32)
        for i, (length, *at) in enumerate(zip(lengths.tolist(), addresses.tolist(), *(c.tolist() for c in companions), strict=True)):
            if not length:
                continue
            if (at[0], length) not in self._places:
                for arrays, address in zip(self._arrays, at, strict=True):
                    arrays.append(_read(address, length))
                self._places[at[0], length] = self._end, self._end + length
                self._end += length
            ranges[i] = self._places[at[0], length]
        return ranges

    def values(self, which: int) -> NDArray[np.int32]:
        """[total] the bits of the lists (0) or of a companion (1, ...)."""
        arrays = self._arrays[which]
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _read(address: int, length: int) -> NDArray[np.int32]:
    return np.frombuffer(ctypes.string_at(address, 4 * length), np.int32) if length else np.zeros(0, np.int32)
