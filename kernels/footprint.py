"""Bytes that a program will take, from its shapes alone: what can be known before a weight is read.

Weights in program.shared are another network's: they are not counted.
"""

import math
from dataclasses import replace
from itertools import chain

import torch

from .execution import Execution, Quantization
from .fp8 import FP8, Fp8Matrix
from .int4 import Int4Matrix
from .layout import kv_bytes_per_block
from .native_abi import INT4_TILE, PANEL
from .ops import BlockLinear, Embed, Experts
from .program import Program, matrices_of, wide_products

_CACHES = {None: None, "int8": torch.int8, "fp8": FP8}


def torch_weight_bytes(program: Program, execution: Execution) -> int:
    """What the torch executor holds. The rows of a tied embedding count beside the head where the head is made narrow or turned."""
    products = _product_bytes(program, execution.dtype, execution.quantization if execution.on_gpu else None)
    wide = {name: math.prod(shape) * execution.dtype.itemsize for name, shape in program.weights.items()}
    is_turned = execution.dtype == torch.float32 and not execution.on_gpu
    embeddings = {op.weight for op in program.ops if isinstance(op, Embed)}
    rows = [name for name in embeddings & products.keys() if is_turned or products[name] != wide[name]]
    kept = [name for name in (*(program.weights.keys() - products.keys()), *rows) if name not in program.shared]
    others = sum(wide[name] for name in kept if name != program.token_map)
    return others + sum(num_bytes for name, num_bytes in products.items() if name not in program.shared)


def product_bytes(program: Program, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
    """What a pass of one token reads in the torch executor: all weights of products, but of experts those that a row has."""
    found = _product_bytes(program, dtype, quantization)
    left_out = 0
    for op in program.ops:
        if isinstance(op, Experts):
            experts = sum(found[name] for names in matrices_of(op) for name in names)
            left_out += experts - experts * op.top // len(op.gates)
    return sum(found.values()) - left_out


def _product_bytes(program: Program, dtype: torch.dtype, quantization: Quantization | None) -> dict[str, int]:
    """Weight of a product -> its bytes. With fp8 the head stays as it is, and some products always do, those of blocks too."""
    found: dict[str, int] = {}
    wide = wide_products(program)
    for op in program.ops:
        narrow = None if wide.intersection(op.outputs) or isinstance(op, BlockLinear) else quantization
        for name in chain.from_iterable(matrices_of(op)):
            shape = program.weights[name]
            if narrow == "int4":
                found[name] = Int4Matrix.num_bytes(shape)
            elif narrow == "fp8" and program.logits not in op.outputs:
                found[name] = Fp8Matrix.num_bytes(shape)
            else:
                found[name] = math.prod(shape) * dtype.itemsize
    return found


def native_weight_bytes(program: Program, execution: Execution) -> int:
    """What the native executor packs: most products in the narrow format, the embedding in dtype unless it is the same as the head."""
    wide, as_computed = wide_products(program), replace(execution, quantization=None)
    matrices = {names: as_computed if wide.intersection(op.outputs) else execution for op in program.ops for names in matrices_of(op)}
    total = 0
    for names, packed in matrices.items():
        if not program.shared.issuperset(names):
            total += _packed_bytes(sum(program.weights[name][0] for name in names), program.weights[names[0]][1], packed)
    for op in program.ops:
        if not isinstance(op, Embed) or op.weight in program.shared:
            continue
        if matrices.get((op.weight,), execution).quantization is not None or (op.weight,) not in matrices:
            vocabulary, width = program.weights[op.weight]
            total += _packed_bytes(vocabulary, width, as_computed)
    return total


def cache_bytes(program: Program, execution: Execution, tokens: int) -> int:
    """Of the KV cache of one sequence, without padding."""
    return kv_bytes_per_block(program.kv_layers, tokens, _CACHES[execution.kv_cache] or execution.dtype)


def native_cache_bytes(program: Program, execution: Execution, tokens: int) -> int:
    """The same in the native executor, which keeps values that lie in keys once more, in the order in which it reads values."""
    layers = tuple(replace(layer, values_in_keys=False) for layer in program.kv_layers)
    return cache_bytes(replace(program, kv_layers=layers), execution, tokens)


def _packed_bytes(outputs: int, inputs: int, execution: Execution) -> int:
    outputs = -(-outputs // PANEL) * PANEL
    match execution.quantization:
        case "int8":
            return outputs * (-(-inputs // 64) * 64 + 4)  # with a scale for each output
        case "int4":
            tile_inputs, tile_bytes = INT4_TILE
            return outputs // PANEL * -(-inputs // tile_inputs) * tile_bytes + outputs * 4
        case None if execution.dtype == torch.bfloat16:
            return outputs * -(-inputs // 32) * 32 * 2
        case _:
            return outputs * inputs * execution.dtype.itemsize
