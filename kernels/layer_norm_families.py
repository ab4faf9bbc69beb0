"""Decoder families whose norms subtract the mean (layer norms; Ba et al. 2016), written as those in families.py."""

from .decoder_builder import DecoderBuilder, layer
from .layer_order import parallel, pre_norm
from .program import Program
from .turned_pairs import qkv_of_pairs


def cohere(d: DecoderBuilder) -> Program:
    """Command R (Cohere 2024) and Aya: attention and MLP side by side; pairs turn."""
    d.refuse("layer_types", "sliding_window", "use_qk_norm")
    return _cohere(d, [None] * d.num_layers, rotates_all=True)


def cohere2(d: DecoderBuilder) -> Program:
    """Command R7B and Command A (Cohere 2024): three of four layers slide, and only these rotate."""
    return _cohere(d, d.windows(), rotates_all=False)


def _cohere(d: DecoderBuilder, windows: list[int | None], rotates_all: bool) -> Program:
    d.layer_norms = True
    rope, bias = d.rope(), d.flag("attention_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, qkv_of_pairs(d, i, x, rope, bias), rope if rotates_all or windows[i] else "", windows[i], bias=bias)

    return d.finish(parallel(d, d.embed(), attention, d.mlp), scale=float(d.config["logit_scale"]))


def starcoder2(d: DecoderBuilder) -> Program:
    """StarCoder2 (Lozhkov et al. 2024): an MLP without a gate, one window for all layers."""
    d.refuse("layer_types")
    d.layer_norms = d.norm_biases = True
    rope, window, bias = d.rope(), d.window(), d.flag("use_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, window, bias=bias)

    def mlp(i: int, x: str) -> str:
        return d.plain_mlp(f"{layer(i)}.mlp", x, d.intermediate_size, bias, ("c_fc", "c_proj"))

    return d.finish(pre_norm(d, d.embed(), attention, mlp))


def stablelm(d: DecoderBuilder) -> Program:
    """StableLM (Stability AI 2024): a quarter of each head turns; in some attention and MLP are side by side."""
    d.refuse("layer_types", "sliding_window", "qk_layernorm")
    d.layer_norms = d.norm_biases = True
    rope, bias = d.rope(partial=True), d.flag("use_qkv_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope)

    order = parallel if d.flag("use_parallel_residual") else pre_norm
    return d.finish(order(d, d.embed(), attention, d.mlp))


def phi(d: DecoderBuilder) -> Program:
    """Phi-1 to Phi-2 (Gunasekar et al. 2023): attention and MLP side by side, biases everywhere, also on the head."""
    d.refuse("layer_types", "sliding_window", "qk_layernorm")
    d.layer_norms = d.norm_biases = True
    d.attention_names = ("q_layernorm", "k_layernorm", "dense")
    rope = d.rope(partial=True)

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, True), rope, bias=True)

    def mlp(i: int, x: str) -> str:
        return d.plain_mlp(f"{layer(i)}.mlp", x, d.intermediate_size, True, ("fc1", "fc2"))

    return d.finish(parallel(d, d.embed(), attention, mlp), norm="model.final_layernorm", head_bias=True)


def nemotron(d: DecoderBuilder) -> Program:
    """Nemotron-4 and Minitron (NVIDIA 2024): the MLP squares what is above 0, norms are stored less one."""
    d.refuse("layer_types", "sliding_window")
    d.layer_norms = d.norm_biases = d.norms_add_one = True
    rope, bias, mlp_bias = d.rope(partial=True), d.flag("attention_bias"), d.flag("mlp_bias")

    def attention(i: int, x: str) -> str:
        return d.attend(i, d.qkv(i, x, bias), rope, bias=bias)

    return d.finish(pre_norm(d, d.embed(), attention, lambda i, x: d.plain_mlp(f"{layer(i)}.mlp", x, d.intermediate_size, mlp_bias)))
