"""What `--speculative-config` may say, as types: one per method, and the settings that hold for all of them.

Keys and defaults are vLLM's. Knows what is a legal setting, not which methods can run: that is `build` in proposers/__init__.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, ConfigEntry, SpeculativeConfigError, nearest
from .detection import NGRAM_NAMES, detect_method

DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_DISABLE_BY_BATCH_SIZE = 16


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup. Defaults as in vLLM: both 5; if one is given the other equals it."""

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    match: Literal["earliest", "latest"] = "earliest"


@dataclass(frozen=True)
class DraftModelConfig:
    """A smaller causal language model with the target's vocabulary."""

    model: str
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    max_model_len: int | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    quantization: Literal["none", "int8", "int4"] | None = None  # of the weights; None = int8 where it runs natively
    revision: str | None = None
    draft_tensor_parallel_size: int = 1


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads. No model: they are looked for in the target's folder."""

    model: str | None = None
    num_speculative_tokens: int | None = None
    num_heads: int | None = None


@dataclass(frozen=True)
class EagleConfig:
    """EAGLE 1 and 3 heads."""

    model: str
    method: Literal["eagle", "eagle3"] = "eagle"
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    draft_tensor_parallel_size: int = 1


@dataclass(frozen=True)
class SuffixConfig:
    """Suffix decoding. num_speculative_tokens None = the tree depth."""

    num_speculative_tokens: int | None = None
    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


@dataclass(frozen=True)
class MtpConfig:
    """Draft layers inside the target's checkpoint. num_speculative_tokens None = what it was trained for."""

    num_speculative_tokens: int | None = None


@dataclass(frozen=True)
class HeadConfig:
    """Learned drafters with nothing to set but their weights. num_speculative_tokens None = the checkpoint's own."""

    model: str
    method: Literal["mlp_speculator", "pard", "dflash", "dspark"]
    num_speculative_tokens: int | None = None


@dataclass(frozen=True)
class PredictionConfig:
    """Predicted Outputs: on for every request that brings a prediction."""

    num_speculative_tokens: int = 16


ProposerConfig = NgramConfig | DraftModelConfig | MedusaConfig | EagleConfig | SuffixConfig | MtpConfig | HeadConfig | PredictionConfig


@dataclass(frozen=True)
class SpeculativeConfig:
    """All proposers, in order of preference, and the limits that hold for all of them."""

    proposers: tuple[ProposerConfig, ...] = ()
    disable_by_batch_size: int = DEFAULT_DISABLE_BY_BATCH_SIZE
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (first, last, k), k may be 0
    rejection_sample_method: Literal["match", "standard"] = "match"
    off: bool = False  # method "off": not even predictions
    warnings: tuple[str, ...] = ()  # what was given and is ignored, one sentence each


def read_speculative_config(text: str) -> SpeculativeConfig:
    """Parse JSON, YAML, or `@FILE` with either inside. Raises SpeculativeConfigError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpeculativeConfigError(f"cannot read the speculative config {text[1:]!r}: {error}") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SpeculativeConfigError(f"the speculative config is neither JSON nor YAML: {error}") from None
    return parse_speculative_config(value)


def parse_speculative_config(value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> SpeculativeConfig:
    """One object, or a list of them: several proposers in order of preference. Raises SpeculativeConfigError.

    Settings that hold for all proposers may stand in any of the objects, but not with different values.
    """
    mappings = [value] if isinstance(value, Mapping) else value
    if isinstance(mappings, str) or not isinstance(mappings, Sequence) or not all(isinstance(m, Mapping) for m in mappings):
        raise SpeculativeConfigError(f"the speculative config must be an object or a list of objects, not {value!r}")
    if not mappings:
        raise SpeculativeConfigError("the speculative config is an empty list; to switch speculation off say {'method': 'off'}")
    proposers: list[ProposerConfig] = []
    shared: dict[str, Any] = {}
    warnings: list[str] = []
    for mapping in mappings:
        entry = ConfigEntry(mapping)
        if entry.flag("adaptive"):
            warnings.append("speculative config: adaptive speculation is not available in this version; k is fixed")
        for key, setting in _shared_settings(entry).items():
            if shared.setdefault(key, setting) != setting:
                raise SpeculativeConfigError(f"{key!r} holds for all proposers, but two values are given: {shared[key]} and {setting}")
        method = _method(entry)
        if method != "off":
            proposers.append(_proposer(method, entry))
        elif len(mappings) > 1:
            raise SpeculativeConfigError("method 'off' cannot stand in a list with other methods")
        warnings += entry.leftovers(method)
    return SpeculativeConfig(tuple(proposers), off=not proposers, warnings=tuple(warnings), **shared)


def _shared_settings(entry: ConfigEntry) -> dict[str, Any]:
    """Those of SpeculativeConfig's own settings that the entry names."""
    entry.choice("acceptance_method", ("rejection_sampler",), lossy=("typical_acceptance_sampler", "typical"))
    for key, meaning in _NOT_AVAILABLE_FLAGS.items():
        if entry.flag(key):
            raise SpeculativeConfigError(f"{key!r} ({meaning}) is known and not available in this version")
    return _given(
        disable_by_batch_size=entry.integer("disable_by_batch_size", 1, 2**31 - 1),
        num_speculative_tokens_per_batch_size=entry.ranges("num_speculative_tokens_per_batch_size"),
        rejection_sample_method=entry.choice(
            "rejection_sample_method", ("match", "standard"), lossy=("synthetic", "fly"), later=("block",)
        ),
    )


def _method(entry: ConfigEntry) -> str:
    """The method's name as in _METHODS; found by the model's content if it is not given."""
    method = entry.take("method")
    if method is False:  # YAML 1.1 reads a bare `off` as a boolean
        return "off"
    if method is None:
        model = entry.peek("model")
        if not isinstance(model, str):
            raise SpeculativeConfigError("the speculative config needs a 'method' or a 'model'")
        method = detect_method(model)
    if isinstance(method, str):
        if method in NGRAM_NAMES or method == "ngram_gpu":
            return "ngram"
        if method.endswith("_mtp"):  # deepseek_mtp, qwen3_next_mtp, ...: one name per model type in older versions
            return "mtp"
    if method not in _METHODS:
        raise SpeculativeConfigError(f"unknown speculative method {method!r}{nearest(str(method), _METHODS)}")
    return method


def _proposer(method: str, entry: ConfigEntry) -> ProposerConfig:
    num_tokens = entry.integer("num_speculative_tokens", 1, MAX_NUM_SPECULATIVE_TOKENS)
    match method:
        case "ngram":
            entry.take("model")  # the literal '[ngram]'
            low, high = entry.integer("prompt_lookup_min", 1, 64), entry.integer("prompt_lookup_max", 1, 64)
            if low and high and low > high:
                raise SpeculativeConfigError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
            order = entry.choice("match", ("earliest", "latest"))
            return NgramConfig(
                **_given(num_speculative_tokens=num_tokens, prompt_lookup_max=high or low, prompt_lookup_min=low or high, match=order)
            )
        case "draft_model":
            return DraftModelConfig(
                entry.model(method),
                **_given(
                    num_speculative_tokens=num_tokens,
                    max_model_len=entry.integer("max_model_len", 1, 2**31 - 1),
                    draft_sample_method=entry.choice("draft_sample_method", ("greedy", "probabilistic")),
                    quantization=entry.choice("quantization", ("int8", "int4", "none")),
                    revision=entry.text("revision"),
                    draft_tensor_parallel_size=entry.integer("draft_tensor_parallel_size", 1, 1024),
                ),
            )
        case "eagle" | "eagle3":
            ranks = entry.integer("draft_tensor_parallel_size", 1, 1024)
            return EagleConfig(
                entry.model(method), method, **_given(num_speculative_tokens=num_tokens, draft_tensor_parallel_size=ranks)
            )
        case "medusa":
            num_heads = entry.integer("num_heads", 1, MAX_NUM_SPECULATIVE_TOKENS)
            if num_heads and num_tokens and num_tokens > num_heads:
                raise SpeculativeConfigError(
                    f"num_speculative_tokens {num_tokens} is above num_heads {num_heads}: every head guesses one token"
                )
            return MedusaConfig(entry.text("model"), num_tokens or num_heads, num_heads)
        case "suffix":
            return SuffixConfig(
                num_tokens,
                **_given(
                    max_tree_depth=entry.integer("suffix_decoding_max_tree_depth", 1, 1024),
                    max_cached_requests=entry.integer("suffix_decoding_max_cached_requests", 0, 2**31 - 1),
                    max_spec_factor=entry.number("suffix_decoding_max_spec_factor", 0, 1000),
                    min_token_prob=entry.number("suffix_decoding_min_token_prob", 0, 1),
                ),
            )
        case "mtp":
            entry.take("model")  # the target itself, wherever it is named
            return MtpConfig(num_tokens)
        case "mlp_speculator" | "pard" | "dflash" | "dspark":
            return HeadConfig(entry.model(method), method, num_tokens)
        case _:
            assert method == "prediction"
            return PredictionConfig(**_given(num_speculative_tokens=num_tokens))


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that were given; the others keep the defaults of their type."""
    return {key: setting for key, setting in settings.items() if setting is not None}


_METHODS = (
    *("off", "ngram", "draft_model", "medusa", "eagle", "eagle3", "suffix", "mtp", "mlp_speculator"),
    *("pard", "dflash", "dspark", "prediction"),
)
_NOT_AVAILABLE_FLAGS = {
    "use_heterogeneous_vocab": "a draft with another tokenizer",
    "parallel_drafting": "all draft tokens in one pass, P-EAGLE and PARD",
}
