"""What `--speculative-config` may say, as types: one per method, and the settings that hold for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_DISABLE_BY_BATCH_SIZE = 16


class SpeculativeConfigError(ValueError):
    """A speculative config that cannot work; the message names the key and what to change."""


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
    quantization: str | None = None
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
class PredictionConfig:
    """Predicted Outputs: on for every request that brings a prediction."""

    num_speculative_tokens: int = 16


ProposerConfig = NgramConfig | DraftModelConfig | MedusaConfig | EagleConfig | PredictionConfig


@dataclass(frozen=True)
class SpeculativeConfig:
    """All proposers, in order of preference, and the limits that hold for all of them."""

    proposers: tuple[ProposerConfig, ...] = ()
    disable_by_batch_size: int = DEFAULT_DISABLE_BY_BATCH_SIZE
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (first, last, k), k may be 0
    rejection_sample_method: Literal["match", "standard"] = "match"
    off: bool = False  # method "off": not even predictions
