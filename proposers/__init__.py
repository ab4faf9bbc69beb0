"""The menu: which proposer each part of a speculative config means.

Imports nothing heavy until something is built: settings are read long before torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import (
    DraftModelConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    NgramConfig,
    PredictionConfig,
    ProposerConfig,
    SpeculativeConfig,
    SpeculativeConfigError,
    SuffixConfig,
)
from .detection import count_medusa_heads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..kernels.layout import Executor, KVTensors
    from .base import Proposer
    from .proposer_set import ProposerSet

AVAILABLE = "ngram, draft_model and prediction"


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model in memory, its cache not yet allocated."""

    executor: Executor
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Resources:
    """What the engine does for proposers while they are built."""

    load_draft: Callable[[DraftModelConfig], LoadedDraft]
    allocate: Callable[[Sequence[Executor]], Sequence[KVTensors]]
    """One cache per executor, all behind the target's block ids. Called once, with every drafter's executor: how many blocks
    there can be depends on all of them."""
    tokenizer: PreTrainedTokenizerBase  # the target's
    vocab_size: int  # the target's
    target_folder: Path


def build(config: SpeculativeConfig, resources: Resources) -> ProposerSet:
    """Everything that guesses, in the config's order, Predicted Outputs first. Raises SpeculativeConfigError."""
    from .draft_model import DraftModelProposer, check_vocabularies
    from .ngram import NgramProposer
    from .prediction import PredictionProposer
    from .proposer_set import ProposerSet

    if config.off:
        resources.allocate([])
        return ProposerSet([])
    drafts: list[LoadedDraft] = []
    for proposer in config.proposers:  # refuse before anything large is allocated
        _check_available(proposer, resources.target_folder)
        if isinstance(proposer, DraftModelConfig):
            drafts.append(resources.load_draft(proposer))
            check_vocabularies(resources.tokenizer, drafts[-1].tokenizer)
    loaded = iter(zip(drafts, resources.allocate([draft.executor for draft in drafts]), strict=True))

    prediction = PredictionConfig()
    proposers: list[Proposer] = []
    return_probs = config.rejection_sample_method == "standard"
    for proposer in config.proposers:
        match proposer:
            case PredictionConfig():
                prediction = proposer
            case NgramConfig():
                proposers.append(NgramProposer(proposer, _unused("ngram", proposers)))
            case DraftModelConfig():
                draft, kv = next(loaded)
                name = _unused("draft_model", proposers)
                proposers.append(DraftModelProposer(draft.executor, kv, proposer, resources.vocab_size, name, return_probs))
    return ProposerSet([PredictionProposer(prediction), *proposers], vocab_size=resources.vocab_size)


def _check_available(config: ProposerConfig, target_folder: Path) -> None:
    """Raise for the methods that are known by name only."""
    match config:
        case NgramConfig() | DraftModelConfig() | PredictionConfig():
            return
        case MedusaConfig():
            method = "medusa"
            folder = Path(config.model) if config.model else target_folder
            num_found = count_medusa_heads(folder)
            if not num_found:
                raise SpeculativeConfigError(f"no Medusa heads among the safetensors of {folder}; name their folder in 'model'")
            wanted = max(config.num_heads or 0, config.num_speculative_tokens or 0)
            if wanted > num_found:
                raise SpeculativeConfigError(f"{wanted} Medusa heads are wanted, but {folder} holds {num_found}")
        case EagleConfig() | HeadConfig():
            method = config.method
        case SuffixConfig():
            method = "suffix"
        case MtpConfig():
            method = "mtp"
    raise SpeculativeConfigError(f"method {method!r} is known and not available in this version; there are {AVAILABLE}")


def _unused(name: str, proposers: Sequence[Proposer]) -> str:
    """Requests choose a proposer by name, so a second one of a kind is draft_model_2."""
    number = sum(p.name.startswith(name) for p in proposers) + 1
    return name if number == 1 else f"{name}_{number}"
