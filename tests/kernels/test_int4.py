import ctypes

import pytest
import torch
from native_only import native_only
from small_networks import made_difficult

from foretoken.kernels.int4 import GROUP, Int4Matrix
from foretoken.kernels.native_abi import Precision
from foretoken.kernels.native_library import load
from foretoken.kernels.native_weights import WeightMemory, pack


def random_weight(outputs: int, depth: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, depth, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("outputs", "depth"), [(1, 1), (3, 31), (5, 32), (2, 128), (9, 200), (33, 576)])
def test_weights_are_near_those_they_were_made_of(outputs: int, depth: int) -> None:
    """Q4_0's rule, whose scales are floats, is hardly better: the scale of 32 weights takes the largest of them to -8."""
    weight = random_weight(outputs, depth)
    found = Int4Matrix.of(weight.bfloat16()).weight()
    groups = torch.nn.functional.pad(weight.bfloat16().float(), (0, -depth % GROUP)).view(outputs, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    plain = ((groups / largest).round().clamp(-8, 7) * largest).nan_to_num().view(outputs, -1)[:, :depth]
    assert found.shape == weight.shape
    assert (found - weight).square().mean() < 1.3 * (plain - weight).square().mean() + 1e-6


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_native_executors(dtype: torch.dtype) -> None:
    """So what the format costs in quality, measured there, holds here."""
    weight = (random_weight(48, 640) * torch.logspace(-3, 2, 48)[:, None]).to(dtype)
    library = load()
    assert library is not None
    packed = pack(library, WeightMemory(), [weight], None, Precision.INT4, gated=False)
    expected, ids = torch.empty(48, 640), torch.arange(48)
    library.ft_op_unpack_rows(
        0, ctypes.byref(packed.struct), ctypes.c_void_p(ids.data_ptr()), 48, 640, ctypes.c_float(1.0),
        ctypes.c_void_p(expected.data_ptr()), ctypes.c_int64(640),
    )
    found = Int4Matrix.of(weight).weight()
    equal = (found - expected).abs() <= 1e-5 * expected.abs().amax(1, keepdim=True)
    assert equal.float().mean() > 0.995, "sums of errors are rounded differently, so a few groups may choose another scale"


def test_zeros_great_ranges_and_damage() -> None:
    weight = made_difficult(random_weight(6, 64))
    found = Int4Matrix.of(weight).weight()
    assert (found[[0, 4]] == 0).all() and (found[1, :32] == 0).all() and not found[3].isfinite().any()
    assert (found[[1, 2, 5]] - weight[[1, 2, 5]]).abs().max() < 0.6


def test_large_weights_are_made_slice_by_slice_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(37, 256)
    whole = Int4Matrix.of(weight)
    monkeypatch.setattr("foretoken.kernels.int4._SLICE", 5 * 256)
    sliced = Int4Matrix.of(weight.t().contiguous().t())
    assert torch.equal(whole.words, sliced.words) and torch.equal(whole.group_scales, sliced.group_scales)
    assert torch.equal(whole.scales, sliced.scales)
