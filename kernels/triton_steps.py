"""Ops of a program bound to Triton kernels: which kernel stands for which op. The kernels themselves are in triton/.

What has no kernel here is left to the reference in torch_executor.py. Knows no graph; nothing bound here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from .execution import Quantization
from .expert_weights import ExpertWeights
from .fp8 import Fp8Matrix
from .int4 import Int4Matrix
from .ops import (
    Activation,
    ArgMax,
    Attention,
    BlockLinear,
    CausalConv,
    Embed,
    Experts,
    GatedDelta,
    GatherRows,
    Linear,
    LowRank,
    Op,
    RMSNorm,
    StateSpace,
)
from .program import matrices_of
from .torch_ops import MATRIX, Binder, Pass, Step
from .triton.activations import activation, gated_activation
from .triton.argmax import best_of_rows
from .triton.attention import LOG2_E, ragged_paged_attention
from .triton.block_linear import block_linear
from .triton.cache_write import rotate_and_store
from .triton.causal_conv import causal_conv, trace
from .triton.expert_routes import Router
from .triton.experts import experts
from .triton.linear import MAX_ROWS, Workspace, fixed_linear, skinny_linear
from .triton.linear_attention import Memory, gated_norm, linear_attention
from .triton.linear_int4 import fixed_int4_linear, int4_linear
from .triton.low_rank import MOST_TOKENS, MOST_WEIGHTS, low_rank
from .triton.norms import rms_norm
from .triton.quantise import quantised
from .triton.rows import rows_of

SPLIT_PLACES = 512
"""In batch-invariant mode every context is cut here, whatever else runs."""

Product = Callable[[Tensor, Tensor | None, bool], Tensor]
"""x [T, in], residual [T, out] or None, whether the residual's memory may be the result's -> [T, out]."""


class TritonKernels:
    """Implements `Kernels`. One object for one network: its products share scratch."""

    def __init__(
        self,
        is_batch_invariant: bool = False,
        quantization: Quantization | None = None,
        narrow_head: bool = False,
        skinny_rows: int = MAX_ROWS,
    ) -> None:
        """is_batch_invariant: tiles and splits that depend on nothing but the network. quantization: fp8 or int4, of the weights of
        all products but BlockLinears; with fp8 the head's only if narrow_head. skinny_rows: those of more rows are cuBLAS's; 0 = all."""
        self.is_batch_invariant = is_batch_invariant
        self.quantization: Quantization | None = quantization
        self._narrow_head = narrow_head
        self._skinny_rows = min(skinny_rows, MAX_ROWS)
        self._workspace: Workspace | None = None

    def step(self, op: Op, bind: Binder) -> Step | None:
        match op:
            case Embed():
                return _embed(op, bind)
            case GatherRows():
                return _gather_rows(op)
            case RMSNorm(groups=1):
                return _rms_norm(op, bind)
            case Linear():
                return _linear(op, self._product(op, bind), bind.own_buffers)
            case BlockLinear():
                return _block_linear(op, bind, self.is_batch_invariant)
            case LowRank():
                return _low_rank(op, bind)
            case Attention():
                return _attention(op, bind, SPLIT_PLACES if self.is_batch_invariant else None)
            case Activation():
                return _activation(op)
            case Experts():
                return self._experts(op, bind)
            case CausalConv():
                return _causal_conv(op, bind)
            case GatedDelta():
                return _gated_delta(op, bind)
            case StateSpace():
                return _state_space(op, bind)
            case ArgMax():
                return _best(op)
            case _:
                return None

    def gated_step(self, op: Linear, activation: Activation, bind: Binder) -> Step | None:
        """Few rows are gated where they are multiplied: what lies between is neither rounded nor written."""
        if self.is_batch_invariant:
            return None
        gated = replace(op, outputs=activation.outputs)
        return _linear(gated, self._product(op, bind, activation.function), bind.own_buffers)

    def _product(self, op: Linear, bind: Binder, function: str | None = None) -> Product:
        """function: outputs are gate | up, and the product is function(gate) * up [T, out / 2]. Not in batch-invariant mode."""
        bias = bind.biases(op)
        if self._workspace is None:
            self._workspace = Workspace(bind.device)
        workspace, skinny_rows = self._workspace, self._skinny_rows
        if self._becomes_fp8(op, bind):
            narrow = bind.weights.get(op.weights, "fp8", bind.dtype, lambda: Fp8Matrix.of(bind.packed(op.weights).t()))

            def few(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
                return skinny_linear(x, values, workspace, bias, residual, scales, function)

            fp8_product = narrow.product(bias, few, skinny_rows, quantised)
            return _gated(lambda x, residual, _: fp8_product(x, residual), function, skinny_rows)
        matrix = self._matrix(op, bind)
        if isinstance(matrix, Int4Matrix):
            if self.is_batch_invariant:
                return lambda x, residual, _: fixed_int4_linear(x, matrix, bias, residual)
            return lambda x, residual, _: int4_linear(x, matrix, workspace, bias, residual, function)
        weight = matrix.t().contiguous()
        if self.is_batch_invariant:
            return lambda x, residual, _: fixed_linear(x, weight, bias, residual)

        def product(x: Tensor, residual: Tensor | None, in_place: bool) -> Tensor:
            if 0 < len(x) <= skinny_rows:
                return skinny_linear(x, weight, workspace, bias, residual, None, function)
            if residual is None:
                return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
            # cuBLAS adds to what is there: elsewhere, the residual would be copied first.
            out = residual.addmm_(x, matrix) if in_place else torch.addmm(residual, x, matrix)
            return out if bias is None else out.add_(bias)

        return _gated(product, function, skinny_rows)

    def _matrix(self, op: Linear, bind: Binder) -> Tensor | Int4Matrix:
        """[in, out] as a view of what checkpoints have, or 4 bits wide. What another network holds is taken in its format."""
        if self.quantization == "int4" and not bind.wide_products.intersection(op.outputs):
            return bind.weights.get(op.weights, MATRIX, "int4", lambda: Int4Matrix.of(bind.packed(op.weights).t()))
        return bind.matrix(op.weights)

    def _experts(self, op: Experts, bind: Binder) -> Step:
        (x, logits), (output,), names, count = op.inputs, op.outputs, matrices_of(op), len(op.gates)
        biases = zip((names[:count], names[count:]), bind.expert_biases(op), strict=True)
        inner, outer = (self._stacked(some, bind, bias) for some, bias in biases)
        is_fixed, correction, scales = self.is_batch_invariant, bind.optional(op.correction), bind.optional(op.scales)
        router = Router(op.top, op.renormalise, op.score == "sigmoid", correction, op.num_groups, op.top_groups, op.scale, scales)

        def step(state: Pass) -> None:
            buffers = state.buffers
            buffers[output] = experts(buffers[x], buffers[logits], inner, outer, op.function, router, is_fixed)

        return step

    def _stacked(self, names: tuple[tuple[str, ...], ...], bind: Binder, bias: Tensor | None) -> ExpertWeights:
        """The matrices of all experts, one behind the other, and their biases."""

        def make() -> ExpertWeights:
            return ExpertWeights.of(len(names), lambda expert: bind.packed(names[expert]).t(), self.quantization, bias)

        return bind.weights.get(tuple(chain.from_iterable(names)), "experts", self.quantization or bind.dtype, make)

    def _becomes_fp8(self, op: Linear, bind: Binder) -> bool:
        """Whether the weights become 8 bits: those that the hardware multiplies so and that no other network holds wider."""
        is_wide = bind.wide_products.intersection(op.outputs) or (bind.logits in op.outputs and not self._narrow_head)
        if self.is_batch_invariant or self.quantization != "fp8" or is_wide:
            return False
        return all(Fp8Matrix.fits(bind.shapes[name]) for name in op.weights) and all(map(bind.weights.is_own, op.weights))


def _gated(product: Product, function: str | None, few_rows: int) -> Product:
    """The gate | up that the product makes of many rows, gated as it gates few rows by itself."""
    if function is None:
        return product

    def gated(x: Tensor, residual: Tensor | None, in_place: bool) -> Tensor:
        out = product(x, residual, in_place)
        return out if 0 < len(x) <= few_rows else gated_activation(out, None, function)

    return gated


def _embed(op: Embed, bind: Binder) -> Step:
    weight, scale, (output,) = bind.rows(op.weight), op.scale, op.outputs

    def step(state: Pass) -> None:
        state.buffers[output] = rows_of(weight, state.batch.token_ids, scale)

    return step


def _gather_rows(op: GatherRows) -> Step:
    (x,), (output,) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        rows, batch = state.buffers[x], state.batch
        state.buffers[output] = rows if batch.scores_every_token else rows_of(rows, batch.logits_indices)

    return step


def _linear(op: Linear, product: Product, own_buffers: frozenset[str]) -> Step:
    x, output, residual = op.inputs[0], op.outputs[0], op.inputs[1] if len(op.inputs) == 2 else None
    is_own = residual in own_buffers and residual != x

    def step(state: Pass) -> None:
        buffers = state.buffers
        in_place = is_own and residual in state.last_reads
        buffers[output] = product(buffers[x], None if residual is None else buffers[residual], in_place)

    return step


def _block_linear(op: BlockLinear, bind: Binder, is_fixed: bool) -> Step:
    weight = bind.matrix((op.weight,)).t().contiguous()
    (x,), (output,) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        state.buffers[output] = block_linear(state.buffers[x], weight, op.groups, is_fixed)

    return step


def _low_rank(op: LowRank, bind: Binder) -> Step:
    factors, of_many = bind.factors(op), bind(op)
    x, output, residual = op.inputs[0], op.outputs[0], op.inputs[1] if len(op.inputs) == 2 else None

    def step(state: Pass) -> None:
        buffers = state.buffers
        if state.slots is None or not 0 < len(buffers[x]) <= MOST_TOKENS or len(op.weights) > MOST_WEIGHTS:
            of_many(state)
            return
        buffers[output] = low_rank(buffers[x], factors, state.slots, None if residual is None else buffers[residual])

    return step


def _rms_norm(op: RMSNorm, bind: Binder) -> Step:
    weight = bind.load(op.weight) if op.weight else None
    bias = bind.load(op.bias) if op.bias else None
    (x,), (output,) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        state.buffers[output] = rms_norm(state.buffers[x], weight, op.eps, bias, op.add_one, op.centred)

    return step


def _attention(op: Attention, bind: Binder, split_places: int | None) -> Step:
    spec, layer, num_heads = bind.kv_layers[op.layer], op.layer, op.num_heads
    k_start = num_heads * spec.k_dim
    k_width = spec.num_kv_heads * spec.k_dim
    sinks = bind.optional(op.sinks)
    sinks = None if sinks is None else sinks * LOG2_E
    q_norm, k_norm = (bind.norm_weight(name, spec.k_dim, op.norm_add_one) if name else None for name in (op.q_norm, op.k_norm))
    # Queries in a buffer of their own stay there.
    queries = op.inputs[0] if len(op.inputs) > 1 and bind.widths[op.inputs[0]] == k_start else None
    names = op.inputs if queries is None else op.inputs[1:]
    growth = bind.growth(op)
    grow = None if growth is None else _at_positions(growth)

    def step(state: Pass) -> None:
        buffers, batch = state.buffers, state.batch
        packed = buffers[names[0]] if len(names) == 1 else torch.cat([buffers[name] for name in names], -1)
        tokens = len(packed)
        q = packed[:, :k_start] if queries is None else buffers[queries]
        k = v = None
        if not op.frozen:
            k, v = packed[:, packed.shape[1] - spec.stored :].tensor_split([k_width], -1)
            k = k.view(tokens, spec.num_kv_heads, spec.k_dim)
            v = None if spec.values_in_keys else v.view(tokens, spec.num_kv_heads, spec.v_dim)
        q = rotate_and_store(
            q.view(tokens, num_heads, spec.k_dim) if num_heads else None,
            k,
            v,
            state.kv.k[layer],
            state.kv.v[layer],
            batch.slot_mapping,
            batch.positions,
            state.tables[op.rope] if op.rope else None,
            q_norm,
            k_norm,
            op.norm_eps,
            op.norm_last,
        )
        if q is not None and grow is not None:
            q.mul_(state.shared(f"growth.{op.rope}", grow))
        if q is not None:
            attended = ragged_paged_attention(
                q, state.kv.k[layer], state.kv.v[layer], batch, op.scale, spec.window, op.softcap, split_places, sinks
            )
            buffers[op.outputs[0]] = attended.view(tokens, -1)

    return step


def _at_positions(table: Tensor) -> Callable[[Pass], Tensor]:
    """[T, 1, 1] of a table [positions]."""
    return lambda state: table.index_select(0, state.batch.positions)[:, None, None]


def _activation(op: Activation) -> Step:
    names, output = op.inputs, op.outputs[0]

    def step(state: Pass) -> None:
        buffers = state.buffers
        first = buffers[names[0]]
        if op.gated:
            buffers[output] = gated_activation(first, buffers[names[1]] if len(names) == 2 else None, op.function)
        else:
            buffers[output] = activation(first, op.function)

    return step


def _causal_conv(op: CausalConv, bind: Binder) -> Step:
    weight = bind.load(op.weight).flatten(1).t().contiguous()  # [taps, width]
    bias = bind.load(op.bias) if op.bias else None
    (x,), (output,), layer, past = op.inputs, op.outputs, op.layer, len(weight) - 1

    def step(state: Pass) -> None:
        records = state.shared(f"trace.{past}", lambda state: trace(state.batch, state.states, past))
        kv, buffers = state.kv, state.buffers
        buffers[output] = causal_conv(buffers[x], weight, bias, op.function, records, kv.states[layer], kv.guesses[layer])

    return step


def _gated_delta(op: GatedDelta, bind: Binder) -> Step:
    memory = Memory(op.num_k_heads, op.num_v_heads, op.k_dim, op.v_dim, *_decay(op, bind))
    weight = bind.norm_weight(op.norm, op.v_dim, add_one=False)

    def step(state: Pass) -> None:
        qkv, z, *numbers = (state.buffers[name] for name in op.inputs)
        b, a = numbers if len(numbers) == 2 else numbers[0].chunk(2, -1)
        layer = state.kv.states[op.layer], state.kv.guesses[op.layer]
        read = linear_attention(qkv, b, a, memory, state.batch, state.states, *layer)
        state.buffers[op.outputs[0]] = gated_norm(read, z, weight, op.norm_eps)

    return step


def _state_space(op: StateSpace, bind: Binder) -> Step:
    skip = bind.float32(op.skip)
    memory = Memory(op.num_k_heads, op.num_v_heads, op.k_dim, op.v_dim, *_decay(op, bind), skip, op.least, op.most)

    def step(state: Pass) -> None:
        vkq, a = (state.buffers[name] for name in op.inputs)
        layer = state.kv.states[op.layer], state.kv.guesses[op.layer]
        state.buffers[op.outputs[0]] = linear_attention(vkq, a, a, memory, state.batch, state.states, *layer)

    return step


def _decay(op: GatedDelta | StateSpace, bind: Binder) -> tuple[Tensor, Tensor]:
    """And the step, as `Memory` has them."""
    decay, step = (bind.weights.tensor(name).to(bind.device).float() for name in (op.decay, op.step))
    return -decay.exp(), step


def _best(op: ArgMax) -> Step:
    (x,), (columns, values) = op.inputs, op.outputs

    def step(state: Pass) -> None:
        state.buffers[values], state.buffers[columns] = best_of_rows(state.buffers[x])

    return step
