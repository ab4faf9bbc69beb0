"""What a model's configuration alone says about serving it: layers that cannot be, and the positions it was made for.

Reads configurations only. The network classes of transformers, which take seconds to import, are not needed for a model that has a
program of its own.
"""

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .families import FAMILIES
from .rope import UnsupportedModel

SERVABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
RECURRENT_LAYERS = {"conv", "linear_attention", "hybrid"}
"""Those that programs have: whoever runs a program can take them back."""
OTHER_TASKS = (
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForPreTraining",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
    "RewardModel",
)
"""Ends of the names of networks that share a family's layers, but not its head: the embedding would be used in its place."""
YOUNGER_SETTINGS = "sliding_windows", "swiglu_limits"
"""One number a layer (K-EXAONE 2.0): whoever does not know them runs another network."""
# Frequencies that change with the longest sequence of a batch: past this length cached keys would no longer fit.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def refuse_layers(hf_config: transformers.PretrainedConfig, is_program: bool = False) -> None:
    """Raise UnsupportedModel for a model that is no causal language model, or has layers that cannot be taken back.

    is_program: a program of ours runs it; else transformers does.
    """
    kind = hf_config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_program:  # of some text halves transformers has no class of their own
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no causal language model of type {kind!r}: choose a model that continues text"
        )
    made_for = next(iter(entry(hf_config, "architectures") or ()), "")
    if entry(hf_config, "is_encoder_decoder") or made_for.endswith(OTHER_TASKS):
        raise UnsupportedModel(f"its config.json names it {made_for or kind}, which does not continue text: choose a causal language model")
    text = hf_config.get_text_config()
    for name in YOUNGER_SETTINGS:
        if entry(text, name) and not hasattr(type(text), name):
            unread = f"its config.json says {name}, which transformers {transformers.__version__} does not read for a {kind!r} model"
            raise UnsupportedModel(f"{unread}: it would answer wrongly, choose another")
    foreign = sorted(set(entry(text, "layer_types") or ()) - SERVABLE_LAYERS)
    if not foreign or is_program:
        return
    if text.model_type in FAMILIES and not RECURRENT_LAYERS.isdisjoint(foreign):
        raise UnsupportedModel(
            f"a {kind!r} model cannot be served through transformers: it has layers of type {foreign[0]!r}, which only a program "
            "can take back when a draft is rejected; use executor auto, which runs one for all published settings of the family"
        )
    raise cannot_be_taken_back(kind, f"layers of type {foreign[0]!r}")


def is_recurrent(hf_config: transformers.PretrainedConfig) -> bool:
    """Whether some layers carry a state from token to token."""
    return not RECURRENT_LAYERS.isdisjoint(entry(hf_config.get_text_config(), "layer_types") or ())


def cannot_be_taken_back(kind: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"a {kind!r} model cannot be served: it has {what}; choose a model with full or sliding-window attention only, "
        "or one of Qwen3-Next, Qwen3.5, LFM2, Granite 4, Bamba, Falcon-H1 and Nemotron-H, because only these can be taken back when a "
        "draft is rejected"
    )


def max_positions(hf_config: transformers.PretrainedConfig) -> int:
    """Positions that the network was made for, its rope scaling included. Raises UnsupportedModel if it does not say."""
    config = hf_config.get_text_config()
    positions = entry(config, "max_position_embeddings")
    if positions is None:
        raise UnsupportedModel(f"the config of this {hf_config.model_type!r} model does not say max_position_embeddings")
    if positions < 1:
        raise UnsupportedModel(f"the config of this {hf_config.model_type!r} model says max_position_embeddings {positions}")
    rope = entry(config, "rope_parameters") or {}
    # Llama 3's says by how much low frequencies slow down: Llama 3.2 has 32 for texts of 16 times 8,192.
    factor = 1 if rope.get("rope_type") == "llama3" else rope.get("factor") or 1
    return int(max(positions, (_original_positions(config) or 0) * factor))


def servable_positions(hf_config: transformers.PretrainedConfig) -> int:
    """`max_positions`, but rope whose frequencies change with the length of the batch only up to where they change."""
    config, positions = hf_config.get_text_config(), max_positions(hf_config)
    if (entry(config, "rope_parameters") or {}).get("rope_type") in LENGTH_DEPENDENT_ROPE:
        return min(positions, _original_positions(config) or int(config.max_position_embeddings))
    return positions


def entry(config: transformers.PretrainedConfig, name: str) -> Any:
    """An entry that not every family's config has; attribute access also follows a family's other name for it."""
    return getattr(config, name, None)


def _original_positions(config: transformers.PretrainedConfig) -> int | None:
    """Positions before rope scaling."""
    rope = entry(config, "rope_parameters") or {}
    return rope.get("original_max_position_embeddings") or entry(config, "original_max_position_embeddings")
