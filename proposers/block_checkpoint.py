"""What a block drafter's checkpoint is, whoever published it: DFlash or what grew out of it, its tensors by one set of names, its
settings checked.

Knows the layouts of z-lab (DFlash, DFlash 2), Tencent (DFlare), DeepSeek (DSpark), Liquid AI (the same for LFM2), NVIDIA (LiLiCorr),
SpecForge (Domino), UIUC (XPress), Meta (Muse Glimmer's assistant) and `speculators`. Knows no program.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..kernels.layout import MAX_TREE_TOKENS
from .block_settings import BlockSettings
from .checkpoint import Checkpoint
from .config_entry import SpeculativeConfigError
from .detection import ASSISTANT
from .draft_layers import LAYER_SETTINGS, config_of, layer_config
from .draft_tables import Table, embedding_of, head_of
from .draft_tensors import DraftTensors
from .loading import TargetView

_LAYER_TYPES = ("qwen3", "qwen2", "llama", "mistral")
_GEMMA4 = "gemma4_text"
_OF_GEMMA4 = (
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
    *("hidden_activation", "attention_bias", "enable_moe_block"),
)
_OF_DOMINO = ("logits_correction", "domino_head", "logit_head")  # what `speculators`, now and once, and first files nest its head in
_ALIASES = {
    "fc": ("fc", "encoder.fc"),
    "hidden_norm": ("hidden_norm", "encoder.output_norm_enc"),
    "confidence_head.proj": ("confidence_head.proj", "confidence_proj"),  # as NVIDIA's exporter has it, which nests no head
    **{part: (part, *(f"{of}.{part}" for of in _OF_DOMINO)) for part in ("prefix_gru", "embed_proj.0", "embed_proj.2")},
}
Kind = Literal["DFlash", "DFlare", "DSpark", "DFlash 2", "LiLiCorr", "Domino", "XPress"]
"""Drafters that differ in what stands behind the block; in a DFlare it is what its layers read of the target."""

_OTHERS = (  # drafters that grew out of DFlash: parts of their tensors' names
    ("Domino with projected states", re.compile(r"(^|\.)hidden_proj\.")),
    ("DFlash with attention sinks", re.compile(r"self_attn\.(sinks|attention_sink_bias)")),
    ("multi-head latent attention", re.compile(r"kv_a_proj_with_mqa")),
    ("mixture-of-experts", re.compile(r"\.experts\.")),
)


@dataclass(frozen=True)
class Fusion:
    """How a DFlare mixes the states of the tapped layers, for each of its own layers anew, where others have fc (Tencent 2026, arXiv
    2606.02091)."""

    shares: tuple[tuple[float, ...], ...]  # of each layer: what each tapped one counts
    norms: tuple[str, ...]  # of each layer, over the mixture; () = hidden_norm, over each state before they are mixed
    keys: str  # the projections that make a layer's entries of it
    values: str


@dataclass(frozen=True)
class BlockDraft:
    """A drafter as its checkpoint describes it."""

    kind: Kind
    layout: str
    settings: BlockSettings
    hf_config: PreTrainedConfig  # of the layers; as many as there are tensors of
    taps: tuple[int, ...]  # boundary ids of the target's states, in the order in which fc reads them
    windows: tuple[int | None, ...]  # of each layer
    causal: tuple[bool, ...]  # of each layer: whether tokens of a block see only those before them
    block_size: int  # tokens of a block that it was trained on
    from_anchor: bool  # the last known token's own place has the first guess, not the first mask's
    mask_token: int
    embedding: Table
    head: Table
    token_ids: Tensor | None  # [rows of the head] int64; None = rows are the target's ids
    markov: Literal["vanilla", "gated", "rnn"] | None
    has_confidence: bool
    fusion: Fusion | None  # of a DFlare
    turns_pairs: bool  # of a head's dimensions 2 i and 2 i + 1, where others turn i and i + n
    conv_taps: int  # of the convolutions around each sublayer, 0 = there are none
    conv_groups: int
    num_speculative_tokens: int | None  # what the checkpoint asks for

    @property
    def max_tokens(self) -> int:
        """Most guesses of one block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def is_gemma4(self) -> bool:
        """Whether its layers are like a Gemma 4's that see everything."""
        return self.hf_config.model_type == _GEMMA4


def read_draft(tensors: DraftTensors, target: TargetView) -> BlockDraft:
    """Raises SpeculativeConfigError where it cannot be read, or not beside this target."""
    checkpoint = tensors.checkpoint
    settings = BlockSettings(checkpoint.folder, checkpoint.config)
    kind = _kind(tensors, settings)
    _refuse_other_networks(tensors, settings, kind)
    num_layers = tensors.num_layers()
    hf_config = _layer_config(tensors, settings, num_layers, kind)
    is_dspark = kind == "DSpark"
    taps = settings.taps(num_layers, target.num_layers)
    fusion = _fusion(tensors, num_layers, len(taps), int(hf_config.hidden_size), target) if kind == "DFlare" else None
    if fusion is None:
        _check_encoder(tensors, taps, target)
    embedding = _embedding(tensors, settings, hf_config, target)
    head, token_ids = _head(tensors, settings, hf_config, target, embedding)
    if kind == "LiLiCorr":
        head = replace(head, scale=1.0, softcap=None)  # its lattice was trained on a head's bare products
    windows = settings.windows(num_layers)
    block_size = settings.block_size(None if is_dspark else 16)
    if not 2 <= block_size <= MAX_TREE_TOKENS:
        raise SpeculativeConfigError(f"{checkpoint.folder}: a block has 2 to {MAX_TREE_TOKENS} tokens here, not {block_size}")
    conv_taps, conv_groups = _convolutions(tensors, settings, int(hf_config.hidden_size))
    return BlockDraft(
        kind=kind,
        layout=settings.layout,
        settings=settings,
        hf_config=hf_config,
        taps=taps,
        windows=windows,
        causal=settings.causal(num_layers, is_dspark),
        block_size=block_size,
        from_anchor=settings.from_anchor(is_dspark, kind == "Domino"),
        mask_token=_mask_token(checkpoint, settings, embedding),
        embedding=embedding,
        head=head,
        token_ids=token_ids,
        markov=_markov(tensors, settings, int(hf_config.hidden_size), head, target) if is_dspark else None,
        has_confidence=is_dspark and tensors.has("confidence_head.proj.weight"),
        fusion=fusion,
        turns_pairs=settings.turns_pairs,
        conv_taps=conv_taps,
        conv_groups=conv_groups,
        num_speculative_tokens=checkpoint.num_speculative_tokens,
    )


def spellings(name: str) -> list[str]:
    """What files call the tensor that programs call `name`, the commonest first."""
    module, _, last = name.removeprefix("model.").rpartition(".")
    modules = _ALIASES.get(module, (module, module.removeprefix("markov_head.")))
    names = [f"{alias}.{last}" if alias else last for alias in modules]
    torchs = [spelling.replace(".in_proj.", ".in_proj_") for spelling in names if ".in_proj." in spelling]  # of its attention module
    return [prefix + spelling for spelling in [*torchs, *names] for prefix in ("", "model.")]


def _refuse_other_networks(tensors: DraftTensors, settings: BlockSettings, kind: Kind) -> None:
    folder, names = settings.folder, tensors.checkpoint.names
    others = [other for other, pattern in _OTHERS if any(pattern.search(name) for name in names)]
    if kind != "DFlare" and (tensors.has("layer_fusion_weights") or settings.find("fusion_mode") is not None):
        others.append(f"{kind} with fused layers")
    if kind == "DFlare" and settings.turns_pairs:
        others.append("DFlare whose rotary pairs lie side by side ('is_neox_style' false)")
    if other := next(iter([*others, *settings.other_kinds()]), None):
        raise SpeculativeConfigError(f"{folder} is a {other} drafter, which is not supported: take one of {', '.join(get_args(Kind))}")
    if masks := sorted(folder.glob("mask_embedding.*")):
        raise SpeculativeConfigError(
            f"{masks[0]} keeps the mask token's embedding outside the checkpoint, which is not supported: take a DFlash whose mask token "
            "has a row in the embedding"
        )


def _kind(tensors: DraftTensors, settings: BlockSettings) -> Kind:
    """By its tensors, and by what it calls itself, so that a head which is missing is missed. An XPress may have a selector, too."""
    names = tensors.checkpoint.names
    if settings.is_lilicorr(any("lilicorr." in name for name in names)):
        return "LiLiCorr"
    if settings.is_called("xpress") or any("xpress_head." in name or "refiner_head." in name for name in names):
        return "XPress"
    if settings.is_called("domino") or any("prefix_gru." in name for name in names):
        return "Domino"
    if settings.is_called("dflare") or any(name.endswith(".k_proj_target.weight") for name in names):
        return "DFlare"
    if settings.is_called("dflash2") or any("candidate_selector." in name for name in names):
        return "DFlash 2"
    is_dspark = settings.is_dspark or any("markov_head." in name or "confidence_head." in name for name in names)
    return "DSpark" if is_dspark else "DFlash"


def _convolutions(tensors: DraftTensors, settings: BlockSettings, width: int) -> tuple[int, int]:
    """Taps and groups of those around each sublayer; (0, 0) without any."""
    name = "model.layers.0.attention_conv"
    if not tensors.has(f"{name}.base_kernel"):
        return 0, 0
    kernels, projection = tensors.shape(f"{name}.base_kernel"), tensors.shape(f"{name}.kernel_projection.weight")
    taps = kernels[1] if len(kernels) == 3 and kernels[0] == 2 else 0
    groups, left = divmod(projection[0], 2 * taps) if taps and len(projection) == 2 else (0, 0)
    if left or not groups or width % groups:
        raise SpeculativeConfigError(
            f"{settings.folder}: convolutions have kernels [2, taps, {width}] and a projection to 2 x taps x groups numbers, groups that "
            f"divide the width, not {list(kernels)} and {list(projection)}"
        )
    return taps, groups


def _layer_config(tensors: DraftTensors, settings: BlockSettings, num_layers: int, kind: Kind) -> PreTrainedConfig:
    """Its own positions, eps and head width, not the target's; what it leaves out is as transformers has it for the model type."""
    layers = settings.layers.get("model_type", "qwen3")
    # Types of SpecForge's (two), TorchSpec's and Meta's own, whose layers are Qwen3's.
    layers = "qwen3" if layers in ("dspark", "qwen3_vl_text", "dflash", ASSISTANT) else layers
    if layers in (_GEMMA4, "gemma4_unified_text") and kind == "DSpark" and settings.layout == "DeepSeek":
        given = {key: settings.layers[key] for key in (*LAYER_SETTINGS, *_OF_GEMMA4) if settings.layers.get(key) is not None}
        full = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
        return config_of(_GEMMA4, {**given, **full}, settings.folder)
    if layers not in _LAYER_TYPES:
        raise SpeculativeConfigError(f"{settings.folder} has layers like {layers!r}, which is not supported: {', '.join(_LAYER_TYPES)} are")
    given = {key: settings.layers[key] for key in LAYER_SETTINGS if settings.layers.get(key) is not None}
    num_query_rows = tensors.shape("model.layers.0.self_attn.q_proj.weight")[0]
    config = layer_config(layers, given, num_layers, num_query_rows, settings.folder)
    rope = config.rope_parameters or {}
    if kind == "DSpark" and settings.layout != "speculators" and rope.get("rope_type") == "default":
        rope.pop("partial_rotary_factor", None)  # a copy of the target's (Qwen3.5): who trains them turns heads as a whole
    return config


def _check_encoder(tensors: DraftTensors, taps: tuple[int, ...], target: TargetView) -> None:
    read = tensors.shape("fc.weight")[-1]
    if read != len(taps) * target.hidden_size:
        raise SpeculativeConfigError(
            f"fc.weight in {tensors.checkpoint.folder} reads states of {read} numbers, but the target's layers "
            f"{', '.join(map(str, taps))} have {len(taps)} x {target.hidden_size}: take the drafter that was trained for this target"
        )


def _fusion(tensors: DraftTensors, num_layers: int, num_taps: int, width: int, target: TargetView) -> Fusion:
    folder = tensors.checkpoint.folder
    if width != target.hidden_size:
        raise SpeculativeConfigError(
            f"{folder} mixes states of {width} numbers, the target's have {target.hidden_size}: take the drafter that was trained for it"
        )
    is_mixed_first = tensors.has("fusion_weights")  # as `speculators` has it
    weights = tensors.take("fusion_weights" if is_mixed_first else "layer_fusion_weights", num_layers, num_taps)
    has_own = tensors.has("model.layers.0.self_attn.k_proj_target.weight")
    return Fusion(
        shares=tuple(map(tuple, torch.softmax(weights.float(), -1).tolist())),
        norms=tuple(f"fusion_norms.{i}" for i in range(num_layers)) if is_mixed_first else (),
        keys="k_proj_target" if has_own else "k_proj",
        values="v_proj_target" if has_own else "v_proj",
    )


def _embedding(tensors: DraftTensors, settings: BlockSettings, hf_config: PreTrainedConfig, target: TargetView) -> Table:
    """The file's, unless it has none or the very same numbers as the target."""
    embedding = embedding_of(tensors, int(hf_config.hidden_size), target, keep_own=False)
    if embedding.rows < target.vocab_size:
        raise SpeculativeConfigError(
            f"{settings.folder} was trained for a vocabulary of {embedding.rows} tokens, the target's has {target.vocab_size}: "
            "take the drafter that was trained for this target"
        )
    scale = 1.0 if settings.takes_bare_tables else embedding.scale
    if hf_config.model_type == _GEMMA4 and tensors.has("embed_tokens.weight"):  # rounded as the numbers are
        scale = float(torch.tensor(hf_config.hidden_size**0.5, dtype=tensors.take("embed_tokens.weight").dtype))
    return replace(embedding, scale=settings.number("input_embedding_scale", scale))


def _head(
    tensors: DraftTensors, settings: BlockSettings, hf_config: PreTrainedConfig, target: TargetView, embedding: Table
) -> tuple[Table, Tensor | None]:
    """The head, and the token ids of its rows where they are a vocabulary of the drafter's own."""
    vocab_size = settings.find("draft_vocab_size")
    head, token_ids = head_of(tensors, int(hf_config.hidden_size), target, embedding, vocab_size, is_tied=False)
    if tensors.has("lm_head.weight") and hf_config.model_type != _GEMMA4:
        return head, token_ids
    if settings.takes_bare_tables:
        head = replace(head, scale=1.0, softcap=None)
    cap = settings.number("final_logit_softcapping", 0.0)
    scaled = replace(head, scale=settings.number("output_multiplier", head.scale), softcap=cap if cap > 0 else head.softcap)
    return scaled, token_ids


def _mask_token(checkpoint: Checkpoint, settings: BlockSettings, embedding: Table) -> int:
    config: Mapping[str, Any] = {"mask_token_id": settings.find("mask_token_id")}
    token = checkpoint.integer("mask_token_id", config=config)
    if not 0 <= token < embedding.rows:
        raise SpeculativeConfigError(
            f"{checkpoint.folder}/config.json: 'mask_token_id' is {token}, but the embedding has {embedding.rows} rows"
        )
    return token


def _markov(
    tensors: DraftTensors, settings: BlockSettings, width: int, head: Table, target: TargetView
) -> Literal["vanilla", "gated", "rnn"] | None:
    if not tensors.has("markov_head.markov_w1.weight") and not settings.find("markov_rank"):
        return None
    rows, rank = tensors.take("markov_head.markov_w1.weight", -1, -1).shape
    if rows < target.vocab_size:
        raise SpeculativeConfigError(f"the Markov head in {settings.folder} knows {rows} tokens, the target has {target.vocab_size}")
    tensors.take("markov_head.markov_w2.weight", head.rows, rank)
    match settings.find("markov_head_type") or "vanilla":
        case "vanilla":
            return "vanilla"
        case "gated":
            tensors.take("markov_head.gate_proj.weight", rank, width + rank)
            return "gated"
        case "rnn":
            tensors.take("markov_head.joint_proj.weight", 3 * rank, 2 * rank + width)
            return "rnn"
        case other:
            raise SpeculativeConfigError(f"{settings.folder}: Markov heads are 'vanilla', 'gated' or 'rnn' here, not {other!r}")
