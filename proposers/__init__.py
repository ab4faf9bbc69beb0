"""The menu: which proposer each part of a speculative config means.

Imports nothing heavy until something is built: settings are read long before torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .config import (
    BlockConfig,
    CustomConfig,
    DraftModelConfig,
    EagleConfig,
    HiddenStatesConfig,
    LookaheadConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    NgramCacheConfig,
    NgramConfig,
    OrthrusConfig,
    PardConfig,
    PredictionConfig,
    ProposerConfig,
    SpeculativeConfig,
    SuffixConfig,
    SyntheticConfig,
    UnoConfig,
)

if TYPE_CHECKING:
    from .base import Proposer
    from .loading import LoadedProposer, Opening, Resources


def load(config: SpeculativeConfig, resources: Resources) -> list[LoadedProposer]:
    """Everything that guesses, in the config's order, Predicted Outputs first. Raises SpeculativeConfigError."""
    from .loading import LoadedProposer
    from .prediction import PredictionProposer

    if config.off:
        return []
    prediction = next((c for c in config.proposers if isinstance(c, PredictionConfig)), PredictionConfig())
    loaded = [LoadedProposer("prediction", lambda _: PredictionProposer(prediction))]
    return loaded + [_load(c, resources) for c in config.proposers if not isinstance(c, PredictionConfig)]


def open_all(loaded: Sequence[LoadedProposer], opening: Callable[[str, int], Opening]) -> list[Proposer]:
    """Their proposers, once there are caches. opening: (a proposer's name, its place among the loaded ones) -> what it is opened with."""
    proposers: list[Proposer] = []
    for index, part in enumerate(loaded):
        proposers.append(part.open(opening(_unused(part.name, proposers), index)))
    return proposers


def _load(config: ProposerConfig, resources: Resources) -> LoadedProposer:
    """Each method is imported when it is asked for."""
    from .loading import LoadedProposer

    match config:
        case NgramConfig():
            from .ngram import NgramProposer

            return LoadedProposer(
                "ngram", lambda opening: NgramProposer(config, opening.name, resources.corpora, opening.places_ahead)
            )
        case NgramCacheConfig():
            from . import ngram_cache

            return ngram_cache.load(config, resources)
        case DraftModelConfig():
            from . import draft_model

            return draft_model.load(config, resources)
        case PardConfig():
            from . import pard

            return pard.load(config, resources)
        case MedusaConfig(method="hydra"):
            from . import hydra

            return hydra.load(config, resources)
        case MedusaConfig(method="redrafter"):
            from . import redrafter

            return redrafter.load(config, resources)
        case MedusaConfig():
            from . import medusa

            return medusa.load(config, resources)
        case EagleConfig():
            from . import eagle

            return eagle.load(config, resources)
        case SuffixConfig():
            from .suffix import SuffixProposer

            return LoadedProposer("suffix", lambda opening: SuffixProposer(config, opening.name, resources.corpora))
        case LookaheadConfig():
            from .lookahead import LookaheadProposer

            return LoadedProposer("lookahead", lambda opening: LookaheadProposer(config, opening.name))
        case MtpConfig():
            from . import mtp

            return mtp.load(config, resources)
        case MlpSpeculatorConfig():
            from . import mlp_speculator

            return mlp_speculator.load(config, resources)
        case BlockConfig():
            from . import dflash

            return dflash.load(config, resources)
        case OrthrusConfig():
            from . import orthrus

            return orthrus.load(config, resources)
        case UnoConfig():
            from . import uno

            return uno.load(config, resources)
        case CustomConfig():
            from . import custom

            return custom.load(config, resources)
        case HiddenStatesConfig():
            from . import hidden_states

            return hidden_states.load(config, resources)
        case SyntheticConfig():
            from .synthetic import SyntheticProposer

            vocab_size = resources.target.vocab_size
            return LoadedProposer(
                "synthetic", lambda opening: SyntheticProposer(config, opening.name, vocab_size, opening.places_ahead > 0)
            )
        case PredictionConfig():
            raise AssertionError("predictions are the same for all")


def _unused(name: str, proposers: Sequence[Proposer]) -> str:
    """Requests choose a proposer by name, so a second one of a kind is draft_model_2."""
    taken = {p.name for p in proposers}
    numbered = (f"{name}_{number}" for number in range(2, 2 + len(taken)))
    return next(candidate for candidate in (name, *numbered) if candidate not in taken)
