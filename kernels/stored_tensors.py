"""Tensors of checkpoints by name: of safetensors and of GGUF files, plain or quantised, whole or cut; read only when they are asked for.

Weights that are quantised there are plain numbers here (quantised_checkpoint.py, gguf_model.py). Knows no program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .gguf_file import GgufError
from .gguf_model import GgufWeights
from .program import RowsOf
from .quantised_checkpoint import Quantisation, UnsupportedQuantisation, plain, read_quantisation, stored_parts, stored_shape
from .text_names import text_names


class WeightError(ValueError):
    """A checkpoint is missing, damaged or not the one its config describes. The message names the tensors."""


def read_tensors(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """All tensors of the safetensors files of a folder by name, or of a model's GGUF files, mapped into memory only when asked for.

    Those that are quantised, as the folder's config.json or the GGUF file says, are float32, made whenever they are asked for.
    Raises WeightError.
    """
    if files and files[0].suffix == ".gguf":
        try:
            return _GgufTensors(GgufWeights(files))
        except GgufError as error:
            raise WeightError(str(error)) from error
    tensors = _TensorFiles(files)
    try:
        quantisation = read_quantisation(files[0].parent) if files else None
    except UnsupportedQuantisation as error:
        raise WeightError(f"the checkpoint is {error}") from error
    return tensors if quantisation is None else _PlainTensors(tensors, quantisation)


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Of one of the tensors, whose numbers are not read."""
    return tuple(without_numbers(tensors, name).shape)


def named(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Some of the tensors, under other names: new -> old."""
    return _NamedTensors(tensors, names)


def text_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those of a checkpoint's text model, as it calls them itself: nothing of what sees or hears. Of most checkpoints, all."""
    return _NamedTensors(tensors, text_names(tensors))


def sliced(tensors: Mapping[str, Tensor], slices: Mapping[str, RowsOf]) -> _SlicedTensors:
    """The same tensors, where those in `slices` that are there are known by their parts instead.

    Parts are views where their rows lie together. Asked for a part of a tensor of another shape, it raises WeightError.
    """
    return _SlicedTensors(tensors, slices)


def rows_of(tensor: Tensor, rows: RowsOf) -> Tensor:
    """[n, columns] the rows that are meant of a tensor with as many rows as rows.shape says, however many columns it has."""
    if rows.transposed:
        matrix, before = divmod(rows.start, tensor.shape[-1])
        return tensor[matrix, :, before : before + rows.stop - rows.start : rows.step].mT
    columns = (rows.columns,) if rows.columns else tensor.shape[-1:] if tensor.dim() > 1 else ()
    found = tensor.reshape(rows.runs, -1, *columns)[:, rows.start : rows.stop : rows.step]
    if rows.pairs:
        turned = found[:, : rows.pairs]
        found = torch.cat((turned[:, ::2], turned[:, 1::2], found[:, rows.pairs :]), 1)
    return (found.mT if rows.runs_transposed else found).flatten(0, 1)


def without_numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors.without_numbers_of(name) if isinstance(tensors, Tensors) else _shape_alone(tensors[name])


def _shape_alone(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _matrix(tensors: Mapping[str, Tensor], name: str, index: int) -> Tensor:
    return tensors.matrix(name, index) if isinstance(tensors, Tensors) else tensors[name][index]


def is_quantised(tensors: Mapping[str, Tensor], name: str) -> bool:
    return isinstance(tensors, Tensors) and tensors.is_quantised(name)


class Tensors(Mapping[str, Tensor]):
    """Tensors by name. Which there are is told without reading one."""

    _names: dict[str, Any]

    def without_numbers_of(self, name: str) -> Tensor:
        """On the device `meta`: a shape and a dtype."""
        return _shape_alone(self[name])

    def is_quantised(self, name: str) -> bool:
        """Whether the files hold it in narrower numbers than these."""
        return False

    def matrix(self, name: str, index: int) -> Tensor:
        """One along the first dimension."""
        return self[name][index]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _TensorFiles(Tensors):
    """Tensor name -> tensor over several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._names = {}
        self._handles = {path: _open(path) for path in paths}
        for path, handle in self._handles.items():
            for name in handle.keys():
                if name in self._names:
                    raise WeightError(f"{name} is in both {self._names[name].name} and {path.name}")
                self._names[name] = path

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._names[name]].get_tensor(name)


class _PlainTensors(Tensors):
    """Tensors of a quantised checkpoint in plain numbers; none is kept."""

    def __init__(self, tensors: Mapping[str, Tensor], quantisation: Quantisation) -> None:
        self._tensors, self._quantisation = tensors, quantisation
        self._latest: tuple[str, int, Tensor] | None = None  # name, index and numbers of a matrix: its parts are asked for in turn
        self._names: dict[str, dict[str, str]] = stored_parts(tensors)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return parts[""]
        shape = self._shape(name, parts)
        if len(shape) == 3:
            return torch.stack([self.matrix(name, index) for index in range(shape[0])])
        return self._plain(name, parts)

    def without_numbers_of(self, name: str) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return _shape_alone(parts[""])
        return torch.empty(self._shape(name, parts), dtype=torch.float32, device="meta")

    def matrix(self, name: str, index: int) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return parts[""][index]
        if self._latest is None or self._latest[:2] != (name, index):
            count = self._shape(name, parts)[0]
            alone = {part: t[index] if t.dim() and len(t) == count else t for part, t in parts.items()}
            self._latest = name, index, self._plain(name, alone)
        return self._latest[2]

    def is_quantised(self, name: str) -> bool:
        return name in self._names and [*self._names[name]] != [""]

    def _parts(self, name: str) -> dict[str, Tensor]:
        return {part: self._tensors[stored] for part, stored in self._names[name].items()}

    def _shape(self, name: str, parts: Mapping[str, Tensor]) -> tuple[int, ...]:
        try:
            shape = stored_shape(parts, self._quantisation)
            if min(shape, default=0) < 0:
                raise ValueError(f"shape {shape} is negative")
            return shape
        except _NONSENSE as error:
            raise _unreadable(name, error) from error

    def _plain(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        try:
            return plain(parts, self._quantisation)
        except _NONSENSE as error:
            raise _unreadable(name, error) from error


class _GgufTensors(Tensors):
    """Those of a model in GGUF files; no plain numbers of what is quantised are kept."""

    def __init__(self, weights: GgufWeights) -> None:
        self._weights, self._names = weights, weights.stored

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.plain(name)

    def without_numbers_of(self, name: str) -> Tensor:
        return torch.empty(self._weights.shape(name), dtype=self._names[name][0].dtype, device="meta")

    def is_quantised(self, name: str) -> bool:
        return name in self._names and self._names[name][0].is_quantised


_NONSENSE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # what Python and torch say of parts that do not fit


def _unreadable(name: str, error: Exception) -> WeightError:
    return WeightError(f"{name} cannot be read as config.json says that it is quantised: {error}")


class _NamedTensors(Tensors):
    """Some of the tensors, under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """names: new -> old."""
        self._tensors, self._names = tensors, dict(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def without_numbers_of(self, name: str) -> Tensor:
        return without_numbers(self._tensors, self._names[name])

    def is_quantised(self, name: str) -> bool:
        return name in self._names and is_quantised(self._tensors, self._names[name])

    def matrix(self, name: str, index: int) -> Tensor:
        return _matrix(self._tensors, self._names[name], index)


class _SlicedTensors(Tensors):
    """Tensors of a checkpoint, of which some are known by the names of their slices."""

    def __init__(self, tensors: Mapping[str, Tensor], slices: Mapping[str, RowsOf]) -> None:
        self._tensors = tensors
        self._slices = {name: rows for name, rows in slices.items() if rows.tensor in tensors}
        cut = {rows.tensor for rows in self._slices.values()}
        self._names = dict.fromkeys([*(name for name in tensors if name not in cut), *self._slices])

    def __getitem__(self, name: str) -> Tensor:
        rows = self._slices.get(name)
        if rows is None:
            return self._tensors[name]
        if (shape := shape_of(self._tensors, rows.tensor)) != rows.shape:
            raise WeightError(f"{rows.tensor} has shape {shape}, but config.json asks for {rows.shape}")
        if is_quantised(self._tensors, rows.tensor) and len(shape) == 3 and rows.runs == 1:
            height = shape[2 if rows.transposed else 1]
            index = rows.start // height  # only this matrix is made plain: parts do not cross their borders
            within = replace(rows, start=rows.start - index * height, stop=rows.stop - index * height)
            return rows_of(_matrix(self._tensors, rows.tensor, index)[None], within)
        return rows_of(self._tensors[rows.tensor], rows)

    def without_numbers(self) -> dict[str, Tensor]:
        """All of them as tensors that have shapes only: nothing is read, where a part whose rows lie apart would be copied."""
        shapes = _SlicedTensors({name: without_numbers(self._tensors, name) for name in self._tensors}, self._slices)
        return {name: shapes[name] for name in shapes}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is damaged or incomplete ({error}); fetch the file again") from error
