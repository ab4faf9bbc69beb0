"""From a model's name to a network that runs: finding its folder, checking its files, choosing what runs it.

Everything that can be wrong with a folder is found before the weights are loaded and told in one sentence. Also sizes the
cache. Knows no requests. Weights come from safetensors only, and no code from a model's folder is ever run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..kernels.layout import Executor
from .config import DEMO_MODEL, CacheConfig, ModelConfig
from .errors import ConfigError, ModelLoadError

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_FOLDERS_LEFT_OUT = ["*/*"]  # other formats of the same weights
DTYPES = {"auto": torch.float32, "float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16}

Progress = Callable[[str], None]


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
    from ..kernels.weights import WeightError, load_program_executor

    kind = choose_executor(hf_config, kind)
    try:
        refuse_unsupported(hf_config)
        _check_length(max_model_len, max_positions(hf_config), folder)
        check_files(folder)
        if kind == "program":
            executor = load_program_executor(folder, hf_config, dtype, max_model_len)  # checks every number itself
        else:
            check_numbers(folder)
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


def find_folder(model: str, revision: str | None, progress: Progress) -> Path:
    """The local folder of foretoken-demo, of a path or of a hub id, downloaded if needed. Raises ModelLoadError."""
    if model == DEMO_MODEL:
        folder = Path(__file__).parent / "demo_model" / "target"
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ModelLoadError(f"the weights of the embedded model are not in this installation ({folder}); name another model")
        return folder
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            raise ModelLoadError(_gguf_sentence(path))
        raise ModelLoadError(f"{model} is a file; name the folder with config.json, tokenizer and safetensors instead")
    if not HUB_ID.fullmatch(model):
        raise ModelLoadError(f"there is no folder {model}")
    return _download(model, revision, progress)


def _download(hub_id: str, revision: str | None, progress: Progress) -> Path:
    """A snapshot in the hub's cache; files already there are not fetched again, partial ones go on where they stopped."""
    progress(f"looking for {hub_id} on the Hugging Face hub")
    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_FOLDERS_LEFT_OUT)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"there is no folder {hub_id}, and the model of that name could not be fetched from the Hugging Face hub: {_one_line(error)}"
        ) from error


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """config.json, if it is one that can be served without code of its own. Raises ModelLoadError."""
    raw = _read_json(folder, "config.json")
    if raw is None:
        ggufs = sorted(folder.glob("*.gguf"))
        raise ModelLoadError(_gguf_sentence(ggufs[0]) if ggufs else f"{folder} has no config.json; is it a model's folder?")
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
        raise ModelLoadError(f"{folder}/config.json is not a valid {model_type} config: {_one_line(error)}") from error


def check_files(folder: Path) -> None:
    """Every weight file is there and whole. Raises ModelLoadError naming the file."""
    for file in _weight_files(folder):
        with _open(file):
            pass


def check_numbers(folder: Path) -> None:
    """Every weight is finite: a damaged file still loads, and then every answer is nonsense. Raises ModelLoadError."""
    for file in _weight_files(folder):
        with _open(file) as weights:
            for name in weights.keys():
                tensor = weights.get_tensor(name)
                # A sum shows any NaN without a temporary of the tensor's size; it may overflow, so look closer then.
                if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
                    raise ModelLoadError(f"{file} is damaged: {name} has values that are not finite; fetch the file again")


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is damaged or incomplete ({error}); fetch the file again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = _read_json(folder, "model.safetensors.index.json")
    if index is not None:
        files = [folder / name for name in sorted(set(index.get("weight_map", {}).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(f"{folder} lacks {len(missing)} of its {len(files)} weight files, the first is {missing[0]}")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if ggufs := sorted(folder.glob("*.gguf")):
        raise ModelLoadError(_gguf_sentence(ggufs[0]))
    if pickles := sorted(file for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} has its weights as {pickles[0].name} only, a format that can run code when it is read. If you trust it, "
            f'convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained(r'{folder}', dtype='auto').save_pretrained(r'{folder}')\""
        )
    if (folder / "adapter_config.json").is_file():
        raise ModelLoadError(f"{folder} is an adapter; merge it into its base model and serve the result")
    raise ModelLoadError(f"{folder} has no model.safetensors")


def _gguf_sentence(file: Path) -> str:
    return (
        f"{file.name} is a GGUF file; serve the original safetensors, or convert it once: python -c "
        f'"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[x.from_pretrained(r'{file.parent}', gguf_file='{file.name}').save_pretrained('converted') for x in (M, T)]\""
    )


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """None if there is no such file. Raises ModelLoadError if it is no JSON object."""
    file = folder / name
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged tokenizer.json
        raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {_one_line(error)}") from error


def _eos_token_ids(
    folder: Path, hf_config: transformers.PretrainedConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> frozenset[int]:
    """All ids that anything in the folder calls an end: chat models often list the end of turn in one place only."""
    generation = _read_json(folder, "generation_config.json") or {}
    values: list[Any] = [generation.get("eos_token_id"), hf_config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def cache_blocks(
    config: CacheConfig, bytes_per_block: int, max_model_len: int, free_bytes: int, useful_tokens: int | None = None
) -> int:
    """How many blocks the cache gets: the configured size, else a share of free memory.

    useful_tokens (max_num_seqs * max_model_len) caps it. Raises ConfigError if a sequence of max_model_len would not fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    gib = 2**30
    if config.kv_cache_gb is not None:
        budget = config.kv_cache_gb * gib
    else:
        budget = min(free_bytes * config.memory_share, config.max_kv_cache_gb * gib)
    needed = -(-max_model_len // config.block_size) + 1
    blocks = int(budget // bytes_per_block)
    if blocks < needed:
        raise ConfigError(
            f"the KV cache gets {budget / 2**20:,.0f} MiB, but one sequence of max_model_len {max_model_len} needs "
            f"{needed * bytes_per_block / 2**20:,.0f} MiB; set kv_cache_gb to at least that, or lower max_model_len"
        )
    if useful_tokens is not None:
        blocks = min(blocks, max(needed, -(-useful_tokens // config.block_size) + 1))
    return blocks


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping: the machine's, or what the container's limit leaves."""
    free = [_meminfo_available(root / "proc/meminfo")]
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),  # version 2
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(root / limit_file), _read_int(root / usage_file)
        if limit is not None and usage is not None:
            cached = _read_entry((root / usage_file).with_name("memory.stat"), "inactive_file") or 0  # given back on demand
            free.append(max(0, limit - usage + cached))
    known = [value for value in free if value is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _meminfo_available(file: Path) -> int | None:
    kibibytes = _read_entry(file, "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _read_entry(file: Path, name: str) -> int | None:
    """The number behind `name` in a file of lines "name number"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _read_int(file: Path) -> int | None:
    """None if the file is not there or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
