"""Queries and keys of checkpoints that turn dimensions 2 i and 2 i + 1 of a head, for attention that turns dimensions i and i + n.

The rows of each head are read in another order, in queries and keys alike: so their products are what they were.
"""

from .decoder_builder import DecoderBuilder, layer
from .program import RowsOf


def qkv_of_pairs(d: DecoderBuilder, i: int, x: str, rope: str, bias: bool = False) -> tuple[str, str, str]:
    """Queries, keys and values of layer i from a weight each, as this table turns them."""
    name = f"{layer(i)}.self_attn"
    q, k = _heads(d, f"{name}.q_proj", x, d.num_heads, rope, bias), keys_of_pairs(d, i, x, rope, bias)
    return q, k, d.linear(f"{name}.v_proj", x, d.num_kv_heads * d.head_dim, bias)


def keys_of_pairs(d: DecoderBuilder, i: int, x: str, rope: str, bias: bool = False) -> str:
    return _heads(d, f"{layer(i)}.self_attn.k_proj", x, d.num_kv_heads, rope, bias)


def norms_of_pairs(d: DecoderBuilder, i: int, rope: str) -> None:
    """Weights of layer i's head norms in the order of these."""
    for norm in ("q_norm", "k_norm"):
        weight = f"{layer(i)}.self_attn.{norm}.weight"
        d.part(weight, RowsOf(weight, (d.head_dim,), 1, 0, d.head_dim, 2 * len(d.ropes[rope].inv_freq)), d.head_dim)


def _heads(d: DecoderBuilder, name: str, x: str, heads: int, rope: str, bias: bool) -> str:
    width = heads * d.head_dim

    def halves(tensor: str, *shape: int) -> str:
        return d.part(f"{tensor}.halves", RowsOf(tensor, shape, heads, 0, d.head_dim, 2 * len(d.ropes[rope].inv_freq)), *shape)

    return d.product(x, (halves(f"{name}.weight", width, d.hidden_size),), name, (halves(f"{name}.bias", width),) if bias else ())
