"""Which tensors of a quantised checkpoint belong together, and what they stand for. Formats are in quantised_formats.py.

config.json names the method and the sizes that tensors do not tell; which weights are quantised is told by the tensors beside them.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .quantised_formats import awq, bitsandbytes4, fp4, gptq, grouped, packed_integers, scaled

READ = "FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes, MXFP4 or ModelOpt's FP8 and NVFP4"
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
_NOT_READ_FORMATS = ("marlin-24", "mxfp6-pack-quantized", "sparse-24-bitmask", "sparse-bitmask")

_PART = re.compile(
    r"(_packed|_blocks|_scales|_scale_inv|_global_scale|_scale_2|_scale|_shape|_zero_point|_g_idx"
    r"|\.(?:nested_)?(?:absmax|quant_map)|\.quant_state\.bitsandbytes__\w+)$"
)
_OF_MODULE = ("qweight", "qzeros", "scales", "g_idx", "SCB")  # beside a weight, not named after it
_OF_ACTIVATIONS = re.compile(
    r"(?:\.(?:(?:input|output|prob_output|[kvq]|kv)_(?:global_)?(?:scale|zero_point)|weight_format)|[._]activation_scale)$"
)


class UnsupportedQuantisation(ValueError):
    """Weights that are stored in a way that is not read. The message says what to take instead."""


@dataclass(frozen=True)
class Quantisation:
    """What a checkpoint says of how its weights are stored."""

    method: str
    bits: int  # 8 or 4: as many as the widest of its quantised weights need
    block: tuple[int, int] = (128, 128)  # outputs and inputs that share a scale
    zeros_less_one: bool = False  # GPTQ
    group: int = 0  # GPTQ: inputs that share a scale; 0 = not told
    asymmetric: bool = False  # compressed-tensors: all that is quantised has zero points


def read_quantisation(folder: Path) -> Quantisation | None:
    """None for a checkpoint in plain numbers. Raises UnsupportedQuantisation."""
    config = _json(folder / "config.json")
    text = config.get("text_config")
    found = config.get("quantization_config") or config.get("compression_config")
    found = found or (text.get("quantization_config") if isinstance(text, dict) else None)
    found = found or _json(folder / "hf_quant_config.json").get("quantization")
    if not isinstance(found, dict) or not found:
        return None
    try:
        return _quantisation(found)
    except (AttributeError, TypeError) as error:
        raise _not_read(f"{found.get('quant_method')}, with settings that make no sense: {error}") from error


def _quantisation(config: Mapping[str, Any]) -> Quantisation:
    method = config.get("quant_method")
    if method is None:  # as ModelOpt's own file has it, and older versions of compressed-tensors
        method = "modelopt" if "quant_algo" in config else "compressed-tensors" if "config_groups" in config else "?"
    if method in ("auto-round", "intel/auto-round"):
        method, config = _whose_layout(config)
    match method:
        case "fp8" | "fbgemm_fp8":
            return Quantisation("fp8", 8, _block(config.get("weight_block_size")))
        case "compressed-tensors":
            return _compressed(config)
        case "gptq":
            bits, stored = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
            if bits not in (2, 3, 4, 8) or stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
                raise _not_read(f"gptq with {bits} bits, format {stored}")
            widest, group = max([bits, *_own_bits(config)]), config.get("group_size")
            group = group if isinstance(group, int) else 0
            return Quantisation(method, 8 if widest > 4 else 4, zeros_less_one=stored == "gptq", group=group)
        case "awq":
            bits, version = config.get("bits", config.get("w_bit", 4)), config.get("version") or config.get("format") or "gemm"
            version = str(version).lower()
            if bits != 4 or version not in ("gemm", "exllama"):
                raise _not_read(f"awq with {bits} bits, version {version}")
            return Quantisation(method, 4)
        case "bitsandbytes":
            return Quantisation(method, 4 if config.get("load_in_4bit") or config.get("_load_in_4bit") else 8)
        case "mxfp4":
            return Quantisation(method, 4)
        case "gguf":  # of which only the width is told here: its own files say the rest
            return Quantisation(method, int(config.get("bits", 8)))
        case "modelopt":
            algorithm = config.get("quant_algo")
            if algorithm not in _MODELOPT:
                raise _not_read(f"modelopt with {algorithm}")
            return Quantisation(method, 4 if algorithm == "NVFP4" else 8)
        case _:
            raise _not_read(str(method))


def _own_bits(config: Mapping[str, Any]) -> list[int]:
    """Of modules that GPTQModel (dynamic) or AutoRound (extra_config) treats apart; with 16 they are plain."""
    own = [config[key] for key in ("dynamic", "extra_config") if isinstance(config.get(key), dict)]
    modules = [module for modules in own for module in modules.values()]
    return [bits for module in modules if isinstance(module, dict) and isinstance(bits := module.get("bits"), int) and bits <= 8]


def _whose_layout(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """AutoRound writes the layouts of others: the method that its configuration stands for, and that method's configuration."""
    for turned in ("rotation_config", "spinquant_config"):  # activations have to be turned as well
        if config.get(turned):
            raise _not_read(f"auto-round with a {turned}")
    match str(config.get("packing_format") or "auto_gptq").removeprefix("auto_round:"):
        case "auto_gptq" | "gptq":
            return "gptq", {**config, "checkpoint_format": "gptq"}
        case "gptqmodel" | "auto_round":
            return "gptq", {**config, "checkpoint_format": "gptq_v2"}
        case "auto_awq" | "awq":
            return "awq", {**config, "version": "gemm"}
        case "llm_compressor":
            return "compressed-tensors", {"config_groups": {"": {"weights": {"num_bits": config.get("bits")}}}}
        case other:
            raise _not_read(f"auto-round packed as {other}")


def _compressed(config: Mapping[str, Any]) -> Quantisation:
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = {config.get("format"), *(group.get("format") for group in groups), (config.get("sparsity_config") or {}).get("format")}
    if wrong := sorted(formats.intersection(_NOT_READ_FORMATS)):
        raise _not_read(f"compressed-tensors with format {wrong[0]}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise _not_read("compressed-tensors with a transform_config")
    weights = [group["weights"] for group in groups if group.get("weights")]
    bits = max((weight.get("num_bits") or 8 for weight in weights), default=8)
    asymmetric = bool(weights) and all(weight.get("symmetric") is False for weight in weights)
    block = _block(next((weight.get("block_structure") for weight in weights), None))
    return Quantisation("compressed-tensors", 4 if bits <= 4 else 8, block, asymmetric=asymmetric)


def _block(stated: Any) -> tuple[int, int]:
    match stated:
        case [int(outputs), int(inputs)] if min(outputs, inputs) > 0:
            return outputs, inputs
        case _:
            return Quantisation.block


def _not_read(what: str) -> UnsupportedQuantisation:
    return UnsupportedQuantisation(f"quantised ({what}), which is not read: take the model's unquantised weights, or a version in {READ}")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):  # whoever needs the file tells what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def stored_parts(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Weight -> what its format calls the tensors that it is stored in -> their names; "" is the weight's own. Of plain ones, {"": name}.

    a.weight, a.weight_scale, b.qweight, b.qzeros, c.bias ->
    {a.weight: {"": a.weight, "_scale": a.weight_scale}, b.weight: {"qweight": b.qweight, "qzeros": b.qzeros}, c.bias: {"": c.bias}}
    """
    names = set(names)
    found: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        module, _, last = name.rpartition(".")
        part = _PART.search(name)
        stem = name[: part.start()] if part else ""
        if last in _OF_MODULE and not names.isdisjoint((f"{module}.qweight", f"{module}.weight")):
            found.setdefault(f"{module}.weight", {})[last] = name
        elif part and not names.isdisjoint((stem, f"{stem}_packed", f"{stem}_blocks")):
            kind = ".quant_state" if part[1].startswith(".quant_state") else part[1]
            found.setdefault(stem, {})[kind] = name
        elif not _OF_ACTIVATIONS.search(name):
            found.setdefault(name, {})[""] = name
    return found


def stored_shape(parts: Mapping[str, Tensor], quantisation: Quantisation) -> tuple[int, ...]:
    """Of the weight. Reads no numbers but those that are a shape."""
    match parts:
        case {"qweight": words} if quantisation.method == "awq":
            return words.shape[1] * 8, words.shape[0]
        case {"qweight": words}:
            return words.shape[1], words.shape[0] * 32 // _gptq_bits(parts, quantisation)
        case {"_packed": _, "_shape": shape}:
            return tuple(shape.tolist())
        case {"_packed": codes} | {"": codes, "_scale_2": _} if codes.dtype == torch.uint8:
            return codes.shape[0], codes.shape[1] * 2
        case {"_blocks": blocks} if blocks.dim() == 4:
            return blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1]
        case {".quant_state": state}:
            return tuple(_state(state)["shape"])
        case {"": values}:
            return tuple(values.shape)
        case _:
            raise _incomplete(parts)


def _incomplete(parts: Mapping[str, Tensor]) -> ValueError:
    return ValueError(f"it has {', '.join(part or 'numbers' for part in sorted(parts))} and no more")


def plain(parts: Mapping[str, Tensor], quantisation: Quantisation) -> Tensor:
    """float32 of a weight from all its parts, as `stored_parts` calls them; of MXFP4 from those of one expert.

    ValueError if they are none that a format has.
    """
    own = parts.get("")
    if own is not None and ".absmax" not in parts and own.is_floating_point() and own.dtype.itemsize > 1:
        return own.float()  # savers leave scales beside weights that they have not quantised, or have made plain again
    if quantisation.asymmetric and "_scale" in parts and "_zero_point" not in parts:
        raise _incomplete(parts)
    match parts:
        case {"qweight": words, "qzeros": zeros, "scales": scales} if quantisation.method == "awq":
            return awq(words, zeros, scales)
        case {"qweight": words, "qzeros": zeros, "scales": scales}:
            groups, bits = parts.get("g_idx"), _gptq_bits(parts, quantisation)
            if groups is None or not len(groups):
                groups = _runs(words.shape[0] * 32 // bits, quantisation.group, len(scales))
            return gptq(words, zeros, scales, groups, bits, quantisation.zeros_less_one)
        case {"_packed": words, "_scale": scales} if words.dtype == torch.int32:
            outputs, inputs = stored_shape(parts, quantisation)
            return packed_integers(words, scales, parts.get("_zero_point"), (outputs, inputs), parts.get("_g_idx"))
        case {"_packed": codes, "_scale": scale, "_global_scale": divisor}:
            return fp4(codes, scale.float() / divisor.float())
        case {"_packed": codes, "_scale": scale} if scale.dtype != torch.float8_e4m3fn:  # which has a second scale
            return fp4(codes, scale)
        case {"_blocks": blocks, "_scales": scales}:  # of an expert, whose matrix is stored the other way round
            if scales.shape != blocks.shape[:-1]:
                raise ValueError(f"scales {tuple(scales.shape)} do not fit blocks {tuple(blocks.shape)}")
            return fp4(blocks.flatten(-2), scales).mT
        case {"": codes, "_scale": scale, "_scale_2": factor}:
            return fp4(codes, scale.float() * factor.float())
        case {"": codes, ".absmax": absmax, ".quant_map": levels, ".quant_state": state}:
            told = _state(state)
            if ".nested_absmax" in parts:
                nested = parts[".nested_quant_map"].float()[absmax.int()]
                factors = parts[".nested_absmax"].float().repeat_interleave(int(told["nested_blocksize"]))[: len(nested)]
                absmax = nested * factors + float(told["nested_offset"])
            return bitsandbytes4(codes, levels, absmax.float(), tuple(told["shape"]), int(told["blocksize"]))
        case {"": values, "SCB": largest}:
            return scaled(values, largest.float() / 127)
        case {"": values, "_scale": scale, "_zero_point": zeros} if not values.is_floating_point():
            return grouped(values, scale.reshape(-1, 1) if scale.dim() < 2 else scale, zeros.reshape(-1, 1) if zeros.dim() < 2 else zeros)
        case {"": values, "_scale_inv": scale} | {"": values, "_scale": scale}:
            return scaled(values, scale, quantisation.block)
        case _:
            raise _incomplete(parts)


def _runs(inputs: int, group: int, count: int) -> Tensor | None:
    """The group of each input where the last one is shorter, as AutoRound leaves it; None: all are alike."""
    return torch.arange(inputs) // group if group > 0 and inputs % group and math.ceil(inputs / group) == count else None


def _gptq_bits(parts: Mapping[str, Tensor], quantisation: Quantisation) -> int:
    """Modules may have other bits than config.json says of most."""
    words, zeros, scales, groups = (parts.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    if words is not None and groups is not None and len(groups):
        return words.shape[0] * 32 // len(groups)
    if zeros is not None and scales is not None:
        return math.ceil(zeros.shape[1] * 32 / scales.shape[1])
    return quantisation.bits


def _state(tensor: Tensor) -> dict[str, Any]:
    """What bitsandbytes writes down beside a weight."""
    return json.loads(bytes(tensor.tolist()))
