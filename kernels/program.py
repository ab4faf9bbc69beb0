"""A network as plain data: a flat list of fused ops over named buffers, and the shapes of the weights they name.

Knows no checkpoint, no model family and nothing that runs it: any executor can read a program, in Python or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from .layout import FINAL, KVLayerSpec, StateLayerSpec
from .ops import (
    ACTIVATIONS,
    CLAMPED,
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

OF_ROWS = (Activation, Add, BlockLinear, Concat, Linear, RMSNorm, Scale, Softcap)
"""Ops that look at nothing but rows of buffers."""


@dataclass(frozen=True)
class RopeTable:
    """Rotary embedding (Su et al. 2021): dimensions i and i + n of a head turn by position * inv_freq[i], n = len(inv_freq).

    Sines and cosines are multiplied by attention_factor (YaRN, LongRoPE). growth: (beta, length), queries are multiplied by
    1 + beta * log(1 + floor(position / length)), which keeps far attention sharp (Llama 4, 2025).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    growth: tuple[float, int] | None = None


@dataclass(frozen=True)
class RowsOf:
    """Some rows of a checkpoint's tensor: it is seen as [-1, columns] and divided evenly into runs, of which each gives rows start to stop.

    columns 0: the tensor's last dimension, of a vector 1. pairs: of so many rows at the start of each run those with even numbers come
    first, then the odd ones: where a checkpoint's heads turn dimensions 2 i and 2 i + 1, programs turn i and i + n. transposed: each of the
    tensor's matrices [columns, rows] is turned first; then there is one run, and the rows are some of one matrix. runs_transposed: the rows
    of each run are turned, a column is a row then.
    """

    tensor: str
    shape: tuple[int, ...]  # of the tensor
    runs: int
    start: int
    stop: int
    pairs: int = 0
    columns: int = 0
    step: int = 1
    transposed: bool = False
    runs_transposed: bool = False


@dataclass(frozen=True)
class Program:
    """A network of T tokens in, N rows of logits out. A drafter's may lack the embedding, the attention or the logits."""

    ops: tuple[Op, ...]
    weights: Mapping[str, tuple[int, ...]]  # name -> shape, of all weights that the ops name
    kv_layers: tuple[KVLayerSpec, ...]
    ropes: Mapping[str, RopeTable]
    vocab_size: int
    max_model_len: int  # positions
    boundaries: tuple[str, ...]  # buffer of boundary id k: the input of layer k; one more for the output of the last layer
    final: str  # buffer of boundary id FINAL; "" = none
    logits: str  # "" = none: the network is run for its cache entries or its boundary states
    best: ArgMax | None  # the op that writes argmax and top; None where there are no logits
    inputs: Mapping[str, int] = field(default_factory=dict)  # name -> width, of buffers that the caller fills
    recurrent: tuple[str, int] | None = None  # (input, boundary id): in a chain that state of a token is the next one's input
    token_map: str = ""  # weight [vocab_size] int64: token id of each column of the logits; "" = the column itself
    shared: frozenset[str] = frozenset()  # weights that mean the same to every network of a bank: it keeps them once
    state_layers: tuple[StateLayerSpec, ...] = ()
    slices: Mapping[str, RowsOf] = field(default_factory=dict)  # weights that a checkpoint has side by side in another one
    wide: frozenset[str] = frozenset()  # weights whose products are never made narrow, whatever becomes of others
    unread: frozenset[str] = frozenset()  # what a checkpoint may have for nobody

    def exchanged(self, names: Mapping[str, str]) -> Program:
        """The same program over other weights of the same shapes. names: of weights -> of those in their place; buffers keep theirs."""

        def of(value: Any) -> Any:
            return tuple(map(of, value)) if isinstance(value, tuple) else names.get(value, value) if isinstance(value, str) else value

        ops = tuple(replace(op, **{part.name: of(getattr(op, part.name)) for part in fields(op)}) for op in self.ops)
        weights = {names.get(name, name): shape for name, shape in self.weights.items()}
        return replace(self, ops=ops, weights=weights, wide=frozenset(names.get(name, name) for name in self.wide))

    @property
    def reads_batch(self) -> bool:
        """Whether anything of a batch matters but how many tokens it has: not where inputs become states, row by row."""
        return not all(isinstance(op, OF_ROWS) for op in self.ops)

    @cached_property
    def is_frozen(self) -> bool:
        """Whether it only reads its cache, which is another network's: all tokens of a chain are computed where the first one is."""
        return any(isinstance(op, Attention) and op.frozen for op in self.ops)

    def boundary(self, boundary: int) -> str:
        """The buffer of a boundary id."""
        return self.final if boundary == FINAL else self.boundaries[boundary]

    @cached_property
    def buffers(self) -> dict[str, int]:
        """Name -> width of every buffer. Raises ValueError if the ops do not fit together."""
        widths = dict(self.inputs)
        for op in self.ops:
            for name in op.inputs:
                _require(name in widths, op, f"reads {name!r} before it is written")
            produced = self._output_widths(op, [widths[name] for name in op.inputs])
            _require(len(produced) == len(op.outputs), op, f"has {len(produced)} outputs")
            _require(min(produced, default=1) > 0, op, f"writes columns {produced}")
            for name, width in zip(op.outputs, produced, strict=True):
                _require(name not in widths, op, f"writes {name!r} a second time")
                widths[name] = width
        best = () if self.best is None else self.best.outputs
        for name in (*self.boundaries, self.final, self.logits, *best):
            if name and name not in widths:
                raise ValueError(f"no op writes {name!r}")
        return widths

    def _output_widths(self, op: Op, widths: list[int]) -> tuple[int, ...]:
        match op:
            case Embed():
                return (self.weights[op.weight][1],)
            case RMSNorm():
                for name in filter(None, (op.weight, op.bias)):
                    _require(self.weights[name] == (widths[0],), op, f"does not fit width {widths[0]}")
                _require(widths[0] % op.groups == 0, op, "has uneven groups")
                return (widths[0],)
            case Linear() | LowRank():
                shapes = [self.weights[name] for name in op.weights]
                out = sum(shape[0] for shape in shapes)
                _require(all(shape[1] == widths[0] for shape in shapes), op, f"does not fit width {widths[0]}")
                _require(widths[1:] in ([], [out]), op, "residual does not fit the output")
                if isinstance(op, LowRank):
                    return (out,)
                biases = [(self.weights[name], (shape[0],)) for name, shape in zip(op.biases, shapes, strict=False) if name]
                _require(all(shape == wanted for shape, wanted in biases), op, "biases do not fit the weights")
                _require(len(op.biases) in (0, len(shapes)), op, "needs a bias name for each weight")
                return (out,)
            case BlockLinear():
                rows, columns = self.weights[op.weight]
                _require(columns * op.groups == widths[0] and rows % op.groups == 0, op, f"does not fit width {widths[0]}")
                return (rows,)
            case Attention():
                spec = self.kv_layers[op.layer]
                expected = op.num_heads * spec.k_dim + (0 if op.frozen else spec.stored)
                _require(not spec.values_in_keys or spec.v_dim <= spec.k_dim, op, "has values that are wider than its keys")
                _require(sum(widths) == expected, op, f"needs inputs of width {expected}, not {sum(widths)}")
                norms = [self.weights[name] for name in (op.q_norm, op.k_norm) if name]
                wanted = [(spec.k_dim,)] * (1 if op.frozen else 2)
                _require(norms in ([], wanted) or not op.num_heads, op, "needs norms of q and k, or neither")
                _require(not op.frozen or op.num_heads > 0, op, "writes nothing and reads nothing")
                _require(not op.sinks or self.weights[op.sinks] == (op.num_heads,), op, "needs a sink for each head")
                _require(not op.rope or 2 * len(self.ropes[op.rope].inv_freq) <= spec.k_dim, op, "rotates more than k_dim dimensions")
                return (op.num_heads * spec.v_dim,) if op.num_heads else ()
            case Activation():
                _require(op.function in (*ACTIVATIONS, *["", CLAMPED] * op.gated), op, f"function is none of {ACTIVATIONS}")
                _require(len(widths) == 1 or widths[0] in (widths[1], *[1] * (op.function != CLAMPED)), op, "gate and up differ in width")
                return (widths[1] if len(widths) == 2 else widths[0] // 2 if op.gated else widths[0],)
            case Experts():
                _require(op.function in (*ACTIVATIONS, CLAMPED), op, f"function is none of {ACTIVATIONS}")
                shapes = [self.weights[name] for name in (*op.gates, *op.ups)] + [self.weights[name][::-1] for name in op.downs]
                _require(len(op.gates) == len(op.ups) == len(op.downs) == widths[1], op, f"has other than {widths[1]} experts")
                _require(0 < op.top <= widths[1], op, f"has no {op.top} experts")
                _require(not op.correction or math.prod(self.weights[op.correction]) == widths[1], op, "has a correction of another size")
                _require(not op.scales or self.weights[op.scales] == (widths[1],), op, "has scales of another size")
                group = widths[1] // op.num_groups
                _require(group * op.num_groups == widths[1] and 0 < op.top_groups <= op.num_groups, op, "has uneven groups of experts")
                _require(not op.has_groups or group > 1 and op.top <= group * op.top_groups, op, f"has no {op.top} experts in its groups")
                _require(all(shape == (shapes[0][0], widths[0]) for shape in shapes), op, f"does not fit width {widths[0]}")
                wanted = [(len(op.gates), 2 * shapes[0][0]), (len(op.gates), widths[0])]
                _require([self.weights[name] for name in op.biases] in ([], wanted), op, "biases do not fit the weights")
                return (widths[0],)
            case LocalConv():
                sides, taps, width = self.weights[op.weight]
                _require(width == widths[0], op, f"does not fit width {widths[0]}")
                groups = widths[1] // max(sides * taps, 1)
                _require(groups * sides * taps == widths[1] > 0 and width % groups == 0, op, f"has kernels of width {widths[1]}")
                _require(0 <= op.side < sides, op, f"has no side {op.side}")
                return (width,)
            case CausalConv():
                width, taps = self.weights[op.weight][0], self.weights[op.weight][-1]
                _require(width == widths[0] and (not op.bias or self.weights[op.bias] == (width,)), op, f"does not fit width {widths[0]}")
                _require(op.function in ("", *ACTIVATIONS), op, f"function is none of {ACTIVATIONS}")
                _require(self.state_layers[op.layer] == StateLayerSpec((taps - 1) * width, width), op, "does not fit its state")
                return (width,)
            case GatedDelta():
                qkv, values = 2 * op.num_k_heads * op.k_dim + op.num_v_heads * op.v_dim, op.num_v_heads * op.v_dim
                expected = [qkv, values, op.num_v_heads, op.num_v_heads]
                _require(widths in (expected, [qkv, values, 2 * op.num_v_heads]), op, f"needs inputs of widths {expected}, not {widths}")
                _require(op.num_v_heads % op.num_k_heads == 0, op, "has value heads that do not share key heads evenly")
                shapes = [self.weights[name] for name in (op.decay, op.step, op.norm)]
                _require(shapes == [(op.num_v_heads,)] * 2 + [(op.v_dim,)], op, f"has decay, step and norm of shapes {shapes}")
                wanted = StateLayerSpec(values * op.k_dim, qkv + 2 * op.num_v_heads)
                _require(self.state_layers[op.layer] == wanted, op, "does not fit its state")
                return (values,)
            case StateSpace():
                values = op.num_v_heads * op.v_dim
                expected = [values + 2 * op.num_k_heads * op.k_dim, op.num_v_heads]
                _require(widths == expected, op, f"needs inputs of widths {expected}, not {widths}")
                _require(op.num_v_heads % op.num_k_heads == 0, op, "has value heads that do not share key heads evenly")
                shapes = [self.weights[name] for name in (op.decay, op.step, op.skip)]
                _require(shapes == [(op.num_v_heads,)] * 3, op, f"has decay, step and skip of shapes {shapes}")
                _require(self.state_layers[op.layer] == StateLayerSpec(values * op.k_dim, sum(expected)), op, "does not fit its state")
                return (values,)
            case Add():
                _require(widths[0] == widths[1], op, f"adds widths {widths}")
                return (widths[0],)
            case Concat():
                _require(not any(width % op.groups for width in widths), op, "has uneven groups")
                return (sum(widths),)
            case GatherRows() | Scale() | Softcap():
                _require(not isinstance(op, Scale) or self.weights.get(op.weight, (1,)) == (1,), op, "has a weight of more than a number")
                return (widths[0],)
            case ArgMax():
                return (1, 1)
            case TopK():
                return (op.k, op.k)


def row_program(
    ops: Iterable[Op],
    weights: Mapping[str, tuple[int, ...]],
    inputs: Mapping[str, int] | None = None,
    final: str = "",
    boundaries: tuple[str, ...] = (),
    best: ArgMax | None = None,
    token_map: str = "",
    shared: frozenset[str] = frozenset(),
) -> Program:
    """A network whose rows know nothing of each other: no cache, no positions. best: the op behind its logits, None = it has none."""
    logits = "" if best is None else best.inputs[0]
    made = Program(
        ops=tuple(ops), weights=weights, kv_layers=(), ropes={}, vocab_size=0, max_model_len=1, boundaries=boundaries, final=final,
        logits=logits, best=best, inputs=inputs or {}, token_map=token_map, shared=shared,
    )
    return made if best is None else replace(made, vocab_size=made.buffers[logits])


def matrices_of(op: Op) -> tuple[tuple[str, ...], ...]:
    """Weights [out, in] that an op multiplies by, those that are one matrix, side by side, together."""
    match op:
        case Linear():
            return (op.weights,)
        case BlockLinear():
            return ((op.weight,),)
        case Experts():
            return (*zip(op.gates, op.ups, strict=True), *((name,) for name in op.downs))
        case _:
            return ()


def routers(ops: Iterable[Op]) -> frozenset[str]:
    """The buffers by whose scores experts are chosen."""
    return frozenset(op.inputs[1] for op in ops if isinstance(op, Experts))


def wide_products(program: Program) -> frozenset[str]:
    """Buffers whose products are never made narrow, for they are few columns that weigh heavily.

    Scores of experts, gates of whole rows, and what says how fast memories learn and fade; and those of weights in program.wide.
    """
    found = {*routers(program.ops)}
    for op in program.ops:
        match op:
            case GatedDelta():
                found.update(op.inputs[2:])
            case StateSpace():
                found.add(op.inputs[1])
            case Activation(inputs=(gate, _)) if program.buffers[gate] == 1:
                found.add(gate)
            case Linear() if not program.wide.isdisjoint(op.weights):
                found.update(op.outputs)
            case _:
                pass
    return frozenset(found)


def own_buffers(program: Program) -> frozenset[str]:
    """Buffers whose memory is nobody else's: made anew by an embedding or a product, and read by nothing that hands them on."""
    made = {name for op in program.ops if isinstance(op, Embed | Linear) for name in op.outputs}
    handed_on = {name for op in program.ops if not isinstance(op, RMSNorm | Linear) for name in op.inputs}
    return frozenset(made - handed_on)


def readers(ops: Iterable[Op]) -> dict[str, list[Op]]:
    """Buffer -> the ops that read it, in order."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        for name in op.inputs:
            found.setdefault(name, []).append(op)
    return found


def _require(condition: bool, op: Op, message: str) -> None:
    if not condition:
        raise ValueError(f"{op}: {message}")
