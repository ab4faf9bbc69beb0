"""Runs a program as one native call per pass: kernels/native/ does the work, this binds programs and weights to it.

What it computes is what torch_executor.py computes, to rounding; a row's result is the same to the bit whatever else is in the
batch and however its tokens are divided among passes.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

from .adapters import AdapterBank
from .execution import Execution
from .layout import FINAL, ChainOutput, Draws, ForwardOutput, KVLayerSpec, KVTensors, RaggedBatch, address
from .native_abi import (
    FUNCTIONS,
    MAX_HEAD_DIM,
    MAX_INPUTS,
    MOST_INPUTS,
    CacheType,
    ChainRequest,
    NativeOp,
    NativeTable,
    NetworkSpec,
    OpKind,
    PackedLinear,
    Precision,
    RoundsDrafter,
    RoundsRequest,
    RunRequest,
)
from .native_kv import NativeKV, block_bytes
from .native_library import ISAS, Availability, availability, load, set_threads, threads, usable_cores
from .native_lowering import Lowered, NotLowered, Product, Step, lower
from .native_weights import PackedWeight, WeightMemory, pack, shortened
from .ngram_table import NgramTable
from .program import (
    Activation,
    Add,
    Attention,
    Concat,
    Embed,
    Experts,
    GatherRows,
    Linear,
    LocalConv,
    Program,
    RMSNorm,
    Scale,
    Softcap,
    TopK,
    matrices_of,
    routers,
)
from .rope_values import rope_table_values
from .rounds import ROW_BYTES, Drafter, RoundsLimits, RoundsOutput, draft_memory, drafts_in
from .weight_bank import NetworkWeights, WeightBank

__all__ = ["Availability", "NativeExecutor", "availability", "set_threads", "supports", "threads", "usable_cores"]

_CACHE = {torch.float32: CacheType.FLOAT32, torch.bfloat16: CacheType.BFLOAT16}
LONG_HEAD = 16 * 2**20  # bytes that no core's own cache holds: to read them takes longer than to multiply
PACKED, GATED = "packed", "packed, gate and up by turns"


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
    experts = (names for op in program.ops if isinstance(op, Experts) for names in matrices_of(op))
    rows = ((op.weight,) for op in program.ops if isinstance(op, Embed))
    return bank.completes((*linears, *experts, *rows), PACKED, program.shared, weights)


_NO_SCORES = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)


class NativeExecutor:
    """A program bound to its packed weights. Implements `Executor`; hidden states and logits come as float32.

    weights: the program's names -> tensors of its shapes, in any floating dtype; they are read once, here. Those in program.shared
    may be missing if `bank`, another native executor's, has them packed.
    isa: an instruction set to use instead of the best one. Raises NotLowered where `supports` has a reason.
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
        binder = _Binder(library, program, lowered, held, execution)
        self.weight_bytes = binder.bytes_per_token
        self._head = binder.head
        self._shortlist: PackedWeight | None = None
        self._isa = ISAS.index(isa)
        self._held = binder.held  # packed weights, norms and tables, which the network points into
        self._buffers = lowered.buffers
        self._bound: dict[tuple[str, ...], ctypes.Array[ctypes.c_int32]] = {}  # numbers of the buffers that passes have bound
        ops = binder.ops
        spec = NetworkSpec(
            ops,
            len(ops),
            (ctypes.c_int32 * len(lowered.widths))(*lowered.widths),
            (ctypes.c_int32 * len(lowered.places))(*lowered.places),
            len(lowered.widths),
            max(lowered.places, default=-1) + 1,
            program.vocab_size,
            self._cache_type,
            self._isa,
        )
        self._network = ctypes.c_void_p(library.ft_network_create(ctypes.byref(spec)))
        if not self._network:
            raise NotLowered(f"instruction set {isa} on this processor")
        # Not when the process ends: a daemon thread may still be in a pass.
        weakref.finalize(self, library.ft_network_destroy, self._network).atexit = False

    def shorten_chains(self, least_bytes: int = LONG_HEAD) -> None:
        """From now on a chain's scores are those of the head in int4, and only in the panels with the best ones the head's own.

        For drafters: what is guessed is nearly always the same, and a large head takes less reading. Heads below least_bytes, which
        the cache may hold, and those in int4 already stay as they are.
        """
        head = self._head
        if head is None or self._shortlist is not None or head.struct.precision == Precision.INT4 or head.num_bytes < least_bytes:
            return
        self._shortlist = shortened(self._library, self._isa, WeightMemory(), head)
        self._library.ft_network_set_shortlist(self._network, ctypes.byref(self._shortlist.struct))

    def allocate(self, num_blocks: int, block_size: int) -> NativeKV:
        """A cache of num_blocks blocks for this network. Raises ValueError unless block_size is 16."""
        return NativeKV(self._library, self.kv_layers, num_blocks, block_size, self._cache_type)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes that one block of the cache takes over all layers."""
        return sum(block_bytes(self._library, layer, self._cache_type, block_size) for layer in self.kv_layers)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass; see `Executor.run`. inputs: the buffers [T, width] float32 that program.inputs names."""
        assert isinstance(kv, NativeKV)
        # shape[0], not len(): that is a Python function of torch's
        num_tokens, num_logits, num_full = batch.token_ids.shape[0], batch.logits_indices.shape[0], batch.full_logits.shape[0]
        bound = dict(inputs or {})
        for name in map(self._boundary, hidden):
            if name not in bound:  # a boundary may be an input
                bound[name] = torch.empty(num_tokens, self.program.buffers[name], dtype=torch.float32)
        states = {boundary: bound[self._boundary(boundary)] for boundary in hidden}
        argmax, top = _NO_SCORES
        if num_logits:
            argmax, top = torch.empty(num_logits, dtype=torch.int64), torch.empty(num_logits, dtype=torch.float32)
        logits = torch.empty(num_full, self.vocab_size, dtype=torch.float32) if num_full else None
        request = self._request(batch, kv, bound)
        request.num_full = num_full
        request.full_logits = address(batch.full_logits, torch.int64)
        request.logits = None if logits is None else logits.data_ptr()
        request.argmax, request.top = argmax.data_ptr(), top.data_ptr()
        self._check(self._library.ft_network_run(self._network, ctypes.byref(request)))
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
        assert isinstance(kv, NativeKV)
        steps = max(counts.tolist(), default=0)
        token_ids = torch.empty((counts.shape[0], steps), dtype=torch.int64)
        confidence = torch.empty((counts.shape[0], steps), dtype=torch.float32)
        logits: Tensor | None = None
        if draws is not None and draws.keep_logits:
            logits = torch.zeros((counts.shape[0], steps, self.vocab_size), dtype=torch.float32)
        bound = dict(inputs or {})
        request = ChainRequest(self._request(batch, kv, bound), address(counts, torch.int64), steps, choosable=self.vocab_size)
        request.input = request.state = -1
        if self.recurrent is not None:
            name, boundary = self.recurrent
            request.input, request.state = self._buffers[name], self._buffers[self._boundary(boundary)]
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
        self._check(self._library.ft_network_run_chain(self._network, ctypes.byref(request)))
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
        num_rows = len(rows) // ROW_BYTES
        most = limits.most_rounds
        prices = array("f", limits.prices)
        drafts, tokens = draft_memory(most * num_rows), array("i", bytes(4 * most))
        seconds, draft_seconds = array("f", bytes(4 * most)), array("f", bytes(4 * most))
        request = RoundsRequest(
            kv.bases, _address(rows), None if drafter is None else ctypes.pointer(_drafter(drafter)), _table(table), *prices.buffer_info(),
            num_rows, most, limits.most_tokens, limits.most_seconds, limits.ends_with_row,
        )  # fmt: skip
        request.interrupt, request.drafts, request.tokens = interrupt.buffer_info()[0], _address(drafts), tokens.buffer_info()[0]
        request.seconds, request.draft_seconds = seconds.buffer_info()[0], draft_seconds.buffer_info()[0]
        self._check(self._library.ft_network_run_rounds(self._network, ctypes.byref(request)))
        count = request.num_rounds
        return RoundsOutput(drafts_in(drafts, request.num_drafts), seconds[:count], draft_seconds[:count], tokens[:count])

    def _request(self, batch: RaggedBatch, kv: NativeKV, bound: Mapping[str, Tensor]) -> RunRequest:
        """The parts that all kinds of passes share. Its pointers are good for as long as batch, kv and bound are."""
        assert batch.block_size == kv.block_size
        request = RunRequest(batch.in_c, kv.bases)
        if bound:
            names = tuple(bound)
            if names not in self._bound:
                self._bound[names] = (ctypes.c_int32 * len(names))(*(self._buffers[name] for name in names))
            request.num_bound, request.bound = len(names), self._bound[names]
            request.bound_memory = (ctypes.c_void_p * len(bound))(*(address(tensor, torch.float32) for tensor in bound.values()))
        return request

    def _boundary(self, boundary: int) -> str:
        return self.program.final if boundary == FINAL else self.program.boundaries[boundary]

    def _check(self, message: bytes | None) -> None:
        if message is not None:
            raise RuntimeError(f"the native executor failed: {message.decode()}")


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _drafter(drafter: Drafter) -> RoundsDrafter:
    executor, kv = drafter.executor, drafter.kv
    assert isinstance(executor, NativeExecutor) and isinstance(kv, NativeKV)
    return RoundsDrafter(
        executor._network, kv.bases, drafter.choosable, drafter.readable, drafter.max_length, drafter.samples, drafter.threshold
    )


def _table(table: NgramTable | None) -> NativeTable:
    return NativeTable() if table is None else NativeTable(*table.addresses, table.shift, table.max_n)


class _Binder:
    """Turns steps into ops with addresses, packing weights on the way."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: Program,
        lowered: Lowered,
        weights: NetworkWeights,
        execution: Execution,
    ) -> None:
        self._library, self._program, self._lowered, self._weights = library, program, lowered, weights
        self._dtype = Precision.BFLOAT16 if execution.dtype == torch.bfloat16 else Precision.FLOAT32
        self._products = {None: self._dtype, "int8": Precision.INT8, "int4": Precision.INT4}[execution.quantization]
        self._memory = WeightMemory()
        self._ropes = {name: rope_table_values(table, program.max_model_len) for name, table in program.ropes.items()}
        self.held: list[object] = list(self._ropes.values())
        self._routers = routers(lowered.steps)
        products = [step for step in lowered.steps if isinstance(step, Product)]
        # The head first: an embedding tied to it reads the same packed rows.
        for product in reversed(products):
            self._pack_product(product)
        self.bytes_per_token = sum(self._pack_product(product).num_bytes for product in products)
        for step in lowered.steps:
            if isinstance(step, Experts):
                self.bytes_per_token += sum(weight.num_bytes for weight in self._pack_experts(step)) * step.top // len(step.gates)
        self.head = next((self._pack_product(product) for product in products if product.is_head), None)
        self.ops = (NativeOp * len(lowered.steps))(*(self._bind(step) for step in lowered.steps))

    def _bind(self, step: Step) -> NativeOp:
        number = self._lowered.buffers
        op = NativeOp(residual=-1, output=-1, second_output=-1, scale=1.0)
        assert len(step.inputs) <= MAX_INPUTS
        op.num_inputs = len(step.inputs)
        for i, name in enumerate(step.inputs):
            op.inputs[i] = number[name]
        if step.outputs:
            op.output = number[step.outputs[0]]
        op.for_logits = any(name in self._lowered.for_logits for name in step.outputs)
        match step:
            case Product():
                self._bind_product(op, step)
            case Embed():
                op.kind, op.scale = OpKind.EMBED, step.scale
                op.weights = ctypes.pointer(self._pack_rows(step.weight).struct)
            case RMSNorm():
                op.kind = OpKind.NORM
                self._bind_norm(op, step)
            case Attention():
                self._bind_attention(op, step)
            case Experts():
                op.kind, op.function, op.outputs = OpKind.EXPERTS, FUNCTIONS[step.function], step.top
                op.num_experts, op.renormalise = len(step.gates), step.renormalise
                packed = (PackedLinear * (2 * len(step.gates)))(*(weight.struct for weight in self._pack_experts(step)))
                self.held.append(packed)
                op.weights = ctypes.cast(packed, ctypes.POINTER(PackedLinear))
            case LocalConv():
                sides, taps, _ = self._program.weights[step.weight]
                op.kind, op.outputs = OpKind.LOCAL_CONV, taps
                op.groups = self._program.buffers[step.inputs[1]] // (sides * taps)
                op.first_kernel = step.side * taps * op.groups
                op.norm_weight = self._vector(step.weight, part=step.side)
            case Activation():
                op.kind, op.function, op.gated = OpKind.ACTIVATION, FUNCTIONS[step.function], step.gated
            case Add():
                op.kind = OpKind.ADD
            case Concat():
                op.kind = OpKind.CONCAT
            case GatherRows():
                op.kind = OpKind.GATHER_ROWS
            case Scale():
                op.kind, op.scale = OpKind.SCALE, step.factor
            case Softcap():
                op.kind, op.softcap = OpKind.SOFTCAP, step.cap
            case TopK():
                op.kind, op.outputs, op.second_output = OpKind.TOP_K, step.k, number[step.outputs[1]]
            case _:
                raise NotLowered(type(step).__name__)
        return op

    def _bind_product(self, op: NativeOp, product: Product) -> None:
        op.kind = OpKind.LINEAR
        op.weights = ctypes.pointer(self._pack_product(product).struct)
        op.is_head = product.is_head
        op.scale, op.softcap = product.scale, product.softcap
        op.outputs = self._program.buffers[product.linear.outputs[0]]
        op.num_inputs = 1
        if len(product.inputs) == 2:
            op.residual = self._lowered.buffers[product.inputs[1]]
        if product.activation is not None:
            op.function, op.gated = FUNCTIONS[product.activation.function], product.activation.gated
        if product.norm is not None:
            op.normalise = 1
            self._bind_norm(op, product.norm)

    def _bind_norm(self, op: NativeOp, norm: RMSNorm) -> None:
        op.eps = norm.eps
        op.norm_weight = self._vector(norm.weight, norm.add_one)
        op.norm_bias = self._vector(norm.bias)

    def _bind_attention(self, op: NativeOp, attention: Attention) -> None:
        spec = self._program.kv_layers[attention.layer]
        op.kind = OpKind.ATTENTION
        op.layer, op.num_heads, op.kv_heads = attention.layer, attention.num_heads, spec.num_kv_heads
        op.k_dim, op.v_dim, op.window = spec.k_dim, spec.v_dim, spec.window or 0
        op.scale, op.softcap, op.eps = attention.scale, attention.softcap or 0.0, attention.norm_eps
        if attention.rope:
            table = self._ropes[attention.rope]
            op.rope, op.rope_half = table.data_ptr(), table.shape[1] // 2
        op.q_norm = self._vector(attention.q_norm, attention.norm_add_one)
        op.k_norm = self._vector(attention.k_norm, attention.norm_add_one)

    def _vector(self, name: str, add_one: bool = False, part: int | None = None) -> int | None:
        """Address of a weight, or of one part of it, as float32, None for no name."""
        if not name:
            return None
        whole = self._weights.tensor(name)
        vector = (whole if part is None else whole[part]).float().contiguous() + (1.0 if add_one else 0.0)
        self.held.append(vector)
        return vector.data_ptr()

    def _pack_product(self, product: Product) -> PackedWeight:
        linear = product.linear
        precision = self._dtype if product.outputs[0] in self._routers else self._products
        return self._packed(linear.weights, linear.biases if any(linear.biases) else (), precision, product.is_gated)

    def _pack_experts(self, experts: Experts) -> list[PackedWeight]:
        """Gate and up of each expert, then down of each."""
        names = matrices_of(experts)
        return [self._packed(some, (), self._products, gated=len(some) == 2) for some in names]

    def _pack_rows(self, name: str) -> PackedWeight:
        """An embedding: rows can only be taken from the format that the network computes in."""
        return self._packed((name,), (), self._dtype, one_form=True)

    def _packed(
        self, names: tuple[str, ...], biases: tuple[str, ...], precision: Precision, gated: bool = False, one_form: bool = False
    ) -> PackedWeight:
        def make() -> PackedWeight:
            matrices = [self._weights.tensor(name) for name in names]
            parts = zip(biases, matrices, strict=False)
            bias = [self._weights.tensor(name).float() if name else torch.zeros(len(matrix), dtype=torch.float32) for name, matrix in parts]
            return pack(self._library, self._memory, matrices, torch.cat(bias) if bias else None, precision, gated)

        packed = self._weights.get((*names, *biases), GATED if gated else PACKED, precision, make, one_form)
        self.held.append(packed)
        return packed

