"""Decoder families, each a short function that writes its program.

To add one: say what attention and MLP do with their input, choose where the norms stand (layer_order.py), refuse settings that
would mean something else, and name the family in FAMILIES. Those with layer norms are in layer_norm_families.py, those with
experts in expert_families.py, those with a state in recurrent_families.py,
those with latent attention in latent_families.py.
"""

from collections.abc import Callable

from .decoder_builder import DecoderBuilder, hidden, layer
from .expert_families import (
    afmoe,
    dots1,
    ernie4_5_moe,
    exaone_attention,
    exaone_moe,
    glm4_moe,
    gpt_oss,
    granite_moe,
    hunyuan_attention,
    hunyuan_moe,
    hy_v3,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    solar_open,
)
from .gemma4 import gemma4
from .latent_families import deepseek_v2, deepseek_v3, glm4_moe_lite, minicpm3, youtu
from .layer_norm_families import cohere, cohere2, nemotron, phi, stablelm, starcoder2
from .layer_order import Block, post_norm, pre_norm, sandwich_norm
from .program import Program
from .recurrent_builder import RecurrentBuilder
from .recurrent_families import bamba, falcon_h1, granite_hybrid, lfm2, lfm2_moe, nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from .rope import UnsupportedModel
from .turned_pairs import qkv_of_pairs


def llama(d: DecoderBuilder) -> Program:
    """Llama (Touvron et al. 2023; Grattafiori et al. 2024), and what shares its form, such as SmolLM2."""
    return _llama(d, d.flag("attention_bias"), d.flag("attention_bias"), d.flag("mlp_bias"))


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

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.plain_mlp(f"{layer(i)}.mlp", x, d.intermediate_size, mlp_bias)))


def seed_oss(d: DecoderBuilder) -> Program:
    """Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and others where attention ends."""
    return _llama(d, d.flag("attention_bias"), d.flag("attention_out_bias"), d.flag("mlp_bias"))


def helium(d: DecoderBuilder) -> Program:
    """Helium (Kyutai 2025): Llama that turns pairs."""
    return _llama(d, d.flag("attention_bias"), False, d.flag("mlp_bias"), pairs=True)


def ernie4_5(d: DecoderBuilder) -> Program:
    """ERNIE 4.5 (Baidu 2025) without experts: Llama that turns pairs."""
    bias = d.flag("use_bias")
    return _llama(d, bias, bias, bias, pairs=True)


def _llama(d: DecoderBuilder, bias: bool, out_bias: bool, mlp_bias: bool, pairs: bool = False) -> Program:
    """bias: on q, k and v; out_bias: where attention ends."""
    d.refuse("layer_types", "sliding_window")
    rope = d.rope()

    def attention(i: int, x: str) -> str:
        return d.attend(i, qkv_of_pairs(d, i, x, rope, bias) if pairs else d.qkv(i, x, bias), rope, bias=out_bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, mlp_bias)))


def hunyuan(d: DecoderBuilder) -> Program:
    """Hunyuan (Tencent 2025) without experts: Llama with norms over heads, behind the rotation."""
    return d.finish(pre_norm(d, d.embed(), hunyuan_attention(d), d.mlp))


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


def smollm3(d: DecoderBuilder) -> Program:
    """SmolLM3 (2025): every fourth layer does not rotate (NoPE; Yang et al. 2025)."""
    windows, rotates = d.windows(), d.config["no_rope_layers"]  # 1 where a layer does rotate, whatever the name says
    if any(windows) and not d.flag("use_sliding_window"):
        raise UnsupportedModel("sliding layers with use_sliding_window off")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope if rotates[i] else "", windows[i], bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.mlp(i, x, mlp_bias)))


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
    return d.finish(post_norm(d, d.embed(), exaone_attention(d), d.mlp))


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


def muse_glimmer(d: DecoderBuilder) -> Program:
    """Muse Glimmer (Meta 2026), text only: embeddings and heads of q and k are normalised without weights, what is attended to has a
    gate, some layers do not rotate, and norms behind attention and MLP have an eps of their own."""
    d.activation_setting, d.norms_add_one = "hidden_activation", True
    rope, windows, bias = d.rope(), d.windows(), d.flag("attention_bias")
    scale, eps = float(d.config["qk_scale_factor"]) * d.head_dim**-0.5, float(d.config["post_norm_eps"])
    bases = d.config["layer_rope_theta"]
    # transformers would rotate a layer with another base like all others.
    if len(bases) != d.num_layers or not {*bases} <= {0, d.config["rope_parameters"]["rope_theta"]}:
        raise UnsupportedModel(f"layer_rope_theta {bases}")

    def attention(i: int, x: str) -> str:
        gate = d.linear(f"{layer(i)}.self_attn.gate_proj", x, d.num_heads * d.head_dim)
        q, k, v = d.qkv(i, x, bias)
        q, k = (d.norm("", heads, f"{heads}.normed", groups) for heads, groups in ((q, d.num_heads), (k, d.num_kv_heads)))
        attended = d.attend(i, (q, k, v), rope if bases[i] else "", windows[i], scale, bias=bias, gate=gate)
        return d.norm(f"{layer(i)}.post_attention_layernorm", attended, eps=eps)

    def mlp(i: int, x: str) -> str:
        return d.norm(f"{layer(i)}.post_feedforward_layernorm", d.mlp(i, x), eps=eps)

    # The table itself stays as it is: the assistant reads it without the norm.
    embedded = d.norm("", d.embed(output="model.embed_tokens"), hidden(0))
    x = pre_norm(d, embedded, attention, mlp, ("input_layernorm", "pre_feedforward_layernorm"))
    d.norms_add_one = False
    return d.finish(x, float(d.config["output_multiplier"]), d.config["final_logit_softcapping"])


FAMILIES: dict[str, tuple[str, Callable[[RecurrentBuilder], Program]]] = {
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
    "qwen2_moe": ("Qwen2MoeForCausalLM", qwen2_moe),
    "glm4_moe": ("Glm4MoeForCausalLM", glm4_moe),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", glm4_moe_lite),
    "deepseek_v2": ("DeepseekV2ForCausalLM", deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek_v3),
    "youtu": ("YoutuForCausalLM", youtu),
    "minicpm3": ("MiniCPM3ForCausalLM", minicpm3),
    "minimax_m2": ("MiniMaxM2ForCausalLM", minimax_m2),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ernie4_5_moe),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", hunyuan_moe),
    "dots1": ("Dots1ForCausalLM", dots1),
    "solar_open": ("SolarOpenForCausalLM", solar_open),
    "exaone_moe": ("ExaoneMoeForCausalLM", exaone_moe),
    "hy_v3": ("HYV3ForCausalLM", hy_v3),
    "afmoe": ("AfmoeForCausalLM", afmoe),
    "granitemoe": ("GraniteMoeForCausalLM", granite_moe),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", granite_moe),
    "lfm2_moe": ("Lfm2MoeForCausalLM", lfm2_moe),
    "bamba": ("BambaForCausalLM", bamba),
    "falcon_h1": ("FalconH1ForCausalLM", falcon_h1),
    "nemotron_h": ("NemotronHForCausalLM", nemotron_h),
    "smollm3": ("SmolLM3ForCausalLM", smollm3),
    "granite": ("GraniteForCausalLM", granite),
    "phi3": ("Phi3ForCausalLM", phi3),
    "olmo2": ("Olmo2ForCausalLM", olmo2),
    "olmo3": ("Olmo3ForCausalLM", olmo3),
    "exaone4": ("Exaone4ForCausalLM", exaone4),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss),
    "olmoe": ("OlmoeForCausalLM", olmoe),
    "gemma": ("GemmaForCausalLM", gemma),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma4_text": ("Gemma4ForCausalLM", gemma4),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", gemma4),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
    "muse_glimmer_text": ("MuseGlimmerForCausalLM", muse_glimmer),
}
"""Model type of a config -> its architecture, and the function that writes its program."""


def _fused_mlp(d: DecoderBuilder) -> Block:
    """A gated MLP with one weight for gate and up."""
    width = d.intermediate_size
    return lambda i, x: d.gated(f"{layer(i)}.mlp", (d.linear(f"{layer(i)}.mlp.gate_up_proj", x, 2 * width),), width)


def _gemma(d: DecoderBuilder, activation: str = "hidden_act") -> tuple[str, bool]:
    """What the Gemmas share; returns the embedding's buffer, and whether attention has biases."""
    d.refuse("use_bidirectional_attention")
    d.norms_add_one, d.activation_setting = True, activation
    return d.embed(d.rounded(d.hidden_size**0.5)), d.flag("attention_bias")
