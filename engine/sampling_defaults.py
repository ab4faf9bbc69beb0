"""How tokens are chosen where a request does not say: what the model's publisher recommends, and who serves it."""

from pathlib import Path
from typing import Any

from .config import ModelConfig
from .errors import ConfigError, InvalidRequest
from .model_folder import read_json
from .request import SamplingParams

FILE = "generation_config.json"
RECOMMENDED = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {"max_new_tokens": "max_tokens"}
"""What is read of the file, as vLLM does, and what SamplingParams calls it."""


def sampling_defaults(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Fields of SamplingParams. folder: the model's. Raises ConfigError."""
    match config.generation_config:
        case "auto":
            said = read_json(folder, FILE) or {}
        case "vllm":
            said = {}
        case other:
            if (said := read_json(Path(other), FILE)) is None:
                raise ConfigError(f"generation_config is auto, vllm or a folder with {FILE}, not {other!r}")
    if unknown := config.override_generation_config.keys() - RECOMMENDED.keys():
        raise ConfigError(f"override_generation_config has {', '.join(RECOMMENDED)}, not {min(unknown)!r}")
    said |= config.override_generation_config
    found = {ours: said[name] for name, ours in RECOMMENDED.items() if said.get(name) is not None}
    try:
        if SamplingParams(**found).max_tokens == 0:  # which asks for nothing but the prompt's scores
            raise InvalidRequest("max_new_tokens must be at least 1, not 0")
    except InvalidRequest as error:
        raise ConfigError(f"{FILE} or override_generation_config: {error}; generation_config vllm leaves out the model's own") from None
    return found
