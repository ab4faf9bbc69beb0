"""What is measured of the GPU path, case by case; each case is alone: what goes wrong in one harms no other.

A case makes what it needs, and its figures stand beside the bar that they are held to. Knows no report.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from ...kernels.graphs import GraphExecutor
from ...kernels.layout import KVTensors, RaggedBatch, RowStates, StateRoom
from ...proposers.config import EagleConfig, SpeculativeConfig, SyntheticConfig
from ...proposers.learned import LearnedProposer
from ..overlapped_runner import OverlappedRunner
from .gpu_bench import OFF, Bench, Effort, Figure, filled, release
from .gpu_clock import device_seconds, graph_seconds, synchronize, wall_seconds
from .gpu_model import MadeEngine, kernels_for, made_network, write_eagle3
from .gpu_profile import profiled
from .network import BLOCK, ragged_batch

_KERNELS_TOLD = 8
"""Of a step: those that take most of it."""


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


def decode(bench: Bench) -> Iterable[Figure]:
    """One stream through the engine, from the request to its tokens."""
    effort = bench.effort
    with bench.engine(OFF, 1, effort.context + effort.decoded + 16) as engine:
        engine.add(effort.context - effort.decoded // 2, effort.decoded)
        engine.until_decoding()
        engine.step()
        seconds: list[float] = []
        tokens = 0
        while engine.core.has_work:
            started = time.perf_counter()
            tokens += engine.step()
            seconds.append(time.perf_counter() - started)
        yield from _profile_of_one(bench, engine, "decode")
        executor = engine.core.runner.executor
        floor = (executor.weight_bytes + effort.context * executor.kv_block_bytes(1)) / bench.ceilings.copied
        each = sum(seconds) / max(tokens, 1)
        yield Figure("decode", f"one stream, context {effort.context}", 1 / each, "tokens/s", note=f"{each * 1e3:.2f} ms a token")
        yield Figure("decode", "share of the bandwidth, end to end", floor / each, "", 0.85)
        yield Figure("decode", "slowest step", max(seconds) * 1e3, "ms")


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


def profile(bench: Bench) -> Iterable[Figure]:
    """How busy the device is while many rows decode, and what the host does meanwhile."""
    return _profiled(bench, OFF, "profile")


def guessing(bench: Bench) -> Iterable[Figure]:
    """The same while an EAGLE-3-shaped head guesses for all of them, k = 5. Its weights are random: what it guesses is refused."""
    folder, rows = write_eagle3(bench.effort.size, bench.folder / "eagle3", bench.device, bench.effort.dtype), bench.effort.profiled_rows
    config = SpeculativeConfig((EagleConfig(str(folder), "eagle3", 5),), adaptive=False, disable_by_batch_size=rows)
    return _profiled(bench, config, "guessing")


def _profiled(bench: Bench, config: SpeculativeConfig, group: str) -> Iterator[Figure]:
    effort = bench.effort
    rows, steps = effort.profiled_rows, 20 if bench.device.type == "cuda" else 2
    with bench.engine(config, rows, effort.profiled_context + 4 * steps + 48) as engine:
        for _ in range(rows):
            engine.add(effort.profiled_context, 4 * steps + 32)
        engine.until_decoding()
        for _ in range(4):
            engine.step()
        synchronize(bench.device)
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        each = (time.perf_counter() - started) / steps
        yield Figure(group, f"a step of {rows} rows", each * 1e3, "ms", note=f"{rows / each:,.0f} rows a second")
        yield from _busy_figures(bench, engine, steps, group, 0.95)
        yield from _ahead_figures(engine, group)


def _ahead_figures(engine: MadeEngine, group: str) -> Iterator[Figure]:
    """How many steps were begun before the host had seen the ones before them."""
    runner = engine.core.runner
    if isinstance(runner, OverlappedRunner) and runner.num_ahead:
        yield Figure(group, "steps begun ahead and used", runner.num_used / runner.num_ahead, "", note=f"of {runner.num_ahead}")


def _profile_of_one(bench: Bench, engine: MadeEngine, group: str, method: str = "auto") -> Iterator[Figure]:
    """How busy the device is while one more stream decodes."""
    steps = 20 if bench.device.type == "cuda" else 2
    engine.add(bench.effort.context - bench.effort.decoded // 2, 5 * (steps + 4), method)
    engine.until_decoding()
    for _ in range(3):
        engine.step()
    yield from _busy_figures(bench, engine, steps, group)


def _busy_figures(bench: Bench, engine: MadeEngine, steps: int, group: str, bar: float | None = None) -> Iterator[Figure]:
    """How busy the device is in the engine's next steps."""
    found = profiled(engine.step, steps, bench.device)
    if found is not None:
        note = f"{len(found.spans) / steps:.0f} kernels and copies a step"
        yield Figure(group, "device busy", found.busy_us / found.whole_us, "", bar, note=note)
        yield Figure(group, "device time of a step", found.busy_us / steps / 1e3, "ms")
        for name, took_us, count in found.longest(_KERNELS_TOLD):
            each = f"{count / steps:.0f} a step, {took_us / count:.1f} us each"
            yield Figure(group, f"kernel `{_short(name)}`", took_us / steps / 1e3, "ms a step", note=each)
    elif bench.device.type == "cuda":
        yield Figure(group, "device busy: left out", 0.0, "", note="the profiler saw nothing of the device")


def _short(name: str) -> str:
    """Templates' arguments of a kernel's name are longer than a page is wide."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:60]


def synthetic(bench: Bench) -> Iterable[Figure]:
    """Plain decoding against guesses of which 80 % pass, k = 4, one stream."""
    effort = bench.effort
    config = SpeculativeConfig((SyntheticConfig(4),), adaptive=False, synthetic_rates=(0.8,))
    rates: dict[str, list[float]] = {"off": [], "synthetic": []}
    with bench.engine(config, 1, effort.context + 2 * effort.decoded + 64) as engine:
        for turn in range(3 if bench.device.type == "cuda" else 1):
            for method in rates if turn % 2 else reversed(rates):
                engine.add(effort.context - effort.decoded // 2, effort.decoded, method)
                engine.until_decoding()
                engine.step()
                started, tokens = time.perf_counter(), engine.finish()
                rates[method].append(tokens / (time.perf_counter() - started))
        stats = engine.core.stats()
        yield from _ahead_figures(engine, "synthetic")
        yield from _profile_of_one(bench, engine, "synthetic", "synthetic")
    plain, guessed = (statistics.median(rates[name]) for name in ("off", "synthetic"))
    accepted = 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)
    yield Figure("synthetic", "against plain decoding", guessed / plain, "x", 2.8, note=f"{accepted:.2f} tokens a step")
    yield Figure("synthetic", "one stream", guessed, "tokens/s", note=f"plain {plain:,.0f}")


def eagle(bench: Bench) -> Iterable[Figure]:
    """What an EAGLE-3-shaped head with k = 5 takes of a step. Its weights are random: what it guesses is refused."""
    effort = bench.effort
    folder = write_eagle3(effort.size, bench.folder / "eagle3", bench.device, effort.dtype)
    config = SpeculativeConfig((EagleConfig(str(folder), "eagle3", 5),), adaptive=False)
    with bench.engine(config, 1, effort.context + 2 * effort.decoded + 64) as engine:
        engine.add(BLOCK, 16)  # near its end a request has room for fewer guesses: each number of them is prepared for here
        engine.finish()
        engine.add(effort.context - effort.decoded // 2, effort.decoded)
        engine.until_decoding()
        for _ in range(3):
            engine.step()
        core = engine.core
        before = core.num_steps, sum(core.proposers.draft_seconds), core.target_seconds
        started = time.perf_counter()
        engine.finish()
        whole = time.perf_counter() - started
        steps = core.num_steps - before[0]
        draft, target = sum(core.proposers.draft_seconds) - before[1], core.target_seconds - before[2]
        health = core.proposers.stats()[0]
        early = next(p.early for p in core.proposers.proposers if isinstance(p, LearnedProposer))
        yield from _profile_of_one(bench, engine, "eagle")
        yield from _ahead_figures(engine, "eagle")
    yield Figure("eagle", "draft time against the target's step", draft / target, "", 0.12, "less", f"{health.num_failures} failures")
    yield Figure("eagle", "draft time of a step, k = 5", draft / max(steps, 1) * 1e3, "ms")
    whole_ms = whole / max(steps, 1) * 1e3
    yield Figure("eagle", "target time of a step", target / max(steps, 1) * 1e3, "ms", note=f"whole step {whole_ms:.2f} ms")
    outside = (whole - draft - target) / max(steps, 1) * 1e3
    yield Figure("eagle", "time of a step outside both", outside, "ms", note="the device makes the next guesses meanwhile")
    if early is not None and early.num_begun:
        yield Figure("eagle", "chains begun early and used", early.num_used / early.num_begun, "", note=f"of {early.num_begun}")


def short(bench: Bench) -> Iterable[Figure]:
    """Steps of a network whose passes are short: what the host does between them tells."""
    effort = replace(bench.effort, size=bench.effort.short)
    context, alone = effort.profiled_context, Bench(bench.device, effort, bench.folder / "short")
    executor, one = alone.executor(), ragged_batch(effort.size.config["vocab_size"], 1, 1, context)
    executor.try_early_launches()
    kv = filled(executor, context // BLOCK + 2)
    passed = device_seconds(lambda: executor.start(one, kv), bench.device, effort.runs)
    yield Figure("short", "a pass of one token", passed * 1e3, "ms", note=effort.size.title)
    eagle3 = EagleConfig(str(write_eagle3(effort.size, alone.folder / "eagle3", bench.device, effort.dtype)), "eagle3", 5)
    guessing = {
        "synthetic, k = 4": SpeculativeConfig((SyntheticConfig(4),), adaptive=False, synthetic_rates=(0.8,)),
        "EAGLE-3, k = 5": SpeculativeConfig((eagle3,), adaptive=False),
    }
    cases = [("plain", OFF, rows) for rows in (1, 16, effort.profiled_rows)] + [(name, config, 1) for name, config in guessing.items()]
    for name, config, rows in cases:
        with alone.engine(config, rows, context + 8 * effort.decoded + 64) as engine:
            for _ in range(rows):
                engine.add(context, effort.decoded)
            engine.until_decoding()
            engine.step()
            before, started = engine.core.num_steps, time.perf_counter()
            engine.finish()
            each = (time.perf_counter() - started) / max(engine.core.num_steps - before, 1)
            yield Figure("short", f"a step of {rows} rows, {name}", each * 1e3, "ms")
        release(bench.device)


def throughput(bench: Bench) -> Iterable[Figure]:
    """Many streams at once, from prompts to the last token: ours."""
    effort = bench.effort
    tokens_per_row = effort.prompt_tokens + effort.new_tokens
    with bench.engine(OFF, effort.streams, tokens_per_row + 16, step_tokens=8192) as engine:
        warm = [engine.add(effort.prompt_tokens, 4) for _ in range(effort.streams)]
        engine.finish()
        assert all(request.num_output_tokens == 4 for request in warm)

        def run(new_tokens: int) -> int:
            for _ in range(effort.streams):
                engine.add(effort.prompt_tokens, new_tokens)
            return engine.finish()

        yield _measured(bench, run, _few(effort), "ours")
        yield _measured(bench, run, effort.new_tokens, "ours")


def transformers_throughput(bench: Bench) -> Iterable[Figure]:
    """The same requests through transformers' continuous batching, with all its defaults (on a CPU it needs to be told sizes).

    Whole requests only if they end in time by what few of their tokens take.
    """
    import transformers

    effort, device = bench.effort, bench.device
    config = transformers.LlamaConfig(**effort.size.config, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=effort.dtype, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(8, config.vocab_size, (effort.streams, effort.prompt_tokens), generator=generator).tolist()
    settings = transformers.GenerationConfig(max_new_tokens=effort.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    sizes = {}
    if device.type == "cpu":
        sizes["continuous_batching_config"] = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)

    def run(new_tokens: int) -> int:
        outputs = model.generate_batch(inputs=prompts, generation_config=settings, max_new_tokens=new_tokens, **sizes).values()
        # What goes wrong there is printed, and the rest returned.
        assert len(outputs) == effort.streams and all(output.error is None for output in outputs), "requests were left unanswered"
        return sum(len(output.generated_tokens) for output in outputs)

    run(4)
    few = _measured(bench, run, _few(effort), "transformers")
    yield few
    if effort.streams * effort.new_tokens / few.value < _PATIENCE_S:
        yield _measured(bench, run, effort.new_tokens, "transformers")
    release(device)


_PATIENCE_S = 45.0
"""For whole requests through transformers."""


def _few(effort: Effort) -> int:
    return max(effort.new_tokens // 8, 1)


def _measured(bench: Bench, run: Callable[[int], int], new_tokens: int, whose: str) -> Figure:
    """run: so many tokens for every stream; how many that were in all."""
    tokens = 0

    def work() -> None:
        nonlocal tokens
        tokens = run(new_tokens)

    seconds = wall_seconds(work, bench.device)
    name = f"{whose}, {new_tokens} tokens each"
    note = f"{bench.effort.streams} streams, {tokens} tokens in {seconds:.1f} s"
    return Figure("throughput", name, tokens / seconds, "tokens/s", note=note)


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
