"""Single ops of the native executor, called from torch tensors, for tests of the kernels. Skips whoever imports it where none can run."""

import ctypes
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels import native_library
from foretoken.kernels.adapters import Factors
from foretoken.kernels.execution import Execution
from foretoken.kernels.native_abi import FUNCTIONS, NativeLowRank, PackedLinear, Precision

LIBRARY = native_library.load()
if LIBRARY is None:
    pytest.skip("the native library was not built at install", allow_module_level=True)


def runs(isa: int) -> bool:
    assert LIBRARY is not None
    return bool(LIBRARY.ft_op_activate(isa, 0, None, None, None, 0))


ISAS = [isa for isa in range(len(native_library.ISAS)) if runs(isa)]
if not ISAS:
    pytest.skip("no instruction set of the native executor runs here", allow_module_level=True)

CODES = (Precision.INT4, Precision.INT2)  # in groups of 32 inputs
INTEGERS = (Precision.INT8, *CODES)
each_isa = pytest.mark.parametrize("isa", ISAS, ids=[native_library.ISAS[isa] for isa in ISAS])
DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16} | dict.fromkeys(INTEGERS, torch.int8)  # of rows
each_precision = pytest.mark.parametrize("precision", list(DTYPES), ids=lambda p: p.name.lower())
OF_PRECISIONS = {
    "float32": Execution(torch.float32), "bfloat16": Execution(torch.bfloat16), "int8": Execution(torch.bfloat16, quantization="int8"),
    "int4": Execution(torch.bfloat16, quantization="int4"),
}
activations = {"": lambda x: x, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
activations |= {"relu": F.relu, "sigmoid": torch.sigmoid, "relu2": lambda x: F.relu(x).square()}


class Prepare(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p), ("x_stride", c_int64), ("width", c_int32), ("normalise", c_bool), ("centred", c_bool), ("norm_weight", c_void_p),
        ("norm_bias", c_void_p), ("eps", c_float), ("precision", c_int32), ("inputs", c_int32), ("data", c_void_p), ("stride", c_int64),
        ("scales", c_void_p), ("input_sums", c_void_p), ("ahead", c_void_p),
    ]


class PreparedRows(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), ("scales", c_void_p), ("input_sums", c_void_p), ("rows", c_int32)]


class Epilogue(ctypes.Structure):
    _fields_ = [
        ("residual", c_void_p), ("residual_stride", c_int64), ("scale", c_float), ("softcap", c_float), ("function", c_int32),
        ("gated", c_bool), ("outputs", c_int32), ("out", c_void_p), ("narrow_out", c_void_p), ("out_stride", c_int64),
        ("out_rows", c_void_p), ("best", c_void_p),
    ]


class Best(ctypes.Structure):
    _fields_ = [("value", c_float), ("poison", c_float), ("index", c_int32), ("unused", c_int32)]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def call(name: str, *args: object) -> None:
    assert LIBRARY is not None
    assert getattr(LIBRARY, name)(*args) == 1


@dataclass(frozen=True)
class Rows:
    """Prepared activations; values [rows, inputs] are the numbers that stand in `data`, scales applied."""

    struct: PreparedRows
    data: Tensor
    scales: Tensor
    input_sums: Tensor

    @property
    def values(self) -> Tensor:
        whole = self.data.double()
        return whole * self.scales.double()[:, None] if self.data.dtype == torch.int8 else whole


def prepare(
    isa: int,
    x: Tensor,
    precision: Precision,
    inputs: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    centred: bool = False,
) -> Rows:
    """eps given: an RMSNorm comes first, or a layer norm."""
    rows, padded = len(x), -(-len(x) // 16) * 16
    data = torch.full((padded, inputs), 55, dtype=DTYPES[precision])
    scales, sums = torch.full((rows,), 55.0), torch.full((rows, inputs // 32 if precision in CODES else 1), 55, dtype=torch.int32)
    stride = data.stride(0) * data.element_size()
    args = Prepare(
        address(x), x.stride(0), x.shape[1], eps is not None, centred, address(weight), address(bias), eps or 0.0, precision, inputs,
        address(data), stride, address(scales), address(sums),
    )
    first = rows // 2  # in two pieces, as threads would
    call("ft_op_prepare", isa, ctypes.byref(args), 0, first)
    call("ft_op_prepare", isa, ctypes.byref(args), first, rows - first)
    return Rows(PreparedRows(address(data), stride, address(scales), address(sums), rows), data[:rows], scales, sums)


@dataclass(frozen=True)
class Packed:
    struct: PackedLinear
    memory: Tensor
    scales: Tensor
    bias: Tensor


def packed(matrices: list[Tensor], precision: Precision, bias: Tensor | None = None, gated: bool = False) -> Packed:
    """Matrices side by side, each from a panel of its own on; gated: the two of them alternate panel by panel."""
    assert LIBRARY is not None
    width, multiple = matrices[0].shape[1], LIBRARY.ft_input_multiple(precision)
    panels = [-(-len(matrix) // 16) for matrix in matrices]
    inputs, outputs = -(-width // multiple) * multiple, sum(panels) * 16
    num_bytes = LIBRARY.ft_packed_bytes(precision, inputs, outputs)
    memory = torch.full((num_bytes + 128,), 55, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    scales, biases = torch.full((outputs,), 55.0), torch.zeros(outputs)
    struct = PackedLinear(precision, inputs, outputs, memory.data_ptr() + start, address(scales))
    struct.bias = None if bias is None else address(biases)
    step = len(matrices) if gated else 1
    for index, matrix in enumerate(matrices):
        first = index if gated else sum(panels[:index])
        source = Precision.BFLOAT16 if matrix.dtype == torch.bfloat16 else Precision.FLOAT32
        data, stride = c_void_p(matrix.data_ptr()), c_int64(matrix.stride(0))
        LIBRARY.ft_pack(ctypes.byref(struct), data, source, len(matrix), width, stride, first, step)
        if bias is not None:
            order = torch.arange(len(matrix))
            biases[(first + order // 16 * step) * 16 + order % 16] = bias[sum(map(len, matrices[:index])) :][: len(matrix)]
    assert (memory[:start] == 55).all() and (memory[start + num_bytes :] == 55).all()
    return Packed(struct, memory, scales, biases)


def unpacked(isa: int, w: Packed, ids: Tensor, width: int, scale: float = 1.0) -> Tensor:
    out = torch.full((len(ids), width + 3), 55.0)
    call("ft_op_unpack_rows", isa, ctypes.byref(w.struct), c_void_p(ids.data_ptr()), len(ids), width, c_float(scale),
         c_void_p(out.data_ptr()), c_int64(out.stride(0)))
    assert (out[:, width:] == 55).all()
    return out[:, :width]


@dataclass
class After:
    """What a linear does behind the product."""

    residual: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    function: str = ""
    gated: bool = False
    out_rows: Tensor | None = None
    narrow: bool = False


def linear(isa: int, w: Packed, x: Rows, outputs: int, after: After, splits: list[int] | None = None) -> tuple[Tensor, list[Best]]:
    """(result, best of each row). splits: panels at which the work is cut into calls; each row's best starts empty."""
    rows, columns = x.struct.rows, outputs // 2 if after.gated else outputs
    out = torch.full((rows, columns + 5), 55.0, dtype=torch.bfloat16 if after.narrow else torch.float32)
    best = (Best * max(rows, 1))(*[Best(-float("inf"), 0.0, 0, 0) for _ in range(rows)])
    residual = after.residual
    epilogue = Epilogue(
        address(residual), 0 if residual is None else residual.stride(0), after.scale, after.softcap, FUNCTIONS[after.function],
        after.gated, outputs, None if after.narrow else address(out), address(out) if after.narrow else None, out.stride(0),
        address(after.out_rows), ctypes.addressof(best),
    )
    panels = w.struct.outputs // 16
    cuts = [0, *(splits or []), panels]
    for first, end in zip(cuts, cuts[1:], strict=False):
        call("ft_op_linear", isa, ctypes.byref(w.struct), ctypes.byref(x.struct), ctypes.byref(epilogue), first, end - first)
    assert (out[:, columns:] == 55).all()
    return out[:, :columns], list(best)[:rows]


def low_rank(
    isa: int, factors: Factors, slot: int, x: Tensor, residual: Tensor | None = None, gated: bool = False, cuts: tuple[int, ...] = ()
) -> Tensor:
    """[rows, sum of out] what a slot adds to rows x. cuts: columns at which the second step is cut into calls; the first is by rank."""
    num_weights, num_slots, rank, width = factors.down.shape
    sizes = [up.shape[2] for up in factors.ups]
    outputs, ups = (c_int32 * num_weights)(*sizes), (c_void_p * num_weights)(*(address(up) for up in factors.ups))
    precision = Precision.BFLOAT16 if factors.down.dtype == torch.bfloat16 else Precision.FLOAT32
    struct = NativeLowRank(
        precision, num_weights, num_slots, rank, width, gated, ctypes.addressof(outputs), address(factors.ranks), address(factors.down), ups
    )
    inner, out = torch.full((len(x) + 1, num_weights * rank), 55.0), torch.full((len(x) + 1, sum(sizes)), 55.0)
    given, between, result = (c_void_p(address(tensor)) for tensor in (x, inner, out))
    ranks, columns = [0, *([rank // 2] if cuts else []), num_weights * rank], [0, *cuts, sum(sizes)]
    for first, end in zip(ranks, ranks[1:], strict=False):
        call("ft_op_low_rank_down", isa, ctypes.byref(struct), slot, given, len(x), first, end, between)
    others = c_void_p(address(residual))
    for first, end in zip(columns, columns[1:], strict=False):
        call("ft_op_low_rank_up", isa, ctypes.byref(struct), slot, between, len(x), others, first, end, result)
    assert (inner[-1] == 55).all() and (out[-1] == 55).all()
    return out[:-1]


def panel_order(outputs: int) -> Tensor:
    """Where each output of a gated product stands: panels of 16, of gate and up in turn."""
    half = torch.arange(outputs // 2)
    return torch.cat([half // 16 * 32 + half % 16, half // 16 * 32 + 16 + half % 16])


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Up to tolerance times the largest expected magnitude."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))
