"""Decoder families with experts whose layers all have attention. What is said of families.py holds here."""

from typing import Literal

from .decoder_builder import DecoderBuilder, layer
from .layer_order import Block, pre_norm, sandwich_norm
from .ops import CLAMPED_LIMIT, CLAMPED_SLOPE
from .program import Program
from .rope import UnsupportedModel
from .turned_pairs import qkv_of_pairs

PARTS = ("gate_proj", "up_proj", "down_proj")


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
        return d.experts(f"{layer(i)}.mlp", x, count, width, d.flag("norm_topk_prob"), PARTS)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def olmoe(d: DecoderBuilder) -> Program:
    """OLMoE (Muennighoff et al. 2024): experts in all layers; norms over all of q and all of k, others in front as in Llama."""
    d.refuse("layer_types", "sliding_window", "clip_qkv")
    rope, bias, count = d.rope(), d.flag("attention_bias"), int(d.config["num_experts"])

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x, bias), rope, bias=bias)

    def mlp(i: int, x: str) -> str:
        return d.experts(f"{layer(i)}.mlp", x, count, d.intermediate_size, d.flag("norm_topk_prob"), PARTS)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def qwen2_moe(d: DecoderBuilder) -> Program:
    """Qwen2 with experts (Yang et al. 2024), and Qwen1.5 before it: one expert more that all tokens share, by a gate."""
    rope, windows, bias, every = d.rope(), d.windows(), d.flag("qkv_bias"), int(d.config["decoder_sparse_step"])
    dense = {*(d.config["mlp_only_layers"] or ())}

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i])

    def mlp(i: int, x: str) -> str:
        return d.mlp(i, x) if i in dense or (i + 1) % every else experts_and_one_shared(d, i, x)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def granite_moe(d: DecoderBuilder) -> Program:
    """Granite 3 with experts (IBM 2024), and maybe an MLP beside them that all tokens share."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, shared = d.rope(), d.flag("attention_bias"), int(d.config.get("shared_intermediate_size") or 0)
    on_embedding, on_scores, on_residual = (float(d.config[f"{what}_multiplier"]) for what in ("embedding", "attention", "residual"))

    def attention(i: int, x: str) -> str:
        return d.scale(d.attend(i, d.qkv(i, x, bias), rope, scale=on_scores, bias=bias), on_residual)

    def mlp(i: int, x: str) -> str:
        return d.scale(granite_experts(d, i, x, int(d.config["num_local_experts"]), shared), on_residual)

    return d.finish(pre_norm(d, d.embed(on_embedding), attention, mlp), scale=1 / float(d.config["logits_scaling"]))


def ernie4_5_moe(d: DecoderBuilder) -> Program:
    """ERNIE 4.5 with experts (Baidu 2025): chances are corrected for choosing; pairs turn."""
    d.refuse("layer_types", "sliding_window")
    rope, bias, count = d.rope(), d.flag("use_bias"), int(d.config["moe_num_experts"])
    width, shared = int(d.config["moe_intermediate_size"]), int(d.config["moe_num_shared_experts"])
    correction = "moe_statics.e_score_correction_bias"
    d.config["num_experts_per_tok"] = d.config["moe_k"]
    if d.config["moe_norm_min"] > 1e-6:
        raise UnsupportedModel(f"moe_norm_min {d.config['moe_norm_min']}")
    some = range(int(d.config["moe_layer_start_index"]), int(d.config["moe_layer_end_index"]) + 1)

    def attention(i: int, x: str) -> str:
        return d.attend(i, qkv_of_pairs(d, i, x, rope, bias), rope, bias=bias)

    def mlp(i: int, x: str) -> str:
        if i not in some or (i + 1) % int(d.config["moe_layer_interval"]):
            return d.mlp(i, x, bias)
        name = f"{layer(i)}.mlp"
        fed = d.experts(name, x, count, width, True, PARTS, correction=correction)
        d.weight(f"{name}.{correction}", 1, count)  # it has a dimension more
        return d.add(fed, d.gated_mlp(f"{name}.shared_experts", x, width * shared, bias), f"{name}.mixed") if shared else fed

    return d.finish(pre_norm(d, d.embed(), attention, mlp), head_bias=bias)


def hunyuan_moe(d: DecoderBuilder) -> Program:
    """Hunyuan with experts (Hunyuan-A13B: Tencent 2025), and an MLP that all tokens have; norms over heads, behind the rotation."""
    count, d.config["num_experts_per_tok"] = (_of_all_layers(d, name) for name in ("num_experts", "moe_topk"))

    def mlp(i: int, x: str) -> str:
        name = f"{layer(i)}.mlp"
        some = d.experts(name, x, count, d.intermediate_size, True, PARTS, router="gate.wg")
        return d.add(some, d.gated_mlp(f"{name}.shared_mlp", x, d.intermediate_size), f"{name}.mixed")

    return d.finish(pre_norm(d, d.embed(), hunyuan_attention(d), mlp))


def hunyuan_attention(d: DecoderBuilder) -> Block:
    """With norms over heads, behind the rotation."""
    d.refuse("layer_types", "sliding_window")
    d.attention_names = ("query_layernorm", "key_layernorm", "o_proj")
    rope, bias = d.rope(), d.flag("attention_bias")
    return lambda i, x: d.attend(i, d.qkv(i, x, bias), rope, head_norms=True, bias=bias, norm_last=True)


def _of_all_layers(d: DecoderBuilder, setting: str) -> int:
    """A number that the config says once, or again for each layer."""
    found = d.config[setting]
    numbers = {*found} if isinstance(found, list) else {found}
    if len(numbers) != 1:
        raise UnsupportedModel(f"{setting} that differ by layer")
    return int(numbers.pop())


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


def glm4_moe(d: DecoderBuilder) -> Program:
    """GLM-4.5, 4.6 and 4.7 (GLM team 2025), not the Flash ones: experts behind the first layers; half of each head turns."""
    d.refuse("layer_types", "sliding_window")
    return d.finish(pre_norm(d, d.embed(), glm_attention(d), lambda i, x: dense_first(d, i, x)))


def glm_attention(d: DecoderBuilder) -> Block:
    rope, bias, head_norms = d.rope(partial=True), d.flag("attention_bias"), d.flag("use_qk_norm")
    return lambda i, x: d.attend(i, d.qkv(i, x, bias), rope, head_norms=head_norms)


def dense_first(d: DecoderBuilder, i: int, x: str) -> str:
    return d.mlp(i, x) if is_dense(d, i) else experts_and_shared(d, i, x)


def is_dense(d: DecoderBuilder, i: int) -> bool:
    """Whether layer i is one of the first, which have no experts."""
    return i < int(d.config["first_k_dense_replace"] or 0)


def solar_open(d: DecoderBuilder) -> Program:
    """Solar Open (Upstage 2025): GLM-4.5 with experts in all layers."""
    d.refuse("layer_types", "sliding_window")
    rope, bias = d.rope(partial=True), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: experts_and_shared(d, i, x)))


def dots1(d: DecoderBuilder) -> Program:
    """dots.llm1 (rednote-hilab 2025): a norm over each head of q and k; some layers may slide."""
    rope, windows, bias = d.rope(), d.windows(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, windows[i], head_norms=True, bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: dense_first(d, i, x)))


def exaone_moe(d: DecoderBuilder) -> Program:
    """K-EXAONE (LG AI Research 2026): where some layers slide, the others do not rotate."""
    d.refuse("sliding_windows", "swiglu_limits")

    def mlp(i: int, x: str) -> str:
        if d.config["mlp_layer_types"][i] != "sparse":
            return d.mlp(i, x)
        return experts_and_shared(d, i, x, ("num_experts", "num_shared_experts"), correction="e_score_correction_bias")

    return d.finish(pre_norm(d, d.embed(), exaone_attention(d), mlp))


def exaone_attention(d: DecoderBuilder) -> Block:
    """Where some layers slide, the others do not rotate."""
    rope, windows = d.rope(), d.windows()
    never_slides = d.window() is None
    return lambda i, x: d.attend(i, d.qkv(i, x), rope if never_slides or windows[i] else "", windows[i], head_norms=True)


def hy_v3(d: DecoderBuilder) -> Program:
    """Hunyuan 3 (Tencent 2026): a norm over each head of q and k; experts behind the first layers."""
    d.refuse("layer_types", "sliding_window")
    mlp_bias = d.flag("mlp_bias")

    def mlp(i: int, x: str) -> str:
        return hunyuan_3_experts(d, i, x) if d.config["mlp_layer_types"][i] == "sparse" else d.mlp(i, x, mlp_bias)

    return d.finish(pre_norm(d, d.embed(), hunyuan_3_attention(d), mlp))


def hunyuan_3_attention(d: DecoderBuilder) -> Block:
    rope, bias = d.rope(), d.flag("attention_bias")
    return lambda i, x: d.attend(i, d.qkv(i, x, bias), rope, head_norms=True, bias=bias)


def hunyuan_3_experts(d: DecoderBuilder, i: int, x: str) -> str:
    names, bias = ("router_scaling_factor", "router.gate", "expert_bias", "shared_mlp"), d.flag("mlp_bias")
    return experts_and_shared(d, i, x, ("num_experts", "num_shared_experts"), *names, bias)


def afmoe(d: DecoderBuilder) -> Program:
    """Trinity (Arcee 2025): norms before and behind, a gate on what is attended to; layers that slide rotate, the others do not."""
    rope, windows, bias = d.rope(), d.windows(), d.flag("attention_bias")
    settings, dense = ("num_experts", "num_shared_experts"), int(d.config["num_dense_layers"] or 0)

    def attention(i: int, x: str) -> str:
        gate = d.linear(f"{layer(i)}.self_attn.gate_proj", x, d.num_heads * d.head_dim)
        return d.attend(i, d.qkv(i, x, bias), rope if windows[i] else "", windows[i], head_norms=True, bias=bias, gate=gate)

    def mlp(i: int, x: str) -> str:
        return d.mlp(i, x) if i < dense else experts_and_shared(d, i, x, settings, "route_scale", "router.gate", "expert_bias")

    embedded = d.embed(d.hidden_size**0.5 if d.flag("mup_enabled") else 1.0)
    return d.finish(sandwich_norm(d, embedded, attention, mlp, norms=("pre_mlp_layernorm", "post_mlp_layernorm")))


def minimax_m2(d: DecoderBuilder) -> Program:
    """MiniMax-M2 (MiniMax 2025): experts in all layers, norms over all of q and all of k; the first half of each head turns."""
    d.refuse("layer_types", "sliding_window")
    rope = d.rope(partial=True)

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.normed_qkv(i, x), rope)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: minimax_experts(d, i, x)))


def minimax_experts(d: DecoderBuilder, i: int, x: str) -> str:
    count, parts, fused = int(d.config["num_local_experts"]), ("w1", "w3", "w2"), f"{layer(i)}.mlp"
    name, correction = f"{layer(i)}.block_sparse_moe", "e_score_correction_bias"
    return d.experts(name, x, count, d.intermediate_size, True, parts, fused, score="sigmoid", correction=correction)


def experts_and_shared(
    d: DecoderBuilder,
    i: int,
    x: str,
    settings: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
    scale: str = "routed_scaling_factor",
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
    shared_bias: bool = False,
    score: Literal["softmax", "sigmoid"] = "sigmoid",
) -> str:
    """Experts chosen by corrected sigmoids, and some that all tokens have, as one MLP (DeepSeek-AI 2024).

    settings: how many there are of each; scale: the setting that all weights are multiplied by; the others are names in the checkpoint.
    """
    name, width = f"{layer(i)}.mlp", int(d.config["moe_intermediate_size"])
    count, num_shared = (int(d.config[setting] or 0) for setting in settings)
    groups = int(d.own("n_group", 1) or 1), int(d.own("topk_group", 1) or 1)
    some = d.experts(
        name, x, count, width, bool(d.own("norm_topk_prob", True)), PARTS, router=router, score=score, correction=correction,
        groups=groups, scale=float(d.config[scale]),
    )
    return d.add(some, d.gated_mlp(f"{name}.{shared}", x, width * num_shared, shared_bias), f"{name}.mixed")


def granite_experts(d: DecoderBuilder, i: int, x: str, count: int, shared: int) -> str:
    """Experts, an MLP of width `shared` that all tokens have, or both; 0 = none."""
    name, block, fed = f"{layer(i)}.shared_mlp", f"{layer(i)}.block_sparse_moe", ""
    if shared:
        fed = d.gated(name, (d.linear(f"{name}.input_linear", x, 2 * shared),), shared, down="output_linear")
    if not count:
        return fed
    tensors = "input_linear.weight", "output_linear.weight"
    chosen = d.experts(block, x, count, d.intermediate_size, True, ("gate", "up", "down"), tensors=tensors, router="router.layer")
    return d.add(chosen, fed, f"{layer(i)}.fed") if shared else chosen


def experts_and_one_shared(d: DecoderBuilder, i: int, x: str) -> str:
    """Some of many experts, and one that all tokens share, as Qwen has had them since Qwen3-Next."""
    name, count, width = f"{layer(i)}.mlp", int(d.config["num_experts"]), int(d.config["moe_intermediate_size"])
    renormalise = bool(d.own("norm_topk_prob", True))  # Qwen3.5 has no such setting
    some = d.experts(name, x, count, width, renormalise, PARTS)
    return d.add(some, d.shared_expert(name, x, int(d.config["shared_expert_intermediate_size"])), f"{name}.mixed")
