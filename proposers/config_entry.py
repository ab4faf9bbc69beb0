"""One object of the speculative config, read key by key: values checked, unknown keys refused, leftovers told apart.

Knows all key names and no method.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .config import EMBEDDED_MODEL

MAX_NUM_SPECULATIVE_TOKENS = 64

KEYS = (  # every key that vLLM 0.5 to 0.33 knows, SGLang's three of a tree, and our own
    *("method", "model", "num_speculative_tokens", "adaptive", "match", "num_branches", "shared_pool", "use_tree"),
    *("prompt_lookup_min", "prompt_lookup_max", "num_heads", "draft_sample_method", "confidence_threshold"),
    *("disable_by_batch_size", "num_speculative_tokens_per_batch_size", "max_model_len", "quantization", "revision"),
    *("draft_tensor_parallel_size", "rejection_sample_method", "acceptance_method", "draft_layers", "heterogeneous_vocab"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "use_heterogeneous_vocab", "parallel_drafting", "enforce_eager", "moe_backend"),
    *("max_window_size", "max_ngram_size", "max_verification_set_size"),
    *("custom_class", "options", "directory", "layers", "max_shard_tokens", "draft_model_config"),
    *("uno_mask_token_id", "uno_noise_seed", "uno_noise_low"),
    *("speculative_token_tree", "eagle_topk", "num_steps", "num_draft_tokens"),
    *("attention_backend", "kv_cache_dtype", "code_revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch"),
    *("disable_eagle_block_drop", "disable_lookahead_block_hashes", "draft_lm_head_quantization", "use_local_argmax_reduction"),
    *("draft_load_config", "synthetic_acceptance_rates", "synthetic_acceptance_length", "enable_adaptive_verification"),
    *("dspark_draft_topk", "xpress_topc", "xpress_num_passes", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    *("disable_mqa_scorer", "disable_logprobs", "posterior_threshold", "posterior_alpha"),
)
ALIASES = {
    "draft_model": "model",
    "uno_lora_path": "model",
    "assistant_confidence_threshold": "confidence_threshold",
    "assistant_early_exit": "draft_layers",
    "shared_storage_path": "directory",
    "eagle_aux_hidden_state_layer_ids": "layers",
    "ddtree_budget": "num_speculative_tokens",
    "medusa_choices": "speculative_token_tree",
    "hydra_choices": "speculative_token_tree",
    "speculative_eagle_topk": "eagle_topk",
    "speculative_num_steps": "num_steps",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
}


class SpeculativeConfigError(ValueError):
    """A speculative config that cannot work; the message names the key and what to change."""


class ConfigEntry:
    """One object of the config being read. What is asked for is checked and taken out; leftovers are known but without effect.

    Keys are asked for by their own names; messages have them as they were given.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        known = (*KEYS, *ALIASES)
        self._values: dict[str, Any] = {}
        self._given_as: dict[str, str] = {}
        for given, value in mapping.items():
            if given == "tensor_parallel_size":
                raise SpeculativeConfigError("'tensor_parallel_size' is the target's; for the draft use 'draft_tensor_parallel_size'")
            if given not in known:
                raise SpeculativeConfigError(f"unknown key {given!r} in the speculative config{nearest(str(given), known)}")
            key = ALIASES.get(given, given)
            if value is None:
                continue
            value = os.fspath(value) if isinstance(value, os.PathLike) else value  # a script's folder
            known_value = self._values.setdefault(key, value)
            if known_value is not value and known_value != value:  # NaN, which JSON may hold, is not even equal to itself
                raise SpeculativeConfigError(f"{self._given_as[key]!r} and {given!r} are names of one setting: give one of them")
            self._given_as.setdefault(key, given)

    def peek(self, key: str) -> Any:
        return self._values.get(key)

    def prefer(self, key: str, value: Any) -> None:
        """For a key that was not given."""
        self._values.setdefault(key, value)
        self._given_as.setdefault(key, key)

    def take(self, key: str) -> Any:
        return self._values.pop(key, None)

    def name(self, key: str) -> str:
        """The key in quotes, as the user spelled it."""
        return repr(self._given_as.get(key, key))

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.take(key)
        if value is not None and not _is_integer(value, low, high):
            raise SpeculativeConfigError(f"{self.name(key)} must be an integer from {low} to {high}, not {value!r}")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...] | None:
        """A list without repetitions."""
        value = self.take(key)
        if value is None:
            return None
        if not _is_list(value) or not all(_is_integer(item, low, high) for item in value) or len(set(value)) < len(value):
            raise SpeculativeConfigError(f"{self.name(key)} must be a list of different integers from {low} to {high}, not {value!r}")
        return tuple(value)

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.take(key)
        if value is not None and not _is_number(value, low, high):
            raise SpeculativeConfigError(f"{self.name(key)} must be a number from {low} to {high}, not {value!r}")
        return value

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...] | None:
        """A list that is not empty; a bare number is a list of one."""
        value = self.take(key)
        if value is None:
            return None
        items = value if _is_list(value) else [value]
        if not items or not all(_is_number(item, low, high) for item in items):
            raise SpeculativeConfigError(f"{self.name(key)} must be a list of numbers from {low} to {high}, not {value!r}")
        return tuple(float(item) for item in items)

    def flag(self, key: str) -> bool | None:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise SpeculativeConfigError(f"{self.name(key)} must be true or false, not {value!r}")
        return value

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise SpeculativeConfigError(f"{self.name(key)} must be a non-empty string, not {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value)):
            raise SpeculativeConfigError(f"{self.name(key)} must be an object, not {value!r}")
        return value

    def choice(self, key: str, options: tuple[str, ...], lossy: tuple[str, ...] = ()) -> Any:
        value = self.take(key)
        if value in lossy:
            raise SpeculativeConfigError(f"{self.name(key)} {value!r} is lossy and not available; leave it out for exact output")
        if value is not None and value not in options:
            listed = " or ".join(repr(option) for option in options)
            raise SpeculativeConfigError(f"{self.name(key)} must be {listed}, not {value!r}")
        return value

    def ranges(self, key: str) -> tuple[tuple[int, int, int], ...] | None:
        """[[first, last, k], ...]: ascending batch sizes that do not overlap, k from 0."""
        value = self.take(key)
        if value is None:
            return None
        message = f"{self.name(key)} must be a list of [first, last, k], batch sizes ascending, k from 0 to {MAX_NUM_SPECULATIVE_TOKENS}"
        if not _is_list(value):
            raise SpeculativeConfigError(f"{message}; not {value!r}")
        previous = 0
        for item in value:
            if not _is_list(item) or len(item) != 3 or any(type(number) is not int for number in item):
                raise SpeculativeConfigError(f"{message}; {item!r} is not")
            first, last, k = item
            if not previous < first <= last or not 0 <= k <= MAX_NUM_SPECULATIVE_TOKENS:
                raise SpeculativeConfigError(f"{message}; {item!r} is not")
            previous = last
        return tuple((first, last, k) for first, last, k in value)

    def model(self, method: str, target: str | None) -> str:
        """The `model`, or the embedded drafter where the embedded model is served."""
        model = self.optional_model(method, target)
        if model is None:
            raise SpeculativeConfigError(f"method {method!r} needs a 'model': a folder or hub id")
        return model

    def optional_model(self, method: str, target: str | None) -> str | None:
        return self.text("model") or (f"{EMBEDDED_MODEL}/{method}" if target == EMBEDDED_MODEL else None)

    def leftovers(self, method: str) -> list[str]:
        names = ", ".join(sorted(self._given_as[key] for key in self._values))
        return [f"speculative config: no effect with method {method!r}, ignored: {names}"] if names else []


def given(**settings: Any) -> dict[str, Any]:
    """The settings that were given; the others keep the defaults of their type."""
    return {key: setting for key, setting in settings.items() if setting is not None}


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high
