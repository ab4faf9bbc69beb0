"""Gemma 4 (Gemma team 2026), text only: layers of two kinds and sizes, some of which attend to what an earlier one has written.

Beside the embedding each layer may have one of its own (E2B, E4B), and beside its MLP experts (26B-A4B); 12B has neither.
"""

from typing import Any

from .decoder_builder import DecoderBuilder, hidden, layer
from .expert_families import PARTS
from .program import Program, RowsOf
from .rope import UnsupportedModel

_MOST_INPUTS = 8  # of one concatenation


def gemma4(d: DecoderBuilder) -> Program:
    """Values are normalised head by head, scores are not scaled, and the output of each layer is scaled as its weights say."""
    if d.config["use_bidirectional_attention"] == "all":
        raise UnsupportedModel("bidirectional attention")
    d.activation_setting = "hidden_activation"
    kinds, windows, bias = d.layer_types(), d.windows(), d.flag("attention_bias")
    sizes = [size_of_layer(d, i, window is None) for i, window in enumerate(windows)]
    first_shared = d.num_layers - int(d.config["num_kv_shared_layers"])
    if bias or not 0 < first_shared <= d.num_layers:
        raise UnsupportedModel(f"attention_bias {bias}, {first_shared} layers that write keys and values")
    ropes: dict[str, str] = {}
    for kind, size in zip(kinds, sizes, strict=True):
        d.head_dim, d.num_kv_heads = size
        ropes.setdefault(kind, d.rope(kind))
    written: dict[str, tuple[int, tuple[str, ...]]] = {}  # kind -> the last layer that wrote keys and values, and what
    x = d.embed(d.rounded(d.hidden_size**0.5))
    own = _embeddings_of_layers(d, x)
    for i in range(d.num_layers):
        d.head_dim, d.num_kv_heads = sizes[i]
        name, kind, is_shared = layer(i), kinds[i], i >= first_shared
        normed = d.norm(f"{name}.input_layernorm", x)
        if is_shared:
            d.unread |= {f"{name}.self_attn.{what}.weight" for what in ("k_proj", "v_proj", "k_norm")}
        else:
            written[kind] = i, keys_and_values(d, i, normed, bool(d.flag("attention_k_eq_v") and windows[i] is None))
        source, kv = written[kind]
        if sizes[source] != sizes[i]:
            raise UnsupportedModel("layers that share keys of another size")
        q = d.linear(f"{name}.self_attn.q_proj", normed, d.num_heads * d.head_dim)
        attended = d.attend(i, (q, *kv), ropes[kind], windows[i], 1.0, head_norms=True, keys_of=source if is_shared else None)
        x = behind_attention(d, i, x, attended, d.intermediate_size * (2 if is_shared and d.flag("use_double_wide_mlp") else 1))
        if own:
            gate = d.linear(f"{name}.per_layer_input_gate", x, int(d.config["hidden_size_per_layer_input"]))
            mixed = d.activate((gate, own[i]), f"{name}.per_layer_input", int(d.config["hidden_size_per_layer_input"]))
            mixed = d.linear(f"{name}.per_layer_projection", mixed, d.hidden_size)
            x = d.add(x, d.norm(f"{name}.post_per_layer_input_norm", mixed), f"{name}.mixed")
        x = d.scale_by(x, f"{name}.layer_scalar", hidden(i + 1))
    return d.finish(x, softcap=d.config["final_logit_softcapping"])


def size_of_layer(d: DecoderBuilder, i: int, sees_all: bool) -> tuple[int, int]:
    """head_dim and number of key heads of layer i."""
    said: dict[Any, dict[str, Any]] = d.config.get("per_layer_config") or {}
    own = next((sizes for number, sizes in said.items() if int(number) == i), {})  # as 5, "5" or, of more than ten layers, "05"
    if not said and sees_all:  # as config.json says it, and older versions of transformers
        heads = d.config.get("num_global_key_value_heads") if d.flag("attention_k_eq_v") else None
        own = {"head_dim": d.config.get("global_head_dim"), "num_key_value_heads": heads}
    if not own.keys() <= {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(f"layer {i} with {sorted(own)} of its own")
    heads = int(own.get("num_key_value_heads") or d.config["num_key_value_heads"])
    if heads < 1 or d.num_heads % heads:
        raise UnsupportedModel(f"{d.num_heads} query heads do not share {heads} heads evenly")
    return int(own.get("head_dim") or d.config["head_dim"]), heads


def behind_attention(d: DecoderBuilder, i: int, x: str, attended: str, width: int) -> str:
    """The rest of layer i but for its scale and its embedding, x being what it reads. width: of its MLP."""
    name = layer(i)
    x = d.add(x, d.norm(f"{name}.post_attention_layernorm", attended), f"{name}.middle")
    fed = d.gated_mlp(f"{name}.mlp", d.norm(f"{name}.pre_feedforward_layernorm", x), width)
    if d.flag("enable_moe_block"):
        fed = d.add(d.norm(f"{name}.post_feedforward_layernorm_1", fed), _experts(d, name, x), f"{name}.both")
    return d.add(x, d.norm(f"{name}.post_feedforward_layernorm", fed), f"{name}.fed")


def keys_and_values(d: DecoderBuilder, i: int, x: str, keys_are_values: bool) -> tuple[str, ...]:
    """Buffers of all keys and of all values, the latter normalised: a product for each head, whose length is its own."""
    name, heads = f"{layer(i)}.self_attn", range(d.num_kv_heads)

    def product_of_each(projection: str) -> list[str]:
        weights = d.parts(f"{name}.{projection}", 1, (d.head_dim,) * d.num_kv_heads, d.hidden_size)
        return [d.product(x, (weight,), f"{name}.{projection}.{head}") for head, weight in zip(heads, weights, strict=True)]

    if keys_are_values:
        raw = product_of_each("k_proj")
        k = _joined(d, raw, f"{name}.k")
    else:
        k, raw = d.linear(f"{name}.k_proj", x, d.num_kv_heads * d.head_dim), product_of_each("v_proj")
    return k, _joined(d, [d.norm("", values, f"{values}.normed") for values in raw], f"{name}.v")


def _joined(d: DecoderBuilder, parts: list[str], output: str) -> str:
    """Side by side."""
    level = 0
    while len(parts) > 1:
        level += 1
        runs = [parts[start : start + _MOST_INPUTS] for start in range(0, len(parts), _MOST_INPUTS)]
        parts = [run[0] if len(run) == 1 else d.concat(tuple(run), f"{output}.{level}.{at}") for at, run in enumerate(runs)]
    return parts[0]


def _experts(d: DecoderBuilder, name: str, x: str) -> str:
    """What experts make of the state that the MLP reads, normalised behind them. They and their router have norms of their own."""
    d.config["num_experts_per_tok"] = d.config["top_k_experts"]
    count, width = int(d.config["num_experts"]), int(d.config["moe_intermediate_size"])
    read = d.norm(f"{name}.pre_feedforward_layernorm_2", x)
    # Scaled before the product: its output must be the scores themselves, so that nobody makes it narrow.
    asked = d.scale(d.norm(f"{name}.router", x, weight="scale"), d.hidden_size**-0.5)
    some = d.experts(name, asked, count, width, True, PARTS, router="router.proj", scales="router.per_expert_scale", read=read)
    return d.norm(f"{name}.post_feedforward_layernorm_2", some)


def _embeddings_of_layers(d: DecoderBuilder, x: str) -> list[str]:
    """Of each layer what it mixes in: a share of the token's second embedding, and of a product of the first. Without one: none."""
    width, rows = (int(d.config.get(f"{what}_per_layer_input") or 0) for what in ("hidden_size", "vocab_size"))
    if not width:
        return []
    table, model = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
    scale = d.rounded(width**0.5)
    found: list[str] = []
    for i, weight in enumerate(d.parts(model, 1, (width,) * d.num_layers, d.hidden_size)):
        part = d.part(f"{table}.{i}", RowsOf(f"{table}.weight", (rows, d.num_layers * width), rows, i, i + 1, columns=width), rows, width)
        looked_up = d.embed(scale, part, rows, part.removesuffix(".weight"), width)
        projected = d.scale(d.product(x, (weight,), f"{model}.{i}"), d.hidden_size**-0.5)
        normed = d.norm("model.per_layer_projection_norm", projected, f"model.per_layer_projection_norm.{i}")
        found.append(d.scale(d.add(normed, looked_up, f"{table}.{i}.sum"), 2.0**-0.5))
    return found
