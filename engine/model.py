"""From a model's folder to a network that runs: which executor, which number format, and what goes with it.

Everything that can be wrong with a folder is found before the weights are loaded and told in one sentence. Knows no requests.
Weights come from safetensors only, and no code from a model's folder is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..kernels.layout import Executor
from .config import ModelConfig
from .errors import ConfigError, ModelLoadError
from .model_folder import Progress, config_json, find_folder, one_line, read_json, weight_files

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A network ready to run and what goes with it."""

    executor: Executor
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str  # as served
    path: Path
    hf_config: transformers.PretrainedConfig
    vocab_size: int  # width of the logits; may be padded past the tokenizer's
    tokenizer_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    executor_kind: str  # program or transformers

    def describe(self) -> str:
        """One line for the log."""
        layers = len(self.executor.kv_layers)
        return (
            f"{self.name}: {self.hf_config.model_type}, {layers} layers, vocabulary {self.vocab_size}, "
            f"context {self.max_model_len}, {str(self.dtype).removeprefix('torch.')}, {self.executor_kind} executor, from {self.path}"
        )


def load_model(config: ModelConfig, progress: Progress) -> LoadedModel:
    """Load what `config` names. Raises ModelLoadError or ConfigError, each with one sentence on what to change."""
    dtype = resolve_dtype(config.dtype)
    folder = find_folder(config.model, config.revision, progress)
    hf_config = read_config(folder)
    tokenizer = _load_tokenizer(folder)
    kind = choose_executor(hf_config, config.executor)
    progress(f"loading {config.model} with the {kind} executor")
    executor = load_executor(folder, hf_config, dtype, kind, config.max_model_len)
    return LoadedModel(
        executor=executor,
        tokenizer=tokenizer,
        name=config.served_model_name or config.model,
        path=folder,
        hf_config=hf_config,
        vocab_size=executor.vocab_size,
        tokenizer_size=len(tokenizer),
        max_model_len=config.max_model_len or executor.max_model_len,
        eos_token_ids=_eos_token_ids(folder, hf_config, tokenizer),
        dtype=dtype,
        executor_kind=kind,
    )


def load_executor(
    folder: Path,
    hf_config: transformers.PretrainedConfig,
    dtype: torch.dtype,
    kind: str = "auto",
    max_model_len: int | None = None,
) -> Executor:
    """The network of a local folder, target or draft model. Raises ModelLoadError, ConfigError for a max_model_len too large.

    kind: program, transformers, or auto (a program where the family is lowered).
    """
    from ..kernels.rope import UnsupportedModel
    from ..kernels.transformers_model import TransformersExecutor, max_positions, refuse_unsupported
    from ..kernels.weights import WeightError, check_finite, load_program_executor, read_tensors

    kind = choose_executor(hf_config, kind)
    try:
        refuse_unsupported(hf_config)
        _check_length(max_model_len, max_positions(hf_config), folder)
        files = weight_files(folder)
        if kind == "program":
            executor = load_program_executor(files, hf_config, dtype, max_model_len)
        else:
            check_finite(read_tensors(files))
            executor = TransformersExecutor.load(folder, hf_config, dtype)
    except (UnsupportedModel, WeightError) as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    _check_length(max_model_len, executor.max_model_len, folder)
    return executor


def _check_length(max_model_len: int | None, limit: int, folder: Path) -> None:
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(f"max_model_len {max_model_len} is above the {limit} positions that the model in {folder} can be run with")


def choose_executor(hf_config: transformers.PretrainedConfig, kind: str) -> str:
    """auto, program or transformers -> program or transformers."""
    if kind not in ("auto", "program", "transformers"):
        raise ConfigError(f"executor {kind!r} is not one of auto, program, transformers")
    if kind == "transformers":
        return kind
    from ..kernels.decoder import supports

    if supports(hf_config):
        return "program"
    if kind == "program":
        raise ModelLoadError(f"a {hf_config.model_type!r} model is not available as a program; use executor auto or transformers")
    return "transformers"


def resolve_dtype(name: str) -> torch.dtype:
    """auto is float32 on a CPU."""
    if name in ("half", "float16"):
        raise ConfigError("dtype float16 is too slow and too narrow on a CPU; use bfloat16 (the same size) or float32")
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, float32, bfloat16")
    return DTYPES[name]


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """config.json, if it is one that can be served without code of its own. Raises ModelLoadError."""
    raw = config_json(folder)
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if "auto_map" in raw and (model_type not in CONFIG_MAPPING or not causal.intersection(architectures)):
        raise ModelLoadError(
            f"{folder} needs Python code of its own (auto_map in config.json), which is never run; "
            "use a version of the model that transformers knows by itself"
        )
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"{folder}: transformers {transformers.__version__} has no model type {model_type!r}")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelLoadError(f"{folder} is quantised ({method}), which is not supported; use the model's unquantised weights")
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every config class has checks of its own
        raise ModelLoadError(f"{folder}/config.json is not a valid {model_type} config: {one_line(error)}") from error


def _load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged tokenizer.json
        raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {one_line(error)}") from error


def _eos_token_ids(
    folder: Path, hf_config: transformers.PretrainedConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> frozenset[int]:
    """All ids that anything in the folder calls an end: chat models often list the end of turn in one place only."""
    generation = read_json(folder, "generation_config.json") or {}
    values: list[Any] = [generation.get("eos_token_id"), hf_config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
