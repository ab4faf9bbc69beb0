"""Decoder families with latent attention. What is said of families.py holds here."""

from .decoder_builder import DecoderBuilder
from .expert_families import dense_first, experts_and_shared, is_dense
from .latent_attention import latent_attention
from .layer_order import pre_norm
from .program import Program
from .rope import UnsupportedModel


def deepseek_v3(d: DecoderBuilder) -> Program:
    """DeepSeek-V3 and R1 (DeepSeek-AI 2024), Moonlight: experts behind the first layers, chosen by corrected sigmoids, in groups."""
    return d.finish(pre_norm(d, d.embed(), latent_attention(d, d.flag("rope_interleave")), lambda i, x: dense_first(d, i, x)))


def deepseek_v2(d: DecoderBuilder) -> Program:
    """DeepSeek-V2 (DeepSeek-AI 2024), the Lite one and its kin: experts by their chances, whatever their groups."""
    d.refuse("mlp_bias", "norm_topk_prob")
    if d.config["topk_method"] != "greedy":
        raise UnsupportedModel(f"topk_method {d.config['topk_method']!r}")
    d.config.update(n_group=1, topk_group=1)

    def mlp(i: int, x: str) -> str:
        return d.mlp(i, x) if is_dense(d, i) else experts_and_shared(d, i, x, correction="", score="softmax")

    return d.finish(pre_norm(d, d.embed(), latent_attention(d, pairs=True), mlp))


def glm4_moe_lite(d: DecoderBuilder) -> Program:
    """GLM-4.7-Flash (GLM team 2026): DeepSeek-V3 where each layer says whether it has experts."""
    kinds = d.config["mlp_layer_types"]

    def mlp(i: int, x: str) -> str:
        return experts_and_shared(d, i, x) if kinds[i] == "sparse" else d.mlp(i, x)

    return d.finish(pre_norm(d, d.embed(), latent_attention(d, d.flag("rope_interleave")), mlp))


def youtu(d: DecoderBuilder) -> Program:
    """Youtu-LLM (Tencent 2025): a Llama with latent attention."""
    return d.finish(pre_norm(d, d.embed(), latent_attention(d, d.flag("rope_interleave")), d.mlp))


def minicpm3(d: DecoderBuilder) -> Program:
    """MiniCPM3 (Hu et al. 2024): the embedding, what layers add and what the head reads are scaled."""
    d.refuse("mlp_bias")
    attention = latent_attention(d, pairs=False)
    on_residual = float(d.config["scale_depth"]) / d.num_layers**0.5
    on_logits = float(d.config["dim_model_base"] or d.hidden_size) / d.hidden_size

    def attend(i: int, x: str) -> str:
        return d.scale(attention(i, x), on_residual)

    def mlp(i: int, x: str) -> str:
        return d.scale(d.mlp(i, x), on_residual)

    return d.finish(pre_norm(d, d.embed(float(d.config["scale_emb"])), attend, mlp), scale=on_logits)
