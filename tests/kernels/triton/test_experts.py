from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.activations import gated
from foretoken.kernels.execution import Quantization
from foretoken.kernels.expert_routes import routes
from foretoken.kernels.expert_weights import ExpertWeights
from foretoken.kernels.ops import CLAMPED, Experts
from foretoken.kernels.triton import experts as module
from foretoken.kernels.triton.expert_routes import Router, group, route
from foretoken.kernels.triton.experts import experts


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"is_sigmoid": True, "scale": 2.5},
    "groups": {"is_sigmoid": True, "num_groups": 4, "top_groups": 3, "scale": 0.5},
}


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("count", "top"), [(5, 2), (8, 6), (60, 4), (1, 1)])
def test_rows_have_the_experts_with_the_greatest_scores(count: int, top: int, name: str, is_corrected: bool, renormalise: bool):
    if name == "groups" and count % 4:
        pytest.skip("no even groups")
    # Some are equal. Groups are not that have other ones, as sigmoid(x) + sigmoid(-x) = 1 would make them: rounding would decide.
    logits = (3 * normal(7, count)).round() + 0.3
    correction, scales = (0.3 * normal(count, seed=1), None) if is_corrected else (None, normal(count, seed=2))
    router = Router(top, renormalise, correction=correction, scales=scales, **ROUTERS[name])
    names = ("",) * count
    op = Experts(
        ("x", "r"), ("y",), names, names, names, "silu", top, renormalise, score="sigmoid" if router.is_sigmoid else "softmax",
        num_groups=router.num_groups, top_groups=router.top_groups, scale=router.scale,
    )
    chosen, weights = route(logits, router)
    expected, shares = routes(op, logits, correction, scales)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("spoiler", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_experts_and_no_weights(spoiler: float, name: str, renormalise: bool):
    logits = normal(2, 8)
    logits[0, 4] = spoiler
    chosen, weights = route(logits, Router(3, renormalise, **ROUTERS[name]))
    assert len(set(chosen[0].tolist()) & set(range(8))) == 3
    assert weights[0].isnan().all() and weights[1].isfinite().all()


@pytest.mark.parametrize("rows", [1, 40, 700])
def test_visits_lie_by_experts_and_in_tiles(rows: int):
    experts, top, tile_rows = 11, 2, 16
    chosen = torch.stack([torch.randperm(experts - 1, generator=torch.Generator().manual_seed(row))[:top] for row in range(rows)]).int()
    visits = group(chosen.to(DEVICE), experts, tile_rows)  # nobody has the last one
    expected = torch.sort(chosen.flatten(), stable=True)
    assert torch.equal(visits.order.cpu().long(), expected.indices)
    found = visits.tiles[: int(visits.num_tiles)].tolist()
    counts = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    assert found == [[e, begin, ends[e]] for e in range(experts) for begin in range(ends[e] - counts[e], ends[e], tile_rows)]
    assert len(found) <= visits.most_tiles


def reference(x: Tensor, logits: Tensor, inner: ExpertWeights, outer: ExpertWeights, top: int, renormalise: bool) -> Tensor:
    function = CLAMPED if inner.bias is not None else "silu"
    chances, order = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = chances[:, :top], order[:, :top]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    rows: list[Tensor] = []
    for row, numbers, shares in zip(x.float(), chosen.tolist(), weights, strict=True):
        total = torch.zeros(outer.outputs, device=x.device)
        for number, share in zip(numbers, shares, strict=True):
            gate, up = (inner.weight(number) @ row + (0 if inner.bias is None else inner.bias[number])).chunk(2)
            total += share * (outer.weight(number) @ gated(function, gate, up) + (0 if outer.bias is None else outer.bias[number]))
        rows.append(total)
    return torch.stack(rows)


def stacked(count: int, outputs: int, depth: int, dtype: torch.dtype, quantization: Quantization | None, seed: int) -> ExpertWeights:
    whole = (normal(count, outputs, depth, seed=seed) / depth**0.5).to(dtype)
    return ExpertWeights.of(count, lambda expert: whole[expert], quantization)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "depth", "width"), [(1, 64, 32), (3, 144, 40), (45, 64, 72), (90, 72, 32)])
def test_equals_the_reference(rows: int, depth: int, width: int, dtype: torch.dtype, quantization: Quantization | None):
    """Few rows and many; sizes that fill no tile; an expert of more rows than a tile."""
    count, top = 5, 2
    inner = stacked(count, 2 * width, depth, dtype, quantization, 1)
    outer = stacked(count, depth, width, dtype, quantization, 2)
    x, logits = normal(rows, depth, seed=3).to(dtype), normal(rows, count, seed=4).to(dtype)
    logits[:, 0] += 5  # all have it
    for renormalise in (False, True):
        if renormalise:
            inner, outer = (replace(some, bias=normal(count, some.outputs, seed=5).to(dtype)) for some in (inner, outer))
        function = CLAMPED if renormalise else "silu"
        found = experts(x, logits, inner, outer, function, Router(top, renormalise), is_fixed=False)
        expected = reference(x, logits, inner, outer, top, renormalise)
        error = (found.float() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_row_is_the_same_bits_in_any_batch(quantization: Quantization | None):
    count, top, depth, width = 6, 3, 96, 64
    inner = stacked(count, 2 * width, depth, torch.float32, quantization, 1)
    outer = stacked(count, depth, width, torch.float32, quantization, 2)
    x, logits = normal(70, depth, seed=3), normal(70, count, seed=4)
    whole = experts(x, logits, inner, outer, "silu", Router(top, True), is_fixed=True)
    for part in (slice(0, 1), slice(5, 16), slice(11, 70)):
        assert torch.equal(experts(x[part], logits[part], inner, outer, "silu", Router(top, True), is_fixed=True), whole[part])


def test_no_rows_and_every_function(monkeypatch: pytest.MonkeyPatch):
    inner, outer = stacked(2, 64, 32, torch.float32, None, 1), stacked(2, 32, 32, torch.float32, None, 2)
    assert experts(normal(0, 32), normal(0, 2), inner, outer, "silu", Router(1, False), is_fixed=False).shape == (0, 32)
    x, logits = normal(3, 32), normal(3, 2)
    results = [experts(x, logits, inner, outer, name, Router(1, False), is_fixed=False) for name in ("silu", "gelu", "gelu_tanh", "relu")]
    assert len({tuple(result.flatten().tolist()) for result in results}) == 4
    monkeypatch.setattr(module, "FEW_ROWS", 0)  # wide tiles for the same rows
    torch.testing.assert_close(experts(x, logits, inner, outer, "relu", Router(1, False), is_fixed=False), results[3], rtol=1e-5, atol=1e-6)
