"""A drafter's folder given to a method that cannot read it: what it holds, and which method does, if any."""

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
from .detection import method_of, read_config, tensor_shapes
from .pickles import only_pickles

_HELD = {
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "draft_model": "a whole language model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "hydra": "Hydra heads",
    "medusa": "Medusa heads",
    "mlp_speculator": "an MLP speculator",
    "mtp": "MTP layers",
    "ngram_cache": "an n-gram cache",
    "pard": "a PARD draft model",
    "redrafter": "a ReDrafter",
    "uno": "an adapter",
}
_TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "tekken.json", "*.tiktoken")
_MOST_NAMED = 3  # of the tensors


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
        if named == model and held is None and isinstance(config, DraftModelConfig):
            return _unknown(folder)
    return None


def _unknown(folder: Path) -> str | None:
    """Of a folder that was taken for a draft model because nothing speaks for another method; None if it may well be one."""
    if any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return None
    if pickles := only_pickles(folder):  # most heads that say nothing of themselves are published so
        return pickles
    tensors = ", ".join(sorted(tensor_shapes(folder))[:_MOST_NAMED])
    return (
        f"{folder} holds neither a language model with its tokenizer nor a drafter of a kind that is known (architectures "
        f"{read_config(folder).get('architectures')}, {f'tensors {tensors}, ...' if tensors else 'no safetensors'}): take "
        f"{', '.join(_HELD.values())}"
    )


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
            return config.model, (config.method,)
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
