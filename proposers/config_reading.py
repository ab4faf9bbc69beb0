"""Reads `--speculative-config`: JSON, YAML or a file, one object or a list of them, into the types of config.py.

Knows the names of the methods and what holds for all of them; the keys of each stand in config_methods.py.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .config import (
    BlockConfig,
    BlockTree,
    DynamicTree,
    EagleConfig,
    HiddenStatesConfig,
    LookaheadConfig,
    MedusaConfig,
    ProposerConfig,
    SpeculativeConfig,
    StaticTree,
    SuffixConfig,
)
from .config_acceptance import check_acceptance, read_acceptance
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, ConfigEntry, SpeculativeConfigError, given, nearest
from .config_methods import MAX_INT, read_proposer
from .detection import NGRAM_NAMES, detect_method

METHODS = (
    *("off", "ngram", "ngram_cache", "suffix", "draft_model", "pard", "eagle", "eagle3", "medusa", "hydra", "redrafter", "mtp"),
    *("mlp_speculator", "dflash", "dspark", "orthrus", "uno", "lookahead", "prediction", "custom_class", "extract_hidden_states"),
    "synthetic",
)
BLOCK_TREES = ("ddtree", "jetspec", "jetflow")
"""Methods that are a DFlash which guesses a tree."""
OTHER_NAMES = {
    **{"ngram_gpu": "ngram", "uno_adapter": "uno", "nextn": "mtp", "frozen_kv_mtp": "mtp", "lookahead_decoding": "lookahead"},
    **{"hydra++": "hydra", "recurrent_drafting": "redrafter"},
    **dict.fromkeys(("standalone", "draft_target", "simple"), "draft_model"),
    **dict.fromkeys(("eagle2", "hass", "gumiho"), "eagle"),
    **dict.fromkeys(("peagle", "p-eagle"), "eagle3"),
    **dict.fromkeys(("dflash2", "dflare", "lilicorr", "domino", "xpress", *BLOCK_TREES), "dflash"),
}
"""What other servers, papers, or a checkpoint's own config, call a method of ours."""
BLOCK_TREE_TOP_K = 8


def read_speculative_config(text: str, target: str | None = None) -> SpeculativeConfig:
    """Parse JSON, YAML, or `@FILE` with either inside. target: as in parse_speculative_config. Raises SpeculativeConfigError."""
    return parse_speculative_config(load_speculative_config(text), target)


def load_speculative_config(text: str) -> Any:
    """The value that JSON, YAML or `@FILE` holds, its keys unread. Raises SpeculativeConfigError."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpeculativeConfigError(f"cannot read the speculative config {text[1:]!r}: {error}") from None
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise SpeculativeConfigError(f"the speculative config is neither JSON nor YAML: {error}") from None


def parse_speculative_config(
    value: Mapping[str, Any] | Sequence[Mapping[str, Any]], target: str | None = None
) -> SpeculativeConfig:
    """One object, or a list of them: several proposers in order of preference. Raises SpeculativeConfigError.

    Settings that hold for all proposers may stand in any of the objects, but not with different values. target: the served
    model, as the user named it; a `model` that is the target itself means its own draft layers, where it has some.
    """
    mappings = [value] if isinstance(value, Mapping) else value
    if isinstance(mappings, str) or not isinstance(mappings, Sequence) or not all(isinstance(m, Mapping) for m in mappings):
        meant = f': write {{"method": "{value}"}}' if isinstance(value, str) and value in METHODS else ""
        raise SpeculativeConfigError(f"the speculative config must be an object or a list of objects, not {value!r}{meant}")
    if not mappings:
        raise SpeculativeConfigError("the speculative config is an empty list; to switch speculation off say {'method': 'off'}")
    proposers: list[ProposerConfig] = []
    shared: dict[str, Any] = {}
    warnings: list[str] = []
    for mapping in mappings:
        entry = ConfigEntry(mapping)
        method = _method(entry, target)
        depth: int | None = None
        if method != "off":
            proposers.append(read_proposer(method, entry, target))
            depth = _depth(proposers[-1])
        elif len(mappings) > 1:
            raise SpeculativeConfigError("method 'off' cannot stand in a list with other methods")
        for key, setting in _shared_settings(entry, method, depth).items():
            if shared.setdefault(key, setting) != setting:
                raise SpeculativeConfigError(f"{key!r} holds for all proposers, but two values are given: {shared[key]} and {setting}")
        warnings += entry.leftovers(method)
    check_acceptance(shared)
    return SpeculativeConfig(tuple(proposers), off=not proposers, warnings=tuple(warnings), **shared)


def _shared_settings(entry: ConfigEntry, method: str, depth: int | None) -> dict[str, Any]:
    """Those of SpeculativeConfig's own settings that the entry names."""
    limits = given(
        adaptive=entry.flag("adaptive"),
        disable_by_batch_size=entry.integer("disable_by_batch_size", 1, MAX_INT),
        num_speculative_tokens_per_batch_size=entry.ranges("num_speculative_tokens_per_batch_size"),
    )
    return limits | read_acceptance(entry, method, depth)


def _depth(config: ProposerConfig) -> int | None:
    """Guesses in a row, one behind the other; None = not known before the checkpoint is read."""
    match config:
        case EagleConfig(tree=StaticTree(paths)) | MedusaConfig(tree=StaticTree(paths)):
            return len(paths[-1])
        case EagleConfig(tree=DynamicTree(depth=depth)) | BlockConfig(tree=BlockTree(depth=depth)):
            return depth
        case SuffixConfig():
            return config.num_speculative_tokens or min(config.max_tree_depth, MAX_NUM_SPECULATIVE_TOKENS)
        case LookaheadConfig():
            return config.max_ngram_size - 1
        case HiddenStatesConfig():
            return None
        case _:
            return config.num_speculative_tokens


def _method(entry: ConfigEntry, target: str | None) -> str:
    """The method's name as in METHODS; found by the model's content if it is not given."""
    method = entry.take("method")
    if method is False:  # YAML 1.1 reads a bare `off` as a boolean
        return "off"
    if method is None:
        method = _unnamed_method(entry, target)
    if isinstance(method, str):
        method = method.lower().removeprefix("draft-")  # SGLang's are capitals, llama.cpp's say that they draft
        if method in NGRAM_NAMES:
            return "ngram"
        if method.endswith("_mtp"):  # deepseek_mtp, qwen3_next_mtp, ...: one name per model type in older versions
            return "mtp"
        if method in BLOCK_TREES:
            entry.prefer("eagle_topk", BLOCK_TREE_TOP_K)
        method = OTHER_NAMES.get(method, method)
        if method in ("draft_model", "pard") and (parallel := entry.flag("parallel_drafting")) is not None:
            return "pard" if parallel else "draft_model"
    if method not in METHODS:
        raise SpeculativeConfigError(f"unknown speculative method {method!r}{nearest(str(method), METHODS)}")
    return method


def _unnamed_method(entry: ConfigEntry, target: str | None) -> str:
    if entry.peek("custom_class") is not None:
        return "custom_class"
    model = entry.peek("model")
    if not isinstance(model, str):
        raise SpeculativeConfigError("the speculative config needs a 'method' or a 'model'")
    return "draft_model" if entry.peek("draft_layers") is not None else detect_method(model, target)
