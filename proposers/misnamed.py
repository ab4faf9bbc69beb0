"""A drafter's folder given to a method that cannot read it: what it holds, and which method does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .config import (
    BlockConfig,
    DraftModelConfig,
    EagleConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    NgramCacheConfig,
    PardConfig,
    ProposerConfig,
    UnoConfig,
)
from .config_entry import SpeculativeConfigError
from .detection import method_of

_HELD = {
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "draft_model": "a whole language model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "mtp": "MTP layers",
    "ngram_cache": "an n-gram cache",
    "pard": "a PARD draft model",
    "uno": "an adapter",
}


def misnamed(configs: Sequence[ProposerConfig], model: str, folder: Path) -> str | None:
    """A sentence if the folder speaks for a method other than that of the config that names it as `model`; None if it does not.

    To be asked when loading has failed: where the weights fit a name decides nothing.
    """
    try:
        held = method_of(folder)
    except SpeculativeConfigError:  # damaged: what loading says of it is enough
        return None
    for config in configs:
        named, methods = _reads(config)
        if named == model and held in _HELD and held not in methods:
            return f'{folder} holds {_HELD[held]}: say "method": "{held}" instead of "{methods[0]}", or leave the method out'
    return None


def _reads(config: ProposerConfig) -> tuple[str | None, tuple[str, ...]]:
    """The model that it names, and the methods whose checkpoints it reads, its own first."""
    match config:
        case EagleConfig():
            return config.model, (config.method, "eagle", "eagle3")
        case BlockConfig():
            return config.model, (config.method, "dflash", "dspark")
        case DraftModelConfig():
            return config.model, ("draft_model", "pard")
        case PardConfig():
            return config.model, ("pard", "draft_model")  # what makes it one is in its config, and loading says what is missing
        case MedusaConfig():
            return config.model, ("medusa",)
        case MtpConfig():
            return config.model, ("mtp",)
        case MlpSpeculatorConfig():
            return config.model, ("mlp_speculator",)
        case NgramCacheConfig():
            return config.model, ("ngram_cache",)
        case UnoConfig():
            return config.model, ("uno",)
        case _:
            return None, ()
