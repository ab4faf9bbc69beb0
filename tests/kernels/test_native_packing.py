"""Weights as the native executor packs them: what comes back out of each precision, on each instruction set."""

import pytest
import torch
from native_ops import ISAS, assert_same_bits, each_isa, each_precision, packed, unpacked
from small_networks import made_difficult

from foretoken.kernels.native_abi import Precision


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
    assert (w.scales[50:] == 0).all()


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
    matrix = made_difficult(torch.randn(6, 64))
    back = unpacked(ISAS[0], packed([matrix], Precision.INT4), torch.arange(6), 64)
    assert (back[0] == 0).all() and (back[1, :32] == 0).all() and not back[3].isfinite().any()
    assert (back[4] == 0).all()
    assert (back[[1, 2, 5]] - matrix[[1, 2, 5]]).abs().max() < 0.6


@each_isa
def test_int2_weights_are_as_near_as_four_levels_allow(isa: int) -> None:
    """0.119 of the variance is what four even levels leave of normal numbers (Max 1960)."""
    for matrix, most in ((torch.randn(48, 512), 0.122), (torch.randn(48, 512) ** 3, 0.48), (torch.randn(48, 512).sign(), 1e-12)):
        error = (unpacked(isa, packed([matrix], Precision.INT2), torch.arange(48), 512) - matrix).square().mean()
        assert error < most * matrix.square().mean()


@each_isa
def test_int2_of_rows_of_zeros_of_groups_of_zeros_and_of_great_range(isa: int) -> None:
    matrix = torch.randn(6, 256)
    matrix[0] = 0
    matrix[1, 32:64] = 0
    matrix[2, 96:] *= 1e-3
    matrix[3, 5] = float("inf")
    matrix[4] *= 1e-36
    back = unpacked(isa, packed([matrix], Precision.INT2), torch.arange(6), 256)
    assert (back[0] == 0).all() and (back[1, 32:64] == 0).all() and (back[4] == 0).all()
    assert not back[3].isfinite().any()
    assert (back[[1, 2, 5]] - matrix[[1, 2, 5]]).square().mean() < 0.15 * matrix[[1, 2, 5]].square().mean()


@each_isa
@each_precision
def test_matrices_are_packed_side_by_side(isa: int, precision: Precision) -> None:
    for sizes in ((48, 16, 16), (16, 32, 5)):
        matrices = [torch.randn(size, 96) for size in sizes]
        together, alone = packed(matrices, precision), [packed([matrix], precision) for matrix in matrices]
        expected = torch.cat([unpacked(isa, w, torch.arange(size), 96) for w, size in zip(alone, sizes, strict=True)])
        assert_same_bits(unpacked(isa, together, torch.arange(sum(sizes)), 96), expected)
