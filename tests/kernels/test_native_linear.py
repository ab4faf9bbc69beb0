"""The native executor's product of rows and packed weights, against torch; and that a row's bits depend on that row alone."""

import ctypes
import random
from dataclasses import replace

import pytest
import torch
from native_ops import (
    INTEGERS,
    ISAS,
    After,
    Best,
    Epilogue,
    activations,
    assert_same_bits,
    call,
    each_isa,
    each_precision,
    linear,
    packed,
    panel_order,
    prepare,
    unpacked,
)
from torch import Tensor

from foretoken.kernels.activations import gated as gated_reference
from foretoken.kernels.native_abi import FUNCTIONS, Precision


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
        return gated_reference(after.function, gate, up)
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
    residual = torch.randn(rows, outputs + 2)[:, :outputs] if rng.random() < 0.5 else None
    after = After(residual, rng.choice([1.0, 0.3]), rng.choice([0.0, 5.0]), rng.choice(list(FUNCTIONS if gated else activations)), gated)
    w = packed(list(torch.randn(outputs, width).chunk(2 if gated else 1)), precision, bias, gated)
    x = prepare(isa, torch.randn(rows, width), precision, w.struct.inputs)

    order, given = torch.arange(outputs), residual
    if gated:
        order = panel_order(outputs)
        if residual is not None:
            given = torch.full((rows, w.struct.outputs), 55.0)
            given[:, order] = residual

    out, best = linear(isa, w, x, outputs, replace(after, residual=given))

    weights = unpacked(isa, w, order, width).double()
    if rows:
        sizes = x.values[:, :width].abs() @ weights.abs().T  # rounding errors are relative to the terms
        expected = reference(x.values[:, :width], weights, bias, after)
        scale = max(float(sizes.max()), 1.0) * (float(expected.abs().max()) if gated or after.function == "relu2" else 1.0)
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
    x = prepare(isa, torch.randn(4, 64), precision, w.struct.inputs)
    plain, best = linear(isa, w, x, 40, After())
    moved, best_moved = linear(isa, w, x, 40, After(out_rows=torch.tensor([2, -1, 0, 1], dtype=torch.int32)))
    assert_same_bits(moved[:3], plain[[2, 3, 0]])
    assert (moved[3] == 55).all()
    assert [b.index for b in best] == [b.index for b in best_moved]


@each_isa
@each_precision
@pytest.mark.parametrize("gated", [False, True])
def test_narrow_results_are_the_others_rounded(isa: int, precision: Precision, gated: bool) -> None:
    w = packed(list(torch.randn(80, 96).chunk(1 + gated)), precision, None, gated)
    x = prepare(isa, torch.randn(19, 96), precision, w.struct.inputs)
    after = After(function="silu" if gated else "", gated=gated)
    wide, _ = linear(isa, w, x, 80, after)
    narrow, _ = linear(isa, w, x, 80, replace(after, narrow=True), splits=[2])
    assert torch.equal(narrow, wide.bfloat16())


@each_isa
@each_precision
@pytest.mark.parametrize("after", [After(), After(function="silu", gated=True), After(softcap=2.0)], ids=["plain", "gated", "capped"])
def test_a_residual_of_nothing_changes_no_bit(isa: int, precision: Precision, after: After) -> None:
    w = packed(list(torch.randn(96, 96).chunk(1 + after.gated)), precision, None, after.gated)
    x = prepare(isa, torch.randn(19, 96), precision, w.struct.inputs)
    for nothing in (0.0, -0.0):
        with_residual, _ = linear(isa, w, x, 96, replace(after, residual=torch.full((19, 96), nothing)))
        assert_same_bits(with_residual, linear(isa, w, x, 96, after)[0])


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
    epilogue = Epilogue(None, 0, 1.0, 0.0, 0, False, 75, None, None, 0, None, ctypes.addressof(best))
    for first in (3, 0, 4, 1, 2):
        call("ft_op_linear", isa, ctypes.byref(w.struct), ctypes.byref(x.struct), ctypes.byref(epilogue), first, 1)
    assert [(b.index, b.value, b.poison) for b in best] == [(0, -32.0, 0.0)] * 2
