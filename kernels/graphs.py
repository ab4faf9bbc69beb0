"""Whole passes, and whole chains, recorded once as CUDA graphs and replayed: one launch a step instead of hundreds.

Owns what is captured and when; a graph's memory is shared with all others of its executor. What no rung of the ladder holds
runs op by op. Knows no request; sizes and padding stand in static_batch.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .chain import run_chain_by_steps
from .device_chain import ChainDraws, ChainTensors, Choosing, chain
from .layout import ChainOutput, Draws, ForwardOutput, KVLayerSpec, KVTensors, RaggedBatch
from .started import Fetched, Started, to_host
from .static_batch import Ladder, Rung, StaticBatch
from .torch_executor import Computed, TorchExecutor, on_device

MOST_CHAIN_ROWS = 256
"""Chains of more rows than this run op by op: by then launches hide behind the work."""

T = TypeVar("T")


@dataclass(frozen=True)
class CaptureReport:
    """What capturing took so far."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def describe(self) -> str:
        """`25 graphs captured in 8.1 s, 310 MB`."""
        return f"{self.num_graphs} graphs captured in {self.seconds:.1f} s, {self.num_bytes / 1e6:.0f} MB"


class GraphExecutor:
    """A `TorchExecutor` on a GPU whose small passes are graphs. Implements `Executor`.

    On a device without graphs (a CPU) every pass runs op by op through the same code.
    """

    def __init__(self, network: TorchExecutor, ladder: Ladder | None = None) -> None:
        """ladder: None = the usual one on a GPU."""
        self.network = network
        self.kv_layers: tuple[KVLayerSpec, ...] = network.kv_layers
        self.vocab_size = network.vocab_size
        self.max_model_len = network.max_model_len
        self.is_batch_invariant = network.is_batch_invariant
        self.weight_bytes = network.weight_bytes
        self.token_ids = None if network.token_ids is None else network.token_ids.cpu()  # drafters read it on the host
        self.bank = network.bank
        self.recurrent = network.recurrent
        self.program = network.program
        self.device = network.device
        self.captured = CaptureReport()
        self.ladder = ladder or Ladder()
        self._has_graphs = self.device.type == "cuda"
        self._enter()
        self._pool = torch.cuda.graph_pool_handle() if self._has_graphs else None
        self._passes: dict[tuple[int, Rung, tuple[int, ...]], _Pass] = {}
        self._chains: dict[tuple[int, Rung, Rung, int, int | None, bool], _Chain] = {}
        self._choosing: dict[int | None, Choosing] = {}
        self._logits: Tensor | None = None

    def allocate(self, num_blocks: int, block_size: int) -> KVTensors:
        return self.network.allocate(num_blocks, block_size)

    def kv_block_bytes(self, block_size: int) -> int:
        return self.network.kv_block_bytes(block_size)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """See `Executor.run`. Logits and states stay on the device."""
        return self.start(batch, kv, hidden, inputs).finish()

    def start(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
        tokens: Tensor | None = None,
    ) -> Started:
        """`run` without waiting. tokens [T]: token ids on the device, for those that the host does not know yet."""
        self._enter()
        num_tokens, num_scores = len(batch.token_ids), len(batch.logits_indices)
        with torch.inference_mode():
            rung = self.ladder.rung(batch) if self._has_graphs else None
            if rung is None:
                moved = on_device(batch, self.device)
                if tokens is not None:
                    moved = replace(moved, token_ids=tokens)
                computed = self.network.compute(moved, kv, hidden, inputs)
            else:
                graph = self._pass(rung, kv, hidden)
                graph.static.fill(batch)
                if tokens is not None:
                    graph.static.batch.token_ids[:num_tokens].copy_(tokens)
                computed = graph.replay(inputs)
            # What a replay left is overwritten by the next one: whatever outlives this step is copied in stream order.
            states = {boundary: state[:num_tokens] for boundary, state in computed.hidden.items()}
            if rung is not None:
                states = {boundary: state.clone() for boundary, state in states.items()}
            wanted = batch.full_logits
            if len(wanted) and self._has_graphs:
                wanted = wanted.pin_memory().to(self.device, non_blocking=True)
            return Started(replace(computed, hidden=states), num_scores, wanted)

    def fetch(self, tensor: Tensor) -> Fetched:
        """Its values as they are now, in the order of the device's work."""
        return Fetched.of(tensor)[0]

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        """See `Executor.run_chain`: one graph, or one run of its ops, and one wait at its end."""
        self._enter()
        steps = int(counts.max()) if len(counts) else 0
        if not steps:
            return run_chain_by_steps(self, batch, kv, counts, draws, inputs)
        vocab_size = None if draws is None else draws.vocab_size
        drawn = draws is not None and bool((draws.temperatures > 0).any())
        host_draws = ChainDraws.of(draws, steps) if draws is not None and drawn else None
        keeps = draws is not None and draws.keep_logits
        with torch.inference_mode():
            size = self.ladder.rung(batch) if self._has_graphs and not keeps else None
            rows = self.ladder.up(len(batch.seq_lens))
            if size is None or rows is None or rows > MOST_CHAIN_ROWS:
                moved_draws = None
                if host_draws is not None:
                    moved_draws = ChainDraws(host_draws.temperatures.to(self.device), host_draws.keys.to(self.device))
                found = self._chain_by_ops(
                    on_device(batch, self.device), kv, counts.to(self.device), steps, vocab_size, inputs, moved_draws, keeps
                )
            else:
                graph = self._captured_chain(Rung(size.tokens, rows), kv, steps, vocab_size, drawn)
                found = graph.replay(batch, counts, inputs, host_draws)
            token_ids, confidence = to_host(found.token_ids[: len(counts)]), to_host(found.confidence[: len(counts)])
            logits = torch.stack(found.logits, 1).cpu() if keeps else None
            if self._has_graphs:
                torch.cuda.current_stream().synchronize()
        return ChainOutput(token_ids, confidence, logits)

    def capture(
        self,
        kv: KVTensors,
        hidden: tuple[int, ...],
        most_rows: int,
        tokens_per_row: int = 1,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Record passes of up to so many rows now, of one token each and of tokens_per_row, so that no request waits for it; and
        compile what comes behind them.

        The largest goes first: others fit its memory. Passes of other shapes are recorded when they come.
        """
        if not self._has_graphs:
            return
        shapes = {(rows * tokens, rows) for rows in self.ladder.below(most_rows) for tokens in {1, tokens_per_row}}
        for tokens, rows in sorted(shapes, reverse=True):
            if (rung := self.ladder.rung_of(tokens, rows)) is not None:
                self._pass(rung, kv, hidden)
        if self.program.logits:
            from .triton.matching import warm_up

            with torch.inference_mode():
                warm_up(self.vocab_size, self.network.dtype, self.device)
        progress(self.captured.describe())

    def _pass(self, rung: Rung, kv: KVTensors, hidden: tuple[int, ...]) -> _Pass:
        key = (id(kv), rung, hidden)
        if key not in self._passes:
            static = self._static(rung, kv)
            widths = self.program.inputs.items()
            inputs = {name: torch.zeros(rung.tokens, width, dtype=self.network.dtype, device=self.device) for name, width in widths}
            logits = self._logits_buffer(rung)

            def work() -> Computed:
                computed = self.network.compute(static.batch, kv, hidden, inputs)
                if computed.logits is None or logits is None:
                    return computed
                return replace(computed, logits=logits.copy_(computed.logits))

            graph, computed = self._record(work)
            self._passes[key] = _Pass(static, inputs, graph, computed, kv)
        return self._passes[key]

    def _logits_buffer(self, rung: Rung) -> Tensor | None:
        """[tokens, V], the same memory for all graphs: what a graph keeps to itself no other can use, and logits are long."""
        if not self.program.logits:
            return None
        if self._logits is None or len(self._logits) < rung.tokens:
            self._logits = torch.empty(rung.tokens, self.vocab_size, dtype=self.network.dtype, device=self.device)
        return self._logits[: rung.tokens]

    def _captured_chain(self, rung: Rung, kv: KVTensors, steps: int, vocab_size: int | None, drawn: bool) -> _Chain:
        chains = Rung(rung.rows, rung.rows)
        key = (id(kv), rung, chains, steps, vocab_size, drawn)
        if key not in self._chains:
            self._choose(vocab_size)  # reads a map on the host, which no graph may
            self._chains[key] = _Chain.record(self, self._static(rung, kv), kv, steps, vocab_size, drawn)
        return self._chains[key]

    def _chain_by_ops(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        steps: int,
        vocab_size: int | None,
        inputs: Mapping[str, Tensor] | None,
        draws: ChainDraws | None,
        keeps: bool = False,
    ) -> ChainTensors:
        def compute(part: RaggedBatch, hidden: tuple[int, ...], given: Mapping[str, Tensor] | None) -> Computed:
            return self.network.compute(part, kv, hidden, given)

        choosing = self._choose(vocab_size)
        return chain(compute, batch, counts, steps, choosing, self.max_model_len, self.recurrent, inputs, draws, keeps)

    def _choose(self, vocab_size: int | None) -> Choosing:
        if vocab_size not in self._choosing:
            self._choosing[vocab_size] = Choosing.of(self.network.token_ids, self.vocab_size, vocab_size)
        return self._choosing[vocab_size]

    def _enter(self) -> None:
        """Kernels start on the thread's own GPU, whatever GPU their tensors are on."""
        if self._has_graphs:
            torch.cuda.set_device(self.device)

    def _static(self, rung: Rung, kv: KVTensors) -> StaticBatch:
        blocks = min(-(-self.max_model_len // kv.block_size) + 8, kv.num_blocks)  # guesses may stand behind the last position
        return StaticBatch(rung, blocks, kv.block_size, self.device)

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run it once, so that all kernels are compiled and all handles made, then record it."""
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch.inference_mode():
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool):
            result = work()
        report = self.captured
        self.captured = CaptureReport(
            report.num_graphs + 1,
            report.seconds + time.perf_counter() - started,
            report.num_bytes + max(torch.cuda.memory_reserved(self.device) - before, 0),
        )
        return graph, result


@dataclass(frozen=True)
class _Pass:
    """A recorded pass, what it reads and what it leaves."""

    static: StaticBatch
    inputs: Mapping[str, Tensor]  # name -> [T, width]
    graph: torch.cuda.CUDAGraph
    computed: Computed
    kv: KVTensors  # kept, so that its address stays its own

    def replay(self, inputs: Mapping[str, Tensor] | None) -> Computed:
        for name, tensor in (inputs or {}).items():
            self.inputs[name][: len(tensor)].copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.computed


@dataclass(frozen=True)
class _Chain:
    """A recorded chain of so many steps for as many chains as its rung has rows."""

    static: StaticBatch
    counts: Tensor  # [N]
    inputs: Mapping[str, Tensor]
    draws: ChainDraws | None
    graph: torch.cuda.CUDAGraph
    found: ChainTensors
    kv: KVTensors

    @classmethod
    def record(
        cls, executor: GraphExecutor, static: StaticBatch, kv: KVTensors, steps: int, vocab_size: int | None, drawn: bool
    ) -> _Chain:
        network, device = executor.network, executor.device
        tokens, rows = static.rung.tokens, static.rung.rows
        counts = torch.ones(rows, dtype=torch.int64, device=device)
        widths = network.program.inputs.items()
        inputs = {name: torch.zeros(tokens, width, dtype=network.dtype, device=device) for name, width in widths}
        draws = None
        if drawn:
            draws = ChainDraws(torch.zeros(rows, device=device), torch.zeros(rows, steps, dtype=torch.int64, device=device))
        batch = chain_batch(static)
        graph, found = executor._record(lambda: executor._chain_by_ops(batch, kv, counts, steps, vocab_size, inputs, draws))
        return cls(static, counts, inputs, draws, graph, found, kv)

    def replay(
        self, batch: RaggedBatch, counts: Tensor, inputs: Mapping[str, Tensor] | None, draws: ChainDraws | None
    ) -> ChainTensors:
        self.static.fill(batch)
        _fill(self.counts, counts, 1)
        for name, tensor in (inputs or {}).items():
            self.inputs[name][: len(tensor)].copy_(tensor, non_blocking=True)
        if self.draws is not None and draws is not None:
            _fill(self.draws.temperatures, draws.temperatures, 0)
            _fill(self.draws.keys, draws.keys, 0)
        self.graph.replay()
        return self.found


def chain_batch(static: StaticBatch) -> RaggedBatch:
    """What a chain starts from: as many scores as there are rows, padding's behind those of the chains."""
    return replace(static.batch, logits_indices=static.batch.logits_indices[: static.rung.rows])


def _fill(static: Tensor, values: Tensor, padding: int) -> None:
    """Put host values in front and padding behind."""
    whole = torch.full(static.shape, padding, dtype=static.dtype, pin_memory=static.is_cuda)
    whole[: len(values)] = values
    static.copy_(whole, non_blocking=True)
