"""Runs a program as one native call per pass: kernels/native/ does the work, this hands it batches and takes what comes back.

What it computes is what torch_executor.py computes, to rounding; a row's result is the same to the bit whatever else is in the
batch and however its tokens are divided among passes.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .adapters import AdapterBank, adapted
from .execution import Execution
from .footprint import native_weight_bytes
from .layout import ChainOutput, Draws, ForwardOutput, KVLayerSpec, KVTensors, RaggedBatch, StateLayerSpec, StateRoom, address
from .native_abi import (
    MAX_HEAD_DIM,
    MOST_INPUTS,
    CacheType,
    ChainRequest,
    NativeTable,
    NetworkSpec,
    Precision,
    RoundsDrafter,
    RoundsRequest,
    RunRequest,
)
from .native_binding import PACKED, BoundOps, ProgramWeights
from .native_kv import NativeKV, block_bytes
from .native_library import ISAS, Availability, availability, load, set_threads, sources, threads, usable_cores
from .native_lowering import Lowered, NotLowered, lower
from .native_weights import PackedWeight, WeightMemory, shortened
from .ngram_table import NgramTable
from .ops import BlockLinear, Embed, Experts, Linear
from .program import Program, matrices_of
from .rounds import ROW_BYTES, Drafter, RoundsLimits, RoundsOutput, adapters_of, draft_memory, drafts_in
from .weight_bank import NetworkWeights, WeightBank

__all__ = ["Availability", "NativeExecutor", "availability", "set_threads", "sources", "supports", "threads", "usable_cores"]

_CACHE = {torch.float32: CacheType.FLOAT32, torch.bfloat16: CacheType.BFLOAT16}
# Bytes of bfloat16 weights that few processors' caches hold: unpacking takes less time than it saves, up to some 10 tokens a pass.
COMPACT_FROM = 64 * 2**20
COMPACT_ISAS = {"avx512_bf16"}  # tiles (AMX) would have to wait for what vectors unpack
LONG_HEAD = 16 * 2**20  # bytes that no core's own cache holds: to read them takes longer than to multiply


def supports(program: Program, execution: Execution) -> str | None:
    """None if the program can run natively on this machine, else one sentence why not."""
    if (available := availability()).isa is None:
        return available.reason
    if execution.on_gpu:
        return "the network runs on a GPU"
    if not execution.prefer_native:
        return "the torch executor was asked for"
    if execution.kv_cache == "fp8":
        return "the native executor's narrow cache is int8"
    if execution.dtype not in _CACHE:
        return f"{execution.dtype} is neither float32 nor bfloat16"
    if (widest := max((max(layer.k_dim, layer.v_dim) for layer in program.kv_layers), default=0)) > MAX_HEAD_DIM:
        return f"the native executor's heads are at most {MAX_HEAD_DIM} wide, not {widest}"
    if (most := max((shape[1] for shape in program.weights.values() if len(shape) == 2), default=0)) > MOST_INPUTS:
        return f"the native executor's linear layers have at most {MOST_INPUTS:,} inputs, not {most:,}"
    try:
        lower(program)
    except NotLowered as error:
        return f"the native executor does not run {error}"
    return None


def has_weights(program: Program, weights: Mapping[str, Tensor], bank: WeightBank) -> bool:
    """Whether the tensors, and what the bank has packed for a native executor, are all that the program shares."""
    linears = ((*op.weights, *filter(None, op.biases)) for op in program.ops if isinstance(op, Linear))
    experts = ((*names, *op.biases) for op in program.ops if isinstance(op, Experts) for names in matrices_of(op))
    blocks = ((op.weight,) for op in program.ops if isinstance(op, BlockLinear))
    rows = ((op.weight,) for op in program.ops if isinstance(op, Embed))
    return bank.completes((*linears, *experts, *blocks, *rows), PACKED, program.shared, weights)


_NO_SCORES = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)


def _precision(program: Program, execution: Execution, isa: str) -> Precision:
    """Of weights that are not quantised."""
    if execution.dtype != torch.bfloat16:
        return Precision.FLOAT32
    is_read_from_memory = native_weight_bytes(program, execution) >= COMPACT_FROM
    is_compact = isa in COMPACT_ISAS and execution.quantization is None and is_read_from_memory
    return Precision.COMPACT if is_compact else Precision.BFLOAT16


def resident_bytes(program: Program, execution: Execution) -> int:
    """What the weights will take, foretold from their shapes: 13 of 16 bits where they are kept compact, a little more than they do."""
    num_bytes, isa = native_weight_bytes(program, execution), availability().isa
    return num_bytes * 13 // 16 if isa is not None and _precision(program, execution, isa) == Precision.COMPACT else num_bytes


class NativeExecutor:
    """A program bound to its packed weights. Implements `Executor`; hidden states and logits come as float32.

    weights: the program's names -> tensors of its shapes, in any floating dtype; they are read once, here. Those in program.shared
    may be missing if `bank`, another native executor's, has them packed.
    isa: an instruction set to use instead of the best one. adapters: in this machine's memory; rows may have them, but those of chains.
    Raises NotLowered where `supports` has a reason, for the program or, with adapters, for `adapted` of it.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        execution: Execution,
        isa: str | None = None,
        bank: WeightBank | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        library = load()
        assert library is not None, "supports() says whether there is a library"
        self._library = library
        isa = isa or availability().isa
        assert isa is not None
        self.program = program
        self.kv_layers: tuple[KVLayerSpec, ...] = program.kv_layers
        self.state_layers: tuple[StateLayerSpec, ...] = program.state_layers
        self.vocab_size = program.vocab_size
        self.max_model_len = program.max_model_len
        self.is_batch_invariant = True
        self.recurrent = program.recurrent
        self.token_ids: Tensor | None = weights[program.token_map].long().contiguous() if program.token_map else None
        self._most_choosable = 0 if self.token_ids is None else int(self.token_ids.max()) + 1
        held = NetworkWeights(weights, program.shared, bank)
        self.bank = held.bank
        self.adapters = adapters
        self._cache_type = CacheType.INT8 if execution.kv_cache == "int8" else _CACHE[execution.dtype]
        lowered = lower(program)
        ready = ProgramWeights(library, program, lowered, held, execution, _precision(program, execution, isa))
        assert isa in COMPACT_ISAS or not ready.has_compact, "weights of a bank that are packed for other instructions"
        self.weight_bytes = ready.bytes_per_token
        self._head = ready.head
        self._shortlist: PackedWeight | None = None
        self._isa = ISAS.index(isa)
        self._plain = _Network(library, program, lowered, ready, self._cache_type, isa)
        # Of the same weights: rows without adapters need not wait for what others' add, nor for the ops that do.
        self._adapted: _Network | None = None
        if adapters is not None:
            program = adapted(program)
            self._adapted = _Network(library, program, lower(program), ready, self._cache_type, isa, adapters)

    def shorten_chains(self, least_bytes: int = LONG_HEAD) -> None:
        """From now on a chain's scores are those of the head in int2, and only where they decide the head's own.

        For drafters: what is guessed is nearly always the same, and a large head takes less reading. Heads below least_bytes, which
        the cache may hold, stay as they are.
        """
        head = self._head
        if head is None or self._shortlist is not None or head.num_bytes < least_bytes:
            return
        self._shortlist = shortened(self._library, self._isa, WeightMemory(), head)
        self._library.ft_network_set_shortlist(self._plain.handle, ctypes.byref(self._shortlist.struct))

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> NativeKV:
        """See `Executor.allocate`. Raises ValueError unless block_size is 16."""
        slot_bytes = () if states is None else self._slot_bytes(states.num_guesses)
        return NativeKV(self._library, self.kv_layers, num_blocks, block_size, self._cache_type, slot_bytes, states)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes that one block of the cache takes over all layers."""
        return sum(block_bytes(self._library, layer, self._cache_type, block_size) for layer in self.kv_layers)

    def most_at_once(self) -> int:
        """See `RoundsExecutor`."""
        return self._library.ft_network_most_at_once(self._plain.handle)

    def state_slot_bytes(self, num_guesses: int) -> int:
        """Bytes of one state over all recurrent layers, with so many guesses."""
        return sum(self._slot_bytes(num_guesses))

    def _slot_bytes(self, num_guesses: int) -> tuple[int, ...]:
        """Of each recurrent layer."""
        handle, slot_bytes = self._plain.handle, self._library.ft_network_state_slot_bytes
        return tuple(slot_bytes(handle, layer, num_guesses) for layer in range(len(self.state_layers)))

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass; see `Executor.run`. inputs: the buffers [T, width] float32 that program.inputs names."""
        assert isinstance(kv, NativeKV)
        network = self._plain if batch.adapters is None else self._network_for(batch.adapters.tolist())
        # shape[0], not len(): that is a Python function of torch's
        num_tokens, num_logits, num_full = batch.token_ids.shape[0], batch.logits_indices.shape[0], batch.full_logits.shape[0]
        bound = dict(inputs or {})
        for name in map(self.program.boundary, hidden):
            if name not in bound:  # a boundary may be an input
                bound[name] = torch.empty(num_tokens, self.program.buffers[name], dtype=torch.float32)
        states = {boundary: bound[self.program.boundary(boundary)] for boundary in hidden}
        argmax, top = _NO_SCORES
        if num_logits:
            argmax, top = torch.empty(num_logits, dtype=torch.int64), torch.empty(num_logits, dtype=torch.float32)
        logits = torch.empty(num_full, self.vocab_size, dtype=torch.float32) if num_full else None
        request = self._request(network, batch, kv, bound)
        request.num_full = num_full
        request.full_logits = address(batch.full_logits, torch.int64)
        request.logits = None if logits is None else logits.data_ptr()
        request.argmax, request.top = argmax.data_ptr(), top.data_ptr()
        self._check(self._library.ft_network_run(network.handle, ctypes.byref(request)))
        return ForwardOutput(argmax if self.token_ids is None else self.token_ids[argmax], top, logits, states)

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        """See `Executor.run_chain`. The whole chain is one call."""
        assert isinstance(kv, NativeKV) and (batch.adapters is None or not any(batch.adapters.tolist()))
        assert batch.states is None or batch.states.chain_slots is not None or not counts.shape[0]
        network = self._plain
        steps = max(counts.tolist(), default=0)
        token_ids = torch.empty((counts.shape[0], steps), dtype=torch.int64)
        confidence = torch.empty((counts.shape[0], steps), dtype=torch.float32)
        logits: Tensor | None = None
        if draws is not None and draws.keep_logits:
            logits = torch.zeros((counts.shape[0], steps, self.vocab_size), dtype=torch.float32)
        bound = dict(inputs or {})
        request = ChainRequest(self._request(network, batch, kv, bound), address(counts, torch.int64), steps, choosable=self.vocab_size)
        request.input = request.state = -1
        if self.recurrent is not None:
            name, boundary = self.recurrent
            request.input, request.state = network.buffers[name], network.buffers[self.program.boundary(boundary)]
        if self.token_ids is not None:
            request.token_map = self.token_ids.data_ptr()
            request.choosable = self._most_choosable if draws is None else draws.vocab_size
            request.limits_columns = self._most_choosable > request.choosable
        request.token_ids, request.confidence = token_ids.data_ptr(), confidence.data_ptr()
        if draws is not None:
            request.choosable = draws.vocab_size
            request.temperatures = address(draws.temperatures, torch.float32)
            request.streams = address(draws.streams, torch.int64)
            request.first_positions = address(draws.positions, torch.int64)
        if logits is not None:
            request.logits = logits.data_ptr()
        self._check(self._library.ft_network_run_chain(network.handle, ctypes.byref(request)))
        return ChainOutput(token_ids, confidence, logits)

    def run_rounds(
        self,
        rows: bytearray,
        kv: KVTensors,
        limits: RoundsLimits,
        interrupt: array[int],
        table: NgramTable | None = None,
        drafter: Drafter | None = None,
    ) -> RoundsOutput:
        """See `RoundsExecutor.run_rounds`."""
        assert isinstance(kv, NativeKV)
        assert self.token_ids is None and self.recurrent is None, "a target's columns are its tokens"
        assert not self.state_layers, "rounds keep no states"
        network = self._plain if self.adapters is None else self._network_for(adapters_of(rows))
        num_rows = len(rows) // ROW_BYTES
        most = limits.most_rounds
        prices = array("f", limits.prices)
        drafts, tokens = draft_memory(most * num_rows), array("i", bytes(4 * most))
        seconds, draft_seconds = array("f", bytes(4 * most)), array("f", bytes(4 * most))
        request = RoundsRequest(
            kv.bases, _address(rows), None if drafter is None else ctypes.pointer(_drafter(drafter)), _table(table), *prices.buffer_info(),
            num_rows, most, limits.most_tokens, limits.most_seconds, limits.ends_with_row,
        )
        request.interrupt, request.drafts, request.tokens = interrupt.buffer_info()[0], _address(drafts), tokens.buffer_info()[0]
        request.seconds, request.draft_seconds = seconds.buffer_info()[0], draft_seconds.buffer_info()[0]
        self._check(self._library.ft_network_run_rounds(network.handle, ctypes.byref(request)))
        count = request.num_rounds
        return RoundsOutput(drafts_in(drafts, request.num_drafts), seconds[:count], draft_seconds[:count], tokens[:count])

    def _network_for(self, slots: Sequence[int]) -> _Network:
        """For rows with these adapters."""
        if not any(slots):
            return self._plain
        assert self._adapted is not None and self.adapters is not None, "rows have adapters, the network has no room for any"
        assert 0 <= min(slots) and max(slots) <= self.adapters.num_slots
        return self._adapted

    def _request(self, network: _Network, batch: RaggedBatch, kv: NativeKV, bound: Mapping[str, Tensor]) -> RunRequest:
        """The parts that all kinds of passes share. Its pointers are good for as long as batch, kv and bound are."""
        assert batch.block_size == kv.block_size
        request = RunRequest(batch.in_c, kv.bases, kv.states, kv.num_guesses)
        if bound:
            request.num_bound, request.bound = len(bound), network.numbers(tuple(bound))
            request.bound_memory = (ctypes.c_void_p * len(bound))(*(address(tensor, torch.float32) for tensor in bound.values()))
        return request

    def _check(self, message: bytes | None) -> None:
        if message is not None:
            raise RuntimeError(f"the native executor failed: {message.decode()}")


class _Network:
    """A program in the library, over weights that others may read as well."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: Program,
        lowered: Lowered,
        weights: ProgramWeights,
        cache_type: CacheType,
        isa: str,
        adapters: AdapterBank | None = None,
    ) -> None:
        ops = BoundOps(program, lowered, weights, adapters)
        self._held = ops, weights  # which it points into
        self.buffers = lowered.buffers
        self._numbers: dict[tuple[str, ...], ctypes.Array[ctypes.c_int32]] = {}  # of the buffers that passes have bound
        spec = NetworkSpec(
            ops.array,
            len(ops.array),
            (ctypes.c_int32 * len(lowered.widths))(*lowered.widths),
            (ctypes.c_int32 * len(lowered.places))(*lowered.places),
            len(lowered.widths),
            max(lowered.places, default=-1) + 1,
            program.vocab_size,
            cache_type,
            ISAS.index(isa),
        )
        self.handle = ctypes.c_void_p(library.ft_network_create(ctypes.byref(spec)))
        if not self.handle:
            raise NotLowered(f"instruction set {isa} on this processor")
        # Not when the process ends: a daemon thread may still be in a pass.
        weakref.finalize(self, library.ft_network_destroy, self.handle).atexit = False

    def numbers(self, names: tuple[str, ...]) -> ctypes.Array[ctypes.c_int32]:
        """Of these buffers."""
        if names not in self._numbers:
            self._numbers[names] = (ctypes.c_int32 * len(names))(*(self.buffers[name] for name in names))
        return self._numbers[names]


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _drafter(drafter: Drafter) -> RoundsDrafter:
    executor, kv = drafter.executor, drafter.kv
    assert isinstance(executor, NativeExecutor) and isinstance(kv, NativeKV)
    return RoundsDrafter(
        executor._plain.handle, kv.bases, drafter.choosable, drafter.readable, drafter.max_length, drafter.samples, drafter.threshold
    )


def _table(table: NgramTable | None) -> NativeTable:
    return NativeTable() if table is None else NativeTable(*table.addresses, table.shift, table.max_n)
