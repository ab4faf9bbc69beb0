"""Reads an adapter's folder, as PEFT writes it: which products it adds to, and by what (LoRA, Hu et al. 2021).

Everything that can be wrong with one is told in a sentence. Only safetensors are read; knows no slot and no request.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..kernels.program import RowsOf
from ..kernels.record import record
from ..kernels.stored_tensors import WeightError, read_tensors, rows_of
from ..kernels.text_names import text_name
from ..kernels.weights import check_finite
from .errors import ModelLoadError
from .model_folder import ADAPTER, read_json, require_files

FACTORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA, which scales weights as well",
    "fan_in_fan_out": "factors that lie the other way round (fan_in_fan_out)",
    "lora_bias": "biases (lora_bias)",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "trainable_token_indices": "token embeddings of its own (trainable_token_indices)",
    "alora_invocation_tokens": "a place in the text from which on it counts (aLoRA)",
    "target_parameters": "parameters that are no linear layers (target_parameters), as experts are",
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # take their start out of the base


@record
class AdapterWeights:
    """What an adapter adds, its scaling already in `up`."""

    rank: int  # the greatest of any product
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # weight -> down [r, in], up [out, r], float32


def adapter_rank(folder: Path) -> int:
    """The greatest rank in it; reads shapes only. Raises ModelLoadError."""
    shapes = [tensor.shape for name, tensor in _tensors(folder).items() if ".lora_A" in name]
    return max((shape[0] for shape in shapes if len(shape) == 2), default=1)


def read_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], most_rank: int, slices: Mapping[str, RowsOf] | None = None
) -> AdapterWeights:
    """shapes: of the weights [out, in] that can be adapted. slices: those of them that an adapter knows as parts of one (`Program.slices`).

    Raises ModelLoadError.
    """
    parts = {name: rows for name, rows in (slices or {}).items() if name in shapes}
    whole = {rows.tensor: rows.shape for rows in parts.values()}
    shapes = {**{name: shape for name, shape in shapes.items() if name not in parts}, **whole}
    config = read_json(folder, ADAPTER) or {}
    _require_lora(folder, config)
    tensors = _tensors(folder)
    _require_numbers(folder, tensors)
    halves: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, str] = {}  # weight -> the adapter's name of its layer
    for name in tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            raise ModelLoadError(f"{folder / FACTORS} holds {name!r}, which is no factor of a linear layer (lora_A or lora_B)")
        names = (found["module"], text_name(found["module"]))  # it may have been made for the whole of which this is the text half
        weight = next((f"{name}.weight" for name in names if f"{name}.weight" in shapes), None)
        if weight is None:
            raise ModelLoadError(f"{folder} adapts {found['module']}, {_why_not(found['module'], shapes)}")
        halves.setdefault(weight, {})[found["factor"]] = tensors[name]
        modules[weight] = found["module"]
    scaling = _scaling(folder, config)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for weight, factors in halves.items():
        if factors.keys() != {"A", "B"}:
            raise ModelLoadError(f"{folder / FACTORS} has only one of the two factors of {weight.removesuffix('.weight')}")
        down, up = factors["A"], factors["B"]
        out, width = shapes[weight]
        rank = len(down)
        if tuple(down.shape) != (rank, width) or tuple(up.shape) != (out, rank):
            raise ModelLoadError(
                f"{folder} was made for another model: its factors of {weight.removesuffix('.weight')} are {list(down.shape)} and "
                f"{list(up.shape)}, but the layer has {width} inputs and {out} outputs"
            )
        if rank > most_rank:
            raise ModelLoadError(f"{folder} has rank {rank}, but there is room for {most_rank}: raise max_lora_rank (--max-lora-rank)")
        down, up = down.float(), up.float() * scaling(modules[weight], rank)
        found = {name: rows_of(up, rows) for name, rows in parts.items() if rows.tensor == weight}
        pairs.update({name: (down, rows) for name, rows in (found or {weight: up}).items()})
    if not pairs:
        raise ModelLoadError(f"{folder / FACTORS} holds no factors")
    return AdapterWeights(max(len(down) for down, _ in pairs.values()), pairs)


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    file = folder / FACTORS
    if not file.is_file():
        if (folder / PICKLED).is_file():
            raise ModelLoadError(
                f"{folder} has its factors as {PICKLED} only, a format that can run code when it is read. If you trust it, convert it "
                f'once: python -c "import torch; from safetensors.torch import save_file as s; '
                f"s(torch.load({str(folder / PICKLED)!r}, weights_only=True), {str(file)!r})\""
            )
        raise ModelLoadError(f"{folder} has no {FACTORS}, which PEFT writes beside {ADAPTER}")
    require_files([file])
    try:
        return read_tensors([file])
    except WeightError as error:
        raise ModelLoadError(f"{folder}: {error}") from error


def _require_numbers(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dim() != 2:
            raise ModelLoadError(f"{folder / FACTORS}: {name} is no matrix of floating point numbers")
    try:
        check_finite(tensors)
    except WeightError as error:
        raise ModelLoadError(f"{folder}: {error}") from error


def _require_lora(folder: Path, config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        raise ModelLoadError(f"{folder} is an adapter of type {kind}; those of type LORA are served")
    asked = [told for name, told in _UNSERVED.items() if config.get(name)]
    if config.get("bias", "none") not in ("none", None):
        asked.append(f"biases (bias {config['bias']!r})")
    if str(begun := config.get("init_lora_weights")).lower().startswith(_CHANGE_THE_BASE):
        asked.append(f"factors that add to changed weights (init_lora_weights {begun!r})")
    if asked:
        base = config.get("base_model_name_or_path") or "its base model"
        raise ModelLoadError(f"{folder} has {asked[0]}, which is not served: merge it into {base} (peft: merge_and_unload) and serve that")


def _scaling(folder: Path, config: Mapping[str, Any]) -> Callable[[str, int], float]:
    """Of a module, by its name and rank: alpha / rank, or alpha / sqrt(rank) where it is stabilised (rsLoRA, Kalajdzievski 2023)."""
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    if not _are_numbers([alpha]) or not isinstance(patterns, Mapping) or not _are_numbers(patterns.values()):
        raise ModelLoadError(f"{folder / ADAPTER}: lora_alpha and the values of alpha_pattern must be finite numbers")
    try:
        by_name = [(re.compile(rf"(.*\.)?({pattern})"), value) for pattern, value in patterns.items()]
    except re.error as error:
        raise ModelLoadError(f"{folder / ADAPTER}: alpha_pattern holds a pattern that is none: {error}") from error

    def of(module: str, rank: int) -> float:
        own = next((value for pattern, value in by_name if pattern.fullmatch(module)), alpha)
        return own / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return of


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _why_not(module: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    if module.split(".")[-1] in ("lm_head", "embed_tokens"):
        return "and adapters of the head or the embedding are not served: train it without, or merge it into its base model"
    if "expert" in module:
        return "and adapters of experts are not served: merge it into its base model"
    if module.endswith(".kv_b_proj"):
        return "whose halves stand on both sides of attention here: adapters of it are not served, merge it into its base model"
    example = next(iter(shapes), "")
    return f"which is no linear layer of this model (one of them is {example.removesuffix('.weight')})"
