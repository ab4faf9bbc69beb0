"""What is measured of whole engines on a GPU: their steps, what guesses bring, many streams at once. Case by case, as in gpu_cases.py."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from ...proposers.config import EagleConfig, SpeculativeConfig, SyntheticConfig
from ...proposers.learned import LearnedProposer
from ..overlapped_runner import OverlappedRunner
from .gpu_bench import OFF, Bench, Effort, Figure, filled, release
from .gpu_clock import device_seconds, synchronize, wall_seconds
from .gpu_model import MadeEngine, write_eagle3
from .gpu_profile import profiled
from .network import BLOCK, ragged_batch

_KERNELS_TOLD = 8
"""Of a step: those that take most of it."""


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
