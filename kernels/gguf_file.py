"""GGUF, the file format of llama.cpp: what a file says, and its tensors as numbers. Knows no model.

The layout is told in ggml's docs/gguf.md. Only what is asked for is read of the tensors.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gguf_formats import FORMATS

_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_NUMBERS: dict[int, str] = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))  # type -> struct's letter
FLOAT32 = 0
_PLAIN = {FLOAT32: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NOT_WEIGHTS = ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64")  # what the gguf package does not make plain
_SLICE = 2**19  # weights made plain at a time: what that takes beside them stays in a core's cache
_MOST = 2**20  # more keys, tensors or dimensions than any file has: a damaged count


class GgufError(ValueError):
    """A file that is damaged, incomplete, or of a kind that is not read. The message names it."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies, and how it is stored."""

    data: np.ndarray  # uint8, mapped
    type: int  # ggml's number for it
    shape: tuple[int, ...]  # as torch has it: rows first

    @property
    def is_quantised(self) -> bool:
        return self.type not in _PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """Of what `plain` gives."""
        return _PLAIN.get(self.type, torch.float32)

    @property
    def bits(self) -> float:
        """A weight's, with its share of the scales."""
        return len(self.data) * 8 / max(math.prod(self.shape), 1)

    def plain(self, index: int | None = None) -> Tensor:
        """As float32, or as the 16 bits that it is stored in. index: only this one along the first dimension."""
        data, shape = self.data, self.shape
        if index is not None:
            data, shape = data.reshape(shape[0], -1)[index], shape[1:]
        if not self.is_quantised:
            return torch.from_numpy(data).view(self.dtype).view(shape)
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        type = GGMLQuantizationType(self.type)
        block, size = GGML_QUANT_SIZES[type]
        blocks, step = data.reshape(-1, size), max(_SLICE // block, 1)
        numbers = torch.empty(shape, dtype=torch.float32)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            with np.errstate(all="ignore"):  # damaged scales are told where numbers are checked
                made = FORMATS[self.type](torch.from_numpy(part)) if self.type in FORMATS else torch.from_numpy(dequantize(part, type))
            numbers.view(-1)[start * block : start * block + made.numel()] = made.flatten()
        return numbers


class GgufFile:
    """What a file of a model says, and the tensors of it and of those that it is split into."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises GgufError."""
        self.path = paths[0]
        self.values: Mapping[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        for path in paths:
            values, tensors = _read(path)
            self.values = self.values or values
            self.tensors.update(tensors)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        data = np.memmap(path, np.uint8, "c")
        return _Header(data).read()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, LookupError, RecursionError, struct.error, TypeError, ValueError) as error:
        raise GgufError(f"{path} is no GGUF file that can be read, or damaged or incomplete ({error})") from error


class _Header:
    """Reads what stands before the numbers, from front to back."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._view, self._at = data, data.data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        magic, version, num_tensors, num_values = self._take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if max(num_tensors, num_values) > _MOST:
            raise ValueError(f"it counts {num_tensors} tensors and {num_values} values")
        values = {self._string(): self._value(self._number("I")) for _ in range(num_values)}
        found = [(self._string(), self._shape(), *self._take("<IQ")) for _ in range(num_tensors)]
        alignment = int(values.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return values, {name: self._tensor(start + offset, type, shape) for name, shape, type, offset in found}

    def _tensor(self, start: int, type: int, shape: tuple[int, ...]) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(type)
        if kind.name in _NOT_WEIGHTS:
            raise ValueError(f"it has numbers of type {kind.name}, which are not read")
        block, size = GGML_QUANT_SIZES[kind]
        end = start + math.prod(shape) // block * size
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data):,}, and a tensor at {end:,}")
        return GgufTensor(self._data[start:end], type, shape)

    def _shape(self) -> tuple[int, ...]:
        dimensions = self._number("I")
        if dimensions > 4:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        return self._take(f"<{dimensions}Q")[::-1]

    def _value(self, type: int) -> Any:
        if type == _STRING:
            return self._string()
        if type != _ARRAY:
            number = self._number(_NUMBERS[type])
            return bool(number) if type == _BOOL else float(str(np.float32(number))) if type == _FLOAT else number  # 0.7, not 0.699999988
        of, length = self._take("<IQ")
        if length > len(self._data):
            raise ValueError(f"a list has {length} values")
        if of in (_STRING, _ARRAY):
            return [self._value(of) for _ in range(length)]
        return list(self._take(f"<{length}{_NUMBERS[of]}"))

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + int.from_bytes(self._view[self._at : start], "little")
        if self._at > len(self._data):
            raise ValueError("a text ends behind the file")
        return str(self._view[start : self._at], "utf-8", "replace")

    def _number(self, letter: str) -> Any:
        return self._take(f"<{letter}")[0]

    def _take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self._view, self._at)
        self._at += struct.calcsize(layout)
        return found
