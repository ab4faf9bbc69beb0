"""How a network will run on this machine, settled before a weight is read: by what, in which formats, and why.

Knows the configuration and the program, no tensors and no requests.
"""

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers

from ..kernels import native
from ..kernels.decoder import supports
from ..kernels.execution import Execution, Quantization
from ..kernels.fp8 import LEAST_CAPABILITY
from ..kernels.program import Program
from ..kernels.quantised_checkpoint import Quantisation
from ..kernels.weights import network_program
from .config import FP8_NAMES, STORED_NAMES, ModelConfig
from .errors import ConfigError, ModelLoadError

OLDEST_GPU = (8, 0)
"""Compute capability of the first GPUs, Ampere's, that multiply bfloat16 and whose programs have room for the kernels' tiles."""

DTYPES = {"auto": None, "float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class NetworkPlan:
    """One of the executors and what it is told."""

    kind: Literal["native", "torch", "transformers"]
    execution: Execution
    program: Program | None  # None: transformers runs its own
    why: str  # why not natively, "" if it is
    stored: str = ""  # the method of a checkpoint that is quantised

    def describe(self) -> str:
        """`native avx512_bf16, int8 weights, bfloat16, 2 threads`, `torch float32 (not native: ...)` or `Triton and CUDA graphs, ...`."""
        if self.execution.on_gpu:
            invariant = ", batch invariant" if self.execution.batch_invariant else ""
            return f"Triton and CUDA graphs, {self.formats()}{invariant}, {gpu_name(self.execution.device)}"
        if self.kind != "native":
            return f"{self.kind} {self.formats()} (not native: {self.why})"
        return f"native {native.availability().isa}, {self.formats()}, {native.threads()} thread{'s' * (native.threads() > 1)}"

    @property
    def dtype(self) -> str:
        """`bfloat16`: of products and of what is not made narrow."""
        return _name(self.execution.dtype)

    def formats(self) -> str:
        """`bfloat16`, or `int8 weights, bfloat16, int8 cache`; of a quantised checkpoint `int8 weights (stored as fp8), bfloat16`."""
        execution = self.execution
        weights = f"{execution.quantization} weights" if execution.quantization else "weights" if self.stored else ""
        weights += f" (stored as {self.stored}), " if self.stored else ", " if weights else ""
        return weights + self.dtype + (f", {execution.kv_cache} cache" if execution.kv_cache else "")


def plan_network(
    config: ModelConfig,
    hf_config: transformers.PretrainedConfig,
    native_quantization: Quantization | None = None,
    stored: Quantisation | None = None,
) -> NetworkPlan:
    """What `config` asks for, as far as this machine can.

    native_quantization: of the weights where config leaves them to us and the network runs natively. stored: how the checkpoint has
    them; then they are made about as wide as they are there.
    Raises ConfigError for formats or an executor that cannot be had, each with what to do; UnsupportedModel.
    """
    if config.quantization in STORED_NAMES:
        if stored is None or config.quantization.partition("_")[0] != stored.method:
            there = "are not quantised" if stored is None else f"are stored as {stored.method}"
            raise ConfigError(f"quantization {config.quantization}: the weights of {config.model} {there}; leave quantization away")
        config = replace(config, quantization="auto")
    followed = stored if config.quantization == "auto" else None
    dtype = resolve_dtype(config.dtype)
    program = network_program(hf_config, config.max_model_len) if config.executor != "transformers" and supports(hf_config) else None
    device = resolve_device(config, program is not None)
    if device == "cpu" and config.quantization == "fp8":
        raise ConfigError("quantization fp8 needs a GPU, and this network runs on the CPU: use int8 or int4, or leave quantization away")
    if device == "cpu" and config.kv_cache_dtype in FP8_NAMES:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU, and this network runs on the CPU, whose narrow cache is int8: use int8, "
            "or leave kv_cache_dtype away"
        )
    if device != "cpu":
        plan = _on_gpu(config, program, device, dtype, followed)
    elif program is None:
        if config.executor in ("native", "torch"):
            raise ModelLoadError(f"a {hf_config.model_type!r} model is not available as a program; use executor auto or transformers")
        asked = config.executor == "transformers"
        why = "executor transformers was chosen" if asked else f"a {hf_config.model_type!r} model is not available as a program"
        plan = NetworkPlan("transformers", Execution(dtype or torch.float32, prefer_native=False), None, why)
    else:
        if followed is not None:
            native_quantization = "int4" if followed.bits == 4 else "int8"
        wished = replace(_native_execution(config, dtype, native_quantization), as_stored=followed is not None)
        refusal = "executor torch was chosen" if config.executor == "torch" else native.supports(program, wished)
        if refusal is None:
            plan = NetworkPlan("native", wished, program, "")
        elif config.executor == "native":
            raise ConfigError(f"executor native cannot be used: {refusal}; or use executor auto")
        else:
            plan = NetworkPlan("torch", Execution(dtype or torch.float32, prefer_native=False), program, refusal)
    _require_formats(config, plan)
    return plan if stored is None else replace(plan, stored=stored.method)


def resolve_device(config: ModelConfig, has_kernels: bool) -> str:
    """`cpu`, `cuda:0`, `cuda:1`, ... auto: the first GPU, if there is one and nothing asked for needs a CPU. Raises ConfigError."""
    needs_cpu = config.executor in ("native", "transformers") or "int8" in (config.quantization, config.kv_cache_dtype)
    if config.device == "cpu":
        return "cpu"
    if config.device == "auto":
        return "cuda:0" if has_kernels and not needs_cpu and gpu_refusal(0) is None else "cpu"
    index = int(config.device.partition(":")[2] or 0)
    if (refusal := gpu_refusal(index)) is not None:
        raise ConfigError(f"device {config.device} cannot be used: {refusal}; use device cpu")
    return f"cuda:{index}"


def gpu_refusal(index: int) -> str | None:
    """Why this GPU cannot be used; None if it can."""
    if not torch.cuda.is_available():
        return f"PyTorch finds no GPU, only 1 CPU ({os.cpu_count()} cores)"
    if torch.version.hip is not None:
        return "this PyTorch is built for AMD's GPUs, and the kernels are for NVIDIA's"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which PyTorch's builds for NVIDIA GPUs bring along"
    if index >= (count := torch.cuda.device_count()):
        return f"GPUs here are cuda:0 to cuda:{count - 1}"
    if torch.cuda.get_device_capability(index) < OLDEST_GPU:
        return f"{torch.cuda.get_device_name(index)} is older than Ampere (compute capability 8.0), the oldest that the kernels are for"
    return None


def multiplies_fp8(device: str) -> bool:
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name(device)


def _on_gpu(
    config: ModelConfig, program: Program | None, device: str, dtype: torch.dtype | None, followed: Quantisation | None
) -> NetworkPlan:
    if program is None or config.executor in ("native", "transformers"):
        why = f"executor {config.executor} was chosen" if program is not None else "this model is not available as a program"
        raise ConfigError(f"device {config.device} cannot be used: {why}, which runs on CPUs only; use device cpu")
    narrow: Any = None if config.quantization in ("auto", "none") else config.quantization
    if followed is not None:
        has_fp8 = multiplies_fp8(device) and not config.batch_invariant
        narrow = "int4" if followed.bits == 4 else "fp8" if has_fp8 else None
    if narrow == "fp8" and config.batch_invariant:
        raise ConfigError("quantization fp8 and batch_invariant cannot be combined: leave one of them away")
    for option, value in (("quantization", narrow), ("kv_cache_dtype", config.kv_cache_dtype)):
        if value in FP8_NAMES and not multiplies_fp8(device):
            raise ConfigError(f"{option} {value} cannot be used: {gpu_name(device)} does not multiply 8-bit floats; leave {option} away")
    execution = Execution(
        dtype=dtype or torch.bfloat16,
        quantization=narrow,
        kv_cache="fp8" if config.kv_cache_dtype in FP8_NAMES else None,
        as_stored=followed is not None,
        prefer_native=False,
        device=device,
        batch_invariant=config.batch_invariant,
    )
    return NetworkPlan("torch", execution, program, "the network runs on a GPU")


def resolve_dtype(name: str) -> torch.dtype | None:
    """None for auto: that depends on what runs the network."""
    if name in ("half", "float16"):
        raise ConfigError("dtype float16 is too slow and too narrow on a CPU; use bfloat16 (the same size) or float32")
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, float32, bfloat16")
    return DTYPES[name]


def _native_execution(config: ModelConfig, dtype: torch.dtype | None, native_quantization: Quantization | None) -> Execution:
    narrow: Any = config.quantization
    return Execution(
        dtype=dtype or (torch.float32 if native.availability().isa is None else torch.bfloat16),
        quantization=native_quantization if narrow == "auto" else None if narrow == "none" else narrow,
        kv_cache="int8" if config.kv_cache_dtype == "int8" else None,
    )


def _require_formats(config: ModelConfig, plan: NetworkPlan) -> None:
    """Nobody gets another format than the one that was asked for."""
    if plan.kind != "native":
        for option, value in (("quantization", config.quantization), ("kv_cache_dtype", config.kv_cache_dtype)):
            if value == "int8" or (value == "int4" and not plan.execution.on_gpu):
                raise ConfigError(f"{option} {value} needs the native executor, which cannot be used: {plan.why}; or leave {option} away")
    dtype = _name(plan.execution.dtype)
    if config.kv_cache_dtype not in ("auto", "int8", *FP8_NAMES, dtype):
        narrow = "fp8" if plan.execution.on_gpu else "int8"
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} differs from dtype {dtype}: the cache holds the network's own format or {narrow}; "
            f"use kv_cache_dtype auto or {narrow}, or dtype {config.kv_cache_dtype}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
