"""Each op of each instruction set that runs here, against torch, over odd shapes: single rows, and rows made ready for a product."""

import ctypes
from ctypes import c_float, c_int64, c_void_p

import pytest
import torch
import torch.nn.functional as F
from native_ops import (
    CODES,
    INTEGERS,
    After,
    Best,
    PreparedRows,
    activations,
    address,
    assert_near,
    assert_same_bits,
    call,
    each_isa,
    each_precision,
    linear,
    packed,
    prepare,
)
from torch import Tensor

from foretoken.kernels import native_library
from foretoken.kernels.activations import gated as gated_reference
from foretoken.kernels.native_abi import FUNCTIONS, PackedLinear, Precision
from foretoken.kernels.ops import CLAMPED

# ---- elementwise


def normed(x: Tensor, weight: Tensor | None, eps: float, centred: bool) -> Tensor:
    return (F.layer_norm if centred else F.rms_norm)(x, x.shape[-1:], None if weight is None else weight.double(), eps=eps)


@each_isa
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [1, 15, 16, 63, 64, 65, 576, 1000])
def test_norms(isa: int, width: int, centred: bool) -> None:
    x, weight, bias = torch.randn(3, width + 2), torch.randn(width), torch.randn(width)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        out = torch.full((3, width + 1), 55.0)
        call("ft_op_rms_norm", isa, c_void_p(x.data_ptr()), c_int64(width + 2), width, centred, c_void_p(address(w)), c_void_p(address(b)),
             c_float(1e-5), c_void_p(out.data_ptr()), c_int64(width + 1), 3)
        expected = normed(x[:, :width].double(), w, 1e-5, centred) + (0 if b is None else b.double())
        assert_near(out[:, :width], expected)
        assert (out[:, width] == 55).all()


@each_isa
@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_activations(isa: int, function: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, 100.0, float("nan")])])
    up, out, gated = 5 * torch.randn_like(x), torch.empty_like(x), torch.empty_like(x)
    call("ft_op_activate", isa, FUNCTIONS[function], c_void_p(x.data_ptr()), None, c_void_p(out.data_ptr()), len(x))
    call("ft_op_activate", isa, FUNCTIONS[function], c_void_p(x.data_ptr()), c_void_p(up.data_ptr()), c_void_p(gated.data_ptr()), len(x))
    assert gated[-1].isnan()
    if function == CLAMPED:  # which only gates
        torch.testing.assert_close(gated[:-1].double(), gated_reference(function, x.double(), up.double())[:-1], rtol=3e-6, atol=3e-6)
        return
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
    affine, plain = (weight, bias, 1e-6), (None, None, 1e-6)
    for norm in ((None, None, None, False), (*affine, False), (weight, None, 1e-6, False), (*plain, False), (*affine, True)):
        expected = x.double()
        size = expected.abs()  # of what is added up: a bias may leave little of it
        if norm[2] is not None:
            expected = normed(expected, norm[0], norm[2], norm[3])
            added = torch.zeros(width).double() if norm[1] is None else norm[1].double()
            size = expected.abs() + added.abs()
            expected = expected + added
        rows = prepare(isa, x, precision, inputs, *norm)
        assert (rows.data[:, width:] == 0).all()
        largest = expected.abs().amax(1, keepdim=True)
        half_steps = {Precision.FLOAT32: 2e-6 * size.amax(1, keepdim=True), Precision.BFLOAT16: expected.abs() / 256 + 1e-6 * size + 1e-12}
        allowed = half_steps.get(precision, largest / 127 * 0.5005)  # a norm's own rounding may decide which way a middle goes
        assert ((rows.values[:, :width] - expected).abs() <= allowed + 1e-30).all()
        if precision in INTEGERS:
            assert rows.data.abs().max() == 127 and rows.data.min() >= -127
            of = 32 if precision in CODES else inputs
            if precision == Precision.INT8 and native_library.ISAS[isa] == "amx":  # its products need no sums
                assert (rows.input_sums == 55).all()
            else:
                assert torch.equal(rows.input_sums, rows.data.view(5, -1, of).sum(2, dtype=torch.int32))


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


def test_the_structs_are_laid_out_as_the_library_expects() -> None:
    assert (ctypes.sizeof(PackedLinear), ctypes.sizeof(PreparedRows), ctypes.sizeof(Best)) == (40, 40, 16)
