"""The keyword arguments of `LLM(...)`, in vLLM's names, as an EngineConfig. Knows no engine."""

import difflib
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

from ..proposers.config import SpeculativeConfig
from ..proposers.config_entry import SpeculativeConfigError
from ..proposers.config_reading import parse_speculative_config, read_speculative_config
from .config import DEMO_MODEL, AdapterConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from .errors import ConfigError
from .vllm_flags import NOTES, SWITCHES, TAKING_A_VALUE, TAKING_VALUES

T = TypeVar("T")

# Names of vLLM that differ from ours.
RENAMED = {"gpu_memory_utilization": "memory_share", "num_gpu_blocks_override": "num_blocks"}
COUNTS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_draft_tokens_per_step", "num_gpu_blocks_override", "threads"),
    *("max_loras", "max_lora_rank"),
)
ON_OR_OFF = ("enable_prefix_caching", "batch_invariant", "enable_lora", "disable_log_stats", "allow_synthetic_acceptance")
LONGEST_UNSEEN_S = 0.1  # nobody watches the tokens of a script's call come, but Ctrl-C and the progress bar wait for a step's end
ONE_DEVICE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
OUR_NAMES = (
    *("dtype", "max_model_len", "revision", "executor", "seed", "served_model_name", "quantization", "kv_cache_dtype", "threads"),
    *("kv_cache_gb", "enable_prefix_caching", "kv_cache_memory_bytes", *RENAMED, "device", "batch_invariant"),
    *("max_num_seqs", "max_num_batched_tokens", "max_draft_tokens_per_step", "generation_config", "override_generation_config"),
    *("chat_template", "tokenizer", "tokenizer_revision"),
    *("enable_lora", "max_loras", "max_lora_rank"),
    *("disable_log_stats", "allow_synthetic_acceptance", "speculation_corpus_dir", *ONE_DEVICE),
)
IGNORED = frozenset(
    {flag.lstrip("-").replace("-", "_") for flag in SWITCHES | TAKING_A_VALUE | TAKING_VALUES} | {"attention_config", "reasoning_parser"}
).difference(OUR_NAMES)
"""Scripts for vLLM go on to run without them."""
OLD_SPECULATION = (
    *("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
    *("speculative_draft_tensor_parallel_size", "speculative_max_model_len", "speculative_disable_by_batch_size"),
)


def engine_config(
    model: str | os.PathLike[str] | None,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | None,
    options: Mapping[str, Any],
) -> EngineConfig:
    """Raises TypeError for an unknown option, with the nearest name, and ConfigError for a value that cannot work.

    Warns once, with all names, about options of vLLM that mean nothing here.
    """
    _check_names(options)
    values = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():
        if getattr(value, "ndim", 0):
            raise ConfigError(f"{name} must be one value, not {value!r}")  # which comparisons of an array's numbers would hide
    for name in ONE_DEVICE:
        if values.get(name, 1) != 1:
            raise ConfigError(f"{name} {values[name]!r} is not available: an engine uses one device; found here: {devices_found()}")
    if not isinstance(values.get("override_generation_config", {}), Mapping):
        raise ConfigError("override_generation_config must be a dict, such as {'temperature': 0.6}")
    _require(values, COUNTS, "a positive integer", Integral, lambda value: value > 0)
    _require(values, ("seed",), "an integer", Integral, lambda _: True)
    values |= {name: int(values[name]) for name in (*COUNTS, "seed") if name in values}  # numpy's too
    _require(values, ("kv_cache_gb", "kv_cache_memory_bytes"), "a number above 0", Real, lambda value: 0 < value < math.inf)
    _require(values, ("gpu_memory_utilization",), "a number above 0 and at most 1", Real, lambda value: 0 < value <= 1)
    for name in ON_OR_OFF:
        if values.get(name, False) not in (True, False):
            raise ConfigError(f"{name} must be True or False, not {values[name]!r}")
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    if "memory_share" in values:
        values["max_kv_cache_gb"] = math.inf  # a share that somebody chose is meant
        values["gpu_memory_utilization"] = values["memory_share"]  # on a GPU it is the whole process's
    if "kv_cache_memory_bytes" in values:
        values.setdefault("kv_cache_gb", values["kv_cache_memory_bytes"] / 2**30)
    if isinstance(values.get("served_model_name"), (list, tuple)):
        values["served_model_name"] = values["served_model_name"][0]
    if "tokenizer" in values:
        values["tokenizer"] = os.fspath(values["tokenizer"])
    _settle_formats(values)
    values["model"] = DEMO_MODEL if model is None else os.fspath(model)
    return EngineConfig(
        model=_fill(ModelConfig, values),
        cache=_fill(CacheConfig, values),
        scheduler=_fill(SchedulerConfig, {"longest_unseen_s": LONGEST_UNSEEN_S, **values}),
        speculative=_speculative(speculative_config, values["model"]),
        adapters=_fill(AdapterConfig, values) if values.get("enable_lora") else None,
        allow_synthetic_acceptance=bool(values.get("allow_synthetic_acceptance", False)),
        speculation_corpus_dir=os.fspath(values["speculation_corpus_dir"]) if "speculation_corpus_dir" in values else None,
    )


def devices_found() -> str:
    """"1 CPU (8 cores)" or "2 GPUs (NVIDIA H200, NVIDIA H200)"."""
    import torch  # only to say what is there, on the way out

    count = torch.cuda.device_count()
    if not count:
        return f"1 CPU ({os.cpu_count()} cores)"
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return f"{count} GPU{'s' if count > 1 else ''} ({names})"


def _require(values: Mapping[str, Any], names: Sequence[str], told: str, kind: type, fits: Callable[[Any], bool]) -> None:
    for name in names:
        if name in values and (not isinstance(value := values[name], kind) or isinstance(value, bool) or not fits(value)):
            raise ConfigError(f"{name} must be {told}, not {value!r}")


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in OLD_SPECULATION:
            raise ConfigError(
                f"{name} is an old name: use speculative_config, for example "
                "speculative_config={'method': 'ngram', 'num_speculative_tokens': 5, 'prompt_lookup_max': 4}"
            )
        if name not in OUR_NAMES and name not in IGNORED:
            near = difflib.get_close_matches(name, ("model", "speculative_config", *OUR_NAMES, *IGNORED), n=1)
            raise TypeError(f"LLM() has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if ignored := sorted(name for name, value in options.items() if name in IGNORED and value is not None):
        told = [name + (f" ({note})" if (note := NOTES.get("--" + name.replace("_", "-"))) else "") for name in ignored]
        warnings.warn(f"LLM(): these options of vLLM have no effect here: {', '.join(told)}", stacklevel=4)


def _settle_formats(values: dict[str, Any]) -> None:
    dtype = str(values.get("dtype", "auto")).removeprefix("torch.")
    if dtype in ("half", "float16"):
        warnings.warn(f"LLM(): dtype {dtype} is not served; auto is used", stacklevel=4)
        dtype = "auto"
    values["dtype"] = "float32" if dtype == "float" else dtype
    if "device" in values:
        values["device"] = str(values["device"])
    for name in ("quantization", "kv_cache_dtype"):
        if name in values:
            values[name] = str(values[name]).removeprefix("torch.").lower()


def _speculative(
    value: SpeculativeConfig | Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | None, target: str
) -> SpeculativeConfig | None:
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    try:
        config = read_speculative_config(value, target) if isinstance(value, str) else parse_speculative_config(value, target)
    except SpeculativeConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from error
    for sentence in config.warnings:
        warnings.warn(f"speculative_config: {sentence}", stacklevel=4)
    return config


def _fill(config: type[T], values: Mapping[str, Any]) -> T:
    """Defaults stand in the dataclasses only: what nobody gave is not passed."""
    return config(**{f.name: values[f.name] for f in fields(config) if f.name in values})  # pyright: ignore[reportArgumentType]
