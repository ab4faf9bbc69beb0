"""Bytes that a program will take, from its shapes alone: what can be known before a weight is read.

Weights in program.shared are another network's: they are not counted.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .execution import Execution
from .layout import kv_bytes_per_block
from .native_abi import INT4_TILE, PANEL
from .program import Embed, Linear, Program


def torch_weight_bytes(program: Program, dtype: torch.dtype, fp8: bool = False) -> int:
    """What the torch executor holds: a tied embedding twice, once as rows and once as a matrix. fp8: a byte for each weight of
    a product, but for the head's, and a scale for each output."""
    in_products = {name for op in program.ops if isinstance(op, Linear) for name in op.weights}
    tied = [op.weight for op in program.ops if isinstance(op, Embed) and op.weight in in_products]
    kept = [name for name in (*program.weights, *tied) if name not in program.shared and name != program.token_map]
    narrow = {name for op in program.ops if isinstance(op, Linear) and program.logits not in op.outputs for name in op.weights}
    total = 0
    for name in kept:
        shape = program.weights[name]
        total += math.prod(shape) + 4 * shape[0] if fp8 and name in narrow else math.prod(shape) * dtype.itemsize
    return total


def product_bytes(program: Program, dtype: torch.dtype) -> int:
    """Weights that a pass reads whole: those of all products, unpadded."""
    names = {name for op in program.ops if isinstance(op, Linear) for name in op.weights}
    return sum(math.prod(program.weights[name]) for name in names) * dtype.itemsize


def native_weight_bytes(program: Program, execution: Execution) -> int:
    """What the native executor packs: products in the narrow format, the embedding in dtype unless it is the same as the head."""
    linears = {op.weights: sum(program.weights[name][0] for name in op.weights) for op in program.ops if isinstance(op, Linear)}
    own = {names: outputs for names, outputs in linears.items() if not program.shared.issuperset(names)}
    total = sum(_packed_bytes(outputs, program.weights[names[0]][1], execution) for names, outputs in own.items())
    for op in program.ops:
        if not isinstance(op, Embed) or op.weight in program.shared:
            continue
        if execution.quantization is not None or (op.weight,) not in linears:
            vocabulary, width = program.weights[op.weight]
            total += _packed_bytes(vocabulary, width, replace(execution, quantization=None))
    return total


def cache_bytes(program: Program, execution: Execution, tokens: int) -> int:
    """Of the KV cache of one sequence, without padding."""
    return kv_bytes_per_block(program.kv_layers, tokens, torch.int8 if execution.kv_cache else execution.dtype)


def _packed_bytes(outputs: int, inputs: int, execution: Execution) -> int:
    outputs = -(-outputs // PANEL) * PANEL
    match execution.quantization:
        case "int8":
            return outputs * (-(-inputs // 64) * 64 + 8)  # with a scale and a sum for each output
        case "int4":
            tile_inputs, tile_bytes = INT4_TILE
            return outputs // PANEL * -(-inputs // tile_inputs) * tile_bytes + outputs * 4
        case None if execution.dtype == torch.bfloat16:
            return outputs * -(-inputs // 32) * 32 * 2
        case _:
            return outputs * inputs * execution.dtype.itemsize
