"""Decoder families of which most layers keep a state of the sequence. What is said of families.py holds here."""

import math

from .decoder_builder import DecoderBuilder, hidden, layer
from .expert_families import experts_and_one_shared, granite_experts
from .layer_order import Block, pre_norm
from .program import Program
from .recurrent_builder import RecurrentBuilder
from .rope import UnsupportedModel

_LFM_PARTS = ("w1", "w3", "w2")


def qwen3_next(d: RecurrentBuilder) -> Program:
    """Qwen3-Next (Qwen team 2025): three of four layers are gated delta nets, attention in the others has a gate; experts."""
    every, dense = int(d.config["decoder_sparse_step"]), {*(d.config["mlp_only_layers"] or ())}

    def mlp(i: int, x: str) -> str:
        if i in dense or not d.config["num_experts"] or (i + 1) % every:
            return d.mlp(i, x)
        return experts_and_one_shared(d, i, x)

    return _with_delta_layers(d, mlp, by_key_head=True)


def qwen3_5(d: RecurrentBuilder) -> Program:
    """Qwen3.5 and 3.6 (2026), text only: Qwen3-Next without experts."""
    return _with_delta_layers(d, d.mlp)


def qwen3_5_moe(d: RecurrentBuilder) -> Program:
    """Qwen3.5 and 3.6 with experts (2026), text only."""
    return _with_delta_layers(d, lambda i, x: experts_and_one_shared(d, i, x))


def lfm2(d: RecurrentBuilder) -> Program:
    """LFM2 (Liquid AI 2025): most layers are a short convolution between two gates."""
    inner = d.intermediate_size
    if d.flag("block_auto_adjust_ff_dim"):
        inner, step = int((d.config["block_ffn_dim_multiplier"] or 1.0) * (2 * inner // 3)), int(d.config["block_multiple_of"])
        inner = -(-inner // step) * step
    return _with_short_convolutions(d, lambda i, x: d.gated_mlp(f"{layer(i)}.feed_forward", x, inner, names=_LFM_PARTS))


def lfm2_moe(d: RecurrentBuilder) -> Program:
    """LFM2 with experts behind the first layers (Liquid AI 2025)."""
    dense, count, width = (int(d.config[name]) for name in ("num_dense_layers", "num_experts", "moe_intermediate_size"))
    correction, scale = "expert_bias" if d.flag("use_expert_bias") else "", float(d.config["routed_scaling_factor"])

    def mlp(i: int, x: str) -> str:
        name = f"{layer(i)}.feed_forward"
        if i < dense:
            return d.gated_mlp(name, x, d.intermediate_size, names=_LFM_PARTS)
        weigh = d.flag("norm_topk_prob")
        return d.experts(name, x, count, width, weigh, _LFM_PARTS, score="sigmoid", correction=correction, scale=scale)

    return _with_short_convolutions(d, mlp)


def _with_short_convolutions(d: RecurrentBuilder, mlp: Block) -> Program:
    """Layers that are short convolutions or attention, by their type."""
    kinds, rope = d.layer_types("conv"), d.rope()
    d.attention_names = ("q_layernorm", "k_layernorm", "out_proj")
    d.config["hidden_act"] = "silu"  # which the config does not say
    taps, bias = int(d.config["conv_L_cache"]), d.flag("conv_bias")

    def mixing(i: int, x: str) -> str:
        if kinds[i] == "conv":
            return d.short_conv(i, x, taps, bias)
        return d.attend(i, d.qkv(i, x), rope, head_norms=True)

    x = pre_norm(d, d.embed(), mixing, mlp, norms=("operator_norm", "ffn_norm"))
    return d.finish(x, norm="model.embedding_norm")


def granite_hybrid(d: RecurrentBuilder) -> Program:
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
        return d.scale(granite_experts(d, i, x, count, shared), on_residual)

    return d.finish(pre_norm(d, d.embed(on_embedding), mixing, mlp), scale=1 / float(d.config["logits_scaling"]))


def bamba(d: RecurrentBuilder) -> Program:
    """Bamba (IBM 2024): most layers are state spaces; half of each head turns in the others."""
    indices, rope = {*(d.config["attn_layer_indices"] or ())}, d.rope(partial=True)
    bias, mlp_bias = d.flag("attention_bias"), d.flag("mlp_bias")

    def mixing(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=bias) if i in indices else d.state_space(i, x)

    def mlp(i: int, x: str) -> str:
        return d.gated_mlp(f"{layer(i)}.feed_forward", x, d.intermediate_size, mlp_bias)

    x = pre_norm(d, d.embed(), mixing, mlp, norms=("input_layernorm", "pre_ff_layernorm"))
    return d.finish(x, norm="model.final_layernorm")


def falcon_h1(d: RecurrentBuilder) -> Program:
    """Falcon-H1 (TII 2025): attention and a state space side by side in each layer, and a multiplier for everything."""
    d.refuse("mamba_rms_norm", "projectors_bias")
    rope, bias, mlp_bias = d.rope(), d.flag("attention_bias"), d.flag("mlp_bias")
    names = "attention_in", "attention_out", "ssm_in", "ssm_out", "key", "embedding", "lm_head"
    before, behind, on_input, on_state, on_keys, on_embedding, on_logits = (float(d.config[f"{name}_multiplier"]) for name in names)
    on_gate, on_mlp = d.config["mlp_multipliers"]
    scales = tuple(on_input * part for part in d.config["ssm_multipliers"])

    def mixing(i: int, x: str) -> str:
        qkv = d.qkv(i, d.scale(x, before), bias)
        attended = d.scale(d.attend(i, qkv, rope, scale=on_keys * d.head_dim**-0.5, bias=bias), behind)
        return d.add(d.scale(d.state_space(i, x, scales, normed=False), on_state), attended, f"{layer(i)}.mixed")

    def mlp(i: int, x: str) -> str:
        name, width = f"{layer(i)}.feed_forward", d.intermediate_size
        gate, up = (d.linear(f"{name}.{part}_proj", x, width, mlp_bias) for part in ("gate", "up"))
        return d.scale(d.gated(name, (d.scale(gate, on_gate), up), width, mlp_bias), on_mlp)

    x = pre_norm(d, d.embed(on_embedding), mixing, mlp, norms=("input_layernorm", "pre_ff_layernorm"))
    return d.finish(x, scale=on_logits, norm="model.final_layernorm")


def nemotron_h(d: RecurrentBuilder) -> Program:
    """Nemotron-H (NVIDIA 2025) and Nemotron 3."""
    return d.finish(only_mixers(d, d.embed(), nemotron_mixer(d)))


def nemotron_mixer(d: RecurrentBuilder) -> Block:
    """A state space, attention without rotation, an MLP or experts."""
    d.refuse("use_bias", "mlp_bias", "sliding_window")
    if d.config["mlp_hidden_act"] != "relu2" or d.config["mamba_hidden_act"] != "silu":
        raise UnsupportedModel(f"activations {d.config['mlp_hidden_act']!r} and {d.config['mamba_hidden_act']!r}")
    d.attention_name = d.state_name = "mixer"
    names = {"n_heads": "mamba_num_heads", "d_head": "mamba_head_dim", "d_state": "ssm_state_size", "d_conv": "conv_kernel"}
    d.config |= {f"mamba_{own}": d.config[other] for own, other in names.items()}
    d.config |= {"mamba_n_groups": d.config["n_groups"], "mamba_conv_bias": d.config["use_conv_bias"], "hidden_act": "silu"}
    d.config["time_step_limit"] = (d.config["time_step_min"], math.inf)
    kinds = d.config["layers_block_type"]

    def mixer(i: int, x: str) -> str:
        match kinds[i]:
            case "linear_attention":
                return d.state_space(i, x)
            case "full_attention":
                return d.attend(i, d.qkv(i, x), "")
            case "mlp":
                return d.plain_mlp(f"{layer(i)}.mixer", x, d.intermediate_size, function="relu2")
            case "moe":
                return squared_experts(d, f"{layer(i)}.mixer", x)
            case kind:
                raise UnsupportedModel(f"layers of type {kind!r}")

    return mixer


def only_mixers(d: DecoderBuilder, x: str, mixer: Block) -> str:
    """Layers of one part each."""
    for i in range(d.num_layers):
        x = d.add(x, mixer(i, d.norm(f"{layer(i)}.norm", x)), hidden(i + 1))
    return x


def squared_experts(d: RecurrentBuilder, name: str, x: str) -> str:
    """Experts whose MLPs are squared ones, maybe in a narrower space, and one that all tokens have."""
    count, width, narrow = (int(d.config[what] or 0) for what in ("n_routed_experts", "moe_intermediate_size", "moe_latent_size"))
    groups, scale = (int(d.config["n_group"]), int(d.config["topk_group"])), float(d.config["routed_scaling_factor"])
    parts, tensors = ("up_proj", "up_proj", "down_proj"), ("experts.up_proj", "experts.down_proj")
    some = d.experts(
        name, x, count, width, d.flag("norm_topk_prob"), parts, tensors=tensors, score="sigmoid",
        correction="gate.e_score_correction_bias", groups=groups, scale=scale, function="relu",
        read=d.linear(f"{name}.fc1_latent_proj", x, narrow) if narrow else None,
    )
    if narrow:
        some = d.linear(f"{name}.fc2_latent_proj", some, d.hidden_size)
    shared = int(d.config["moe_shared_expert_intermediate_size"])
    return d.add(some, d.plain_mlp(f"{name}.shared_experts", x, shared, function="relu2"), f"{name}.mixed")


def gated_attention(d: DecoderBuilder, i: int, x: str, rope: str) -> str:
    """Attention with norms over heads, a share of each head that turns, and a gate on what is attended to (Qwen3-Next, Qwen3.5)."""
    qkv, gate = d.gated_qkv(i, x, d.flag("attention_bias"))
    return d.attend(i, qkv, rope, head_norms=True, gate=gate)


def _with_delta_layers(d: RecurrentBuilder, mlp: Block, by_key_head: bool = False) -> Program:
    """Layers that are gated delta nets or attention, by their type."""
    kinds, rope = d.layer_types("linear_attention"), d.rope(partial=True)
    d.norms_add_one = True

    def attention(i: int, x: str) -> str:
        return d.gated_delta(i, x, by_key_head) if kinds[i] == "linear_attention" else gated_attention(d, i, x, rope)

    return d.finish(pre_norm(d, d.embed(), attention, mlp))
