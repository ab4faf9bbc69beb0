"""Decoder families, each a short function that writes its program.

To add one: say what attention and MLP do with their input, choose where the norms stand (pre_norm, sandwich_norm, post_norm),
refuse settings that would mean something else, and name the family in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .decoder_builder import DecoderBuilder, hidden, layer
from .program import CLAMPED_LIMIT, CLAMPED_SLOPE, Program
from .rope import UnsupportedModel

Block = Callable[[int, str], str]
"""Attention or MLP: (index of the layer, buffer it reads) -> buffer it writes."""


def llama(d: DecoderBuilder) -> Program:
    """Llama (Touvron et al. 2023; Grattafiori et al. 2024), and what shares its form, such as SmolLM2."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=bias)

    def mlp(i: int, x: str) -> str:
        return d.mlp(i, x, mlp_bias)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def mistral(d: DecoderBuilder) -> Program:
    """Mistral (Jiang et al. 2023): Llama with one window for all layers."""
    d.refuse("layer_types")
    rope, window = d.rope(), d.window()

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x), rope, window)

    return d.finish(pre_norm(d, d.embed(), attention, d.mlp))


def mixtral(d: DecoderBuilder) -> Program:
    """Mixtral (Jiang et al. 2024): Mistral with experts."""
    d.refuse("layer_types")
    rope, window, count = d.rope(), d.window(), int(d.config["num_local_experts"])

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x), rope, window)

    def mlp(i: int, x: str) -> str:
        parts, fused = ("w1", "w3", "w2"), f"{layer(i)}.mlp"
        return d.experts(f"{layer(i)}.block_sparse_moe", x, count, d.intermediate_size, True, parts, fused)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def qwen2(d: DecoderBuilder) -> Program:
    """Qwen2 (Yang et al. 2024): biases on q, k and v; some layers may slide."""
    rope, windows = d.rope(), d.windows()

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias=True), rope, windows[i])

    return d.finish(pre_norm(d, d.embed(), attention, d.mlp))


def qwen3(d: DecoderBuilder) -> Program:
    """Qwen3 (Yang et al. 2025): a norm over each head of q and k."""
    rope, windows, bias = d.rope(), d.windows(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i], head_norms=True, bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, d.mlp))


def qwen3_moe(d: DecoderBuilder) -> Program:
    """Qwen3 with experts (Yang et al. 2025) in all layers, in every so manieth, or in all but some."""
    rope, window, bias = d.rope(), d.window() if d.flag("use_sliding_window") else None, d.flag("attention_bias")
    count, width, every = (int(d.config[name]) for name in ("num_local_experts", "moe_intermediate_size", "decoder_sparse_step"))
    dense = {*(d.config["mlp_only_layers"] or ())}

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, window, head_norms=True, bias=bias)

    def mlp(i: int, x: str) -> str:
        if i in dense or not count or (i + 1) % every:
            return d.mlp(i, x)
        return d.experts(f"{layer(i)}.mlp", x, count, width, d.flag("norm_topk_prob"), ("gate_proj", "up_proj", "down_proj"))

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def qwen3_next(d: DecoderBuilder) -> Program:
    """Qwen3-Next (Qwen team 2025): three of four layers are gated delta nets, attention in the others has a gate; experts."""
    every, dense = int(d.config["decoder_sparse_step"]), {*(d.config["mlp_only_layers"] or ())}

    def mlp(i: int, x: str) -> str:
        if i in dense or not d.config["num_experts"] or (i + 1) % every:
            return d.mlp(i, x)
        return experts_and_one_shared(d, i, x)

    return _with_delta_layers(d, mlp, by_key_head=True)


def qwen3_5(d: DecoderBuilder) -> Program:
    """Qwen3.5 and 3.6 (2026), text only: Qwen3-Next without experts."""
    return _with_delta_layers(d, d.mlp)


def qwen3_5_moe(d: DecoderBuilder) -> Program:
    """Qwen3.5 and 3.6 with experts (2026), text only."""
    return _with_delta_layers(d, lambda i, x: experts_and_one_shared(d, i, x))


def lfm2(d: DecoderBuilder) -> Program:
    """LFM2 (Liquid AI 2025): most layers are a short convolution between two gates."""
    kinds, rope = d.layer_types("conv"), d.rope()
    d.attention_names = ("q_layernorm", "k_layernorm", "out_proj")
    d.config["hidden_act"] = "silu"  # which the config does not say
    taps, bias, inner = int(d.config["conv_L_cache"]), d.flag("conv_bias"), d.intermediate_size
    if d.flag("block_auto_adjust_ff_dim"):
        inner, step = int((d.config["block_ffn_dim_multiplier"] or 1.0) * (2 * inner // 3)), int(d.config["block_multiple_of"])
        inner = -(-inner // step) * step

    def mixing(i: int, x: str) -> str:
        if kinds[i] == "conv":
            return d.short_conv(i, x, taps, bias)
        return d.attend(i, d.qkv(i, x), rope, head_norms=True)

    def mlp(i: int, x: str) -> str:
        return d.gated_mlp(f"{layer(i)}.feed_forward", x, inner, names=("w1", "w3", "w2"))

    x = pre_norm(d, d.embed(), mixing, mlp, norms=("operator_norm", "ffn_norm"))
    return d.finish(x, norm="model.embedding_norm")


def granite_hybrid(d: DecoderBuilder) -> Program:
    """Granite 4 (IBM 2025): most layers are state spaces, attention rarely rotates; a shared MLP, and experts beside it in some."""
    kinds, rotates = d.layer_types("linear_attention"), d.config["position_embedding_type"] == "rope"
    rope, bias, count = d.rope() if rotates else "", d.flag("attention_bias"), int(d.config["num_local_experts"] or 0)
    on_embedding, on_scores, on_residual = (float(d.config[f"{what}_multiplier"]) for what in ("embedding", "attention", "residual"))
    shared = int(d.config["shared_intermediate_size"])

    def mixing(i: int, x: str) -> str:
        if kinds[i] == "linear_attention":
            return d.scale(d.state_space(i, x), on_residual)
        return d.scale(d.attend(i, d.qkv(i, x, bias), rope, scale=on_scores, bias=bias), on_residual)

    def mlp(i: int, x: str) -> str:
        name, block = f"{layer(i)}.shared_mlp", f"{layer(i)}.block_sparse_moe"
        fed = d.gated(name, (d.linear(f"{name}.input_linear", x, 2 * shared),), shared, down="output_linear")
        if count:
            parts, tensors = ("gate", "up", "down"), ("input_linear.weight", "output_linear.weight")
            chosen = d.experts(block, x, count, d.intermediate_size, True, parts, tensors=tensors, router="router.layer")
            fed = d.add(chosen, fed, f"{layer(i)}.fed")
        return d.scale(fed, on_residual)

    return d.finish(pre_norm(d, d.embed(on_embedding), mixing, mlp), scale=1 / float(d.config["logits_scaling"]))


def smollm3(d: DecoderBuilder) -> Program:
    """SmolLM3 (2025): every fourth layer does not rotate (NoPE; Yang et al. 2025)."""
    windows, rotates = d.windows(), d.config["no_rope_layers"]  # 1 where a layer does rotate, whatever the name says
    if any(windows) and not d.flag("use_sliding_window"):
        raise UnsupportedModel("sliding layers with use_sliding_window off")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope if rotates[i] else "", windows[i], bias=bias)

    def mlp(i: int, x: str) -> str:
        return d.mlp(i, x, mlp_bias)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def granite(d: DecoderBuilder) -> Program:
    """Granite 3 (2024): Llama with four multipliers (as in maximal update parametrisation, Yang et al. 2022)."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")
    on_embedding, on_scores, on_residual = (float(d.config[f"{what}_multiplier"]) for what in ("embedding", "attention", "residual"))

    def attention(i: int, x: str) -> str:
        return d.scale(d.attend(i, d.qkv(i, x, bias), rope, scale=on_scores, bias=bias), on_residual)

    def mlp(i: int, x: str) -> str:
        return d.scale(d.mlp(i, x, mlp_bias), on_residual)

    return d.finish(pre_norm(d, d.embed(on_embedding), attention, mlp), scale=1 / float(d.config["logits_scaling"]))


def phi3(d: DecoderBuilder) -> Program:
    """Phi-3 (Abdin et al. 2024), also Phi-3.5 and Phi-4: one weight for q, k and v, one for gate and up."""
    d.refuse("layer_types")
    rope, window = d.rope(partial=True), d.window()
    qkv_width = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim

    def attention(i: int, x: str) -> str:
        return d.attend(i, (d.linear(f"{layer(i)}.self_attn.qkv_proj", x, qkv_width),), rope, window)

    def mlp(i: int, x: str) -> str:
        name, width = f"{layer(i)}.mlp", d.intermediate_size
        return d.gated(name, (d.linear(f"{name}.gate_up_proj", x, 2 * width),), width)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def olmo2(d: DecoderBuilder) -> Program:
    """OLMo 2 (OLMo team 2025): norms behind attention and MLP, and over all of q and all of k."""
    d.refuse("layer_types", "sliding_window", "clip_qkv")
    rope, bias = d.rope(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x, bias), rope, bias=bias)

    return d.finish(post_norm(d, d.embed(), attention, d.mlp))


def olmoe(d: DecoderBuilder) -> Program:
    """OLMoE (Muennighoff et al. 2024): experts in all layers; norms over all of q and all of k, others in front as in Llama."""
    d.refuse("layer_types", "sliding_window", "clip_qkv")
    rope, bias, count = d.rope(), d.flag("attention_bias"), int(d.config["num_experts"])

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x, bias), rope, bias=bias)

    def mlp(i: int, x: str) -> str:
        parts = ("gate_proj", "up_proj", "down_proj")
        return d.experts(f"{layer(i)}.mlp", x, count, d.intermediate_size, d.flag("norm_topk_prob"), parts)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def gemma2(d: DecoderBuilder) -> Program:
    """Gemma 2 (Gemma team 2024): every second layer slides; scores and logits are capped."""
    rope, windows, scores = d.rope(), d.windows(), d.config["attn_logit_softcapping"]
    embedded, scale, bias = _gemma(d)

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i], scale, scores, bias=bias)

    return d.finish(sandwich_norm(d, embedded, attention, d.mlp), softcap=d.config["final_logit_softcapping"])


def gemma3(d: DecoderBuilder) -> Program:
    """Gemma 3 (Gemma team 2025), text only: five of six layers slide, with a rotary table of their own; q and k norms, no caps."""
    d.refuse("attn_logit_softcapping")
    kinds, windows = d.layer_types(), d.windows()
    ropes = {kind: d.rope(kind) for kind in sorted(set(kinds))}
    embedded, scale, bias = _gemma(d)

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), ropes[kinds[i]], windows[i], scale, head_norms=True, bias=bias)

    return d.finish(sandwich_norm(d, embedded, attention, d.mlp), softcap=d.config["final_logit_softcapping"])


def gpt_oss(d: DecoderBuilder) -> Program:
    """gpt-oss (OpenAI 2025): sinks in attention, every second layer slides; experts with biases behind a clamped gate."""
    if (d.config.get("swiglu_alpha", CLAMPED_SLOPE), d.config.get("swiglu_limit", CLAMPED_LIMIT)) != (CLAMPED_SLOPE, CLAMPED_LIMIT):
        raise UnsupportedModel("another clamped gate")
    rope, windows, bias, count = d.rope(), d.windows(), d.flag("attention_bias"), int(d.config["num_local_experts"])

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i], bias=bias, sinks=True)

    def mlp(i: int, x: str) -> str:
        return d.biased_experts(f"{layer(i)}.mlp", x, count, d.intermediate_size)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


FAMILIES: dict[str, tuple[str, Callable[[DecoderBuilder], Program]]] = {
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "mixtral": ("MixtralForCausalLM", mixtral),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe),
    "qwen3_next": ("Qwen3NextForCausalLM", qwen3_next),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", qwen3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", qwen3_5_moe),
    "lfm2": ("Lfm2ForCausalLM", lfm2),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", granite_hybrid),
    "smollm3": ("SmolLM3ForCausalLM", smollm3),
    "granite": ("GraniteForCausalLM", granite),
    "phi3": ("Phi3ForCausalLM", phi3),
    "olmo2": ("Olmo2ForCausalLM", olmo2),
    "olmoe": ("OlmoeForCausalLM", olmoe),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
}
"""Model type of a config -> its architecture, and the function that writes its program."""


def pre_norm(
    d: DecoderBuilder, x: str, attention: Block, mlp: Block, norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
) -> str:
    """Layers that normalise what attention and MLP read."""
    for i in range(d.num_layers):
        attended = attention(i, d.norm(f"{layer(i)}.{norms[0]}", x))
        x = d.add(x, attended, f"{layer(i)}.middle")
        x = d.add(x, mlp(i, d.norm(f"{layer(i)}.{norms[1]}", x)), hidden(i + 1))
    return x


def post_norm(d: DecoderBuilder, x: str, attention: Block, mlp: Block) -> str:
    """Layers that normalise what attention and MLP write."""
    for i in range(d.num_layers):
        attended = d.norm(f"{layer(i)}.post_attention_layernorm", attention(i, x))
        x = d.add(x, attended, f"{layer(i)}.middle")
        x = d.add(x, d.norm(f"{layer(i)}.post_feedforward_layernorm", mlp(i, x)), hidden(i + 1))
    return x


def sandwich_norm(d: DecoderBuilder, x: str, attention: Block, mlp: Block) -> str:
    """Layers that normalise both."""
    for i in range(d.num_layers):
        attended = attention(i, d.norm(f"{layer(i)}.input_layernorm", x))
        x = d.add(x, d.norm(f"{layer(i)}.post_attention_layernorm", attended), f"{layer(i)}.middle")
        fed = mlp(i, d.norm(f"{layer(i)}.pre_feedforward_layernorm", x))
        x = d.add(x, d.norm(f"{layer(i)}.post_feedforward_layernorm", fed), hidden(i + 1))
    return x


def experts_and_one_shared(d: DecoderBuilder, i: int, x: str) -> str:
    """Some of many experts, and one that all tokens share, as Qwen has had them since Qwen3-Next."""
    name, count, width = f"{layer(i)}.mlp", int(d.config["num_experts"]), int(d.config["moe_intermediate_size"])
    renormalise = bool(d.config.get("norm_topk_prob", True))  # Qwen3.5 has no such setting
    some = d.experts(name, x, count, width, renormalise, ("gate_proj", "up_proj", "down_proj"))
    return d.add(some, d.shared_expert(name, x, int(d.config["shared_expert_intermediate_size"])), f"{name}.mixed")


def gated_attention(d: DecoderBuilder, i: int, x: str, rope: str) -> str:
    """Attention with norms over heads, a share of each head that turns, and a gate on what is attended to (Qwen3-Next, Qwen3.5)."""
    qkv, gate = d.gated_qkv(i, x, d.flag("attention_bias"))
    return d.attend(i, qkv, rope, head_norms=True, gate=gate)


def _with_delta_layers(d: DecoderBuilder, mlp: Block, by_key_head: bool = False) -> Program:
    """Layers that are gated delta nets or attention, by their type."""
    kinds, rope = d.layer_types("linear_attention"), d.rope(partial=True)
    d.norms_add_one = True

    def attention(i: int, x: str) -> str:
        return d.gated_delta(i, x, by_key_head) if kinds[i] == "linear_attention" else gated_attention(d, i, x, rope)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def _gemma(d: DecoderBuilder) -> tuple[str, float, bool]:
    """What the Gemmas share; returns the embedding's buffer, the scale of scores, and whether attention has biases."""
    d.refuse("use_bidirectional_attention")
    d.norms_add_one, d.activation_setting = True, "hidden_activation"
    # Trained with sqrt(hidden size) in the format of the weights: 55.5 for 55.4256 in bfloat16.
    scale = float(torch.tensor(d.hidden_size**0.5, dtype=d.dtype))
    return d.embed(scale), float(d.config["query_pre_attn_scalar"]) ** -0.5, d.flag("attention_bias")
