"""Sampling in the native library: places where tokens are wanted in, token ids out, in one call. Knows no requests.

noise.py, engine/logit_edits.py and engine/logit_filters.py say what is meant, and do it where there is no library; this
gives the same tokens up to rounding. What it saves is passes over the vocabulary: one finds the best of each block, and
most of what follows needs a few blocks only.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_bool, c_int32, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import native_library

_POINTERS = ("logits", "allowed", "banned", "bias_ids", "bias", "seen", "counts", "path")
_INTEGERS = ("num_banned", "num_bias", "num_seen", "path_length", "parent", "guess", "top_k")
_FLOATS = ("temperature", "log_min_p", "repetition", "frequency", "presence")

ROW = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [("key", np.int64), ("top_p", np.float64)]
    + [(name, np.int32) for name in _INTEGERS]
    + [(name, np.float32) for name in _FLOATS]
)
"""One place: the struct SampleRow of native/sampling.h, which says what each field means. Who fills in an address keeps what it
points to until `sample` returns."""


def available() -> bool:
    """Whether `sample` can be called on this machine."""
    return _function() is not None


def takes(logits: Tensor) -> bool:
    """Whether rows of logits [n, V] can be read as they lie."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and (logits.stride(1) == 1 or logits.shape[1] == 1) and available()


def rows_of(logits: Tensor, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Addresses of these rows of logits [n, V]."""
    return (logits.data_ptr() + indices * (4 * logits.stride(0))).astype(np.uint64)


def neutral(count: int) -> NDArray[np.void]:
    """[count] of ROW that change nothing and depend on no other; logits and key are still to be filled in."""
    rows = np.zeros(count, ROW)
    rows["parent"] = rows["guess"] = -1
    rows["top_k"] = np.iinfo(np.int32).max
    rows["top_p"] = rows["temperature"] = rows["repetition"] = 1.0
    rows["log_min_p"] = -np.inf
    return rows


def sample(rows: NDArray[np.void], vocab_size: int) -> NDArray[np.int64]:
    """A token for each place. -1: the logits have NaN or no finite best, or the parent's token is not the guess."""
    tokens = np.empty(len(rows), np.int64)
    function = _function()
    assert function is not None
    if not function(rows.ctypes.data, len(rows), vocab_size, tokens.ctypes.data):
        raise MemoryError("sampling")
    return tokens


def race(logits: Tensor, keys: Tensor) -> Tensor:
    """noise.sample for logits that this `takes`; a row with NaN gives 0."""
    rows = neutral(len(logits))
    rows["logits"] = rows_of(logits, np.arange(len(logits)))
    rows["key"] = keys.numpy()
    return torch.from_numpy(sample(rows, logits.shape[1]).clip(min=0))


@functools.cache
def _function() -> ctypes._NamedFuncPointer | None:
    library = native_library.load()
    if library is None or native_library.availability().isa is None:
        return None
    function = library.ft_sample
    function.argtypes = [c_void_p, c_int32, c_int32, c_void_p]
    function.restype = c_bool
    return function
