"""What is measured of the GPU path, case by case; each case is alone: what goes wrong in one harms no other.

A case makes what it needs, and its figures stand beside the bar that they are held to. Knows no report. Here are those of the device,
of kernels and of networks alone; those of whole engines stand in gpu_engine_cases.py.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from ...kernels.graphs import GraphExecutor
from ...kernels.layout import KVTensors, RaggedBatch, RowStates, StateRoom
from .gpu_bench import Bench, Figure, filled
from .gpu_clock import device_seconds, graph_seconds, wall_seconds
from .gpu_engine_cases import decode, eagle, guessing, profile, short, synthetic, throughput, transformers_throughput
from .gpu_model import kernels_for, made_network
from .network import BLOCK, ragged_batch


def machine(bench: Bench) -> Iterable[Figure]:
    """The ceilings that everything else is held to."""
    yield Figure("machine", "copy bandwidth", bench.ceilings.copied / 1e12, "TB/s", note="device to device, bytes read and written")
    yield Figure("machine", "bfloat16 product", bench.ceilings.multiplied / 1e12, "TFLOP/s")
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        yield Figure("machine", "memory", total / 1e9, "GB", note=f"{free / 1e9:.1f} GB free at the start")


def verification(bench: Bench) -> Iterable[Figure]:
    """The network alone: passes of one row and some tokens against one token, and one token against the bandwidth."""
    effort = bench.effort
    executor = bench.executor()
    executor.try_early_launches()
    kv = filled(executor, (effort.context + max(effort.verified)) // BLOCK + 2)
    seconds: dict[int, float] = {}
    for tokens in effort.verified:
        made = ragged_batch(executor.vocab_size, 1, tokens, effort.context)
        seconds[tokens] = device_seconds(lambda made=made: executor.start(made, kv), bench.device, effort.runs)
    floor = (executor.weight_bytes + effort.context * executor.kv_block_bytes(1)) / bench.ceilings.copied
    yield Figure("network", f"one token, context {effort.context}", seconds[1] * 1e3, "ms", note=f"floor {floor * 1e3:.2f} ms")
    yield Figure("network", "share of the bandwidth", floor / seconds[1], "", note="weights and cache read, against the copy bandwidth")
    one = ragged_batch(executor.vocab_size, 1, 1, effort.context)
    alone = statistics.median(wall_seconds(lambda: executor.start(one, kv), bench.device) for _ in range(effort.runs))
    yield Figure("network", "one token, waited for", alone * 1e3, "ms", note="by the host's clock, from the batch to the end")
    bars = {8: 1.08, 16: 1.15}
    for tokens in effort.verified[1:]:
        yield Figure("verification", f"{tokens} tokens against 1", seconds[tokens] / seconds[1], "x", bars.get(tokens), "less")
    if (launches := executor.launches) is not None:
        yield Figure("network", "kernels that come early", launches.usual_ms / launches.early_ms, "x", note=launches.describe())
    report = executor.captured
    yield Figure("graphs", "captured", report.num_graphs, "graphs", note=report.describe())


def recurrent(bench: Bench) -> Iterable[Figure]:
    """A network with recurrent layers alone: guesses behind one token when all those of the pass before were accepted, and a prompt."""
    effort = bench.effort
    executor = made_network(effort.recurrent, bench.device, effort.dtype)
    executor.try_early_launches()
    most = max(effort.verified)
    kv = filled(executor, (effort.context + most) // BLOCK + 2, StateRoom(2, most))
    seconds: dict[int, float] = {}
    for tokens in effort.verified:
        batch = replace(ragged_batch(executor.vocab_size, 1, tokens, effort.context), states=_second_state(1, (1 << tokens - 1) - 1))
        seconds[tokens] = device_seconds(lambda batch=batch: executor.start(batch, kv), bench.device, effort.runs)
    num_bytes = executor.weight_bytes + effort.context * executor.kv_block_bytes(1) + 2 * executor.state_slot_bytes(0)
    floor = num_bytes / bench.ceilings.copied
    yield Figure("recurrent", f"one token, context {effort.context}", seconds[1] * 1e3, "ms", note=f"floor {floor * 1e3:.2f} ms")
    yield Figure("recurrent", "share of the bandwidth", floor / seconds[1], "", note="weights, cache and states")
    for tokens in effort.verified[1:]:
        yield Figure("recurrent", f"{tokens} tokens against 1", seconds[tokens] / seconds[1], "x", better="less")
    prompt = replace(ragged_batch(executor.vocab_size, 1, effort.context, 0), states=_second_state(effort.context, 0))
    prompt = replace(prompt, logits_indices=prompt.logits_indices[-1:])
    took = device_seconds(lambda: executor.start(prompt, kv), bench.device, effort.runs)
    yield Figure("recurrent", f"a prompt of {effort.context}", took * 1e3, "ms")


def _second_state(num_known: int, accepted: int) -> RowStates:
    """Of one row, that goes on from the first slot."""

    def one(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype)

    return RowStates(one(0), one(1), one(accepted, torch.int64), one(num_known), one(0), one(-1))


def attention(bench: Bench) -> Iterable[Figure]:
    """The kernel alone: many rows of a long context, one token each."""
    effort, device = bench.effort, bench.device
    if kernels_for(device) is None:
        yield Figure("attention", "left out", 0.0, "", note="there is no Triton here")
        return
    from ...kernels.torch_executor import on_device
    from ...kernels.triton.attention import ragged_paged_attention

    config = effort.size.config
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    rows, context = effort.attention_rows, effort.attention_context
    tables = -(-context // BLOCK)
    k, v = (torch.randn(rows * tables * BLOCK, kv_heads, dim, device=device).to(effort.dtype) for _ in range(2))
    q = torch.randn(rows, config["num_attention_heads"], dim, device=device).to(effort.dtype)
    moved = on_device(_rows_of_one(rows, context, tables), device)

    def attend() -> object:
        return ragged_paged_attention(q, k, v, moved, dim**-0.5)

    seconds = graph_seconds(attend, device, effort.runs)
    rate = rows * context * kv_heads * dim * 2 * k.element_size() / seconds
    yield Figure("attention", f"{rows} rows of {context}", seconds * 1e6, "us", note=f"{rate / 1e12:.2f} TB/s")
    yield Figure("attention", "share of the bandwidth", rate / bench.ceilings.copied, "", 0.8)


def latent(bench: Bench) -> Iterable[Figure]:
    """Attention over latent keys with values in them, and the products of its heads: 16 of them, of DeepSeek-V2-Lite's sizes."""
    effort, device = bench.effort, bench.device
    if kernels_for(device) is None:
        yield Figure("latent", "left out", 0.0, "", note="there is no Triton here")
        return
    from ...kernels.torch_executor import on_device
    from ...kernels.triton.attention import ragged_paged_attention
    from ...kernels.triton.block_linear import block_linear

    heads, rank, turned, plain = 16, 512, 64, 128
    for rows in (1, effort.attention_rows):
        context = effort.attention_context
        tables = -(-context // BLOCK)
        keys = torch.randn(rows * tables * BLOCK, 1, turned + rank, device=device).to(effort.dtype)
        q = torch.randn(rows, heads, turned + rank, device=device).to(effort.dtype)
        moved = on_device(_rows_of_one(rows, context, tables), device)
        attend = partial(ragged_paged_attention, q, keys, keys[..., turned:], moved, (turned + plain) ** -0.5)
        seconds = graph_seconds(attend, device, effort.runs)
        share = rows * context * (turned + rank) * keys.element_size() / seconds / bench.ceilings.copied
        yield Figure("latent", f"{rows} rows of {context}", seconds * 1e6, "us", note=f"{share:.2f} of the bandwidth")
    weight = torch.randn(heads * rank, plain, device=device).to(effort.dtype)
    for rows in (1, 8, 64, 512):
        x = torch.randn(rows, heads * plain, device=device).to(effort.dtype)
        blocks = weight.view(heads, rank, plain).mT
        ours = graph_seconds(partial(block_linear, x, weight, heads), device, effort.runs)
        theirs = graph_seconds(lambda x=x, blocks=blocks: x.view(-1, heads, plain).transpose(0, 1) @ blocks, device, effort.runs)
        yield Figure("latent", f"products of heads, {rows} rows", ours * 1e6, "us", note=f"cuBLAS {theirs * 1e6:.1f} us")


def _rows_of_one(rows: int, context: int, blocks: int) -> RaggedBatch:
    """One token at the end of each row's context; blocks in a random order, as after some time of serving."""
    order = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(0)).int().view(rows, blocks)
    last = torch.full((rows,), context - 1)
    slots = order[torch.arange(rows), last // BLOCK].long() * BLOCK + last % BLOCK
    return RaggedBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=last,
        slot_mapping=slots,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.full((rows,), context, dtype=torch.int32),
        block_tables=order,
        num_causal=torch.ones(rows, dtype=torch.int32),
        tree_mask=torch.zeros(rows, dtype=torch.int64),
        logits_indices=torch.arange(rows),
        full_logits=torch.zeros(0, dtype=torch.int64),
        block_size=BLOCK,
    )


def invariant(bench: Bench) -> Iterable[Figure]:
    """What batch-invariant mode costs, and whether it is what it says: the same bits alone, among others and with guesses behind."""
    effort = bench.effort
    executor = bench.executor(is_batch_invariant=True) if kernels_for(bench.device) is not None else bench.executor()
    executor.try_early_launches()
    rows = min(effort.profiled_rows, 16)
    blocks = -(-(effort.context + 8) // BLOCK)
    kv = filled(executor, rows * blocks + 1)
    together = ragged_batch(executor.vocab_size, rows, 1, effort.context)
    alone = _first_row(together)
    chain = replace(ragged_batch(executor.vocab_size, 1, 4, effort.context), block_tables=alone.block_tables)
    chain.token_ids[0] = alone.token_ids[0]
    first = [_scores(executor, made, kv) for made in (alone, together, chain)]
    same = all(torch.equal(first[0], scores) for scores in first[1:])
    seconds = device_seconds(lambda: executor.start(alone, kv), bench.device, effort.runs)
    yield Figure("invariant", "same bits in any batch", float(same), "", 1.0 if executor.is_batch_invariant else None)
    yield Figure("invariant", f"one token, context {effort.context}", seconds * 1e3, "ms")


def _first_row(made: RaggedBatch) -> RaggedBatch:
    """The first row of rows of one token."""
    return replace(
        made,
        token_ids=made.token_ids[:1],
        positions=made.positions[:1],
        slot_mapping=made.slot_mapping[:1],
        query_start_loc=made.query_start_loc[:2],
        seq_lens=made.seq_lens[:1],
        block_tables=made.block_tables[:1],
        num_causal=made.num_causal[:1],
        tree_mask=made.tree_mask[:1],
        logits_indices=made.logits_indices[:1],
    )


def _scores(executor: GraphExecutor, made: RaggedBatch, kv: KVTensors) -> torch.Tensor:
    """The first token's logits."""
    logits = executor.run(replace(made, full_logits=torch.zeros(1, dtype=torch.int64)), kv).logits
    assert logits is not None
    return logits[0].clone()


def fp8(bench: Bench) -> Iterable[Figure]:
    """Few tokens with 8-bit weights."""
    return _narrow(bench, "fp8")


def int4(bench: Bench) -> Iterable[Figure]:
    """Few tokens with 4-bit weights, and as many as a prompt has."""
    return _narrow(bench, "int4")


def _narrow(bench: Bench, quantization: Literal["fp8", "int4"]) -> Iterable[Figure]:
    if kernels_for(bench.device) is None:
        yield Figure(quantization, "left out", 0.0, "", note="there is no Triton here")
        return
    effort = bench.effort
    executor = bench.executor(quantization=quantization)
    executor.try_early_launches()
    counts = (1, 8, 32, 64, 256, 512) if bench.device.type == "cuda" else (1, 8)
    kv = filled(executor, (effort.context + max(counts)) // BLOCK + 2)
    for tokens in counts:
        made = ragged_batch(executor.vocab_size, 1, tokens, effort.context)
        seconds = device_seconds(lambda made=made: executor.start(made, kv), bench.device, effort.runs)
        yield Figure(quantization, f"{tokens} tokens, context {effort.context}", seconds * 1e3, "ms")
        if tokens == 1:
            floor = (executor.weight_bytes + effort.context * executor.kv_block_bytes(1)) / bench.ceilings.copied
            yield Figure(quantization, "share of the bandwidth", floor / seconds, "", note=f"floor {floor * 1e3:.2f} ms")


def memory(bench: Bench) -> Iterable[Figure]:
    """The memory plan of a server with this model."""
    if bench.device.type != "cuda":
        yield Figure("memory", "left out", 0.0, "", note="a plan for GPUs")
        return
    from .. import gpu_memory
    from ..config import SchedulerConfig

    executor = bench.executor()
    networks, scheduler = [executor], SchedulerConfig()
    graphs = gpu_memory.graph_bytes(networks, scheduler)
    plan = gpu_memory.measure(bench.device, 0.9, lambda: gpu_memory.run_largest_step(networks, scheduler, BLOCK), graphs)
    yield Figure("memory", "left for the cache", plan.for_cache / 1e9, "GB", note=plan.describe())
    yield Figure("memory", "tokens in it", plan.for_cache / executor.kv_block_bytes(1), "tokens")


CASES: dict[str, Callable[[Bench], Iterable[Figure]]] = {
    "machine": machine,
    "verification": verification,
    "recurrent": recurrent,
    "decode": decode,
    "attention": attention,
    "latent": latent,
    "profile": profile,
    "synthetic": synthetic,
    "eagle": eagle,
    "guessing": guessing,
    "short": short,
    "throughput": throughput,
    "transformers": transformers_throughput,
    "fp8": fp8,
    "int4": int4,
    "invariant": invariant,
    "memory": memory,
}
"""In the order of what matters most: time may run out."""
