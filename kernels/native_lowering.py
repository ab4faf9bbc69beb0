"""A program as the native executor runs it: norms and activations folded into the products beside them, buffers given numbers and memory.

Plain data in, plain data out: knows no tensors, no library and no machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from .native_abi import MAX_TAPS, PANEL
from .ops import (
    Activation,
    Attention,
    BlockLinear,
    CausalConv,
    Concat,
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
)
from .program import Program, readers


@dataclass(frozen=True)
class Product:
    """A Linear with what is computed on the way in and out: act(softcap(scale * (norm(x) @ w.T + bias + residual))).

    groups: as in BlockLinear, which is a product of which so many parts of equal length read a run of columns each.
    """

    linear: Linear
    norm: RMSNorm | None = None
    activation: Activation | None = None
    scale: float = 1.0
    softcap: float = 0.0
    output: str = ""
    is_head: bool = False
    groups: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        x = self.norm.inputs[0] if self.norm is not None else self.linear.inputs[0]
        return (x, *self.linear.inputs[1:])

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output or self.linear.outputs[0],)

    @property
    def is_gated(self) -> bool:
        return self.activation is not None and self.activation.gated


Step = Product | Op


@dataclass(frozen=True)
class Lowered:
    """steps in order; buffers by number; buffers of one place share memory, since they are never needed at the same time."""

    steps: tuple[Step, ...]
    buffers: dict[str, int]  # name -> number
    widths: tuple[int, ...]
    places: tuple[int, ...]
    for_logits: frozenset[str]  # buffers with one row for each of logits_indices, not for each token
    by_turns: frozenset[str]  # residuals whose columns stand as a gated product has its panels, of gate and up by turns


class NotLowered(ValueError):
    """The program holds something that the native executor does not run. The message says what."""


def lower(program: Program) -> Lowered:
    """Raises NotLowered."""
    return _number_rows(program, _fold(program))


def _fold(program: Program) -> list[Step]:
    """Products with their norms, activations, and the head's scale and softcap; ArgMax is the head's own business."""
    widths, read_by = program.buffers, readers(program.ops)
    kept = {*program.boundaries, program.final}
    any_order = _in_any_order(program)
    norms = {
        op.outputs[0]: op
        for op in program.ops
        if isinstance(op, RMSNorm)
        and op.groups == 1
        and op.outputs[0] not in kept
        and all(isinstance(reader, Linear) and reader.inputs[0] == op.outputs[0] for reader in read_by.get(op.outputs[0], ()))
        and all(op.outputs[0] not in reader.inputs[1:] for reader in read_by.get(op.outputs[0], ()))
    }
    folded: set[int] = {id(op) for op in norms.values()}
    steps: list[Step] = []
    for op, behind in zip_longest(program.ops, program.ops[1:]):
        if id(op) in folded or (program.best is not None and op == program.best):
            continue
        if not isinstance(op, Linear):
            if isinstance(op, CausalConv) and (taps := program.weights[op.weight][-1]) > MAX_TAPS:
                raise NotLowered(f"a convolution over {taps} tokens, more than {MAX_TAPS}")
            if isinstance(op, Experts) and program.weights[op.gates[0]][0] % PANEL:  # gate and up can only alternate in whole panels
                raise NotLowered(f"experts whose width is no multiple of {PANEL}")
            if isinstance(op, LowRank) and not _is_residual(op, behind, read_by):
                raise NotLowered("a LowRank that is not the residual of the product behind it")
            match op:
                case Attention():
                    steps += _two_inputs(op, program)
                case BlockLinear():
                    steps.append(_blocks(op, program))
                case _:
                    steps.append(op)
            continue
        product = Product(op, norm=norms.get(op.inputs[0]))
        while True:
            name = product.outputs[0]
            following = read_by.get(name, [])
            if name == program.logits or name in kept or len(following) != 1 or id(following[0]) in folded:
                break
            grown = _grow(product, following[0], widths, any_order)
            if grown is None:
                break
            product = grown
            folded.add(id(following[0]))
        if product.outputs[0] == program.logits:
            best = () if program.best is None else program.best.inputs
            if len(read_by.get(program.logits, [])) != 1 or program.logits not in best:
                raise NotLowered("logits that are read by more than the final argmax")
            product = replace(product, is_head=True)
        steps.append(product)
    if len({(step.top, len(step.gates)) for step in steps if isinstance(step, Experts)}) > 1:
        raise NotLowered("layers with different numbers of experts")
    if program.logits and not any(isinstance(step, Product) and step.is_head for step in steps):
        raise NotLowered("logits that are not the output of a linear layer, scaled or capped at most")
    return steps


def _is_residual(added: LowRank, behind: Op | None, read_by: dict[str, list[Op]]) -> bool:
    """Whether it is made for the op right behind it alone, a product that adds it."""
    return isinstance(behind, Linear) and behind.inputs[1:] == added.outputs and len(read_by[added.outputs[0]]) == 1


def _two_inputs(attention: Attention, program: Program) -> list[Step]:
    """q in one buffer, k and v side by side in another, or all in one: as the native attention reads them."""
    names, q_width = attention.inputs, attention.num_heads * program.kv_layers[attention.layer].k_dim
    alone = names[:1] if program.buffers[names[0]] == q_width else ()
    together = names[len(alone) :]
    if len(together) == 1 or attention.frozen:
        return [attention]
    name = "|".join(names)  # of all of them: another layer may read the same keys
    return [Concat(together, (name,)), replace(attention, inputs=(*alone, name))]


def _blocks(op: BlockLinear, program: Program) -> Product:
    if (outputs := program.weights[op.weight][0] // op.groups) % PANEL:
        raise NotLowered(f"a product by blocks of {outputs} outputs, no multiple of {PANEL}")
    return Product(Linear(op.inputs, op.outputs, (op.weight,)), groups=op.groups)


def _in_any_order(program: Program) -> set[str]:
    """Buffers whose writer can put them in panels by turns as well."""
    return {
        op.outputs[0]
        for op in program.ops
        if isinstance(op, LowRank) and all(program.weights[name][0] % PANEL == 0 for name in op.weights)
    }


def _grow(product: Product, op: Op, widths: dict[str, int], any_order: set[str]) -> Product | None:
    """The product with the op behind it folded in, None if it does not fold. any_order: residuals that may stand by turns."""
    match op:
        case Activation(inputs=(_,)) if product.activation is None:
            # gate and up can only alternate in whole panels, and what is added to them with them
            if op.gated and (widths[op.inputs[0]] % (2 * PANEL) or not any_order.issuperset(product.inputs[1:])):
                return None
            return replace(product, activation=op, output=op.outputs[0])
        case Scale(weight="") if product.activation is None and not product.softcap:
            return replace(product, scale=product.scale * op.factor, output=op.outputs[0])
        case Softcap() if product.activation is None and not product.softcap:
            return replace(product, softcap=op.cap, output=op.outputs[0])
        case _:
            return None


def _number_rows(program: Program, steps: Sequence[Step]) -> Lowered:
    """Which buffers have a row per token and which per logits row; then memory for all."""
    widths = dict(program.buffers)
    for_logits: set[str] = set()
    for step in steps:
        if isinstance(step, Concat):
            widths[step.outputs[0]] = sum(widths[name] for name in step.inputs)
        if isinstance(step, GatherRows):
            for_logits.update(step.outputs)
        elif any(name in for_logits for name in step.inputs):
            is_of_tokens = isinstance(step, Attention | Experts | LocalConv | CausalConv | GatedDelta | StateSpace | LowRank)
            if is_of_tokens or not all(name in for_logits for name in step.inputs):
                raise NotLowered(f"{type(step).__name__} over rows of two kinds")
            for_logits.update(step.outputs)
    used = [*program.inputs, *(name for step in steps for name in step.outputs)]
    buffers = {name: number for number, name in enumerate(used)}
    places = _share_memory(steps, buffers, {*program.inputs})
    by_turns = frozenset(name for step in steps if isinstance(step, Product) and step.is_gated for name in step.inputs[1:])
    return Lowered(tuple(steps), buffers, tuple(widths[name] for name in used), places, frozenset(for_logits), by_turns)


def _share_memory(steps: Iterable[Step], buffers: dict[str, int], filled: set[str]) -> tuple[int, ...]:
    """A place for each buffer, free again once the last step that reads the buffer is over.

    Row-local steps that follow one another run together, each thread with rows of its own: what the first of them reads last
    is only free when a product, an attention or another step that waits for all rows has come between. What a LowRank reads is
    needed until the product behind it is over, which may make its own columns of the sum.
    """
    steps = list(steps)
    last_use = {name: i + isinstance(step, LowRank) for i, step in enumerate(steps) for name in (*step.inputs, *step.outputs)}
    used_last: list[list[str]] = [[] for _ in steps]
    for name, i in last_use.items():
        used_last[i].append(name)
    place_of = {name: place for place, name in enumerate(filled)}
    free: list[int] = []
    dying: list[int] = []
    num_places = len(place_of)
    for i, step in enumerate(steps):
        if isinstance(step, Product | Attention | Experts | GatherRows | LocalConv | CausalConv | GatedDelta | StateSpace):
            free, dying = free + dying, []
        for name in step.outputs:
            if free:
                place_of[name] = free.pop()
            else:
                place_of[name], num_places = num_places, num_places + 1
        dying += [place_of[name] for name in used_last[i]]
    return tuple(place_of[name] for name in buffers)
