"""Names of the text model's tensors in checkpoints that can see or hear as well, or are older. Knows no tensors and no config."""

import re
from collections.abc import Iterable

_TEXT_OF = re.compile(r"(?:model\.language_model|language_model\.model|model\.text_model)\.")  # newer and older saves, SmolVLM
_HEAD_OF = re.compile(r"(?:language_model\.)?(?=lm_head\.)")
_OF_VIEW = re.compile(r"(model\.layers\.\d+\.self_attn\.\w+)_diff(\.(?:weight|bias))")
_DRAFTS_OF = re.compile(r"(?:model\.)?mtp(?:_\w+)?\.")
_BACKBONE = re.compile(r"backbone\.(embeddings|norm_f|layers)\.")  # Nemotron-H
_IN_BACKBONE = {"embeddings": "model.embed_tokens.", "norm_f": "model.norm.", "layers": "model.layers."}
_EXAONE = {  # up to 3.5
    "transformer.wte": "model.embed_tokens", "transformer.h.": "model.layers.", "transformer.ln_f": "model.norm",
    ".ln_1": ".input_layernorm", ".ln_2": ".post_attention_layernorm", ".attn.attention.": ".self_attn.", ".out_proj": ".o_proj",
    ".c_fc_0": ".gate_proj", ".c_fc_1": ".up_proj", ".c_proj": ".down_proj",
}


def text_name(name: str) -> str | None:
    """What the text model alone calls a tensor or a module of such a checkpoint; None if it is of the other half.

    model.language_model.layers.0.mlp.up_proj.weight -> model.layers.0.mlp.up_proj.weight
    """
    if prefix := _TEXT_OF.match(name):
        return "model." + name[prefix.end() :]
    if prefix := _BACKBONE.match(name):
        return _IN_BACKBONE[prefix[1]] + name[prefix.end() :]
    if prefix := _HEAD_OF.match(name):
        return name[prefix.end() :]
    if name.startswith("transformer."):
        for theirs, ours in _EXAONE.items():
            name = name.replace(theirs, ours)
        return name
    return name if _DRAFTS_OF.match(name) else None


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Name of a tensor in the text model -> its name in the file, of all that the text model has. Of other checkpoints these are the same.

    A text model alone may be saved under the names that it has in a whole: names tell, and not the config.
    """
    names = list(names)
    if {"embed_tokens.weight", "norm.weight"} <= {*names}:  # saved without the model around it, as Qwen3-Embedding is
        return {name if name.startswith("lm_head.") else f"model.{name}": name for name in names}
    if not any(_TEXT_OF.match(name) or _BACKBONE.match(name) or ".mlp.c_fc_0." in name for name in names):
        return {name: name for name in names if not name.startswith("visual.")}  # Qwen2-VL has its text model's names in front of nothing
    return {alone: name for name in names if (alone := text_name(name)) is not None}


def view_names(names: Iterable[str]) -> dict[str, str]:
    """Of the text model of an Orthrus: each weight of which there is a second one -> that one. Of others nothing."""
    return {match[1] + match[2]: name for name in names if (match := _OF_VIEW.fullmatch(name))}
