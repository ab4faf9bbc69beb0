"""Whole passes, and whole chains, recorded once as CUDA graphs and replayed: one launch a step instead of hundreds.

Owns what is captured and when; a graph's memory is shared with all others of its executor. What no rung of the ladder holds
runs op by op. Knows no request; sizes and padding stand in static_batch.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .chain import run_chain_by_steps
from .device_chain import ChainDraws, ChainTensors, Choosing, chain
from .launch_trial import Trial, try_early_launches
from .layout import ChainOutput, Draws, ForwardOutput, KVLayerSpec, KVTensors, RaggedBatch, StateLayerSpec, StateRoom
from .started import Started, to_host
from .static_batch import BlockTables, Ladder, Rung, StaticBatch, put
from .torch_executor import Computed, TorchExecutor, on_device
from .upload import upload

MOST_CHAIN_ROWS = 256
"""Chains of more rows than this run op by op: by then launches hide behind the work."""

PATIENCE = 16
"""While requests are served a shape is wanted so many times before it is recorded: recording stops all of them for a moment, which a shape
that hardly ever comes is not worth. Until then it is put into a recorded one with room for it, or runs op by op."""

ROOMY_TOKENS, ROOMY_FACTOR = 16, 2
"""How much longer such a pass may be: so many tokens, or the batch's own so many times. Weights are read once for all of them, and more
tokens take hardly longer; to launch a pass op by op takes several times as long."""

FEW_SCORES = 8
"""So many logits each graph keeps to itself: to bring them where all graphs leave theirs would be one more launch."""

FEW_OPS = 5
"""Programs of so few that look at no batch are never recorded: to fill a graph's memory and to empty it takes more launches than they."""

T = TypeVar("T")


@dataclass(frozen=True)
class CaptureReport:
    """What capturing took so far."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def __add__(self, other: CaptureReport) -> CaptureReport:
        return CaptureReport(self.num_graphs + other.num_graphs, self.seconds + other.seconds, self.num_bytes + other.num_bytes)

    def describe(self) -> str:
        """`25 graphs captured in 8.1 s, 310 MB`."""
        return f"{self.num_graphs} graphs captured in {self.seconds:.1f} s, {self.num_bytes / 1e6:.0f} MB"


class Recorder(Protocol):
    """What makes graphs."""

    captured: CaptureReport  # by it so far

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """What does the work again, over the same memory, and where it leaves its results. The work is done once, too."""
        ...


class CudaRecorder:
    """Records for one executor on one GPU, all graphs sharing their memory: no two of them run at once. Implements `Recorder`."""

    def __init__(self, device: torch.device) -> None:
        self.captured = CaptureReport()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for everything: cuBLAS keeps a workspace for each stream that it was ever used on, graphs share memory only if they
        # were recorded on the same one, and the one that torch would choose belongs to whichever GPU was the first.
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Run it once, so that all kernels are compiled and all handles of this thread made, then record it."""
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        added = max(torch.cuda.memory_reserved(self._device) - before, 0)
        self.captured += CaptureReport(1, time.perf_counter() - started, added)
        return graph.replay, result


class GraphExecutor:
    """A `TorchExecutor` on a GPU whose small passes are graphs. Implements `Executor`.

    On a device without graphs (a CPU) every pass runs op by op through the same code. A shape is recorded when it is first wanted,
    until the executor is told to be patient.
    """

    def __init__(self, network: TorchExecutor, ladder: Ladder | None = None, recorder: Recorder | None = None) -> None:
        """ladder: None = the usual one. recorder: None = the device's own, if it has graphs."""
        self.network = network
        self.kv_layers: tuple[KVLayerSpec, ...] = network.kv_layers
        self.state_layers: tuple[StateLayerSpec, ...] = network.state_layers
        self.vocab_size = network.vocab_size
        self.max_model_len = network.max_model_len
        self.is_batch_invariant = network.is_batch_invariant
        self.weight_bytes = network.weight_bytes
        self.token_ids = None if network.token_ids is None else network.token_ids.cpu()  # drafters read it on the host
        self.bank = network.bank
        self.adapters = network.adapters
        self.recurrent = network.recurrent
        self.program = network.program
        self.device = network.device
        self._is_short = len(network.program.ops) <= FEW_OPS and not network.program.reads_batch
        self.ladder = ladder or Ladder()
        self._on_gpu = self.device.type == "cuda"
        self._enter()
        self._recorder = CudaRecorder(self.device) if recorder is None and self._on_gpu else recorder
        self.launches: Trial | None = None  # what was found of how kernels are launched best
        self._patience = 0
        self._passes: dict[tuple[int, Rung, tuple[int, ...]], _Pass] = {}
        self._chains: dict[tuple[int, Rung, int, int | None, bool], _Chain] = {}
        self._choosing: dict[int | None, Choosing] = {}
        self._logits: Tensor | None = None
        self._tables: dict[int, BlockTables] = {}  # of each cache: what is filled last stands there

    @property
    def has_graphs(self) -> bool:
        return self._recorder is not None and not self._is_short

    @property
    def captured(self) -> CaptureReport:
        """All graphs so far."""
        return CaptureReport() if self._recorder is None else self._recorder.captured

    def be_patient(self) -> None:
        """From now on somebody waits for every pass: no shape is recorded before it has been wanted PATIENCE times."""
        self._patience = PATIENCE

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> KVTensors:
        return self.network.allocate(num_blocks, block_size, states)

    def kv_block_bytes(self, block_size: int) -> int:
        return self.network.kv_block_bytes(block_size)

    def state_slot_bytes(self, num_guesses: int) -> int:
        return self.network.state_slot_bytes(num_guesses)

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
    ) -> Started:
        """`run` without waiting. The batch may lie on the device: the host need not know all of it."""
        self._enter()
        num_tokens, num_scores = len(batch.token_ids), len(batch.logits_indices)
        with torch.inference_mode():
            prepared = self._prepared(batch, kv, hidden)
            if prepared is None:
                computed = self.network.compute(batch if self._is_short else on_device(batch, self.device), kv, hidden, inputs)
            else:
                prepared.fill(batch, inputs)
                computed = prepared.work(self._recorder, self._patience)
            # What a replay left is overwritten by the next one: whatever outlives this step is copied in stream order.
            states = {boundary: state[:num_tokens] for boundary, state in computed.hidden.items()}
            if prepared is not None and states:
                states = dict(zip(states, torch.stack([*states.values()]).unbind(), strict=True))
            return Started(replace(computed, hidden=states), num_scores, upload(batch.full_logits, self.device))

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
        if not steps or self.state_layers:  # a chain's states are on the host's mind
            return run_chain_by_steps(self, batch, kv, counts, draws, inputs)
        vocab_size = None if draws is None else draws.vocab_size
        drawn = draws is not None and bool((draws.temperatures > 0).any())
        host_draws = ChainDraws.of(draws, steps) if draws is not None and drawn else None
        keeps = draws is not None and draws.keep_logits
        with torch.inference_mode():
            rung = None if keeps else self._chain_rung(batch)
            if rung is None:
                moved_draws = None
                if host_draws is not None:
                    moved_draws = ChainDraws(upload(host_draws.temperatures, self.device), upload(host_draws.keys, self.device))
                found = self._chain_by_ops(
                    on_device(batch, self.device), kv, upload(counts, self.device), steps, vocab_size, inputs, moved_draws, keeps
                )
            else:
                prepared = self._chain(rung, kv, steps, vocab_size, drawn)
                prepared.fill(batch, counts, inputs, host_draws)
                found = prepared.work(self._recorder, self._patience)
            token_ids, confidence = to_host(found.token_ids[: len(counts)]), to_host(found.confidence[: len(counts)])
            logits = torch.stack(found.logits, 1).cpu() if keeps else None
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
        return ChainOutput(token_ids, confidence, logits)

    def takes_chains(self, num_tokens: int, num_rows: int) -> bool:
        """See `ChainStarter.takes_chains`."""
        return not self.has_graphs or (self.ladder.up(num_tokens) is not None and num_rows <= MOST_CHAIN_ROWS)

    def start_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        steps: int,
        draws: ChainDraws | None = None,
        vocab_size: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainTensors:
        """See `ChainStarter.start_chain`: the graph is that of `run_chain`."""
        self._enter()
        with torch.inference_mode():
            rung = self._chain_rung(batch)
            if rung is None:
                found = self._chain_by_ops(batch, kv, counts, steps, vocab_size, inputs, draws)
            else:
                prepared = self._chain(rung, kv, steps, vocab_size, draws is not None)
                prepared.take(batch, counts, inputs, draws)
                found = prepared.work(self._recorder, self._patience)
            return ChainTensors(found.token_ids[: len(counts)], found.confidence[: len(counts)], [])

    def capture(
        self,
        kv: KVTensors,
        hidden: tuple[int, ...],
        most_rows: int,
        tokens_per_row: int = 1,
        most_tokens: int = 1,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Record passes of up to so many rows now, of one token each and of tokens_per_row, so that no request waits for it; and
        compile what comes behind them, and what all others of up to most_tokens take.

        The largest goes first: others fit its memory. Passes of other shapes are recorded when they come, or have come often.
        """
        if self._recorder is None:
            return
        self.try_early_launches()
        with torch.inference_mode():
            for rung in sorted(self.ladder.samples(most_tokens, most_rows), key=lambda rung: rung.rows, reverse=True):
                self.network.compute(self._static(rung, kv).batch, kv, hidden, self._inputs(rung))
        shapes = {(rows * tokens, rows) for rows in self.ladder.below(most_rows) for tokens in {1, tokens_per_row}}
        for tokens, rows in sorted(shapes, reverse=True):
            if (rung := self.ladder.rung_of(tokens, rows, tokens)) is not None:
                self._pass(rung, kv, hidden).work.record(self._recorder)
        if self.program.logits and self._on_gpu:
            from .triton import continuation, following, lookup, matching, static_batch

            with torch.inference_mode():
                matching.warm_up(self.vocab_size, self.network.dtype, self.device)
                continuation.warm_up(self.device)
                following.warm_up(self.device)
                lookup.warm_up(self.device)
                static_batch.warm_up(self.device)
        progress(self.captured.describe())

    def try_early_launches(self) -> None:
        """See launch_trial.py; once."""
        if self.launches is None and self._on_gpu:
            self.launches = try_early_launches(self.network, CudaRecorder(self.device).record)

    def _prepared(self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...]) -> _Pass | None:
        """What the batch is put into: memory of its own size, or of one that is recorded and has room for it while its own is not."""
        rung = self.ladder.rung(batch) if self.has_graphs else None
        if rung is None:
            return None
        own = self._pass(rung, kv, hidden)
        if own.work.is_recorded or own.work.num_wanted >= self._patience:
            return own
        others = [other for (cache, _, states), other in self._passes.items() if (cache, states) == (id(kv), hidden)]
        most = max(ROOMY_FACTOR * rung.tokens, ROOMY_TOKENS)
        roomy = [other for other in others if other.work.is_recorded and other.rung.tokens <= most and other.rung.holds(batch)]
        if not roomy:
            return own
        own.work.num_wanted += 1
        return min(roomy, key=lambda other: (other.rung.tokens, other.rung.scores, other.rung.rows))

    def _pass(self, rung: Rung, kv: KVTensors, hidden: tuple[int, ...]) -> _Pass:
        key = (id(kv), rung, hidden)
        if key not in self._passes:
            static, inputs = self._static(rung, kv), self._inputs(rung)
            logits = self._logits_buffer(rung)

            def work() -> Computed:
                computed = self.network.compute(static.batch, kv, hidden, inputs)
                if computed.logits is None or logits is None:
                    return computed
                return replace(computed, logits=logits.copy_(computed.logits))

            self._passes[key] = _Pass(static, inputs, _Work(work), kv)
        return self._passes[key]

    def _logits_buffer(self, rung: Rung) -> Tensor | None:
        """[scores, V], the same memory for all graphs: what a graph keeps to itself no other can use, and logits are long. None: no
        such memory, because there are none or few."""
        if not self.program.logits or rung.scores <= FEW_SCORES:
            return None
        if self._logits is None or len(self._logits) < rung.scores:
            self._logits = torch.empty(rung.scores, self.vocab_size, dtype=self.network.dtype, device=self.device)
        return self._logits[: rung.scores]

    def _chain_rung(self, batch: RaggedBatch) -> Rung | None:
        """Of the graph that holds such chains; None if none does."""
        rung = self.ladder.chain_rung(batch) if self.has_graphs else None
        return None if rung is None or rung.rows > MOST_CHAIN_ROWS else rung

    def _chain(self, rung: Rung, kv: KVTensors, steps: int, vocab_size: int | None, drawn: bool) -> _Chain:
        key = (id(kv), rung, steps, vocab_size, drawn)
        if key not in self._chains:
            self._choose(vocab_size)  # reads a map on the host, which no graph may
            static, inputs = self._static(rung, kv), self._inputs(rung)
            counts = torch.ones(rung.rows, dtype=torch.int64, device=self.device)
            draws = None
            if drawn:
                keys = torch.zeros(rung.rows, steps, dtype=torch.int64, device=self.device)
                draws = ChainDraws(torch.zeros(rung.rows, device=self.device, dtype=torch.float32), keys)

            def work() -> ChainTensors:
                return self._chain_by_ops(static.batch, kv, counts, steps, vocab_size, inputs, draws)

            self._chains[key] = _Chain(static, counts, inputs, draws, _Work(work), kv)
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
        assert not self.state_layers, "a chain keeps no states: a recurrent network would begin anew with every token"

        def compute(part: RaggedBatch, hidden: tuple[int, ...], given: Mapping[str, Tensor] | None, wants_best: bool) -> Computed:
            return self.network.compute(part, kv, hidden, given, wants_best)

        choosing = self._choose(vocab_size)
        advance = int(not self.program.is_frozen)
        return chain(compute, batch, counts, steps, choosing, self.max_model_len, self.recurrent, inputs, draws, keeps, advance)

    def _choose(self, vocab_size: int | None) -> Choosing:
        if vocab_size not in self._choosing:
            self._choosing[vocab_size] = Choosing.of(self.network.token_ids, self.vocab_size, vocab_size)
        return self._choosing[vocab_size]

    def _enter(self) -> None:
        """Kernels start on the thread's own GPU, whatever GPU their tensors are on."""
        if self._on_gpu:
            torch.cuda.set_device(self.device)

    def _static(self, rung: Rung, kv: KVTensors) -> StaticBatch:
        tables = self._tables.get(id(kv))
        if tables is None or len(tables.memory) < rung.rows:
            blocks = min(-(-self.max_model_len // kv.block_size) + 8, kv.num_blocks)  # guesses may stand behind the last position
            tables = self._tables[id(kv)] = BlockTables(rung.rows, blocks, self.device)
        return StaticBatch(rung, tables, kv.block_size, has_adapters=self.adapters is not None, has_states=bool(self.state_layers))

    def _inputs(self, rung: Rung) -> dict[str, Tensor]:
        """name -> [T, width]"""
        widths = self.program.inputs.items()
        return {name: torch.zeros(rung.tokens, width, dtype=self.network.dtype, device=self.device) for name, width in widths}


class _Work(Generic[T]):
    """Work over memory that stays where it is: run op by op until it is recorded, then replayed."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self.num_wanted = 0  # times, before it is recorded
        self._recorded: tuple[Callable[[], object], T] | None = None

    def __call__(self, recorder: Recorder | None, patience: int) -> T:
        """What it reads must be in place: to record it is to do it once more, which changes nothing only with the same values."""
        if self.num_wanted >= patience and recorder is not None:
            self.record(recorder)
        if self._recorded is None:
            self.num_wanted += 1
            return self._run()
        replay, result = self._recorded
        replay()
        return result

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    def record(self, recorder: Recorder) -> None:
        if self._recorded is None:
            self._recorded = recorder.record(self._run)


@dataclass(frozen=True)
class _Pass:
    """A pass of one shape, and what it reads."""

    static: StaticBatch
    inputs: Mapping[str, Tensor]  # name -> [T, width]
    work: _Work[Computed]
    kv: KVTensors  # kept, so that its address stays its own

    @property
    def rung(self) -> Rung:
        return self.static.rung

    def fill(self, batch: RaggedBatch, inputs: Mapping[str, Tensor] | None) -> None:
        if is_of_the_host(batch):
            self.static.fill(batch)
        else:
            self.static.take(batch)
        _fill_inputs(self.inputs, inputs)


@dataclass(frozen=True)
class _Chain:
    """Chains of so many steps, as many as the rung has rows, and what they read."""

    static: StaticBatch
    counts: Tensor  # [N]
    inputs: Mapping[str, Tensor]
    draws: ChainDraws | None
    work: _Work[ChainTensors]
    kv: KVTensors

    def fill(self, batch: RaggedBatch, counts: Tensor, inputs: Mapping[str, Tensor] | None, draws: ChainDraws | None) -> None:
        self.static.fill(batch)
        _fill(self.counts, counts, 1)
        _fill_inputs(self.inputs, inputs)
        if self.draws is not None and draws is not None:
            _fill(self.draws.temperatures, draws.temperatures, 0)
            _fill(self.draws.keys, draws.keys, 0)

    def take(self, batch: RaggedBatch, counts: Tensor, inputs: Mapping[str, Tensor] | None, draws: ChainDraws | None) -> None:
        """`fill` with what is on the device already."""
        self.static.take(batch)
        put(self.counts, counts, 1)
        _fill_inputs(self.inputs, inputs)
        if self.draws is not None and draws is not None:
            put(self.draws.temperatures, draws.temperatures, 0)
            put(self.draws.keys, draws.keys, 0)


def is_of_the_host(batch: RaggedBatch) -> bool:
    return batch.token_ids.is_cpu


def _fill_inputs(static: Mapping[str, Tensor], inputs: Mapping[str, Tensor] | None) -> None:
    for name, tensor in (inputs or {}).items():
        static[name][: len(tensor)].copy_(tensor, non_blocking=True)


def _fill(static: Tensor, values: Tensor, padding: int) -> None:
    """Put host values in front and padding behind."""
    whole = torch.full(static.shape, padding, dtype=static.dtype, pin_memory=static.is_cuda)
    whole[: len(values)] = values
    static.copy_(whole, non_blocking=True)
