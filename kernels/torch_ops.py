"""What each op of a program means, in torch: the readable reference, and the path for machines without a native executor.

Owns the tensors of a program, packed as its ops want them. Knows no checkpoint and nothing that runs a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import FUNCTIONS, gated
from .adapters import AdapterBank, Factors, slots_of_tokens
from .attention import AttentionPlan, paged_attention
from .expert_routes import routes
from .layout import RaggedBatch, RowStates
from .ops import (
    Activation,
    Add,
    ArgMax,
    Attention,
    BlockLinear,
    CausalConv,
    Concat,
    Embed,
    Experts,
    GatedDelta,
    GatherRows,
    Linear,
    LocalConv,
    LowRank,
    Op,
    RMSNorm,
    Scale,
    Softcap,
    StateSpace,
    TopK,
)
from .program import Program, matrices_of, own_buffers, wide_products
from .recurrence import Parts, RecurrencePlan, add, correct, states_of, to_length_one
from .rope_values import query_growth, rotated, rotation_at
from .row_maxima import max_of_rows
from .torch_kv import TorchKV
from .weight_bank import NetworkWeights

ROWS, MATRIX = "rows", "matrix"


@dataclass
class Pass:
    """What the ops of one pass share."""

    buffers: dict[str, Tensor]
    batch: RaggedBatch
    kv: TorchKV
    tables: Mapping[str, Tensor]  # rotary, [positions, 2 n] cosines and sines
    last_reads: Sequence[str] = ()  # buffers that nobody reads after the step that is taken
    _rotations: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _shared: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Made when the first reference attention asks: it reads the batch on the host."""
        return AttentionPlan(self.batch)

    @cached_property
    def recurrence(self) -> RecurrencePlan:
        """The same of the reference's recurrent layers."""
        return RecurrencePlan(self.batch)

    @cached_property
    def states(self) -> RowStates:
        """See `states_of`."""
        return states_of(self.batch)

    @cached_property
    def places(self) -> Tensor:
        """[T] of each token, among the new ones of its row. Not waited for."""
        tokens = torch.arange(self.batch.token_ids.shape[0], device=self.batch.token_ids.device, dtype=torch.int32)
        return tokens - self.batch.query_start_loc[self.batch.rows_of_tokens]

    @cached_property
    def slots(self) -> Tensor | None:
        """See `slots_of_tokens`."""
        return slots_of_tokens(self.batch)

    def shared(self, name: str, make: Callable[[Pass], Tensor]) -> Tensor:
        """What kernels of several layers read, made when the first one asks."""
        if name not in self._shared:
            self._shared[name] = make(self)
        return self._shared[name]

    def rotation(self, name: str) -> tuple[Tensor, Tensor]:
        """cos, sin [T, 1, rotated dims] of the batch's positions."""
        if name not in self._rotations:
            self._rotations[name] = rotation_at(self.tables[name], self.batch.positions)
        return self._rotations[name]


Step = Callable[[Pass], None]


class Binder:
    """Turns ops into functions that already hold their weights, so that a pass is a loop over calls."""

    def __init__(
        self,
        program: Program,
        weights: NetworkWeights,
        dtype: torch.dtype,
        device: torch.device | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.adapters = adapters
        self.kv_layers, self.widths, self.weights, self.dtype = program.kv_layers, program.buffers, weights, dtype
        self.logits = program.logits
        self.shapes = program.weights
        self._ropes, self._max_model_len = program.ropes, program.max_model_len
        self.wide_products = wide_products(program)
        self.own_buffers = own_buffers(program)
        self._embeddings = {op.weight for op in program.ops if isinstance(op, Embed)}
        if device is not None:
            # Tensors name their GPU by number: "cuda" would never be equal to it.
            is_nameless = device.type == "cuda" and device.index is None
            self.device = torch.device("cuda", torch.cuda.current_device()) if is_nameless else device
            return
        smallest = min(filter(weights.is_own, program.weights), key=lambda name: math.prod(self.shapes[name]), default=None)
        self.device = torch.device("cpu") if smallest is None else weights.tensor(smallest).device

    def __call__(self, op: Op) -> Step:
        match op:
            case Embed():
                return self._embed(op)
            case RMSNorm():
                return self._rms_norm(op)
            case Linear():
                return self._linear(op)
            case BlockLinear():
                return self._block_linear(op)
            case LowRank():
                return self._low_rank(op)
            case Attention():
                return self._attention(op)
            case Activation():
                return _activation(op)
            case Experts():
                return self._experts(op)
            case LocalConv():
                return self._local_conv(op)
            case CausalConv():
                return self._causal_conv(op)
            case GatedDelta():
                return self._gated_delta(op)
            case StateSpace():
                return self._state_space(op)
            case Add(inputs=(x, y)):
                return _elementwise(op, lambda b: b[x] + b[y])
            case Concat(inputs=names, groups=1):
                return _elementwise(op, lambda b: torch.cat([b[name] for name in names], -1))
            case Concat(inputs=names, groups=groups):
                return _elementwise(op, lambda b: torch.cat([b[name].unflatten(-1, (groups, -1)) for name in names], -1).flatten(1))
            case Scale(inputs=(x,), factor=factor):
                by = self.load(op.weight) * factor if op.weight else factor
                return _elementwise(op, lambda b: b[x] * by)
            case Softcap(inputs=(x,), cap=cap):
                return _elementwise(op, lambda b: (b[x] / cap).tanh_().mul_(cap))
            case GatherRows():
                return _gather_rows(op)
            case ArgMax() | TopK():
                return _best(op)

    def _embed(self, op: Embed) -> Step:
        weight, scale, (output,) = self.rows(op.weight), op.scale, op.outputs

        def step(state: Pass) -> None:
            rows = weight.index_select(0, state.batch.token_ids)
            state.buffers[output] = rows if scale == 1.0 else rows * scale

        return step

    def _rms_norm(self, op: RMSNorm) -> Step:
        weight = self.norm_weight(op.weight, self.widths[op.inputs[0]], op.add_one)
        whole = self._normaliser(weight if op.groups == 1 else weight.view(op.groups, -1), op.eps)
        normalise = whole if op.groups == 1 else lambda x: whole(x.unflatten(-1, (op.groups, -1))).flatten(1)
        bias = self.load(op.bias) if op.bias else None
        (x,), (output,) = op.inputs, op.outputs

        def step(state: Pass) -> None:
            rows = state.buffers[x]
            if op.centred:
                rows = rows.float() - rows.mean(-1, keepdim=True, dtype=torch.float32)
            normed = normalise(rows)
            state.buffers[output] = normed if bias is None else normed + bias

        return step

    def _linear(self, op: Linear) -> Step:
        matrix = self.matrix(op.weights)
        bias = self.biases(op)
        x, output, residual = op.inputs[0], op.outputs[0], op.inputs[1] if len(op.inputs) == 2 else None

        def step(state: Pass) -> None:
            buffers = state.buffers
            if residual is not None:
                result = torch.addmm(buffers[residual], buffers[x], matrix)
                buffers[output] = result if bias is None else result.add_(bias)
            elif bias is not None:
                buffers[output] = torch.addmm(bias, buffers[x], matrix)
            else:
                buffers[output] = torch.mm(buffers[x], matrix)

        return step

    def _block_linear(self, op: BlockLinear) -> Step:
        blocks = self.blocks(op)
        (x,), (output,) = op.inputs, op.outputs

        def step(state: Pass) -> None:
            rows = state.buffers[x].unflatten(-1, (op.groups, -1)).transpose(0, 1)
            state.buffers[output] = torch.bmm(rows, blocks).transpose(0, 1).flatten(1)

        return step

    def _low_rank(self, op: LowRank) -> Step:
        factors = self.factors(op)
        x, output, residual = op.inputs[0], op.outputs[0], op.inputs[1] if len(op.inputs) == 2 else None
        out = sum(self.shapes[name][0] for name in op.weights)

        def step(state: Pass) -> None:
            rows, others = state.buffers[x], None if residual is None else state.buffers[residual]
            if state.slots is None:
                state.buffers[output] = rows.new_zeros(len(rows), out) if others is None else others
                return
            added = factors.added(rows, state.slots)
            state.buffers[output] = added if others is None else others + added

        return step

    def _local_conv(self, op: LocalConv) -> Step:
        base = self.load(op.weight)  # [sides, taps, width]
        (x, kernels), (output,) = op.inputs, op.outputs
        sides, taps, width = base.shape
        groups = self.widths[kernels] // (sides * taps)
        fixed = base[op.side].view(taps, groups, width // groups)

        def step(state: Pass) -> None:
            rows = state.buffers[x].view(-1, groups, width // groups)
            dynamic = state.buffers[kernels].view(-1, sides, taps, groups, 1)[:, op.side]
            result = (fixed[0] + dynamic[:, 0]) * rows
            for tap in range(1, taps):
                earlier = F.pad(rows, (0, 0, 0, 0, tap, 0))[: len(rows)]
                earlier = earlier.masked_fill((state.places < tap)[:, None, None], 0.0)  # of another row, which may hold NaN
                result = result + (fixed[tap] + dynamic[:, tap]) * earlier
            state.buffers[output] = result.flatten(1)

        return step

    def _causal_conv(self, op: CausalConv) -> Step:
        weight = self.load(op.weight).flatten(1)
        bias = self.load(op.bias) if op.bias else None
        (x,), (output,), layer = op.inputs, op.outputs, op.layer
        function = FUNCTIONS[op.function]

        def step(state: Pass) -> None:
            state.buffers[output] = function(state.recurrence.convolved(state.kv, layer, state.buffers[x], weight, bias))

        return step

    def _gated_delta(self, op: GatedDelta) -> Step:
        num_k, num_v, k_dim, v_dim = op.num_k_heads, op.num_v_heads, op.k_dim, op.v_dim
        decay = -self.weights.tensor(op.decay).to(self.device).float().exp()
        offset = self.float32(op.step)
        normalise = self._normaliser(self.norm_weight(op.norm, v_dim, add_one=False), op.norm_eps)
        shape = num_v, k_dim, v_dim
        qkv_widths = [num_k * k_dim] * 2 + [num_v * v_dim]

        def split(kept: Tensor) -> Parts:
            """kept [n, q | k | v | b | a]."""
            q, k, v, b, a = kept.float().split_with_sizes([*qkv_widths, num_v, num_v], -1)
            q, k = (to_length_one(x.view(-1, num_k, k_dim)).repeat_interleave(num_v // num_k, 1) for x in (q, k))
            return q * k_dim**-0.5, k, v.view(-1, num_v, v_dim), (decay * F.softplus(a + offset)).exp(), b.sigmoid()

        def step(state: Pass) -> None:
            qkv, z, *numbers = (state.buffers[name] for name in op.inputs)
            read = state.recurrence.scanned(state.kv, op.layer, shape, torch.cat([qkv, *numbers], -1), split, correct)
            gate = F.silu(z.view(-1, num_v, v_dim).float())
            state.buffers[op.outputs[0]] = normalise(read.to(qkv.dtype)).mul(gate).to(qkv.dtype).flatten(1)

        return step

    def _state_space(self, op: StateSpace) -> Step:
        num_k, num_v, k_dim, v_dim = op.num_k_heads, op.num_v_heads, op.k_dim, op.v_dim
        decay = -self.weights.tensor(op.decay).to(self.device).float().exp()
        offset, skip = self.float32(op.step), self.float32(op.skip)
        values, keys = num_v * v_dim, num_k * k_dim

        def split(kept: Tensor) -> Parts:
            """kept [n, v | k | q | a]."""
            v, k, q, a = kept.float().split_with_sizes([values, keys, keys, num_v], -1)
            k, q = (x.view(-1, num_k, k_dim).repeat_interleave(num_v // num_k, 1) for x in (k, q))
            steps = F.softplus(a + offset).clamp(op.least, op.most)
            return q, k, v.view(-1, num_v, v_dim), (decay * steps).exp(), steps

        def step(state: Pass) -> None:
            vkq, a = (state.buffers[name] for name in op.inputs)
            read = state.recurrence.scanned(state.kv, op.layer, (num_v, k_dim, v_dim), torch.cat([vkq, a], -1), split, add)
            skipped = vkq[:, :values].float().view(-1, num_v, v_dim) * skip[:, None]
            state.buffers[op.outputs[0]] = (read + skipped).to(vkq.dtype).flatten(1)

        return step

    def _experts(self, op: Experts) -> Step:
        matrices = [self.matrix(names) for names in matrices_of(op)]
        gates_ups, downs = matrices[: len(op.gates)], matrices[len(op.gates) :]
        function, (x, logits), output = op.function, op.inputs, op.outputs[0]
        correction, scales = self.optional(op.correction), self.optional(op.scales)
        inner, outer = self.expert_biases(op)

        def step(state: Pass) -> None:
            rows = state.buffers[x]
            chosen, weights = routes(op, state.buffers[logits].float(), correction, scales)
            results = rows.new_empty(*chosen.shape, rows.shape[1])
            for expert in chosen.unique().tolist():
                some = (chosen == expert).nonzero(as_tuple=True)  # (row, rank)
                gate, up = _biased(torch.mm(rows[some[0]], gates_ups[expert]), inner, expert).chunk(2, -1)
                results[some] = _biased(torch.mm(gated(function, gate, up), downs[expert]), outer, expert)
            state.buffers[output] = (results * weights[..., None]).sum(1).to(rows.dtype)

        return step

    def _attention(self, op: Attention) -> Step:
        spec, layer, num_heads = self.kv_layers[op.layer], op.layer, op.num_heads
        num_written = 0 if op.frozen else spec.num_kv_heads
        num_rotated = num_heads + num_written  # heads of q and k, which share their treatment
        qk_width, v_shape = num_rotated * spec.k_dim, (num_written, spec.v_dim)
        normalise = None
        if op.q_norm or op.k_norm:
            names = [op.q_norm] * num_heads + [op.k_norm] * num_written
            head_weights = [self.norm_weight(name, spec.k_dim, op.norm_add_one) for name in names]
            normalise = self._normaliser(torch.stack(head_weights), op.norm_eps)
        growth = self.growth(op)
        sinks = self.optional(op.sinks)

        def step(state: Pass) -> None:
            buffers = state.buffers
            packed = buffers[op.inputs[0]] if len(op.inputs) == 1 else torch.cat([buffers[name] for name in op.inputs], -1)
            tokens = len(packed)
            heads = packed[:, :qk_width].view(tokens, num_rotated, spec.k_dim)
            v = packed[:, qk_width:].view(tokens, *v_shape) if not spec.values_in_keys else None
            if normalise is not None and not op.norm_last:
                heads = normalise(heads)
            if op.rope:
                heads = rotated(heads, *state.rotation(op.rope))
            if normalise is not None and op.norm_last:
                heads = normalise(heads)
            q, k = heads[:, :num_heads], heads[:, num_heads:]
            v = k[..., -spec.v_dim :] if v is None else v
            if not num_heads:
                state.plan.write(state.kv, layer, k, v)
                return
            if growth is not None:
                q = (q * growth.index_select(0, state.batch.positions)[:, None, None]).to(q.dtype)
            k, v = (None, None) if op.frozen else (k, v)
            attended = paged_attention(q, k, v, state.kv, layer, state.plan, op.scale, spec.window, op.softcap, sinks)
            buffers[op.outputs[0]] = attended.reshape(tokens, -1)

        return step

    def _normaliser(self, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        """x -> x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 within; weight [n] or [heads, n].

        sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n): half the torch calls of the textbook form.
        """
        size = weight.shape[-1]
        weight = weight * math.sqrt(size)
        floor = torch.tensor(math.sqrt(size * eps), device=self.device, dtype=torch.float32)
        dtype = self.dtype

        def normalise(x: Tensor) -> Tensor:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            normed = (x / torch.hypot(length, floor)).mul_(weight)
            return normed if dtype == torch.float32 else normed.to(dtype)

        return normalise

    def factors(self, op: LowRank) -> Factors:
        assert self.adapters is not None, "a program with adapters needs a bank"
        return self.adapters.factors[op.weights]

    def norm_weight(self, name: str, size: int, add_one: bool) -> Tensor:
        if not name:
            return torch.ones(size, device=self.device, dtype=torch.float32)
        return self.weights.tensor(name).to(self.device).float() + (1.0 if add_one else 0.0)

    def float32(self, name: str) -> Tensor:
        """What is added up in float32 whatever the network's number format."""
        return self.weights.tensor(name).to(self.device, torch.float32, copy=True)

    def growth(self, op: Attention) -> Tensor | None:
        """See `query_growth`."""
        return query_growth(self._ropes[op.rope], self._max_model_len, self.device) if op.rope else None

    def rows(self, name: str) -> Tensor:
        """[rows, width], for looking rows up."""
        return self.weights.get((name,), ROWS, self.dtype, lambda: self.load(name))

    def matrix(self, names: tuple[str, ...]) -> Tensor:
        """[in, out], side by side."""
        return self.weights.get(names, MATRIX, self.dtype, lambda: self.packed(names))

    def packed(self, names: tuple[str, ...]) -> Tensor:
        """`matrix`, kept by nobody; a view of the rows of an embedding that is a matrix too (a tied head)."""
        first, *others = names
        if others:
            matrix = torch.cat([self.weights.tensor(name).to(self.device, self.dtype) for name in names]).t()
        else:
            matrix = (self.rows if first in self._embeddings else self.load)(first).t()
        # [in, out] in memory; bfloat16 kernels, and GPUs, like the stored layout as well or better
        return matrix.contiguous() if self.dtype == torch.float32 and self.device.type == "cpu" else matrix

    def blocks(self, op: BlockLinear) -> Tensor:
        """[groups, width / groups, n]."""
        return self.matrix((op.weight,)).t().unflatten(0, (op.groups, -1)).mT

    def load(self, name: str) -> Tensor:
        copy = self.weights.is_own(name) and self.device.type == "cpu"  # never a view of a file that might change
        return self.weights.tensor(name).to(self.device, self.dtype, copy=copy)

    def biases(self, op: Linear) -> Tensor | None:
        """[out], of all its weights; zeros where only some have one."""
        return torch.cat([self._bias(*names) for names in zip(op.weights, op.biases, strict=True)]) if op.biases else None

    def expert_biases(self, op: Experts) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """[experts, gate | up] and [experts, in]."""
        if not op.biases:
            return None, None
        inner, outer = map(self.load, op.biases)
        return torch.cat((inner[:, ::2], inner[:, 1::2]), -1), outer

    def optional(self, name: str) -> Tensor | None:
        """[n] float32, as `float32`; None for no name: sinks, what scores of experts are corrected by."""
        return self.float32(name).flatten() if name else None

    def _bias(self, weight: str, bias: str) -> Tensor:
        return self.load(bias) if bias else torch.zeros(self.shapes[weight][0], dtype=self.dtype, device=self.device)


def _biased(rows: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    return rows if biases is None else rows + biases[expert]


def _elementwise(op: Op, compute: Callable[[dict[str, Tensor]], Tensor]) -> Step:
    output = op.outputs[0]

    def step(state: Pass) -> None:
        state.buffers[output] = compute(state.buffers)

    return step


def _gather_rows(op: GatherRows) -> Step:
    (x,), (output,) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        rows, batch = state.buffers[x], state.batch
        state.buffers[output] = rows if batch.scores_every_token else rows.index_select(0, batch.logits_indices)

    return step


def _activation(op: Activation) -> Step:
    names, output = op.inputs, op.outputs[0]

    def step(state: Pass) -> None:
        first = state.buffers[names[0]]
        if not op.gated:
            state.buffers[output] = FUNCTIONS[op.function](first)
            return
        gate, up = (first, state.buffers[names[1]]) if len(names) == 2 else first.chunk(2, -1)
        state.buffers[output] = gated(op.function, gate, up)

    return step


def _best(op: ArgMax | TopK) -> Step:
    (x,), (indices, values) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        buffers = state.buffers
        if isinstance(op, TopK):
            buffers[values], buffers[indices] = buffers[x].topk(op.k)
        else:
            buffers[values], buffers[indices] = max_of_rows(buffers[x])

    return step
