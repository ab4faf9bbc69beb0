"""What a model folder holds, found by its content: which speculative method its weights belong to.

Reads config.json and the headers of safetensors files, never weights. Of a hub id it knows the name only.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ..kernels.text_names import text_names, view_names
from .config_entry import SpeculativeConfigError

ASSISTANT = "muse_glimmer_assistant"  # the model type of the DFlash that is published with Muse Glimmer
NGRAM_NAMES = ("ngram", "[ngram]")  # vLLM's literals for "no model at all"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

_MEDUSA_HEAD = re.compile(r"^(?:medusa_heads?\.)?(?:blocks\.)?\d+\.(?:layers\.)?\d+\.(?:linear\.)?weight$")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_OWN_MTP = re.compile(r"^(?:model\.)?(?:mtp|mtp_layers|mtp_block)\.")
# Parts of published repository names, the first that fits counts. deepseek-ai/dflash_qwen3_* hold DSpark files.
_NAME_PARTS = (
    *(("dspark", "dspark"), ("dflash_qwen3", "dspark"), ("dflash", "dflash"), ("dflare", "dflash"), ("lilicorr", "dflash")),
    *(("eagle3", "eagle3"), ("p-eagle", "eagle3"), ("peagle", "eagle3"), ("eagle-", "eagle"), ("gumiho", "eagle"), ("medusa", "medusa")),
    ("hydra-vicuna", "hydra"),
    *(("speculator.mtp", "mtp"), ("-accelerator", "mlp_speculator"), ("arctic-lstm-speculator", "mlp_speculator")),
    *(("/pard-", "pard"), ("/pard2-", "pard")),
    *(("-it-assistant", "mtp"), ("muse-glimmer-30b-assistant", "dflash")),
    *(("-xpress", "dflash"), ("speculator.xpress", "dflash"), ("-domino", "dflash"), ("speculator.domino", "dflash")),
    *(("ngram-cache", "ngram_cache"), ("ngram_cache", "ngram_cache"), ("/uno-", "uno")),
)

# Both ends of a causal language model. EAGLE heads, which call themselves one in their config, lack at least one.
_WHOLE = {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"}

Shapes = Mapping[str, tuple[int, ...]]


def detect_method(model: str, target: str | None = None) -> str:
    """The method that a `model` without a `method` means; "draft_model" if nothing speaks for another one.

    model, target: folders or hub ids; target is the served model. Raises SpeculativeConfigError for damaged files.
    """
    if model in NGRAM_NAMES:
        return "ngram"
    folder = Path(model)
    if not folder.is_dir():
        return _method_of_name(model) or "draft_model"
    method = method_of(folder) or "draft_model"
    if method == "draft_model" and is_same_model(model, target):
        shapes = tensor_shapes(folder)
        return "mtp" if has_mtp_layers(read_config(folder), shapes) else "orthrus" if has_view(shapes) else method
    return method


def method_of(folder: Path) -> str | None:
    """The method that the folder's content speaks for; None if it speaks for none. Raises SpeculativeConfigError for damaged files."""
    config, shapes = read_config(folder), tensor_shapes(folder)
    method = _declared_method(config) or _method_of_tensors(shapes) or _named_method(config, folder)
    if method is None and not shapes:
        method = _method_of_name(folder.name)  # pickles of an EAGLE, whose config is that of a whole model
    return method or ("draft_model" if _WHOLE <= text_names(shapes).keys() else None)


def is_same_model(model: str, target: str | None) -> bool:
    if target is None or model == target:
        return target is not None
    return Path(model).is_dir() and Path(target).is_dir() and Path(model).samefile(target)


def has_mtp_layers(config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether a target's checkpoint holds draft layers: behind its last layer, or under a name of their own."""
    num_layers = (nested(config, "text_config") or config).get("num_hidden_layers")
    if any(_OWN_MTP.match(name) for name in shapes):
        return True
    return isinstance(num_layers, int) and any(int(match[1]) >= num_layers for name in shapes if (match := _LAYER.match(name)))


def has_view(names: Iterable[str]) -> bool:
    """Whether a target's checkpoint holds the second set of attention weights of an Orthrus."""
    return bool(view_names(text_names(names)))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty if it has none. Raises SpeculativeConfigError if it is damaged."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpeculativeConfigError(f"{path} is not readable: {error}") from None
    if not isinstance(config, dict):
        raise SpeculativeConfigError(f"{path} must hold an object")
    return cast(dict[str, Any], config)


def nested(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside of a config.json; empty if there is none."""
    value = config.get(key)
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the folder's safetensors files; empty if there are none."""
    headers = [_header(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items() if name != "__metadata__"}


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file opens with 8 bytes of little-endian length, then that much JSON: tensor name -> dtype, shape, offsets."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, MAX_HEADER_BYTES))
        if len(text) < length:
            raise ValueError("its header is cut off")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise SpeculativeConfigError(f"{path} is no whole safetensors file ({error}): download it again") from None


def _method_of_name(name: str) -> str | None:
    return next((method for part, method in _NAME_PARTS if part in name.lower()), None)


def _declared_method(config: Mapping[str, Any]) -> str | None:
    """Settings that only one format has."""
    kind = config.get("speculators_model_type")
    if isinstance(kind, str):
        names = {
            **{"peagle": "eagle3", "independent": "draft_model"},
            **dict.fromkeys(("dflash2", "dflare", "domino", "xpress"), "dflash"),
        }
        return names.get(kind, kind)
    if config.get("model_type") == ASSISTANT:
        return "dflash"
    if str(config.get("model_type")).endswith(("_mtp", "_assistant")):  # Gemma 4's assistants
        return "mtp"
    if config.get("model_type") == "recurrent_drafting_drafter":
        return "redrafter"
    if {"hydra_num_heads", "hydra_head_arch"} & config.keys():
        return "hydra"
    architecture = _architecture(config)
    if "dspark" in architecture or {"markov_rank", "dspark_config"} & config.keys() or "markov_rank" in nested(config, "dflash_config"):
        return "dspark"
    is_called = any(name in architecture for name in ("dflash", "dflare", "lilicorr", "domino", "xpress"))
    if is_called or {"dflash_config", "selector_rank"} & config.keys():
        return "dflash"
    return None


def _method_of_tensors(shapes: Shapes) -> str | None:
    if any("markov_head." in name for name in shapes):
        return "dspark"
    if "mask_hidden" in shapes or _reads_embedding_and_state(shapes):
        return "eagle3"
    if {"hidden_norm.weight", "encoder.output_norm_enc.weight"} & shapes.keys():
        return "dflash"
    if _is_eagle(shapes, "") or _is_eagle(shapes, "model."):
        return "eagle"
    if any(name.startswith("hydra_mlp.") for name in shapes):
        return "hydra"
    if {"rnn_w.weight", "lm_head.0.linear.weight"} <= shapes.keys():
        return "redrafter"
    if any("speculator.emb." in name for name in shapes):
        return "mlp_speculator"
    if {"runs.1", "next.1", "chance.1"} <= shapes.keys():
        return "ngram_cache"
    if any(map(_OWN_MTP.match, shapes)) and not any(map(_LAYER.match, shapes)) or "model.layers.0.eh_proj.weight" in shapes:
        return "mtp"  # modules without the model that they were taken from
    return "medusa" if any(map(_MEDUSA_HEAD.match, shapes)) else None


def _reads_embedding_and_state(shapes: Shapes) -> bool:
    """EAGLE-3: the queries of a layer see [embedding; normed state], twice as wide as the norm of the state."""
    for name, shape in shapes.items():
        if name.endswith(".hidden_norm.weight"):
            layer = name.removesuffix("hidden_norm.weight")
            queries = [shapes.get(f"{layer}self_attn.{part}.weight") for part in ("q_proj", "qkv_proj", "q_a_proj")]
            if any(query is not None and query[-1] == 2 * shape[0] for query in queries):
                return True
    return False


def _is_eagle(shapes: Shapes, prefix: str) -> bool:
    """EAGLE-1: one fusing layer [H, 2H] and a decoder layer without the norms at its two ends."""
    fc = shapes.get(f"{prefix}fc.weight")
    ends = {f"{prefix}layers.0.input_layernorm.weight", f"{prefix}norm.weight"}
    return fc is not None and len(fc) == 2 and fc[1] == 2 * fc[0] and ends.isdisjoint(shapes)


def _named_method(config: Mapping[str, Any], folder: Path) -> str | None:
    """By names in the config: all there is where the weights are pickles, which nobody opens here."""
    architecture, model_type = _architecture(config), config.get("model_type")
    if any((folder / place / "adapter_config.json").is_file() for place in (".", "adapter")):
        return "uno"
    if "eagle3" in architecture or "peagle" in architecture or {"eagle_config", "draft_vocab_size"} & config.keys():
        return "eagle3"
    if "eagle" in architecture or "gumiho" in architecture or model_type in ("eagle", "gumiho"):
        return "eagle"
    if model_type == "medusa" or "medusa_num_heads" in config or any(folder.glob("medusa_lm_head.*")):
        return "medusa"
    if any(folder.glob("hydra_lm_head.*")):
        return "hydra"
    if model_type == "mlp_speculator" or "speculatorpretrainedmodel" in architecture:
        return "mlp_speculator"
    return "pard" if {"pard_token", "ptd_token_id"} & config.keys() or (folder / "warp_model.bin").is_file() else None


def _architecture(config: Mapping[str, Any]) -> str:
    """The first of `architectures` in lower case; "" if there is none."""
    names = config.get("architectures")
    return str(names[0]).lower() if isinstance(names, list) and names else ""
