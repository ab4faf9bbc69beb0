"""Checkpoints in the formats that others quantise to, written number by number from what the formats' papers and savers say.

Nothing here is shared with what reads them: values are computed in Python, one after the other.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 8
Parts = dict[str, Tensor]
"""What stands behind a module's name -> tensor."""
Encoded = tuple[Parts, list[list[float]]]
"""The tensors of a random weight, and its values."""
Encoder = Callable[[Random, int, int], Encoded]
"""Of (random, outputs, inputs)."""


def words(codes: list[int], bits: int, places: tuple[int, ...] | None = None) -> list[int]:
    """int32 words of so many codes side by side, which may cross from one into the next; places: of eight codes, where each goes."""
    at = [i - i % 8 + places[i % 8] if places else i for i in range(len(codes))]
    run = sum(code << (bits * place) for code, place in zip(codes, at, strict=True))
    packed = [run >> first & 0xFFFFFFFF for first in range(0, bits * len(codes), 32)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in packed]


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def columns(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def of_e4m3(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10))


def of_e2m1(code: int) -> float:
    sign, exponent, fraction = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else math.ldexp(2 + fraction, exponent - 2))


def single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def some_scales(random: Random, rows: int, width: int, size: float) -> list[list[float]]:
    return [[single(float(torch.tensor(random.uniform(size / 2, size), dtype=torch.float16))) for _ in range(width)] for _ in range(rows)]


def some_bytes(random: Random, outputs: int, inputs: int) -> list[list[int]]:
    """Of 8-bit floats of moderate size."""
    return [[random.randrange(0x28, 0x40) | random.randrange(2) << 7 for _ in range(inputs)] for _ in range(outputs)]


def group_of_each(random: Random, inputs: int, reordered: bool) -> list[int]:
    groups = [i // GROUP for i in range(inputs)]
    if reordered:
        random.shuffle(groups)
    return groups


def fp8(scale_name: str, block: tuple[int, int] | None, scale_shape: Callable[[int, int], tuple[int, ...]]) -> Encoder:
    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        shape = scale_shape(outputs, inputs)
        down, across = block or (outputs if math.prod(shape) == 1 else 1, inputs)
        codes = some_bytes(random, outputs, inputs)
        scales = some_scales(random, math.ceil(outputs / down), math.ceil(inputs / across), 0.1)
        values = [[single(of_e4m3(codes[o][i]) * scales[o // down][i // across]) for i in range(inputs)] for o in range(outputs)]
        weight = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return {"weight": weight, scale_name: torch.tensor(scales).view(shape), "input_scale": torch.ones(1)}, values

    return encode


def int8(asymmetric: bool) -> Encoder:
    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        codes = [[random.randrange(-128, 128) for _ in range(inputs)] for _ in range(outputs)]
        scales, zeros = some_scales(random, outputs, 1, 0.002), [random.randrange(-9, 9) * asymmetric for _ in range(outputs)]
        values = [[single((codes[o][i] - zeros[o]) * scales[o][0]) for i in range(inputs)] for o in range(outputs)]
        parts = {"weight": torch.tensor(codes, dtype=torch.int8), "weight_scale": torch.tensor(scales)}
        return parts | ({"weight_zero_point": torch.tensor(zeros, dtype=torch.int8)[:, None]} if asymmetric else {}), values

    return encode


def packed(bits: int, asymmetric: bool, reordered: bool) -> Encoder:
    """compressed-tensors: signed integers plus half their range, in words along the inputs; zero points along the outputs."""

    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        half, count = 1 << (bits - 1), inputs // GROUP
        order = group_of_each(random, inputs, reordered)
        codes = [[random.randrange(-half, half) for _ in range(inputs)] for _ in range(outputs)]
        zeros = [[random.randrange(-half, half) // 3 * asymmetric for _ in range(count)] for _ in range(outputs)]
        scales = some_scales(random, outputs, count, 0.5 / half)
        values = [
            [single((row[i] - zero[order[i]]) * scale[order[i]]) for i in range(inputs)]
            for row, zero, scale in zip(codes, zeros, scales, strict=True)
        ]
        parts = {
            "weight_packed": int32([words([code + half for code in row], bits) for row in codes]),
            "weight_scale": torch.tensor(scales),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if asymmetric:
            parts["weight_zero_point"] = int32(columns([words([zero + half for zero in column], bits) for column in columns(zeros)]))
        if reordered:
            parts["weight_g_idx"] = torch.tensor(order, dtype=torch.int32)
        return parts, values

    return encode


def gptq(bits: int, less_one: bool, reordered: bool) -> Encoder:
    """Words along the inputs, and of zeros along the outputs: [in, out] on disk."""

    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        top, count = 1 << bits, inputs // GROUP
        order = group_of_each(random, inputs, reordered)
        codes = [[random.randrange(top) for _ in range(outputs)] for _ in range(inputs)]
        zeros = [[random.randrange(1, top) for _ in range(outputs)] for _ in range(count)]
        scales = some_scales(random, count, outputs, 0.5 / top)
        values = [[single((codes[i][o] - zeros[order[i]][o]) * scales[order[i]][o]) for i in range(inputs)] for o in range(outputs)]
        return {
            "qweight": int32(columns([words(column, bits) for column in columns(codes)])),
            "qzeros": int32([words([zero - less_one for zero in row], bits) for row in zeros]), "scales": torch.tensor(scales).half(),
            "g_idx": torch.tensor(order, dtype=torch.int32), "bias": torch.zeros(outputs).half(),
        }, values

    return encode


def awq(random: Random, outputs: int, inputs: int) -> Encoded:
    """Eight outputs a word; from the lowest bits up they are 0, 2, 4, 6, 1, 3, 5, 7."""
    count, places = inputs // GROUP, (0, 4, 1, 5, 2, 6, 3, 7)
    codes = [[random.randrange(16) for _ in range(outputs)] for _ in range(inputs)]
    zeros = [[random.randrange(16) for _ in range(outputs)] for _ in range(count)]
    scales = some_scales(random, count, outputs, 0.03)
    values = [[single((codes[i][o] - zeros[i // GROUP][o]) * scales[i // GROUP][o]) for i in range(inputs)] for o in range(outputs)]
    return {
        "qweight": int32([words(row, 4, places) for row in codes]),
        "qzeros": int32([words(row, 4, places) for row in zeros]),
        "scales": torch.tensor(scales).half(),
    }, values


def fp4(kind: str) -> Encoder:
    """nvfp4 (compressed-tensors), modelopt, mxfp4: two numbers a byte, the lower half first."""

    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        codes, count, overall = [[random.randrange(16) for _ in range(inputs)] for _ in range(outputs)], inputs // GROUP, 0.25
        exponents = [[random.randrange(121, 125) for _ in range(count)] for _ in range(outputs)]
        scales = some_bytes(random, outputs, count)
        factor = {"nvfp4": 1 / 16, "modelopt": overall, "mxfp4": 1.0}[kind]
        size = [
            [math.ldexp(1.0, e - 127) if kind == "mxfp4" else abs(of_e4m3(s)) * factor for e, s in zip(*row, strict=True)]
            for row in zip(exponents, scales, strict=True)
        ]
        values = [[single(of_e2m1(codes[o][i]) * size[o][i // GROUP]) for i in range(inputs)] for o in range(outputs)]
        halves = torch.tensor([[row[i] | row[i + 1] << 4 for i in range(0, inputs, 2)] for row in codes], dtype=torch.uint8)
        e4m3 = torch.tensor([[byte & 0x7F for byte in row] for row in scales], dtype=torch.uint8).view(torch.float8_e4m3fn)
        match kind:
            case "nvfp4":
                return {"weight_packed": halves, "weight_scale": e4m3, "weight_global_scale": torch.tensor([16.0])}, values
            case "modelopt":
                return {"weight": halves, "weight_scale": e4m3, "weight_scale_2": torch.tensor(overall)}, values
            case _:
                return {"weight_packed": halves, "weight_scale": torch.tensor(exponents, dtype=torch.uint8)}, values

    return encode


def bitsandbytes4(nested: bool, kept_as: torch.dtype = torch.uint8) -> Encoder:
    """Two numbers a byte, the upper half first, in blocks of the flat weight; the last block may be short."""

    def encode(random: Random, outputs: int, inputs: int) -> Encoded:
        size, block = outputs * inputs, 64
        levels, codes = sorted(single(random.uniform(-1, 1)) for _ in range(16)), [random.randrange(16) for _ in range(size)]
        blocks = math.ceil(size / block)
        absmax, parts = [row[0] for row in some_scales(random, blocks, 1, 0.2)], {}
        few = [random.randrange(256) for _ in range(blocks)]
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
        if nested:
            known = [i / 255 for i in range(256)]
            largest, offset = [single(random.uniform(0.05, 0.1)) for _ in range(math.ceil(blocks / 4))], 0.0625
            absmax = [single(known[byte]) * largest[i // 4] + offset for i, byte in enumerate(few)]
            parts = {"weight.nested_absmax": torch.tensor(largest), "weight.nested_quant_map": torch.tensor(known)}
            state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
        values = [
            [single(levels[codes[o * inputs + i]] * absmax[(o * inputs + i) // block]) for i in range(inputs)] for o in range(outputs)
        ]
        halves = [codes[i] << 4 | codes[i + 1] for i in range(0, size, 2)]
        return {
            "weight": torch.tensor(halves, dtype=torch.uint8).view(kept_as)[:, None],
            "weight.absmax": torch.tensor(few, dtype=torch.uint8) if nested else torch.tensor(absmax),
            "weight.quant_map": torch.tensor(levels),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
            **parts,
        }, values

    return encode


def bitsandbytes8(random: Random, outputs: int, inputs: int) -> Encoded:
    codes = [[random.randrange(-127, 128) for _ in range(inputs)] for _ in range(outputs)]
    largest = [single(random.uniform(0.1, 0.2)) for _ in range(outputs)]
    values = [[single(code * top / 127) for code in row] for row, top in zip(codes, largest, strict=True)]
    return {
        "weight": torch.tensor(codes, dtype=torch.int8),
        "SCB": torch.tensor(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, values


def _compressed(format: str, bits: int, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **more}


FORMATS: dict[str, tuple[dict[str, Any], Encoder]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        fp8("weight_scale_inv", (16, 16), lambda o, i: (math.ceil(o / 16), math.ceil(i / 16))),
    ),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8("weight_scale", None, lambda o, i: ())),
    "fp8-channel": (_compressed("float-quantized", 8), fp8("weight_scale", None, lambda o, i: (o, 1))),
    "fp8-block": (
        _compressed("float-quantized", 8, block_structure=[8, 24]),
        fp8("weight_scale", (8, 24), lambda o, i: (math.ceil(o / 8), math.ceil(i / 24))),
    ),
    "w8a8": (_compressed("int-quantized", 8), int8(False)),
    "w8a8-asymmetric": (_compressed("int-quantized", 8, symmetric=False), int8(True)),
    "w4a16": (_compressed("pack-quantized", 4), packed(4, False, False)),
    "w4a16-asymmetric": (_compressed("pack-quantized", 4, symmetric=False), packed(4, True, False)),
    "w4a16-actorder": (_compressed("pack-quantized", 4), packed(4, True, True)),
    "w3a16-asymmetric": (_compressed("pack-quantized", 3), packed(3, True, False)),
    "w8a16": (_compressed("pack-quantized", 8), packed(8, False, False)),
    "nvfp4": (_compressed("nvfp4-pack-quantized", 4), fp4("nvfp4")),
    "mxfp4": (_compressed("mxfp4-pack-quantized", 4), fp4("mxfp4")),
    "gptq": (_gptq(4), gptq(4, True, False)),
    "gptq-8": (_gptq(8), gptq(8, True, False)),
    "gptq-desc-act": (_gptq(4, desc_act=True), gptq(4, True, True)),
    "gptq-v2": (_gptq(4, checkpoint_format="gptq_v2"), gptq(4, False, False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes4(False)),
    "bnb-nested": ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, bitsandbytes4(True)),
    "bnb-kept-as-bfloat16": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes4(False, torch.bfloat16)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes8),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, fp4("modelopt")),
}
"""A name -> what config.json says, and how a weight is written."""

LINEAR = re.compile(r"\.layers\..*(proj|fc|w[123])\.weight$")


def quantise(folder: Path, name: str, which: re.Pattern[str] = LINEAR) -> Mapping[str, Tensor]:
    """Give weights of a saved checkpoint other values, stored in this format; returns all tensors in plain numbers."""
    config, encode = FORMATS[name]
    random, path = Random(0), folder / "model.safetensors"
    plain, stored = load_file(path), {}
    for weight in sorted(plain):
        if not which.search(weight):
            stored[weight] = plain[weight]
            continue
        parts, values = encode(random, *plain[weight].shape)
        plain[weight] = torch.tensor(values)
        stored |= {weight.removesuffix("weight") + part: tensor.clone() for part, tensor in parts.items()}
    save_file(stored, path, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return plain
