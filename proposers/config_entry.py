"""One object of the speculative config, read key by key: values checked, unknown keys refused, leftovers told apart.

Knows all key names and no method.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_NUM_SPECULATIVE_TOKENS = 64

KEYS = (  # every key that vLLM 0.5 to 0.33 knows, and our own: adaptive, match
    *("method", "model", "draft_model", "num_speculative_tokens", "adaptive", "match"),
    *("prompt_lookup_min", "prompt_lookup_max", "num_heads", "draft_sample_method"),
    *("disable_by_batch_size", "num_speculative_tokens_per_batch_size", "max_model_len", "quantization", "revision"),
    *("draft_tensor_parallel_size", "rejection_sample_method", "acceptance_method"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "use_heterogeneous_vocab", "parallel_drafting", "enforce_eager", "moe_backend"),
    *("attention_backend", "kv_cache_dtype", "code_revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch"),
    *("disable_eagle_block_drop", "disable_lookahead_block_hashes", "draft_lm_head_quantization", "use_local_argmax_reduction"),
    *("draft_load_config", "synthetic_acceptance_rates", "synthetic_acceptance_length", "enable_adaptive_verification"),
    *("dspark_draft_topk", "xpress_topc", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    *("disable_mqa_scorer", "disable_logprobs", "typical_acceptance_sampler_posterior_threshold"),
    *("typical_acceptance_sampler_posterior_alpha", "posterior_threshold", "posterior_alpha", "speculative_token_tree"),
)


class SpeculativeConfigError(ValueError):
    """A speculative config that cannot work; the message names the key and what to change."""


class ConfigEntry:
    """One object of the config being read. What is asked for is checked and taken out; leftovers are known but without effect."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        for key in mapping:
            if key == "tensor_parallel_size":
                raise SpeculativeConfigError("'tensor_parallel_size' is the target's; for the draft use 'draft_tensor_parallel_size'")
            if key not in KEYS:
                raise SpeculativeConfigError(f"unknown key {key!r} in the speculative config{nearest(str(key), KEYS)}")
        self._values = {key: value for key, value in mapping.items() if value is not None}
        if "draft_model" in self._values:
            alias = self._values.pop("draft_model")
            if self._values.setdefault("model", alias) != alias:
                raise SpeculativeConfigError("'draft_model' is another name of 'model': give one of them")

    def peek(self, key: str) -> Any:
        return self._values.get(key)

    def take(self, key: str) -> Any:
        return self._values.pop(key, None)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.take(key)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise SpeculativeConfigError(f"{key!r} must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.take(key)
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise SpeculativeConfigError(f"{key!r} must be a number from {low} to {high}, not {value!r}")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise SpeculativeConfigError(f"{key!r} must be true or false, not {value!r}")
        return value

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise SpeculativeConfigError(f"{key!r} must be a non-empty string, not {value!r}")
        return value

    def choice(self, key: str, options: tuple[str, ...], lossy: tuple[str, ...] = (), later: tuple[str, ...] = ()) -> Any:
        value = self.take(key)
        if value in lossy:
            raise SpeculativeConfigError(f"{key!r} {value!r} is lossy: not available yet; leave it out for exact output")
        if value in later:
            raise SpeculativeConfigError(f"{key!r} {value!r} is known and not available in this version; there is {_listed(options)}")
        if value is not None and value not in options:
            raise SpeculativeConfigError(f"{key!r} must be {_listed(options)}, not {value!r}")
        return value

    def ranges(self, key: str) -> tuple[tuple[int, int, int], ...] | None:
        """[[first, last, k], ...]: ascending batch sizes that do not overlap, k from 0."""
        value = self.take(key)
        if value is None:
            return None
        message = f"{key!r} must be a list of [first, last, k], batch sizes ascending, k from 0 to {MAX_NUM_SPECULATIVE_TOKENS}"
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise SpeculativeConfigError(f"{message}; not {value!r}")
        previous = 0
        for item in value:
            if not isinstance(item, Sequence) or len(item) != 3 or any(type(number) is not int for number in item):
                raise SpeculativeConfigError(f"{message}; {item!r} is not")
            first, last, k = item
            if not previous < first <= last or not 0 <= k <= MAX_NUM_SPECULATIVE_TOKENS:
                raise SpeculativeConfigError(f"{message}; {item!r} is not")
            previous = last
        return tuple((first, last, k) for first, last, k in value)

    def model(self, method: str) -> str:
        model = self.text("model")
        if model is None:
            raise SpeculativeConfigError(f"method {method!r} needs a 'model': a folder or hub id")
        return model

    def leftovers(self, method: str) -> list[str]:
        names = ", ".join(sorted(self._values))
        return [f"speculative config: no effect with method {method!r}, ignored: {names}"] if names else []


def _listed(options: tuple[str, ...]) -> str:
    return " or ".join(repr(option) for option in options)


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
