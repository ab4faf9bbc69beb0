"""Each op of each instruction set that runs here, against torch, over odd shapes; and that a row's bits depend on that row alone."""

from __future__ import annotations

import ctypes
import random
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels import native_library
from foretoken.kernels.native_abi import FUNCTIONS, PackedLinear, Precision

LIBRARY = native_library.load()
if LIBRARY is None:
    pytest.skip("the native library was not built at install", allow_module_level=True)


def runs(isa: int) -> bool:
    assert LIBRARY is not None
    return bool(LIBRARY.ft_op_activate(isa, 0, None, None, None, 0))


ISAS = [isa for isa in range(len(native_library.ISAS)) if runs(isa)]
if not ISAS:
    pytest.skip("this processor has no AVX-512", allow_module_level=True)

INTEGERS = (Precision.INT8, Precision.INT4)
each_isa = pytest.mark.parametrize("isa", ISAS, ids=[native_library.ISAS[isa] for isa in ISAS])
each_precision = pytest.mark.parametrize("precision", list(Precision), ids=lambda p: p.name.lower())
activations = {"": lambda x: x, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


class Prepare(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("width", c_int32),
        ("normalise", c_bool),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("eps", c_float),
        ("precision", c_int32),
        ("inputs", c_int32),
        ("data", c_void_p),
        ("stride", c_int64),
        ("scales", c_void_p),
        ("group_sums", c_void_p),
    ]


class PreparedRows(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), ("scales", c_void_p), ("group_sums", c_void_p), ("rows", c_int32)]


class Epilogue(ctypes.Structure):
    _fields_ = [
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("function", c_int32),
        ("gated", c_bool),
        ("outputs", c_int32),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_rows", c_void_p),
        ("best", c_void_p),
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
    group_sums: Tensor

    @property
    def values(self) -> Tensor:
        whole = self.data.double()
        return whole * self.scales.double()[:, None] if self.data.dtype == torch.int8 else whole


DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16, Precision.INT8: torch.int8, Precision.INT4: torch.int8}


def prepare(
    isa: int,
    x: Tensor,
    precision: Precision,
    inputs: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Rows:
    """eps given: an RMSNorm comes first."""
    rows, padded = len(x), -(-len(x) // 16) * 16
    data = torch.full((padded, inputs), 55, dtype=DTYPES[precision])
    scales, group_sums = torch.full((rows,), 55.0), torch.full((rows, inputs // 32), 55, dtype=torch.int32)
    stride = data.stride(0) * data.element_size()
    args = Prepare(
        address(x), x.stride(0), x.shape[1], eps is not None, address(weight), address(bias), eps or 0.0, precision, inputs,
        address(data), stride, address(scales), address(group_sums),
    )  # fmt: skip
    first = rows // 2  # in two pieces, as threads would
    call("ft_op_prepare", isa, ctypes.byref(args), 0, first)
    call("ft_op_prepare", isa, ctypes.byref(args), first, rows - first)
    return Rows(PreparedRows(address(data), stride, address(scales), address(group_sums), rows), data[:rows], scales, group_sums)


@dataclass(frozen=True)
class Packed:
    struct: PackedLinear
    memory: Tensor
    scales: Tensor
    column_sums: Tensor
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
    scales, column_sums, biases = torch.full((outputs,), 55.0), torch.full((outputs,), 55, dtype=torch.int32), torch.zeros(outputs)
    struct = PackedLinear(precision, inputs, outputs, memory.data_ptr() + start, address(scales), address(column_sums))
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
    return Packed(struct, memory, scales, column_sums, biases)


def unpacked(isa: int, w: Packed, ids: Tensor, width: int, scale: float = 1.0) -> Tensor:
    out = torch.full((len(ids), width + 3), 55.0)
    call("ft_op_unpack_rows", isa, ctypes.byref(w.struct), c_void_p(ids.data_ptr()), len(ids), width, c_float(scale),
         c_void_p(out.data_ptr()), c_int64(out.stride(0)))  # fmt: skip
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


def linear(isa: int, w: Packed, x: Rows, outputs: int, after: After, splits: list[int] | None = None) -> tuple[Tensor, list[Best]]:
    """(result, best of each row). splits: panels at which the work is cut into calls; each row's best starts empty."""
    rows, columns = x.struct.rows, outputs // 2 if after.gated else outputs
    out = torch.full((rows, columns + 5), 55.0)
    best = (Best * max(rows, 1))(*[Best(-float("inf"), 0.0, 0, 0) for _ in range(rows)])
    residual = after.residual
    epilogue = Epilogue(
        address(residual), 0 if residual is None else residual.stride(0), after.scale, after.softcap, FUNCTIONS[after.function],
        after.gated, outputs, address(out), out.stride(0), address(after.out_rows), ctypes.addressof(best),
    )  # fmt: skip
    panels = w.struct.outputs // 16
    cuts = [0, *(splits or []), panels]
    for first, end in zip(cuts, cuts[1:], strict=False):
        call("ft_op_linear", isa, ctypes.byref(w.struct), ctypes.byref(x.struct), ctypes.byref(epilogue), first, end - first)
    assert (out[:, columns:] == 55).all()
    return out[:, :columns], list(best)[:rows]


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Up to tolerance times the largest expected magnitude."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---- elementwise


@each_isa
@pytest.mark.parametrize("width", [1, 15, 16, 63, 64, 65, 576, 1000])
def test_rms_norm(isa: int, width: int) -> None:
    x, weight, bias = torch.randn(3, width + 2), torch.randn(width), torch.randn(width)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        out = torch.full((3, width + 1), 55.0)
        call("ft_op_rms_norm", isa, c_void_p(x.data_ptr()), c_int64(width + 2), width, c_void_p(address(w)), c_void_p(address(b)),
             c_float(1e-5), c_void_p(out.data_ptr()), c_int64(width + 1), 3)  # fmt: skip
        expected = F.rms_norm(x[:, :width].double(), (width,), None if w is None else w.double(), 1e-5) + (0 if b is None else b.double())
        assert_near(out[:, :width], expected)
        assert (out[:, width] == 55).all()


@each_isa
@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_activations(isa: int, function: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, 100.0, float("nan")])])
    up, out, gated = torch.randn_like(x), torch.empty_like(x), torch.empty_like(x)
    call("ft_op_activate", isa, FUNCTIONS[function], c_void_p(x.data_ptr()), None, c_void_p(out.data_ptr()), len(x))
    call("ft_op_activate", isa, FUNCTIONS[function], c_void_p(x.data_ptr()), c_void_p(up.data_ptr()), c_void_p(gated.data_ptr()), len(x))
    assert out[-1].isnan()
    torch.testing.assert_close(out[:-1].double(), activations[function](x[:-1].double()), rtol=3e-6, atol=3e-6)
    assert_same_bits(gated, out * up)


@each_isa
def test_softcap(isa: int) -> None:
    x, out = torch.cat([torch.linspace(-300, 300, 1001), torch.linspace(-1e-3, 1e-3, 100)]), torch.empty(1101)
    call("ft_op_softcap", isa, c_float(30.0), c_void_p(x.data_ptr()), c_void_p(out.data_ptr()), len(x))
    torch.testing.assert_close(out.double(), 30 * torch.tanh(x.double() / 30), rtol=2e-6, atol=0)


def best_of(isa: int, x: Tensor) -> tuple[Best, float]:
    best, probability = Best(), c_float()
    call("ft_op_best_of_row", isa, c_void_p(x.data_ptr()), len(x), ctypes.byref(best), ctypes.byref(probability))
    return best, probability.value


@each_isa
def test_best_of_row(isa: int) -> None:
    for count in (1, 2, 16, 17, 100, 5000):
        x = torch.randn(count)
        best, probability = best_of(isa, x)
        assert (best.index, best.value, best.poison) == (int(x.argmax()), float(x.max()), 0)
        assert probability == pytest.approx(float(x.double().softmax(0).max()), rel=1e-5)


@each_isa
def test_best_is_the_lowest_of_equals_and_sees_what_is_not_finite(isa: int) -> None:
    x = torch.zeros(100)
    x[[70, 33, 99]] = 1.0
    assert best_of(isa, x)[0].index == 33
    assert best_of(isa, -torch.zeros(20) * torch.arange(20))[0].index == 0  # 0 and -0 are equal
    for broken in (float("nan"), float("inf"), -float("inf")):
        x[50] = broken
        best, _ = best_of(isa, x)
        assert best.poison != best.poison
        assert best.index == (50 if broken == float("inf") else 33)


# ---- prepare


@each_isa
@each_precision
@pytest.mark.parametrize("width", [1, 17, 64, 100, 576])
def test_prepare(isa: int, precision: Precision, width: int) -> None:
    inputs = width if precision == Precision.FLOAT32 else -(-width // 64) * 64
    whole = torch.randn(5, width + 3) * torch.tensor([1.0, 100.0, 1e-4, 1.0, 0.0])[:, None]
    x, weight, bias = whole[:, :width], torch.randn(width), torch.randn(width)
    for norm in ((None, None, None), (weight, bias, 1e-6), (weight, None, 1e-6), (None, None, 1e-6)):
        expected = x.double()
        size = expected.abs()  # of what is added up: a bias may leave little of it
        if norm[2] is not None:
            expected = F.rms_norm(expected, (width,), None if norm[0] is None else norm[0].double(), norm[2])
            added = torch.zeros(width).double() if norm[1] is None else norm[1].double()
            size = expected.abs() + added.abs()
            expected = expected + added
        rows = prepare(isa, x, precision, inputs, *norm)
        assert (rows.data[:, width:] == 0).all()
        largest = expected.abs().amax(1, keepdim=True)
        half_steps = {Precision.FLOAT32: 2e-6 * size.amax(1, keepdim=True), Precision.BFLOAT16: expected.abs() / 256 + 1e-6 * size + 1e-12}
        allowed = half_steps.get(precision, largest / 127 * 0.50001)
        assert ((rows.values[:, :width] - expected).abs() <= allowed + 1e-30).all()
        if precision in INTEGERS:
            assert rows.data.abs().max() == 127 and rows.data.min() >= -127
        if precision == Precision.INT4:
            assert torch.equal(rows.group_sums, rows.data.view(5, -1, 32).sum(2, dtype=torch.int32))


@each_isa
@each_precision
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", [False, True])
def test_a_row_that_is_not_finite_poisons_its_results_only(isa: int, precision: Precision, broken: float, norm: bool) -> None:
    x = torch.randn(3, 128)
    clean = prepare(isa, x, precision, 128, eps=1e-6 if norm else None)
    x[1, 77] = broken
    rows = prepare(isa, x, precision, 128, eps=1e-6 if norm else None)
    out, best = linear(isa, packed([torch.randn(40, 128)], precision), rows, 40, After())
    assert torch.equal(rows.data[[0, 2]], clean.data[[0, 2]])
    assert out[[0, 2]].isfinite().all() and not out[1].isfinite().any()
    assert [b.poison == b.poison for b in best] == [True, False, True]


# ---- packing


@each_isa
def test_floats_are_packed_as_they_are(isa: int) -> None:
    for width, outputs in ((1, 1), (33, 17), (64, 50), (100, 16)):
        matrix, ids = torch.randn(outputs, width + 1)[:, :width], torch.randperm(outputs)
        rounded = matrix.bfloat16()
        assert_same_bits(unpacked(isa, packed([matrix], Precision.FLOAT32), ids, width), matrix[ids])
        assert_same_bits(unpacked(isa, packed([rounded], Precision.FLOAT32), ids, width), rounded[ids].float())
        for source in (matrix, rounded):
            assert_same_bits(unpacked(isa, packed([source], Precision.BFLOAT16), ids, width, 0.1), rounded[ids].float() * 0.1)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_within_half_a_step(isa: int, dtype: torch.dtype) -> None:
    matrix = (torch.randn(50, 200) * torch.logspace(-6, 3, 50)[:, None]).to(dtype)
    matrix[7] = 0
    w = packed([matrix], Precision.INT8)
    steps = matrix.float().abs().amax(1, keepdim=True) / 127
    assert ((unpacked(isa, w, torch.arange(50), 200) - matrix.float()).abs() <= steps * 0.50001).all()
    integers = (unpacked(isa, w, torch.arange(50), 200) / w.scales[:50, None].clamp(min=1e-30)).round()
    assert torch.equal(w.column_sums[:50], integers.sum(1).int())
    assert (w.column_sums[50:] == 0).all() and (w.scales[50:] == 0).all()


@each_isa
def test_int4_weights_are_about_as_near_as_with_a_float_scale_for_each_group(isa: int) -> None:
    """Q4_0's rule: the scale of 32 weights takes the largest of them to -8."""
    for matrix, factor in ((torch.randn(48, 512), 1.1), (torch.randn(48, 512) ** 3, 1.25), (torch.randn(48, 512).sign(), 1.1)):
        groups = matrix.view(48, -1, 32)
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
        plain = ((groups / largest).round().clamp(-8, 7) * largest - groups).square().mean()
        ours = (unpacked(isa, packed([matrix], Precision.INT4), torch.arange(48), 512) - matrix).square().mean()
        assert ours < factor * plain


def test_int4_of_rows_of_one_group_of_zeros_and_of_great_range() -> None:
    matrix = torch.randn(6, 64)
    matrix[0] = 0
    matrix[1, :32] = 0
    matrix[2, :32] *= 1e-3
    matrix[3, 5] = float("inf")
    matrix[4] *= 1e-36
    back = unpacked(ISAS[0], packed([matrix], Precision.INT4), torch.arange(6), 64)
    assert (back[0] == 0).all() and (back[1, :32] == 0).all() and not back[3].isfinite().any()
    assert (back[4] == 0).all()
    assert (back[[1, 2, 5]] - matrix[[1, 2, 5]]).abs().max() < 0.6


@each_isa
@each_precision
def test_matrices_are_packed_side_by_side(isa: int, precision: Precision) -> None:
    for sizes in ((48, 16, 16), (16, 32, 5)):
        matrices = [torch.randn(size, 96) for size in sizes]
        together, alone = packed(matrices, precision), [packed([matrix], precision) for matrix in matrices]
        expected = torch.cat([unpacked(isa, w, torch.arange(size), 96) for w, size in zip(alone, sizes, strict=True)])
        assert_same_bits(unpacked(isa, together, torch.arange(sum(sizes)), 96), expected)


# ---- linear


def random_shape(rng: random.Random) -> tuple[int, int, int]:
    """(rows, width, outputs)"""
    rows = rng.choice([0, 1, 2, 3, 4, 5, 8, 13, 16, 17, 33, 64])
    return rows, rng.choice([1, 31, 32, 64, 65, 200, 576]), rng.choice([1, 15, 16, 33, 96, 112, 300])


def reference(x: Tensor, w: Tensor, bias: Tensor | None, after: After) -> Tensor:
    y = x @ w.T + (0 if bias is None else bias.double()) + (0 if after.residual is None else after.residual.double())
    y = y * after.scale
    y = after.softcap * torch.tanh(y / after.softcap) if after.softcap else y
    if after.gated:
        gate, up = y.chunk(2, 1)
        return activations[after.function](gate) * up
    return activations[after.function](y)


@each_isa
@each_precision
@pytest.mark.parametrize("seed", range(12))
def test_linear(isa: int, precision: Precision, seed: int) -> None:
    """Against the product of the very numbers that are multiplied: only the order of additions differs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, width, outputs = random_shape(rng)
    gated = rng.random() < 0.3
    outputs *= 2 if gated else 1
    bias = torch.randn(outputs) if rng.random() < 0.5 else None
    residual = torch.randn(rows, outputs + 2)[:, :outputs] if rng.random() < 0.5 and not gated else None
    after = After(residual, rng.choice([1.0, 0.3]), rng.choice([0.0, 5.0]), rng.choice(list(FUNCTIONS)), gated)
    w = packed(list(torch.randn(outputs, width).chunk(2 if gated else 1)), precision, bias, gated)
    x = prepare(isa, torch.randn(rows, width), precision, w.struct.inputs)

    out, best = linear(isa, w, x, outputs, after)

    order = torch.arange(outputs)
    if gated:  # where gate and up lie: panels of 16 in turn
        half = torch.arange(outputs // 2)
        order = torch.cat([half // 16 * 32 + half % 16, half // 16 * 32 + 16 + half % 16])
    weights = unpacked(isa, w, order, width).double()
    if rows:
        sizes = x.values[:, :width].abs() @ weights.abs().T  # rounding errors are relative to the terms
        expected = reference(x.values[:, :width], weights, bias, after)
        scale = max(float(sizes.max()), 1.0) * (float(expected.abs().max()) if gated else 1.0)
        assert (out.double() - expected).abs().max() <= 2e-6 * scale
    assert [b.index for b in best] == out.argmax(1).tolist() if rows else not best
    assert [b.value for b in best] == out.amax(1).tolist() if rows else True


@each_isa
@each_precision
@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_on_neither_rows_nor_panels(isa: int, precision: Precision, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, outputs, gated = rng.choice([96, 200, 576, 1500]), rng.choice([96, 176, 384]), seed % 2 == 1
    step = 2 if gated else 1
    w = packed(list(torch.randn(outputs, width).chunk(step)), precision, torch.randn(outputs), gated)
    whole = torch.randn(64, width)
    after = After(function="silu", gated=gated)
    expected, _ = linear(isa, w, prepare(isa, whole, precision, w.struct.inputs, eps=1e-6), outputs, after)
    for _ in range(6):
        rows = sorted(rng.sample(range(64), rng.choice([1, 1, 2, 3, 5, 8, 16, 17, 31, 63])))
        splits = sorted(rng.sample(range(step, outputs // 16, step), rng.randrange(4)))
        out, _ = linear(isa, w, prepare(isa, whole[rows], precision, w.struct.inputs, eps=1e-6), outputs, after, splits)
        assert_same_bits(out, expected[rows])


@pytest.mark.skipif(len(ISAS) < 2, reason="one instruction set runs here")
@pytest.mark.parametrize("precision", INTEGERS, ids=lambda p: p.name.lower())
@pytest.mark.parametrize("width", [64, 320, 1536])
def test_integer_products_are_the_same_on_all_instruction_sets(precision: Precision, width: int) -> None:
    w = packed([torch.randn(112, width)], precision)
    x = torch.randn(21, width)
    first, *others = [linear(isa, w, prepare(isa, x, precision, w.struct.inputs), 112, After())[0] for isa in ISAS]
    for other in others:
        assert_same_bits(other, first)


@each_isa
@pytest.mark.parametrize("precision", INTEGERS, ids=lambda p: p.name.lower())
def test_extreme_integers_do_not_overflow(isa: int, precision: Precision) -> None:
    x = torch.ones(3, 4096) * torch.tensor([1.0, -1.0, 1.0])[:, None]
    for sign in (1.0, -1.0):
        w = packed([torch.full((16, 4096), sign)], precision)
        out, _ = linear(isa, w, prepare(isa, x, precision, 4096), 16, After())
        torch.testing.assert_close(out, x[:, :1].expand(3, 16) * sign * 4096, rtol=1e-5, atol=0)


@each_isa
@each_precision
def test_rows_are_stored_where_they_are_wanted(isa: int, precision: Precision) -> None:
    w = packed([torch.randn(40, 64)], precision)
    x = prepare(isa, torch.randn(4, 64), precision, 64)
    plain, best = linear(isa, w, x, 40, After())
    moved, best_moved = linear(isa, w, x, 40, After(out_rows=torch.tensor([2, -1, 0, 1], dtype=torch.int32)))
    assert_same_bits(moved[:3], plain[[2, 3, 0]])
    assert (moved[3] == 55).all()
    assert [b.index for b in best] == [b.index for b in best_moved]


@each_isa
@each_precision
def test_many_rows(isa: int, precision: Precision) -> None:
    """More than one tile of sums holds."""
    w = packed([torch.randn(33, 40)], precision)
    x = torch.randn(1500, 40)
    whole, _ = linear(isa, w, prepare(isa, x, precision, w.struct.inputs), 33, After())
    for rows in (slice(0, 3), slice(679, 684), slice(1490, 1500)):
        alone, _ = linear(isa, w, prepare(isa, x[rows], precision, w.struct.inputs), 33, After())
        assert_same_bits(whole[rows], alone)


@each_isa
def test_best_of_columns_in_any_order(isa: int) -> None:
    """Chunks of columns may be done in any order: still the lowest of equals, and columns that do not exist never compete."""
    w = packed([-torch.ones(75, 32)], Precision.FLOAT32)
    x = prepare(isa, torch.ones(2, 32), Precision.FLOAT32, 32)
    best = (Best * 2)(*[Best(-float("inf"), 0.0, 0, 0)] * 2)
    epilogue = Epilogue(None, 0, 1.0, 0.0, 0, False, 75, None, 0, None, ctypes.addressof(best))
    for first in (3, 0, 4, 1, 2):
        call("ft_op_linear", isa, ctypes.byref(w.struct), ctypes.byref(x.struct), ctypes.byref(epilogue), first, 1)
    assert [(b.index, b.value, b.poison) for b in best] == [(0, -32.0, 0.0)] * 2


def test_the_structs_are_laid_out_as_the_library_expects() -> None:
    assert (ctypes.sizeof(PackedLinear), ctypes.sizeof(PreparedRows), ctypes.sizeof(Best)) == (48, 40, 16)
