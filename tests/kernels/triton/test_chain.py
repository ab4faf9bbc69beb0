"""What stands between the passes of a chain, made by the kernels, against the references."""

import math
from dataclasses import fields, replace

import pytest
import torch
from decoding import ragged
from paged_batches import assert_same_batch
from small_networks import random_weights, small_program
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels import device_chain
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.device_chain import Choosing, TorchChoices
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.ops import ArgMax, Attention, Concat, Embed, GatherRows, Linear
from foretoken.kernels.program import Program, RopeTable
from foretoken.kernels.torch_executor import Computed, TorchExecutor
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.triton import chain
from foretoken.kernels.triton_steps import TritonKernels

BLOCK_SIZE = 4


def on_device(batch: RaggedBatch) -> RaggedBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{name: value.to(DEVICE) for name, value in values.items() if isinstance(value, Tensor)})


def random_batch(seed: int, most_rows: int) -> tuple[RaggedBatch, Tensor]:
    """Chains behind some of the rows, and how many tokens each is to have."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows: list[tuple[list[int], int, list[int]]] = []
    width = number(9, 12) if seed % 4 else 2100  # more blocks than a program copies
    for _ in range(number(1, most_rows)):
        table = torch.randint(1000, (width,), generator=generator).tolist()
        rows.append(([1] * number(1, 6), number(0, 12), table))
    batch = ragged(rows, all_logits=False)
    some = sorted(torch.randperm(len(rows), generator=generator)[: number(1, len(rows) + 1)].tolist())
    indices = batch.logits_indices[some]
    if seed % 3 == 0:  # as in a static batch: rows without tokens, tokens of no row, and chains behind token 0 that nobody wants
        more = (0, number(1, 4))
        padded = {name: torch.nn.functional.pad(getattr(batch, name), more) for name in ("token_ids", "positions", "tree_mask")}
        lengths = {name: torch.nn.functional.pad(getattr(batch, name), more) for name in ("seq_lens", "num_causal")}
        starts = torch.cat([batch.query_start_loc, batch.query_start_loc[-1:].expand(more[1])])
        tables = torch.nn.functional.pad(batch.block_tables, (0, 0, *more))
        slots = torch.nn.functional.pad(batch.slot_mapping, more, value=-1)
        indices = torch.nn.functional.pad(indices, more)
        batch = replace(batch, **padded, **lengths, slot_mapping=slots, query_start_loc=starts, block_tables=tables)
    if seed % 2:
        batch = replace(batch, first_places=torch.arange(len(batch.seq_lens), dtype=torch.int32) % 3)
    counts = torch.randint(1, 7, (len(indices),), generator=generator)
    return replace(batch, logits_indices=indices, full_logits=indices[:0]), counts


@pytest.mark.parametrize("advance", [1, 0])
@pytest.mark.parametrize("steps", [2, 6, 40])
@pytest.mark.parametrize("seed", range(12))
def test_passes_are_laid_out_as_the_reference_does(seed: int, steps: int, advance: int) -> None:
    batch, counts = random_batch(seed, 70 if seed == 5 else 6)
    expected = device_chain.laid_out(batch, counts, steps, 20, advance)
    found = chain.follow_ups(on_device(batch), counts.to(DEVICE), steps, 20, advance)
    assert len(found) == len(expected) == steps - 1
    for one, other in zip(found, expected, strict=True):
        assert_same_batch(one, other)
        assert not any(value.data_ptr() % 16 for field in fields(one) if isinstance(value := getattr(one, field.name), Tensor))


def odd_scores(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Ties, zeros of both signs, and what is not finite."""
    scores = (3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    scores[1] = scores[1].round()  # many equals
    scores[2, width // 2 :] = math.nan
    scores[3] = -math.inf
    scores[4, -1] = math.inf
    scores[5] = -scores[5].abs() - 1
    scores[5, width // 3 :: 2] = -0.0
    scores[5, width // 3 + 1 :: 2] = 0.0
    scores[6, : width // 2] = -math.inf
    scores[7, 0] = -math.nan
    return scores


def choosing_of(kind: str, width: int) -> Choosing:
    some = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1))[:width].sort().values
    limits = {"cut": max(width * 2 // 3, 1), "wider": width + 8, "map cut": int(some[width // 2]) + 1}
    return Choosing.of(some if kind.startswith("map") else None, width, limits.get(kind))


def moved(choosing: Choosing) -> Choosing:
    return replace(choosing, **{n: v.to(DEVICE) for n in ("token_ids", "barred") if (v := getattr(choosing, n)) is not None})


@pytest.mark.parametrize("kind", ["all", "cut", "wider", "map", "map cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 97, 2048, 5000])
def test_choices_are_those_of_the_reference(width: int, dtype: torch.dtype, kind: str) -> None:
    choosing = choosing_of(kind, width)
    scores = odd_scores(9, width, dtype)
    reference, fused = TorchChoices(choosing), chain.BestChoices(moved(choosing), 9, 3, torch.device(DEVICE))
    for turn in range(3):
        logits = scores.roll(turn, 0)
        if turn == 2:  # a row of scores need not end where the next one begins
            logits = torch.cat([logits, logits], 1)[:, :width]
        top, columns = logits.max(-1)
        names = columns if choosing.token_ids is None else choosing.token_ids[columns]
        tokens = reference.add(Computed(names, top.float(), logits, {}))
        empty = torch.zeros(0)
        assert fused.add(Computed(empty.long(), empty, logits.to(DEVICE), {})).cpu().tolist() == tokens.tolist()
    for value, right in zip(fused.said(), reference.said(), strict=True):
        assert value.dtype == right.dtype and value.is_contiguous()
        torch.testing.assert_close(value.cpu(), right, rtol=1e-5, atol=1e-7, equal_nan=True)


def draft_head() -> Program:
    """Like an EAGLE head: what it makes of a token goes into the next one. Its columns are some of the tokens."""
    ops = (
        Embed((), ("e",), "embed"), Concat(("e", "feature"), ("both",)), Linear(("both",), ("x",), ("fc",)),
        Linear(("x",), ("qkv",), ("qkv",)), Attention(("qkv",), ("attended",), 0, 4, 0.3, "rope"),
        Linear(("attended", "x"), ("out",), ("o",)), GatherRows(("out",), ("rows",)), Linear(("rows",), ("logits",), ("head",)), BEST,
    )
    weights = {"embed": (97, 32), "fc": (32, 64), "qkv": (64, 32), "o": (32, 32), "head": (41, 32), "ids": (41,)}
    return Program(
        ops, weights, (KVLayerSpec(2, 8, 8),), {"rope": RopeTable((1.0, 0.3, 0.1, 0.03))}, 41, 64, ("feature", "out"), "out", "logits",
        BEST, {"feature": 32}, ("feature", 1), "ids",
    )


BEST = ArgMax(("logits",), ("argmax", "top"))
PROGRAMS = {"draft model": small_program(), "head": draft_head()}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_chain_between_whose_passes_kernels_stand_is_the_chain_by_steps(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(program)
    if program.token_map:
        weights["ids"] = torch.arange(41) * 2
    rows = [([5, 6, 7, 8, 9], 0, [0, 1, 2, 3]), ([10, 11], 0, [4, 5, 6, 7]), ([12, 13, 14], 0, [8, 9, 10, 11])]
    batch, counts = ragged(rows, all_logits=False), torch.tensor([4, 2])
    batch = replace(batch, logits_indices=batch.logits_indices[[0, 2]], full_logits=batch.full_logits[:0])
    inputs = {name: torch.randn(10, width) for name, width in program.inputs.items()}
    reference = TorchExecutor(program, weights, torch.float32, device="cpu")
    fused = GraphExecutor(TorchExecutor(program, weights, torch.float32, device=DEVICE, kernels=TritonKernels()))
    monkeypatch.setattr(device_chain, "follow_ups", chain.follow_ups)  # as on a GPU
    monkeypatch.setattr(device_chain, "_choices", lambda count, device, steps, how, draws: chain.BestChoices(how, count, steps, device))
    caches = reference.allocate(16, BLOCK_SIZE), fused.allocate(16, BLOCK_SIZE)
    for kv in caches:
        assert isinstance(kv, TorchKV)
        for cache in (*kv.k, *kv.v):
            cache.fill_(7.0)
    with torch.inference_mode():
        expected = run_chain_by_steps(reference, batch, caches[0], counts, None, inputs)
    found = fused.run_chain(batch, caches[1], counts, None, inputs)
    for row, count in enumerate(counts.tolist()):
        assert found.token_ids[row, :count].tolist() == expected.token_ids[row, :count].tolist()
        torch.testing.assert_close(found.confidence[row, :count], expected.confidence[row, :count], rtol=1e-4, atol=1e-5)
    for one, other in zip(*(kv.gather(0, torch.arange(16 * BLOCK_SIZE)) for kv in caches), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-4)  # nothing else is written
