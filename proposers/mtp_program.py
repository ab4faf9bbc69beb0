"""The network of an MTP module as a program: MiMo's, those that `speculators` writes in its form, Qwen's since Qwen3-Next,
ERNIE 4.5's, and those that DeepSeek and GLM publish as one more layer.

Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from ..kernels.decoder_builder import DecoderBuilder, hidden, layer
from ..kernels.expert_families import experts_and_one_shared, experts_and_shared, glm_attention
from ..kernels.latent_attention import latent_attention
from ..kernels.layout import FINAL
from ..kernels.program import Program
from ..kernels.recurrent_families import gated_attention
from ..kernels.turned_pairs import qkv_of_pairs
from .guessing import FEATURE
from .loading import TargetView

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
    state = d.norm("hidden_layernorm", d.input(FEATURE, d.hidden_size))
    token = d.norm("token_layernorm", d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    pair = (state, token) if state_first else (token, state)
    read = d.linear("input_proj", d.concat(pair, "pair"), d.hidden_size)
    qkv = d.qkv(0, d.norm(f"{layer(0)}.input_layernorm", read), has("self_attn.q_proj.bias"))
    head_norms, bias = has("self_attn.q_norm.weight"), has("self_attn.o_proj.bias")
    x = d.add(read, d.attend(0, qkv, rope, window, head_norms=head_norms, bias=bias), f"{layer(0)}.middle")
    x = d.add(x, d.mlp(0, d.norm(f"{layer(0)}.post_attention_layernorm", x), has("mlp.gate_proj.bias")), hidden(1))
    return _guessing(d, d.norm("final_layernorm", x), (read, x), target)


def gated_draft_program(hf_config: PretrainedConfig, target: TargetView, has_experts: bool) -> Program:
    """o = layer(fc([pre_fc_norm_embedding(E); pre_fc_norm_hidden(f)])), scores = the target's head of norm(o).

    (Qwen3-Next, Qwen3.5: Qwen team 2025.) The layer is one of the target's that have attention, every norm weight is stored less one.
    hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.norms_add_one = True
    rope = d.rope(partial=True)
    state = d.norm("pre_fc_norm_hidden", d.input(FEATURE, d.hidden_size))
    token = d.norm("pre_fc_norm_embedding", d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    read = d.linear("fc", d.concat((token, state), "pair"), d.hidden_size)
    attended = gated_attention(d, 0, d.norm(f"{layer(0)}.input_layernorm", read), rope)
    x = d.add(read, attended, f"{layer(0)}.middle")
    normed = d.norm(f"{layer(0)}.post_attention_layernorm", x)
    x = d.add(x, experts_and_one_shared(d, 0, normed) if has_experts else d.mlp(0, normed), hidden(1))
    return _guessing(d, d.norm("norm", x), (read, x), target)


def numbered_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """o = layer(eh_proj([enorm(E); hnorm(f)])), scores = the target's head of shared_head.norm(o).

    (DeepSeek-AI 2024, section 2.2, with the halves in the order that the published weights want; GLM-4.5: GLM team 2025.) The layer is
    one of the target's that have experts. hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    attention = latent_attention(d, d.flag("rope_interleave")) if "kv_lora_rank" in d.config else glm_attention(d)
    state = d.norm("hnorm", d.input(FEATURE, d.hidden_size))
    token = d.norm("enorm", d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    read = d.linear("eh_proj", d.concat((token, state), "pair"), d.hidden_size)
    x = d.add(read, attention(0, d.norm(f"{layer(0)}.input_layernorm", read)), f"{layer(0)}.middle")
    x = d.add(x, experts_and_shared(d, 0, d.norm(f"{layer(0)}.post_attention_layernorm", x)), hidden(1))
    return _guessing(d, d.norm("shared_head.norm", x), (read, x), target)


def ernie_draft_program(hf_config: PretrainedConfig, target: TargetView) -> Program:
    """o = layer(linear_proj([emb_norm(E); hidden_norm(f)])), scores = the target's head of o, which has no norm.

    (ERNIE 4.5: Baidu 2025.) The layer is one of the target's that have no experts. hf_config: of the one layer.
    """
    d = DecoderBuilder(hf_config, target.max_model_len, torch.float32)
    d.refuse("use_bias")
    rope = d.rope()
    state = d.norm("hidden_norm.0", d.input(FEATURE, d.hidden_size))
    token = d.norm("emb_norm.0", d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded"))
    read = d.linear("linear_proj.0", d.concat((token, state), "pair"), d.hidden_size)
    qkv = qkv_of_pairs(d, 0, d.norm(f"{layer(0)}.input_layernorm", read), rope)
    x = d.add(read, d.attend(0, qkv, rope), f"{layer(0)}.middle")
    x = d.add(x, d.mlp(0, d.norm(f"{layer(0)}.post_attention_layernorm", x)), hidden(1))
    return _guessing(d, x, (read, x), target)


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


def _guessing(d: DecoderBuilder, final: str, boundaries: tuple[str, str], target: TargetView) -> Program:
    """What is behind the last norm goes through the target's head, and is the state that the next guess reads."""
    return replace(
        d.program(final, d.logits(final, target.head, target.vocab_size, target.logits_scale, target.logits_softcap)),
        boundaries=boundaries,
        recurrent=(FEATURE, FINAL),
        shared=frozenset((target.embedding, target.head)),
    )
