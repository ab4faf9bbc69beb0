"""The order of a layer: where its norms stand, and what attention and the MLP read. Knows no family."""

from collections.abc import Callable

from .decoder_builder import DecoderBuilder, hidden, layer

Block = Callable[[int, str], str]
"""Attention or MLP: (index of the layer, buffer it reads) -> buffer it writes."""

_AROUND_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


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


def sandwich_norm(
    d: DecoderBuilder, x: str, attention: Block, mlp: Block, behind: str = "post_attention_layernorm", norms: tuple[str, str] = _AROUND_MLP
) -> str:
    """Layers that normalise both. behind: the norm of what attention writes; norms: before and behind the MLP."""
    for i in range(d.num_layers):
        attended = attention(i, d.norm(f"{layer(i)}.input_layernorm", x))
        x = d.add(x, d.norm(f"{layer(i)}.{behind}", attended), f"{layer(i)}.middle")
        fed = mlp(i, d.norm(f"{layer(i)}.{norms[0]}", x))
        x = d.add(x, d.norm(f"{layer(i)}.{norms[1]}", fed), hidden(i + 1))
    return x


def parallel(d: DecoderBuilder, x: str, attention: Block, mlp: Block) -> str:
    """Layers whose attention and MLP read the same norm."""
    for i in range(d.num_layers):
        normed = d.norm(f"{layer(i)}.input_layernorm", x)
        x = d.add(d.add(x, attention(i, normed), f"{layer(i)}.middle"), mlp(i, normed), hidden(i + 1))
    return x
