"""The steps of a lowered program as the native library reads them: ops with addresses of packed weights, vectors and tables.

Owns what the ops point into, but for the factors of adapters, which are their bank's. Knows no batch and runs nothing.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from .adapters import AdapterBank
from .execution import Execution
from .native_abi import FUNCTIONS, MAX_INPUTS, NativeLowRank, NativeOp, OpKind, PackedLinear, Precision
from .native_lowering import Lowered, NotLowered, Product, Step
from .native_weights import PackedWeight, WeightMemory, pack
from .ops import (
    Activation,
    Add,
    Attention,
    CausalConv,
    Concat,
    Embed,
    Experts,
    GatedDelta,
    GatherRows,
    LocalConv,
    LowRank,
    RMSNorm,
    Scale,
    Softcap,
    StateSpace,
    TopK,
)
from .program import Program, matrices_of, wide_products
from .rope_values import query_growth, rope_table_values
from .weight_bank import NetworkWeights

PACKED, GATED = "packed", "packed, gate and up by turns"
_FACTORS = {torch.float32: Precision.FLOAT32, torch.bfloat16: Precision.BFLOAT16}


class ProgramWeights:
    """A program's weights as native ops read them: packed, as float32, as tables. Made once for all networks that read them."""

    def __init__(
        self, library: ctypes.CDLL, program: Program, lowered: Lowered, weights: NetworkWeights, execution: Execution, precision: Precision
    ) -> None:
        """precision: of what is not quantised."""
        self._library, self._weights = library, weights
        self._dtype = precision
        self._products = {None: self._dtype, "int8": Precision.INT8, "int4": Precision.INT4}[execution.quantization]
        self._memory = WeightMemory()
        self._wide_products = wide_products(program)
        self._held: list[PackedWeight] = []
        self._vectors: dict[tuple[str, bool, int | None], torch.Tensor] = {}
        self.ropes = {name: rope_table_values(table, program.max_model_len) for name, table in program.ropes.items()}
        self.growths = {name: query_growth(table, program.max_model_len) for name, table in program.ropes.items()}
        products = [step for step in lowered.steps if isinstance(step, Product)]
        # The head first: an embedding tied to it reads the same packed rows.
        for product in reversed(products):
            self.product(product)
        self.bytes_per_token = sum(self.product(product).num_bytes for product in products)
        for step in lowered.steps:
            if isinstance(step, Experts):
                self.bytes_per_token += sum(weight.num_bytes for weight in self.experts(step)) * step.top // len(step.gates)
        self.has_compact = any(weight.struct.precision == Precision.COMPACT for weight in self._held)
        self.head = next((self.product(product) for product in products if product.is_head), None)

    def product(self, product: Product) -> PackedWeight:
        linear = product.linear
        precision = self._dtype if product.outputs[0] in self._wide_products else self._products
        return self._packed(linear.weights, linear.biases if any(linear.biases) else (), precision, product.is_gated)

    def experts(self, experts: Experts) -> list[PackedWeight]:
        """Gate and up of each expert, then down of each."""
        count, names = len(experts.gates), matrices_of(experts)

        def bias(number: int) -> torch.Tensor:
            assert experts.biases
            if number >= count:
                return self._weights.tensor(experts.biases[1])[number - count].float()
            by_turns = self._weights.tensor(experts.biases[0])[number].float()
            return torch.cat((by_turns[::2], by_turns[1::2]))

        makers = [partial(bias, number) if experts.biases else None for number in range(len(names))]
        return [self._packed(names[i], experts.biases, self._products, i < count, bias=made) for i, made in enumerate(makers)]

    def rows(self, name: str) -> PackedWeight:
        """An embedding: rows can only be taken from the format that the network computes in."""
        return self._packed((name,), (), self._dtype, one_form=True)

    def vector(self, name: str, add_one: bool = False, part: int | None = None) -> int | None:
        """Address of a weight, or of one part of it, as float32, None for no name."""
        if not name:
            return None
        key = name, add_one, part
        if key not in self._vectors:
            whole = self._weights.tensor(name)
            self._vectors[key] = (whole if part is None else whole[part]).float().contiguous() + (1.0 if add_one else 0.0)
        return self._vectors[key].data_ptr()

    def taps(self, name: str) -> int:
        """Address of a causal convolution's weight as [taps, width] float32."""
        if (name, False, None) not in self._vectors:
            self._vectors[name, False, None] = self._weights.tensor(name).float().flatten(1).t().contiguous()
        return self._vectors[name, False, None].data_ptr()

    def rate(self, name: str) -> int:
        """Address of -exp(weight), float32: what a memory's decay is made of."""
        if (name, False, None) not in self._vectors:
            self._vectors[name, False, None] = -self._weights.tensor(name).float().exp().contiguous()
        return self._vectors[name, False, None].data_ptr()

    def _packed(
        self, names: tuple[str, ...], biases: tuple[str, ...], precision: Precision, gated: bool = False, one_form: bool = False,
        bias: Callable[[], torch.Tensor] | None = None,
    ) -> PackedWeight:
        """bias: where `biases` are not those of these matrices alone."""

        def make() -> PackedWeight:
            matrices = [self._weights.tensor(name) for name in names]
            if bias is not None:
                return pack(self._library, self._memory, matrices, bias(), precision, gated)
            parts = zip(biases, matrices, strict=False)
            some = [self._weights.tensor(name).float() if name else torch.zeros(len(matrix), dtype=torch.float32) for name, matrix in parts]
            return pack(self._library, self._memory, matrices, torch.cat(some) if some else None, precision, gated)

        form = Precision.BFLOAT16 if precision == Precision.COMPACT else precision  # the same numbers come out of both
        packed = self._weights.get((*names, *biases), GATED if gated else PACKED, form, make, one_form)
        self._held.append(packed)
        return packed


class BoundOps:
    """A lowered program's ops, and what they point into. adapters: where it has LowRank ops."""

    def __init__(self, program: Program, lowered: Lowered, weights: ProgramWeights, adapters: AdapterBank | None = None) -> None:
        self._program, self._lowered, self._weights, self._adapters = program, lowered, weights, adapters
        self._held: list[object] = []
        self.array = (NativeOp * len(lowered.steps))(*(self._bind(step) for step in lowered.steps))

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
                op.weights = ctypes.pointer(self._weights.rows(step.weight).struct)
            case RMSNorm():
                op.kind = OpKind.NORM
                self._bind_norm(op, step)
            case Attention():
                self._bind_attention(op, step)
            case Experts():
                op.kind, op.function, op.outputs = OpKind.EXPERTS, FUNCTIONS[step.function], step.top
                op.num_experts, op.renormalise, op.sigmoid = len(step.gates), step.renormalise, step.score == "sigmoid"
                op.groups, op.top_groups, op.scale = step.num_groups, step.top_groups, step.scale
                op.norm_bias, op.norm_weight = self._weights.vector(step.correction), self._weights.vector(step.scales)
                packed = (PackedLinear * (2 * len(step.gates)))(*(weight.struct for weight in self._weights.experts(step)))
                self._held.append(packed)
                op.weights = ctypes.cast(packed, ctypes.POINTER(PackedLinear))
            case LocalConv():
                sides, taps, _ = self._program.weights[step.weight]
                op.kind, op.outputs = OpKind.LOCAL_CONV, taps
                op.groups = self._program.buffers[step.inputs[1]] // (sides * taps)
                op.first_kernel = step.side * taps * op.groups
                op.norm_weight = self._weights.vector(step.weight, part=step.side)
            case CausalConv():
                op.kind, op.layer, op.function = OpKind.CAUSAL_CONV, step.layer, FUNCTIONS[step.function]
                op.outputs = self._program.weights[step.weight][-1]
                op.norm_weight, op.norm_bias = self._weights.taps(step.weight), self._weights.vector(step.bias)
            case GatedDelta():
                op.kind, op.eps, op.norm_weight = OpKind.GATED_DELTA, step.norm_eps, self._weights.vector(step.norm)
                self._bind_memory(op, step)
            case StateSpace():
                op.kind, op.least, op.most, op.skip = OpKind.STATE_SPACE, step.least, step.most, self._weights.vector(step.skip)
                self._bind_memory(op, step)
            case LowRank():
                self._bind_low_rank(op, step)
            case Activation():
                op.kind, op.function, op.gated = OpKind.ACTIVATION, FUNCTIONS[step.function], step.gated
            case Add():
                op.kind = OpKind.ADD
            case Concat():
                op.kind, op.groups = OpKind.CONCAT, step.groups
            case GatherRows():
                op.kind = OpKind.GATHER_ROWS
            case Scale():
                op.kind, op.scale, op.norm_weight = OpKind.SCALE, step.factor, self._weights.vector(step.weight)
            case Softcap():
                op.kind, op.softcap = OpKind.SOFTCAP, step.cap
            case TopK():
                op.kind, op.outputs, op.second_output = OpKind.TOP_K, step.k, number[step.outputs[1]]
            case _:
                raise NotLowered(type(step).__name__)
        return op

    def _bind_product(self, op: NativeOp, product: Product) -> None:
        op.kind = OpKind.LINEAR
        op.weights = ctypes.pointer(self._weights.product(product).struct)
        op.is_head, op.groups = product.is_head, product.groups
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

    def _bind_low_rank(self, op: NativeOp, step: LowRank) -> None:
        assert self._adapters is not None, "a program with adapters needs a bank"
        factors = self._adapters.factors[step.weights]
        num_weights, num_slots, rank, width = factors.down.shape
        outputs = (ctypes.c_int32 * num_weights)(*(up.shape[2] for up in factors.ups))
        ups = (ctypes.c_void_p * num_weights)(*(up.data_ptr() for up in factors.ups))
        low_rank = NativeLowRank(
            _FACTORS[factors.down.dtype], num_weights, num_slots, rank, width, step.outputs[0] in self._lowered.by_turns,
            ctypes.addressof(outputs), factors.ranks.data_ptr(), factors.down.data_ptr(), ups,
        )
        self._held += (factors, outputs, ups, low_rank)
        op.kind, op.low_rank = OpKind.LOW_RANK, ctypes.pointer(low_rank)
        op.num_inputs = 1
        if len(step.inputs) == 2:
            op.residual = self._lowered.buffers[step.inputs[1]]

    def _bind_memory(self, op: NativeOp, step: GatedDelta | StateSpace) -> None:
        op.layer, op.num_heads, op.kv_heads, op.k_dim, op.v_dim = step.layer, step.num_v_heads, step.num_k_heads, step.k_dim, step.v_dim
        op.rate, op.step = self._weights.rate(step.decay), self._weights.vector(step.step)

    def _bind_norm(self, op: NativeOp, norm: RMSNorm) -> None:
        op.eps, op.centred, op.groups = norm.eps, norm.centred, norm.groups
        op.norm_weight = self._weights.vector(norm.weight, norm.add_one)
        op.norm_bias = self._weights.vector(norm.bias)

    def _bind_attention(self, op: NativeOp, attention: Attention) -> None:
        spec = self._program.kv_layers[attention.layer]
        op.kind = OpKind.ATTENTION
        op.layer, op.num_heads, op.kv_heads = attention.layer, attention.num_heads, spec.num_kv_heads
        op.k_dim, op.v_dim, op.window, op.values_in_keys = spec.k_dim, spec.v_dim, spec.window or 0, spec.values_in_keys
        op.scale, op.softcap, op.eps = attention.scale, attention.softcap or 0.0, attention.norm_eps
        if attention.rope:
            table = self._weights.ropes[attention.rope]
            op.rope, op.rope_half = table.data_ptr(), table.shape[1] // 2
            growth = self._weights.growths[attention.rope]
            op.growth = None if growth is None else growth.data_ptr()
        op.sinks = self._weights.vector(attention.sinks)
        op.q_norm = self._weights.vector(attention.q_norm, attention.norm_add_one)
        op.k_norm = self._weights.vector(attention.k_norm, attention.norm_add_one)
        op.norm_last = attention.norm_last
