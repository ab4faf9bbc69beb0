"""What an EAGLE checkpoint is, whoever published it: its settings read from config.json, and all of it held to the target.

Knows both layouts: EAGLE's own (also SpecForge's, SGLang's and NVIDIA's) and that of `speculators`. Knows no program.
"""

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedConfig

from ..kernels.layout import FINAL
from .checkpoint import Checkpoint
from .config import EagleConfig
from .config_entry import SpeculativeConfigError
from .detection import nested
from .draft_layers import LAYER_SETTINGS, layer_config, settings_like
from .draft_tables import Table, embedding_of, head_of
from .draft_tensors import DraftTensors
from .eagle_taps import tapped_layers
from .loading import TargetView

_LATENT = "deepseek_v3"
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_LAYER_SETTINGS = (*LAYER_SETTINGS, "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_FIRST_LAYER = "model.layers.0"
_ATTENTION = f"{_FIRST_LAYER}.self_attn"
_HEAD_LAYER = re.compile(r"(?:mlp\.){1,2}(\d{1,4})\.(\d{1,4})\.linear\.weight")
_OTHERS = {"experts": "mlp.experts.", "attention sinks": "self_attn.sinks"}


@dataclass(frozen=True)
class EagleDraft:
    """A drafter as its checkpoint describes it."""

    kind: Literal["EAGLE", "EAGLE-3", "P-EAGLE"]
    layout: Literal["EAGLE", "speculators"]
    hf_config: PreTrainedConfig  # of the layers; as many as there are tensors of
    taps: tuple[int, ...]  # boundary ids of the target's states, lowest first
    has_encoder: bool  # whether they go through fc before the layers see them
    norm_before_residual: bool
    norm_output: bool  # the feature that is fed back is read behind the last norm
    has_final_norm: bool
    embedding: Table
    head: Table
    token_ids: Tensor | None  # [rows of the head] int64; None = rows are the target's ids
    mask_token: int | None  # P-EAGLE: stands where a guess will be
    mask_state: Tensor | None  # [states of all taps] float32, what it is paired with
    num_speculative_tokens: int | None  # what the checkpoint was made for
    further_heads: tuple[tuple[str, ...], ...]  # names of each one's layers, where it is an EAGLE with heads behind it: a Gumiho

    @property
    def has_latent_attention(self) -> bool:
        """As DeepSeek's (Kimi's drafters have it)."""
        return self.hf_config.model_type == _LATENT


def read_draft(tensors: DraftTensors, target: TargetView, config: EagleConfig) -> EagleDraft:
    """Raises SpeculativeConfigError where it cannot be read, or not beside this target."""
    checkpoint = tensors.checkpoint
    settings = _Settings(checkpoint)
    _refuse_other_networks(tensors, settings)
    hf_config = _layer_config(tensors, settings, target)
    is_parallel = settings.speculators_type == "peagle" or tensors.has("mask_hidden")
    reads_pairs = settings.speculators_type == "eagle3" or tensors.has(f"{_FIRST_LAYER}.hidden_norm.weight")
    kind = "P-EAGLE" if is_parallel else "EAGLE-3" if reads_pairs else "EAGLE"
    reads_taps = kind != "EAGLE" and settings.flag("use_aux_hidden_state", True)
    _check_width(settings, hf_config, target, may_differ=reads_taps)
    _check_vocabulary(tensors, settings, target)
    taps = tapped_layers(checkpoint.config, config.aux_layers, target.num_layers) if reads_taps else (FINAL,)
    if reads_taps:
        _check_encoder(tensors, settings, taps, target)
    elif config.aux_layers is not None:
        raise SpeculativeConfigError(f"{checkpoint.folder} reads the target's last state only: leave 'layers' out")
    width, is_tied = int(hf_config.hidden_size), bool(settings.layers.get("tie_word_embeddings"))
    embedding = embedding_of(tensors, width, target, keep_own=is_parallel)
    head, token_ids = head_of(tensors, width, target, embedding, settings.number("draft_vocab_size"), is_tied)
    return EagleDraft(
        kind=kind,
        layout="EAGLE" if settings.speculators_type is None else "speculators",
        hf_config=hf_config,
        taps=taps,
        has_encoder=reads_taps,
        norm_before_residual=settings.flag("norm_before_residual", settings.speculators_type == "eagle3"),
        norm_output=settings.flag("norm_output", False),
        has_final_norm=kind != "EAGLE" and settings.flag("use_last_layernorm", True),
        embedding=embedding,
        head=head,
        token_ids=token_ids,
        mask_token=_mask_token(checkpoint, embedding) if is_parallel else None,
        mask_state=_mask_state(tensors, len(taps) * target.hidden_size) if is_parallel else None,
        num_speculative_tokens=checkpoint.num_speculative_tokens,
        further_heads=_further_heads(checkpoint) if kind == "EAGLE" else (),
    )


class _Settings:
    """config.json: settings stand at the top or in `eagle_config`, those of the layers at the top or in an object of their own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.top = checkpoint.config
        self.speculators_type: str | None = self.top.get("speculators_model_type")
        self._eagle = nested(self.top, "eagle_config")
        self.layers = nested(self.top, "transformer_layer_config") or nested(self.top, "model") or self.top

    def flag(self, key: str, default: bool) -> bool:
        value = self.top.get(key, self._eagle.get(key))
        return default if value is None else bool(value)

    def number(self, key: str) -> int | None:
        value = self.top.get(key, self._eagle.get(key))
        return value if type(value) is int else None


def spellings(name: str) -> list[str]:
    """What files call the tensor that programs call `name`, the commonest first."""
    names = [name.removeprefix("model.")]
    if match := re.match(r"model\.layers\.(\d+)\.(.*)", name):
        names.append(f"midlayer.{match[1]}.{match[2]}")
        if match[1] == "0":
            names += [f"midlayer.{match[2]}", f"transformer.{match[2]}"]
    if name in ("fc.weight", "fc.bias"):
        names.append(f"fusion_{name}")
    if match := re.match(r"fc_norm\.([012])\.weight", name):
        names.append(f"aux_norm_{('low', 'mid', 'high')[int(match[1])]}.weight")
    return [prefix + spelling for spelling in names for prefix in ("", "model.")]


def _refuse_other_networks(tensors: DraftTensors, settings: _Settings) -> None:
    for what, part in _OTHERS.items():
        if any(part in name for name in tensors.checkpoint.names):
            raise SpeculativeConfigError(
                f"{settings.folder} is a drafter with {what} ({part}), which is not supported: take one with ordinary layers"
            )
    odd = {"use_mtp_layernorm": False, "use_input_layernorm_in_first_layer": True, "next_layer_regular": True, "layernorms": False}
    for key, usual in odd.items():
        if settings.flag(key, usual) != usual:
            raise SpeculativeConfigError(f"{settings.folder}/config.json sets {key!r} to {not usual}, which is not supported")
    if (settings.number("parallel_draft_step") or 1) > 1 and not tensors.has("mask_hidden"):
        raise SpeculativeConfigError(f"{settings.folder}/config.json has 'parallel_draft_step' above 1, which is not supported")


def _layer_config(tensors: DraftTensors, settings: _Settings, target: TargetView) -> PreTrainedConfig:
    """Its own positions, eps and head width, not the target's; what it leaves out is as transformers has it for the model type.

    Where it does not even say its width, which some publish, the layers are like the target's.
    """
    if tensors.has(f"{_ATTENTION}.kv_a_proj_with_mqa.weight"):
        return _latent_config(tensors, settings)
    usual = "llama" if settings.speculators_type is None else "qwen3"
    model_type = settings.layers.get("model_type", usual)
    kind = model_type if model_type in _LLAMA_LIKE else "llama"
    given = {key: settings.layers[key] for key in _LAYER_SETTINGS if settings.layers.get(key) is not None}
    if "hidden_size" not in given:
        given = settings_like(given, target.config)
    if kind == "llama" and "layer_types" not in given:
        given.pop("sliding_window", None)  # a Llama has none by itself
    num_layers = tensors.num_layers()
    if isinstance(kinds := given.get("layer_types"), list) and len(kinds) != num_layers:
        del given["layer_types"]
    return layer_config(kind, given, num_layers, tensors.shape(f"{_ATTENTION}.q_proj.weight")[0], settings.folder)


def _latent_config(tensors: DraftTensors, settings: _Settings) -> PreTrainedConfig:
    """Of latent attention, whatever model type it calls itself. Its sizes are those of the tensors: configs leave some out."""
    heads = settings.layers.get("num_attention_heads")
    rank, outputs = tensors.shape(f"{_ATTENTION}.kv_a_layernorm.weight")[0], tensors.shape(f"{_ATTENTION}.kv_b_proj.weight")[0]
    turned, values = tensors.shape(f"{_ATTENTION}.kv_a_proj_with_mqa.weight")[0] - rank, tensors.shape(f"{_ATTENTION}.o_proj.weight")[-1]
    if type(heads) is not int or heads < 1 or outputs % heads or values % heads or outputs <= values or turned < 1:
        raise SpeculativeConfigError(
            f"{settings.folder}/config.json: {heads!r} heads ('num_attention_heads') cannot have made keys and values of {outputs} numbers "
            f"and results of {values}"
        )
    given = {key: settings.layers[key] for key in (*LAYER_SETTINGS, "rope_interleave") if settings.layers.get(key) is not None}
    given |= {
        "q_lora_rank": tensors.shape(f"{_ATTENTION}.q_a_proj.weight")[0] if tensors.has(f"{_ATTENTION}.q_a_proj.weight") else None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "v_head_dim": values // heads,
        "qk_nope_head_dim": (outputs - values) // heads,
        "attention_bias": tensors.has(f"{_ATTENTION}.kv_a_proj_with_mqa.bias"),
    }
    return layer_config(_LATENT, given, tensors.num_layers(), 0, settings.folder)


def _check_width(settings: _Settings, hf_config: PreTrainedConfig, target: TargetView, may_differ: bool) -> None:
    width = settings.number("target_hidden_size")
    if width is None and not may_differ:
        width = int(hf_config.hidden_size)
    if width is not None and width != target.hidden_size:
        raise SpeculativeConfigError(
            f"{settings.folder} was trained for a target of hidden size {width}, this one has {target.hidden_size}: "
            "take the drafter that was trained for this target"
        )


def _check_vocabulary(tensors: DraftTensors, settings: _Settings, target: TargetView) -> None:
    sizes = {f"its {name}": tensors.shape(name)[0] for name in ("embed_tokens.weight", "t2d") if tensors.has(name)}
    sizes = sizes or {"the 'vocab_size' of its config.json": settings.layers.get("vocab_size")}
    for what, size in sizes.items():
        # Mask tokens may have rows of their own behind the vocabulary.
        if size is not None and size != target.vocab_size and not (tensors.has("mask_hidden") and size > target.vocab_size):
            raise SpeculativeConfigError(
                f"{settings.folder} was trained for a vocabulary of {size} tokens ({what}), the target's has {target.vocab_size}: "
                "take the drafter that was trained for this target"
            )


def _check_encoder(tensors: DraftTensors, settings: _Settings, taps: tuple[int, ...], target: TargetView) -> None:
    read = tensors.shape("fc.weight")[-1]
    if read != len(taps) * target.hidden_size:
        raise SpeculativeConfigError(
            f"fc.weight in {settings.folder} reads states of {read} numbers, but the target's layers {', '.join(map(str, taps))} have "
            f"{len(taps)} x {target.hidden_size}: it was trained for another target, or for other layers (then name them in 'layers')"
        )
    one, each = settings.flag("norm_before_fc", False), settings.flag("fc_norm", False)
    if one and each:
        raise SpeculativeConfigError(f"{settings.folder}/config.json sets both 'norm_before_fc' and 'fc_norm': only one can be meant")
    for wanted, name in ((one, "input_norm.weight"), (each, "fc_norm.0.weight")):
        if wanted:
            tensors.shape(name)  # raises if it is missing: without it guesses would only be worse


def _further_heads(checkpoint: Checkpoint) -> tuple[tuple[str, ...], ...]:
    places = {(int(match[1]), int(match[2])): match[0] for match in map(_HEAD_LAYER.fullmatch, checkpoint.names) if match}
    if not places:
        return ()
    num_heads, depth = (1 + max(place[axis] for place in places) for axis in (0, 1))
    if missing := [(head, layer) for head in range(num_heads) for layer in range(depth) if (head, layer) not in places]:
        raise SpeculativeConfigError(
            f"the heads in {checkpoint.folder} are incomplete: head {missing[0][0]} has no layer {missing[0][1]}"
        )
    return tuple(tuple(places[head, layer].removesuffix(".weight") for layer in range(depth)) for head in range(num_heads))


def _mask_token(checkpoint: Checkpoint, embedding: Table) -> int:
    keys = ("mask_token_id", "ptd_token_id", "pard_token")
    key = next((key for key in keys if checkpoint.config.get(key) is not None), keys[0])
    token = checkpoint.integer(key)
    if not 0 <= token < embedding.rows:
        raise SpeculativeConfigError(f"{checkpoint.folder}/config.json: {key!r} is {token}, but the embedding has {embedding.rows} rows")
    return token


def _mask_state(tensors: DraftTensors, width: int) -> Tensor:
    ones = (1,) * (len(tensors.shape("mask_hidden")) - 1)  # one or two of them: publishers differ
    return tensors.take("mask_hidden", *ones, width).reshape(-1).float()
