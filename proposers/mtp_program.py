"""The network of an MTP module as a program: MiMo's, those that `speculators` writes in its form, Qwen's since Qwen3-Next, K-EXAONE's,
ERNIE 4.5's, Nemotron 3's, and those that DeepSeek, GLM and Hunyuan 3 publish as one more layer.

Knows no tensors.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers import PretrainedConfig

from ..kernels.decoder_builder import DecoderBuilder, layer
from ..kernels.expert_families import (
    exaone_attention,
    experts_and_one_shared,
    experts_and_shared,
    glm_attention,
    hunyuan_3_attention,
    hunyuan_3_experts,
)
from ..kernels.latent_attention import latent_attention
from ..kernels.layer_order import Block, pre_norm
from ..kernels.layout import FINAL
from ..kernels.program import Program
from ..kernels.recurrent_builder import RecurrentBuilder
from ..kernels.recurrent_families import gated_attention, nemotron_mixer, only_mixers
from ..kernels.rope import UnsupportedModel
from ..kernels.turned_pairs import qkv_of_pairs
from .guessing import FEATURE
from .loading import TargetView

_OF_GATED = "pre_fc_norm_hidden", "pre_fc_norm_embedding", "fc", "norm"
_OF_NUMBERED = "hnorm", "enorm", "eh_proj"
_OF_SPECULATORS = {
    "fc": "input_proj",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "pre_fc_norm_embedding": "token_layernorm",
    "norm": "final_layernorm",
}


def draft_program(hf_config: PretrainedConfig, target: TargetView, has: Callable[[str], bool], state_first: bool) -> Program:
    """o = layer(input_proj([hidden_layernorm(f); token_layernorm(E)])), scores = the target's head of final_layernorm(o).

    (MiMo: Xiaomi 2025.) state_first: else the projection reads the embedding's half first, as in all other families.
    hf_config: of the one layer. has: whether the module holds a tensor, by `published` names.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    rope = d.rope(partial=True)
    window = d.window() if "sliding_attention" in (d.config.get("layer_types") or ()) else None
    head_norms, bias = has("self_attn.q_norm.weight"), has("self_attn.o_proj.bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, has("self_attn.q_proj.bias")), rope, window, head_norms=head_norms, bias=bias)

    names = "hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"
    return _program(d, target, names, _layer(d, attention, lambda i, x: d.mlp(i, x, has("mlp.gate_proj.bias"))), state_first)


def gated_draft_program(hf_config: PretrainedConfig, target: TargetView, has_experts: bool) -> Program:
    """o = layer(fc([pre_fc_norm_embedding(E); pre_fc_norm_hidden(f)])), scores = the target's head of norm(o).

    (Qwen3-Next, Qwen3.5: Qwen team 2025.) The layer is one of the target's that have attention, every norm weight is stored less one.
    hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.norms_add_one = True
    rope = d.rope(partial=True)
    mlp = partial(experts_and_one_shared, d) if has_experts else d.mlp
    return _program(d, target, _OF_GATED, _layer(d, lambda i, x: gated_attention(d, i, x, rope), mlp))


def exaone_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """The same around a layer of K-EXAONE's that has no experts, with norms as they are stored (LG AI Research 2026)."""
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.config["sliding_window"] = d.windows()[0]  # it rotates, even if it does not slide
    return _program(d, target, _OF_GATED, _layer(d, exaone_attention(d), d.mlp))


def numbered_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """o = layer(eh_proj([enorm(E); hnorm(f)])), scores = the target's head of shared_head.norm(o).

    (DeepSeek-AI 2024, section 2.2, with the halves in the order that the published weights want; GLM-4.5: GLM team 2025.) The layer is
    one of the target's that have experts. Hunyuan 3 (Tencent 2026) calls the last norm otherwise. hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    if hf_config.model_type == "hy_v3":
        return _program(d, target, (*_OF_NUMBERED, "final_layernorm"), _layer(d, hunyuan_3_attention(d), partial(hunyuan_3_experts, d)))
    attention = latent_attention(d, d.flag("rope_interleave")) if "kv_lora_rank" in d.config else glm_attention(d)
    return _program(d, target, (*_OF_NUMBERED, "shared_head.norm"), _layer(d, attention, partial(experts_and_shared, d)))


def ernie_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """o = layer(linear_proj([emb_norm(E); hidden_norm(f)])), scores = the target's head of o, which has no norm.

    (ERNIE 4.5: Baidu 2025.) The layer is one of the target's that have no experts. hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.refuse("use_bias")
    rope = d.rope()
    names = "hidden_norm.0", "emb_norm.0", "linear_proj.0", ""
    return _program(d, target, names, _layer(d, lambda i, x: d.attend(i, qkv_of_pairs(d, i, x, rope), rope), d.mlp))


def nemotron_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """Hunyuan 3's form around layers of the target's, each of which is one part (Nemotron 3: NVIDIA 2025).

    hf_config: of these layers.
    """
    d = RecurrentBuilder(hf_config, target.max_model_len, torch.float32)
    if "linear_attention" in d.config["layers_block_type"]:
        raise UnsupportedModel("an MTP layer with a state space")
    mixer, last = nemotron_mixer(d), f"{layer(d.num_layers - 1)}.final_layernorm"
    names = *(f"{layer(0)}.{name}" for name in _OF_NUMBERED), last
    return _program(d, target, names, lambda read: only_mixers(d, read, mixer))


def published(name: str) -> str:
    """What the module calls the weight that the program calls `name`; its prefix is left out."""
    return name.removeprefix(f"{layer(0)}.")


def published_by_ernie(name: str) -> str:
    return name.replace(layer(0), "block.0")


def published_by_speculators(name: str) -> str:
    """The same for a gated module in the layout of `speculators`, which names the parts of all families alike."""
    module, _, last = name.rpartition(".")
    return f"{_OF_SPECULATORS[module]}.{last}" if module in _OF_SPECULATORS else published(name)


def published_with_layer(name: str) -> str:
    """The same, where the prefix stands for all modules and each has its number."""
    return name.removeprefix("model.")


def _layer(d: DecoderBuilder, attention: Block, mlp: Block) -> Callable[[str], str]:
    return lambda read: pre_norm(d, read, attention, mlp)


def _program(
    d: DecoderBuilder, target: TargetView, names: tuple[str, ...], layers: Callable[[str], str], state_first: bool = False
) -> Program:
    """What is behind the last norm goes through the target's head, and is the state that the next guess reads.

    names: of the state's norm, the embedding's, the projection of both, and the last norm, "" = none.
    """
    of_state, of_token, projection, last = names
    state = d.norm(of_state, d.input(FEATURE, d.hidden_size))
    token = d.norm(of_token, d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    read = d.linear(projection, d.concat((state, token) if state_first else (token, state), "pair"), d.hidden_size)
    x = layers(read)
    final = d.norm(last, x) if last else x
    return replace(
        d.program(final, d.logits(final, target.head, target.vocab_size, target.logits_scale, target.logits_softcap)),
        boundaries=(read, x),
        recurrent=(FEATURE, FINAL),
        shared=frozenset((target.embedding, target.head)),
    )
