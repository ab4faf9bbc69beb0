"""Weights in the order in which the native executor reads them, packed once from tensors that may be mapped files.

Owns the packed memory. Knows no program: a weight is some matrices [out, in] side by side along their outputs.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from .large_pages import in_large_pages
from .native_abi import PANEL, PackedLinear, Precision
from .native_library import usable_cores

_OUTPUTS_PER_TASK = 1024  # packed by one thread at a time
_REGION_BYTES = 32 * 2**20


class WeightMemory:
    """Hands out memory for packed weights, in large pages: small weights share a region. Threads may take some at once.

    What stays must not lie among what goes: a few numbers that are kept in the C library's memory would hold all that was freed there.
    """

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to 64 bytes, not initialised."""
        if num_bytes > _REGION_BYTES // 2:
            return in_large_pages(num_bytes)
        with self._lock:
            if self._used + num_bytes > len(self._region):
                self._region, self._used = in_large_pages(_REGION_BYTES), 0
            taken = self._region[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // 64) * 64
        return taken

    def mark(self) -> tuple[Tensor, int]:
        """What `give_back` gives back everything behind; who has large weights in hand drops them."""
        return self._region, self._used

    def give_back(self, mark: tuple[Tensor, int]) -> None:
        self._region, self._used = mark


@dataclass(frozen=True)
class PackedWeight:
    """struct is what the library reads; tensors own the memory behind its pointers."""

    struct: PackedLinear
    tensors: tuple[Tensor, ...]
    num_bytes: int  # of the packed weights, scales included: what a pass reads


@dataclass(frozen=True)
class _Range:
    """Rows of a source matrix and where they go: panel first_panel + i * panel_step holds rows 16 i ..."""

    source: Tensor
    first_panel: int
    panel_step: int


def pack(
    library: ctypes.CDLL, memory_of: WeightMemory, matrices: Sequence[Tensor], bias: Tensor | None, precision: Precision, gated: bool
) -> PackedWeight:
    """Pack matrices [n_i, K], one after the other along their outputs. bias: [sum of n_i] or None.

    gated: the first half of all outputs is the gate, the second what it gates; they alternate in panels of 16. COMPACT becomes
    BFLOAT16 where that is no larger.
    """
    if precision == Precision.COMPACT:
        return _pack_compact(library, memory_of, matrices, bias, gated)
    width, total = matrices[0].shape[1], sum(len(matrix) for matrix in matrices)
    multiple = library.ft_input_multiple(precision)
    inputs, outputs = -(-width // multiple) * multiple, -(-total // PANEL) * PANEL
    num_bytes = library.ft_packed_bytes(precision, inputs, outputs)
    memory = memory_of.take(num_bytes)
    scales = torch.zeros(outputs, dtype=torch.float32) if precision in (Precision.INT8, Precision.INT4, Precision.INT2) else None
    struct = PackedLinear(precision, inputs, outputs, _address(memory), _address(scales), None)

    with ThreadPoolExecutor(usable_cores()) as threads:
        ranges = _ranges(matrices, total, gated)
        list(threads.map(lambda part: _pack_range(library, struct, part, part.first_panel, part.panel_step), ranges))
    return _with_bias(struct, (memory,) if scales is None else (memory, scales), bias, total, gated)


def _pack_compact(
    library: ctypes.CDLL, memory_of: WeightMemory, matrices: Sequence[Tensor], bias: Tensor | None, gated: bool
) -> PackedWeight:
    width, total = matrices[0].shape[1], sum(len(matrix) for matrix in matrices)
    multiple = library.ft_input_multiple(Precision.COMPACT)
    inputs, outputs = -(-width // multiple) * multiple, -(-total // PANEL) * PANEL
    mark = memory_of.mark()
    memory = memory_of.take(library.ft_packed_bytes(Precision.COMPACT, inputs, outputs))
    struct = PackedLinear(Precision.COMPACT, inputs, outputs, _address(memory), None, None)

    def pack_range(part: _Range) -> Tensor:
        """Returns its raw blocks."""
        panels = -(-len(part.source) // PANEL)
        plain = torch.empty(panels * PANEL * inputs, dtype=torch.bfloat16)
        _pack_range(library, PackedLinear(Precision.BFLOAT16, inputs, panels * PANEL, _address(plain), None, None), part, 0, 1)
        compaction = ctypes.c_void_p(library.ft_compaction_begin(ctypes.c_void_p(plain.data_ptr()), inputs, panels))
        if not compaction:
            raise MemoryError("no memory to pack weights")
        try:
            raw = memory_of.take(library.ft_compaction_raw_bytes(compaction))
            where = ctypes.c_int32(part.first_panel), ctypes.c_int32(part.panel_step), ctypes.c_void_p(raw.data_ptr())
            library.ft_compaction_make(compaction, ctypes.c_void_p(memory.data_ptr()), *where)
        finally:
            library.ft_compaction_end(compaction)
        return raw

    with ThreadPoolExecutor(usable_cores()) as threads:
        raw = list(threads.map(pack_range, _ranges(matrices, total, gated)))
    packed = _with_bias(struct, (memory, *raw), bias, total, gated)
    if packed.num_bytes >= library.ft_packed_bytes(Precision.BFLOAT16, inputs, outputs):
        memory_of.give_back(mark)
        return pack(library, memory_of, matrices, bias, Precision.BFLOAT16, gated)
    return packed


def _pack_range(library: ctypes.CDLL, struct: PackedLinear, part: _Range, first_panel: int, panel_step: int) -> None:
    source = part.source if part.source.dtype in (torch.float32, torch.bfloat16) else part.source.float()
    library.ft_pack(
        ctypes.byref(struct),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int32(Precision.BFLOAT16 if source.dtype == torch.bfloat16 else Precision.FLOAT32),
        ctypes.c_int32(len(source)),
        ctypes.c_int32(source.shape[1]),
        ctypes.c_int64(source.stride(0)),
        ctypes.c_int32(first_panel),
        ctypes.c_int32(panel_step),
    )


def _with_bias(struct: PackedLinear, tensors: tuple[Tensor, ...], bias: Tensor | None, total: int, gated: bool) -> PackedWeight:
    if bias is not None:
        packed = torch.zeros(struct.outputs, dtype=torch.float32)
        for first, rows in _outputs(total, gated):
            packed[rows] = bias[first : first + (rows.stop - rows.start)].float()
        struct.bias = _address(packed)
        tensors = *tensors, packed
    return PackedWeight(struct, tensors, sum(tensor.nbytes for tensor in tensors))


def shortened(library: ctypes.CDLL, isa: int, memory_of: WeightMemory, weight: PackedWeight) -> PackedWeight:
    """The same weight in int2, from what is packed of it, with its bias."""
    of = weight.struct
    multiple = library.ft_input_multiple(Precision.INT2)
    inputs = -(-of.inputs // multiple) * multiple
    memory = memory_of.take(library.ft_packed_bytes(Precision.INT2, inputs, of.outputs))
    scales = torch.zeros(of.outputs, dtype=torch.float32)
    struct = PackedLinear(Precision.INT2, inputs, of.outputs, _address(memory), _address(scales), of.bias)

    def pack_rows(first: int) -> None:
        ids = torch.arange(first, min(first + _OUTPUTS_PER_TASK, of.outputs))
        rows = torch.empty(len(ids), of.inputs, dtype=torch.float32)
        library.ft_op_unpack_rows(
            isa, ctypes.byref(of), ctypes.c_void_p(ids.data_ptr()), len(ids), of.inputs, ctypes.c_float(1.0),
            ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(of.inputs),
        )
        library.ft_pack(
            ctypes.byref(struct), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int32(Precision.FLOAT32), ctypes.c_int32(len(ids)),
            ctypes.c_int32(of.inputs), ctypes.c_int64(of.inputs), ctypes.c_int32(first // PANEL), ctypes.c_int32(1),
        )

    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(pack_rows, range(0, of.outputs, _OUTPUTS_PER_TASK)))
    return PackedWeight(struct, (memory, scales), memory.nbytes + scales.nbytes)


def _ranges(matrices: Sequence[Tensor], total: int, gated: bool) -> Iterator[_Range]:
    """All rows, in pieces that start at a panel."""
    half = total // 2 if gated else total
    starts = [0, *accumulate(len(matrix) for matrix in matrices)]
    if any(start % PANEL for start in starts[:-1]):
        matrices, starts = [torch.cat([matrix.float() for matrix in matrices])], [0]
    for matrix, start in zip(matrices, starts, strict=False):
        for first in _cuts(start, start + len(matrix), half):
            rows = matrix[first.start - start : first.stop - start]
            yield _Range(rows if rows.stride(1) == 1 else rows.contiguous(), _panel(first.start, half, gated), 2 if gated else 1)


def _cuts(start: int, stop: int, half: int) -> Iterable[range]:
    """start..stop in pieces of at most _OUTPUTS_PER_TASK that do not cross half."""
    while start < stop:
        end = min(stop, start + _OUTPUTS_PER_TASK, half if start < half else stop)
        yield range(start, end)
        start = end


def _outputs(total: int, gated: bool) -> Iterator[tuple[int, slice]]:
    """(first output, its place and its neighbours' in packed order), panel by panel."""
    half = total // 2
    for first in range(0, total, PANEL):
        panel = _panel(first, half, gated)
        yield first, slice(panel * PANEL, panel * PANEL + min(PANEL, total - first))


def _panel(output: int, half: int, gated: bool) -> int:
    """Where an output stands: in order, or gates (those before half) in even panels and what they gate in odd ones."""
    return output % half // PANEL * 2 + output // half if gated else output // PANEL


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
