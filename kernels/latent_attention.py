"""Attention over latent keys and values (MLA: DeepSeek-AI 2024), as one head of keys that all heads of queries share.

A place's cache entry is k_rot | c, its values are c. The published form makes keys K_h c and values V_h c of each head from c, and K_h, V_h
are halves of one weight. Here K_h goes to the other side of the product, q . (K_h c) = (K_h^T q) . c, and V_h behind the mean over places:
so nothing but c is kept of a place, or read.
"""

import math

from .decoder_builder import DecoderBuilder, layer
from .layer_order import Block
from .layout import KVLayerSpec
from .ops import Attention
from .program import RowsOf
from .rope import UnsupportedModel

_EPS = 1e-6  # of the norms within, whatever the config says of others


def latent_attention(d: DecoderBuilder, pairs: bool) -> Block:
    """Attention and the projection behind it.

    pairs: the checkpoint turns dimensions 2 i and 2 i + 1, else i and i + n.
    """
    sizes = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    rank, plain, turned, values = (int(d.config[name]) for name in sizes)
    d.head_dim = turned  # of what turns: not all configs say so
    rope, bias, heads = d.rope(partial=True), d.flag("attention_bias"), d.num_heads
    if 2 * len(d.ropes[rope].inv_freq) != turned:
        raise UnsupportedModel(f"a rotary embedding of other than {turned} dimensions")
    scale = (plain + turned) ** -0.5 * _magnitude(d) ** 2

    def some_rows(name: str, x: str, runs: int, start: int, stop: int, rows: int, with_bias: bool = False) -> str:
        """The product by rows start to stop of each run of this many; those that turn come last in a run."""
        turns = start > 0
        output = f"{name}.{'turned' if turns else 'plain'}"

        def part(tensor: str, *shape: int) -> str:
            cut = RowsOf(f"{name}.{tensor}", (runs * rows, *shape), runs, start, stop, turned if turns and pairs else 0)
            return d.part(f"{output}.{tensor}", cut, runs * (stop - start), *shape)

        return d.product(x, (part("weight", d.width(x)),), output, (part("bias"),) if with_bias else ())

    def block(name: str, x: str, start: int, stop: int, output: str, transposed: bool) -> str:
        tensor = f"{name}.kv_b_proj.weight"
        cut = RowsOf(tensor, (heads * (plain + values), rank), heads, start, stop, runs_transposed=transposed)
        shape = (heads * rank, stop - start) if transposed else (heads * (stop - start), rank)
        return d.block_product(x, d.part(f"{output}.weight", cut, *shape), output, heads)

    def attention(i: int, x: str) -> str:
        name = f"{layer(i)}.self_attn"
        of_queries, read = f"{name}.q_proj", x
        if d.config["q_lora_rank"] is not None:
            narrow = d.linear(f"{name}.q_a_proj", x, int(d.config["q_lora_rank"]), bias)
            of_queries, read = f"{name}.q_b_proj", d.norm(f"{name}.q_a_layernorm", narrow, eps=_EPS)
        every = plain + turned
        q = block(name, some_rows(of_queries, read, heads, 0, plain, every), 0, plain, f"{name}.kv_b_proj.keys", transposed=True)
        q = d.concat((some_rows(of_queries, read, heads, plain, every, every), q), f"{name}.q", heads)
        of_keys, every = f"{name}.kv_a_proj_with_mqa", rank + turned
        latent = d.norm(f"{name}.kv_a_layernorm", some_rows(of_keys, x, 1, 0, rank, every, bias), eps=_EPS)
        inputs = q, some_rows(of_keys, x, 1, rank, every, every, bias), latent
        attended = d.attend_over(KVLayerSpec(1, every, rank, values_in_keys=True), Attention(inputs, (name,), 0, heads, scale, rope))
        attended = block(name, attended, plain, plain + values, f"{name}.kv_b_proj.values", transposed=False)
        return d.linear(f"{name}.o_proj", attended, d.hidden_size, bias)

    return attention


def _magnitude(d: DecoderBuilder) -> float:
    """What YaRN multiplies queries and keys by, where it does so in the scores and not in the rotation."""
    rope = d.config["rope_parameters"]
    by = rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type", "default") == "default" or not by or rope["factor"] <= 1:
        return 1.0
    return 0.1 * by * math.log(rope["factor"]) + 1.0
