"""Decoder families, each a short function that writes its program.

To add one: say what attention and MLP do with their input, choose where the norms stand (layer_order.py), refuse settings that
would mean something else, and name the family in FAMILIES. Those with layer norms are in layer_norm_families.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .decoder_builder import DecoderBuilder, layer
from .gemma4 import gemma4
from .layer_norm_families import cohere, cohere2, nemotron, phi, stablelm, starcoder2
from .layer_order import Block, post_norm, pre_norm, sandwich_norm
from .program import CLAMPED_LIMIT, CLAMPED_SLOPE, Program
from .rope import UnsupportedModel
from .turned_pairs import qkv_of_pairs


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


def ministral3(d: DecoderBuilder) -> Program:
    """Ministral 3 (Mistral AI 2025): Mistral whose queries grow beyond the length that it was made for at first."""
    rope, window = d.rope(grows=True), d.window()

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x), rope, window)

    return d.finish(pre_norm(d, d.embed(), attention, d.mlp))


def ministral(d: DecoderBuilder) -> Program:
    """Ministral (Mistral AI 2024), also CWM (Meta 2025): Llama of which some layers slide."""
    d.refuse("attention_bias")
    rope, windows, bias = d.rope(), d.windows(), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x), rope, windows[i])

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, bias)))


def arcee(d: DecoderBuilder) -> Program:
    """AFM (Arcee 2025): Llama whose MLP has no gate and squares what is above 0 (So et al. 2021)."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.plain_mlp(i, x, mlp_bias)))


def seed_oss(d: DecoderBuilder) -> Program:
    """Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and others where attention ends."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, out_bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("attention_out_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=out_bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, mlp_bias)))


def helium(d: DecoderBuilder) -> Program:
    """Helium (Kyutai 2025): Llama that turns pairs."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, qkv_of_pairs(d, i, x, rope, bias), rope)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, mlp_bias)))


def ernie4_5(d: DecoderBuilder) -> Program:
    """ERNIE 4.5 (Baidu 2025) without experts: Llama that turns pairs."""
    d.refuse("layer_types", "sliding_window")
    rope, bias = d.rope(), d.flag("use_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, qkv_of_pairs(d, i, x, rope, bias), rope, bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, bias)))


def hunyuan(d: DecoderBuilder) -> Program:
    """Hunyuan (Tencent 2025) without experts: Llama with norms over heads, behind the rotation."""
    d.refuse("layer_types", "sliding_window")
    d.attention_names = ("query_layernorm", "key_layernorm", "o_proj")
    rope, bias = d.rope(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, head_norms=True, bias=bias, norm_last=True)

    return d.finish(pre_norm(d, d.embed(), attention, d.mlp))


def glm(d: DecoderBuilder) -> Program:
    """GLM-4 (GLM team 2024): pairs of the first half of a head turn."""
    return d.finish(pre_norm(d, d.embed(), _glm_attention(d), _fused_mlp(d)))


def glm4(d: DecoderBuilder) -> Program:
    """GLM-4-0414 (2025): GLM-4 with norms behind attention and MLP as well."""
    names = ("post_attention_layernorm", "post_mlp_layernorm")
    return d.finish(sandwich_norm(d, d.embed(), _glm_attention(d), _fused_mlp(d), "post_self_attn_layernorm", names))


def _glm_attention(d: DecoderBuilder) -> Block:
    d.refuse("layer_types", "sliding_window")
    rope, bias = d.rope(partial=True), d.flag("attention_bias")
    return lambda i, x: d.attend(i, qkv_of_pairs(d, i, x, rope, bias), rope)


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

    return d.finish(pre_norm(d, d.embed(), attention, _fused_mlp(d)))


def olmo2(d: DecoderBuilder) -> Program:
    """OLMo 2 (OLMo team 2025): norms behind attention and MLP, and over all of q and all of k."""
    d.refuse("layer_types", "sliding_window", "clip_qkv")
    rope, bias = d.rope(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x, bias), rope, bias=bias)

    return d.finish(post_norm(d, d.embed(), attention, d.mlp))


def olmo3(d: DecoderBuilder) -> Program:
    """OLMo 3 (OLMo team 2025): OLMo 2 of which three of four layers slide; each type has a rotary table of its own."""
    d.refuse("clip_qkv")
    kinds, windows, bias = d.layer_types(), d.windows(), d.flag("attention_bias")
    # To older versions of transformers both types have one table.
    one_for_all = "rope_type" in d.config["rope_parameters"]
    if one_for_all and d.config["rope_parameters"]["rope_type"] != "default":
        raise UnsupportedModel("rotary scaling of sliding layers")
    ropes = {kind: d.rope(None if one_for_all else kind) for kind in sorted(set(kinds))}

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x, bias), ropes[kinds[i]], windows[i], bias=bias)

    return d.finish(post_norm(d, d.embed(), attention, d.mlp))


def exaone4(d: DecoderBuilder) -> Program:
    """EXAONE 4.0 (LG AI Research 2025): norms behind attention and MLP; where some layers slide, the others do not rotate."""
    rope, windows = d.rope(), d.windows()
    never_slides = d.window() is None

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x), rope if never_slides or windows[i] else "", windows[i], head_norms=True)

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


def gemma(d: DecoderBuilder) -> Program:
    """Gemma (Gemma team 2024): Llama with a scaled embedding."""
    d.refuse("layer_types", "sliding_window")
    rope, (embedded, bias) = d.rope(), _gemma(d)

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=bias)

    return d.finish(pre_norm(d, embedded, attention, d.mlp))


def gemma2(d: DecoderBuilder) -> Program:
    """Gemma 2 (Gemma team 2024): every second layer slides; scores and logits are capped."""
    rope, windows, scores = d.rope(), d.windows(), d.config["attn_logit_softcapping"]
    embedded, bias = _gemma(d, "hidden_activation")
    scale = float(d.config["query_pre_attn_scalar"]) ** -0.5

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i], scale, scores, bias=bias)

    return d.finish(sandwich_norm(d, embedded, attention, d.mlp), softcap=d.config["final_logit_softcapping"])


def gemma3(d: DecoderBuilder) -> Program:
    """Gemma 3 (Gemma team 2025), text only: five of six layers slide, with a rotary table of their own; q and k norms, no caps."""
    d.refuse("attn_logit_softcapping")
    kinds, windows = d.layer_types(), d.windows()
    ropes = {kind: d.rope(kind) for kind in sorted(set(kinds))}
    embedded, bias = _gemma(d, "hidden_activation")
    scale = float(d.config["query_pre_attn_scalar"]) ** -0.5

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
    "ministral3": ("Ministral3ForCausalLM", ministral3),
    "ministral": ("MinistralForCausalLM", ministral),
    "cwm": ("CwmForCausalLM", ministral),
    "arcee": ("ArceeForCausalLM", arcee),
    "seed_oss": ("SeedOssForCausalLM", seed_oss),
    "helium": ("HeliumForCausalLM", helium),
    "ernie4_5": ("Ernie4_5ForCausalLM", ernie4_5),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", hunyuan),
    "glm": ("GlmForCausalLM", glm),
    "glm4": ("Glm4ForCausalLM", glm4),
    "cohere": ("CohereForCausalLM", cohere),
    "cohere2": ("Cohere2ForCausalLM", cohere2),
    "starcoder2": ("Starcoder2ForCausalLM", starcoder2),
    "stablelm": ("StableLmForCausalLM", stablelm),
    "phi": ("PhiForCausalLM", phi),
    "nemotron": ("NemotronForCausalLM", nemotron),
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
    "olmo3": ("Olmo3ForCausalLM", olmo3),
    "exaone4": ("Exaone4ForCausalLM", exaone4),
    "olmoe": ("OlmoeForCausalLM", olmoe),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
    "gemma": ("GemmaForCausalLM", gemma),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma4_text": ("Gemma4ForCausalLM", gemma4),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
}
"""Model type of a config -> its architecture, and the function that writes its program."""


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


def _fused_mlp(d: DecoderBuilder) -> Block:
    """A gated MLP with one weight for gate and up."""
    width = d.intermediate_size
    return lambda i, x: d.gated(f"{layer(i)}.mlp", (d.linear(f"{layer(i)}.mlp.gate_up_proj", x, 2 * width),), width)


def _gemma(d: DecoderBuilder, activation: str = "hidden_act") -> tuple[str, bool]:
    """What the Gemmas share; returns the embedding's buffer, and whether attention has biases."""
    d.refuse("use_bidirectional_attention")
    d.norms_add_one, d.activation_setting = True, activation
    # Trained with sqrt(hidden size) in the format of the weights: 55.5 for 55.4256 in bfloat16.
    return d.embed(float(torch.tensor(d.hidden_size**0.5, dtype=d.dtype))), d.flag("attention_bias")
