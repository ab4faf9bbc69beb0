"""Speed-ups as transformations of a finished program: each takes one and returns an equivalent one with fewer ops."""

import dataclasses

from .ops import Activation, Add, Attention, GatedDelta, Linear, Op
from .program import Program, readers


def fuse(program: Program) -> Program:
    """All transformations that pay for every executor."""
    return fuse_residual_adds(fuse_linears(program))


def fuse_linears(program: Program) -> Program:
    """Pack Linears that feed one op side by side: q, k, v -> qkv of an Attention, gate, up -> gate_up of an Activation, and b, a of a
    GatedDelta.

    Their input is read once and one wide product replaces several narrow ones.
    """
    ops = program.ops
    writer: dict[str, Op] = {name: op for op in ops for name in op.outputs}
    read_by = readers(ops)
    packed_into: dict[Op, Linear] = {}  # the consumer and the first of its Linears -> the packed Linear
    dropped: set[Op] = set()
    for op in ops:
        packed = _packable(op)
        if len(packed) < 2:
            continue
        parts = [part for name in packed if isinstance(part := writer.get(name), Linear)]
        alike = len(parts) == len(packed) and all(p.inputs == parts[0].inputs and len(p.inputs) == 1 for p in parts)
        if not alike or any(read_by[name] != [op] or name in _kept(program) for name in packed):
            continue
        biases = tuple(bias for p in parts for bias in (p.biases or ("",) * len(p.weights)))
        packed_into[op] = packed_into[parts[0]] = Linear(
            inputs=parts[0].inputs,
            outputs=("|".join(packed),),
            weights=tuple(name for p in parts for name in p.weights),
            biases=biases if any(biases) else (),
        )
        dropped.update(parts[1:])
    fused: list[Op] = []
    for op in ops:
        if op in packed_into and isinstance(op, Linear):
            fused.append(packed_into[op])
        elif op in packed_into:
            own = op.inputs[: len(op.inputs) - len(_packable(op))]
            fused.append(dataclasses.replace(op, inputs=own + packed_into[op].outputs))
        elif op not in dropped:
            fused.append(op)
    return dataclasses.replace(program, ops=tuple(fused))


def _packable(op: Op) -> tuple[str, ...]:
    """Its last inputs, which one Linear may write side by side."""
    match op:
        case Attention() | Activation():
            return op.inputs
        case GatedDelta():
            return op.inputs[2:]  # not z: these are never made narrow
        case _:
            return ()


def fuse_residual_adds(program: Program) -> Program:
    """Let a Linear whose output is only added to another buffer add it itself."""
    ops = program.ops
    writer: dict[str, Op] = {name: op for op in ops for name in op.outputs}
    read_by = readers(ops)
    dropped: set[Op] = set()
    replaced: dict[Op, Linear] = {}
    for op in ops:
        if not isinstance(op, Add):
            continue
        for name, other in (op.inputs, op.inputs[::-1]):
            part = writer.get(name)
            if isinstance(part, Linear) and len(part.inputs) == 1 and read_by[name] == [op] and name not in _kept(program):
                # At the place of the Add, where both inputs are sure to be written.
                replaced[op] = dataclasses.replace(part, inputs=(part.inputs[0], other), outputs=op.outputs)
                dropped.add(part)
                break
    return dataclasses.replace(program, ops=tuple(replaced.get(op, op) for op in ops if op not in dropped))


def gated_products(program: Program) -> dict[Linear, Activation]:
    """Linears whose outputs are gate | up of a gated Activation and are read by nothing else: who has a kernel for both may use it."""
    read_by = readers(program.ops)
    found: dict[Linear, Activation] = {}
    for op in program.ops:
        if not isinstance(op, Linear) or len(op.inputs) != 1 or op.outputs[0] in _kept(program):
            continue
        match read_by.get(op.outputs[0]):
            case [Activation(inputs=(_,), gated=True) as activation]:
                found[op] = activation
            case _:
                pass
    return found


def _kept(program: Program) -> set[str]:
    """Buffers that are read from outside."""
    return {*program.boundaries, program.final, program.logits}
