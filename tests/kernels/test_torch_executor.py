import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from decoding import ragged
from elsewhere import THERE, Elsewhere, Remote, here
from recurrent_batches import Row, recurrent_batch
from small_networks import small_network
from torch import Tensor

from foretoken.kernels.layout import FINAL, ForwardOutput, KVLayerSpec, RaggedBatch, RowStates
from foretoken.kernels.ops import (
    Activation,
    ArgMax,
    Attention,
    Concat,
    Embed,
    GatherRows,
    Linear,
    LocalConv,
    Op,
    RMSNorm,
    Scale,
    Softcap,
    TopK,
)
from foretoken.kernels.program import Program, RopeTable
from foretoken.kernels.row_maxima import max_of_rows
from foretoken.kernels.torch_executor import TorchExecutor, on_device
from foretoken.kernels.upload import ALIGNMENT

IDS = [3, 1, 4, 1, 5]
ONE_HEAD = KVLayerSpec(num_kv_heads=1, k_dim=6, v_dim=6)
BEST = ArgMax(("logits",), ("argmax", "top"))
WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, (name, shape) in enumerate(
    {"embed": (12, 8), "norm": (8,), "bias": (8,), "wide": (12, 8), "k_norm": (6,), "q_norm": (6,), "qkv": (24, 8)}.items()
)}
X = WEIGHTS["embed"][IDS]


def run(*ops: Op, x: str = "y", spec: KVLayerSpec = ONE_HEAD, rope: RopeTable | None = None, **inputs: Tensor) -> Tensor:
    """Buffer x after embed -> "x" and the given ops, for the five tokens of one row."""
    output, _ = run_all(*ops, x=x, spec=spec, rope=rope, **inputs)
    return output.hidden[0]


def run_all(*ops: Op, x: str, spec: KVLayerSpec, rope: RopeTable | None, **inputs: Tensor) -> tuple[ForwardOutput, tuple[Tensor, Tensor]]:
    head = (GatherRows(("x",), ("rows",)), Linear(("rows",), ("logits",), ("wide",)), BEST)
    shapes = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    widths = {name: value.shape[1] for name, value in inputs.items()}
    ropes: Mapping[str, RopeTable] = {"rope": rope} if rope else {}
    program = Program((Embed((), ("x",), "embed"), *ops, *head), shapes, (spec,), ropes, 12, 16, (x,), "x", "logits", BEST, widths)
    executor = TorchExecutor(program, WEIGHTS, torch.float32)
    kv = executor.allocate(2, 4)
    batch = ragged([(IDS, 0, [1, 0])])
    output = executor.run(batch, kv, (0,), inputs)
    return output, kv.gather(0, batch.slot_mapping)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Embed((), ("y",), "embed", scale=2.5), X * 2.5),
        (RMSNorm(("x",), ("y",), "norm", 0.1), rms(X, WEIGHTS["norm"], 0.1)),
        (RMSNorm(("x",), ("y",), "norm", 0.1, "bias", add_one=True), rms(X, 1 + WEIGHTS["norm"], 0.1) + WEIGHTS["bias"]),
        (RMSNorm(("x",), ("y",), "", 0.1), rms(X, torch.ones(8), 0.1)),
        (RMSNorm(("x",), ("y",), "norm", 0.1, "bias", centred=True), F.layer_norm(X, (8,), WEIGHTS["norm"], WEIGHTS["bias"], 0.1)),
        (Linear(("x",), ("y",), ("wide", "qkv"), ("", "")), X @ torch.cat((WEIGHTS["wide"], WEIGHTS["qkv"])).T),
        (Scale(("x",), ("y",), 0.25), X / 4),
        (Softcap(("x",), ("y",), 0.5), 0.5 * torch.tanh(X / 0.5)),
        (Concat(("x", "x"), ("y",)), torch.cat((X, X), 1)),
        (Activation(("x",), ("y",), "relu", gated=False), F.relu(X)),
        (Activation(("x",), ("y",), "relu2", gated=False), F.relu(X) ** 2),
        (Activation(("x",), ("y",), "gelu", gated=True), F.gelu(X[:, :4]) * X[:, 4:]),
        (Activation(("x", "x"), ("y",), "gelu_tanh", gated=True), F.gelu(X, approximate="tanh") * X),
        (TopK(("x",), ("columns", "y"), k=3), X.sort(-1, descending=True).values[:, :3]),
        (TopK(("x",), ("y", "values"), k=2), X.argsort(-1, descending=True)[:, :2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ops_are_their_formulas(op: Op, expected: Tensor) -> None:
    torch.testing.assert_close(run(op), expected)


def rotate_by_pairs(x: Tensor, inv_freq: list[float], factor: float) -> Tensor:
    """Rotary embedding of x [T, dim], one plane at a time."""
    out, n = x.clone(), len(inv_freq)
    for position in range(len(x)):
        for i, freq in enumerate(inv_freq):
            cos, sin = factor * math.cos(position * freq), factor * math.sin(position * freq)
            a, b = x[position, i], x[position, i + n]
            out[position, i], out[position, i + n] = a * cos - b * sin, b * cos + a * sin
    return out


def test_attention_with_all_its_features() -> None:
    """Norms of q and k, partial rotary with a factor, softcap and window, two query heads on one kv head of other width."""
    inv_freq, factor = [1.0, 0.3], 1.2
    spec = KVLayerSpec(1, k_dim=6, v_dim=6, window=3)
    attention = Attention(("qkv",), ("y",), 0, 2, 0.7, "rope", softcap=2.0, q_norm="q_norm", k_norm="k_norm", norm_eps=0.1)
    found = run(Linear(("x",), ("qkv",), ("qkv",)), attention, spec=spec, rope=RopeTable(tuple(inv_freq), factor))

    q1, q2, k, v = (X @ WEIGHTS["qkv"].T).split(6, 1)
    k = rms(k, WEIGHTS["k_norm"], 0.1)
    k = rotate_by_pairs(k, inv_freq, factor)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    outside = (distance < 0) | (distance >= 3)
    heads: list[Tensor] = []
    for q in (q1, q2):
        q = rotate_by_pairs(rms(q, WEIGHTS["q_norm"], 0.1), inv_freq, factor)
        scores = 2.0 * torch.tanh(q @ k.T * 0.7 / 2.0)
        heads.append(scores.masked_fill(outside, -math.inf).softmax(-1) @ v)
    torch.testing.assert_close(found, torch.cat(heads, 1), rtol=1e-5, atol=1e-5)


def test_a_local_conv_mixes_the_new_tokens_of_a_row() -> None:
    """Two rows, kernels [2 sides, 3 taps, 4 groups]; what is in the cache is no token of it."""
    generator = torch.Generator().manual_seed(1)
    base, kernels, x = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8), (7, 24), (7, 8)))
    program = Program((LocalConv(("x", "kernels"), ("y",), "base", 1),), {"base": (2, 3, 8)}, (), {}, 0, 16, (), "y", "", None,
                      {"x": 8, "kernels": 24})
    executor = TorchExecutor(program, {"base": base}, torch.float32)
    batch = dataclasses.replace(ragged([(IDS, 3, [1, 0]), ([7, 8], 0, [2])]), logits_indices=torch.zeros(0, dtype=torch.int64))
    found = executor.run(batch, executor.allocate(4, 4), (FINAL,), {"x": x, "kernels": kernels}).hidden[FINAL]
    expected = torch.zeros(7, 8)
    for start, end in ((0, 5), (5, 7)):
        for i in range(start, end):
            for tap in range(3):
                for c in range(8):
                    if i - tap >= start:
                        expected[i, c] += (base[1, tap, c] + kernels[i, 12 + 4 * tap + c // 2]) * x[i - tap, c]
    torch.testing.assert_close(found, expected)


def test_a_row_that_is_no_number_leaves_the_next_one_alone() -> None:
    program = Program((LocalConv(("x", "kernels"), ("y",), "base", 0),), {"base": (1, 2, 8)}, (), {}, 0, 16, (), "y", "", None,
                      {"x": 8, "kernels": 8})
    executor = TorchExecutor(program, {"base": torch.ones(1, 2, 8)}, torch.float32)
    batch = dataclasses.replace(ragged([(IDS, 3, [1, 0]), ([7, 8], 0, [2])]), logits_indices=torch.zeros(0, dtype=torch.int64))
    x = torch.ones(7, 8)
    x[:5] = torch.nan
    found = executor.run(batch, executor.allocate(4, 4), (FINAL,), {"x": x, "kernels": torch.zeros(7, 8)}).hidden[FINAL]
    assert found[:5].isnan().all() and torch.equal(found[5:], torch.tensor([1.0, 2.0])[:, None].expand(2, 8))


def test_only_the_wanted_logits_come_back() -> None:
    output, _ = run_all(x="x", spec=ONE_HEAD, rope=None)
    expected = X @ WEIGHTS["wide"].T
    assert output.logits is not None
    torch.testing.assert_close(output.logits, expected)
    assert output.argmax.dtype == torch.int64 and torch.equal(output.argmax, expected.argmax(-1))


def test_a_pass_need_neither_look_for_the_best_nor_pick_rows_out() -> None:
    network, batch = small_network(), ragged([(IDS[:1], 0, [1]), (IDS[1:2], 0, [0])])
    kv = network.allocate(4, 4)
    expected = network.compute(batch, kv, (1,))
    found = network.compute(dataclasses.replace(batch, scores_every_token=True), kv, (1,), None, False)
    assert len(found.argmax) == len(found.top) == 0 and len(expected.argmax) == 2
    assert found.logits is not None and expected.logits is not None
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.hidden[1], expected.hidden[1])


@pytest.mark.parametrize("shape", [(1, 100), (5, 12), (3, 8192), (40, 640), (0, 8192), (20, 1001)])
def test_max_of_rows_takes_the_first_of_equals(shape: tuple[int, int]) -> None:
    scores = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0)).float()  # full of ties
    values, columns = max_of_rows(scores)
    assert torch.equal(values, scores.amax(-1))
    assert columns.tolist() == [row.index(max(row)) for row in scores.tolist()]


def test_max_of_rows_shows_rows_that_are_not_finite() -> None:
    scores = torch.zeros(3, 8192)
    scores[1, 5000], scores[2, 7] = math.nan, math.inf
    assert [math.isfinite(value) for value in max_of_rows(scores)[0].tolist()] == [True, False, False]


@pytest.mark.parametrize("chain_slots", [None, torch.tensor([[4, 5], [1, 6]], dtype=torch.int32)], ids=["none", "some"])
def test_states_go_to_a_device_with_their_batch(chain_slots: Tensor | None) -> None:
    batch = recurrent_batch([Row([1, 2, 3], 0, 1, -1, 0), Row([4], 5, 1, 1, 2, 0b101, None, (4, 3))])
    assert batch.states is not None
    batch = dataclasses.replace(batch, states=dataclasses.replace(batch.states, chain_slots=chain_slots))
    with Elsewhere() as device:
        moved = on_device(batch, THERE).states
        assert len(device.to_device) == 1 and not device.to_host  # one copy for all
    assert moved is not None and batch.states is not None
    for part in dataclasses.fields(RowStates):
        value, expected = getattr(moved, part.name), getattr(batch.states, part.name)
        if expected is None:
            assert value is None
            continue
        assert isinstance(value, Remote) and value.storage_offset() * value.element_size() % ALIGNMENT == 0
        assert here(value).dtype == expected.dtype and torch.equal(here(value), expected)


@pytest.mark.parametrize("first_places", [None, torch.tensor([1, 0], dtype=torch.int32)], ids=["none", "some"])
def test_a_batch_goes_to_a_device_in_one_copy(first_places: Tensor | None) -> None:
    """One of wide numbers and one of narrow ones. Each tensor is aligned, whatever the sizes: kernels are not compiled anew."""
    batch = dataclasses.replace(ragged([(IDS, 3, [1, 0]), ([7, 8], 0, [2])]), first_places=first_places)
    with Elsewhere() as device:
        moved = on_device(batch, THERE)
        assert len(device.to_device) == 1 and not device.to_host  # one copy for all
    for part in dataclasses.fields(RaggedBatch):
        value, expected = getattr(moved, part.name), getattr(batch, part.name)
        if isinstance(expected, Tensor):
            assert isinstance(value, Remote) and value.storage_offset() * value.element_size() % ALIGNMENT == 0
            assert here(value).dtype == expected.dtype and torch.equal(here(value), expected)
        else:
            assert value == expected
    assert on_device(batch, torch.device("cpu")) is batch
