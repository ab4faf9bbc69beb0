import dataclasses
from collections.abc import Mapping

import pytest

from foretoken.kernels.layout import KVLayerSpec
from foretoken.kernels.ops import Activation, Add, ArgMax, Attention, Concat, Embed, GatherRows, Linear, LocalConv, Op, RMSNorm, TopK
from foretoken.kernels.program import Program, RopeTable, own_buffers

BEST = ArgMax(("logits",), ("argmax", "top"))
WEIGHTS = {"embed": (10, 8), "norm": (8,), "head": (10, 8), "q": (8, 8), "kv": (4, 8), "bias": (10,), "conv": (2, 2, 8), "odd": (2, 3, 8)}


def program(*middle: Op, x: str = "x", weights: Mapping[str, tuple[int, ...]] = WEIGHTS, **inputs: int) -> Program:
    """embed -> x, the given ops, then the head over buffer x."""
    head = (GatherRows((x,), ("rows",)), Linear(("rows",), ("logits",), ("head",)), BEST)
    ops = (Embed((), ("x",), "embed"), *middle, *head)
    kv_layers = (KVLayerSpec(num_kv_heads=1, k_dim=4, v_dim=4),)
    return Program(ops, weights, kv_layers, {"rope": RopeTable((1.0, 0.5))}, 10, 32, ("x",), x, "logits", BEST, inputs)


def test_widths_follow_from_the_weights() -> None:
    made = program(
        RMSNorm(("x",), ("normed",), "norm", 1e-6),
        Linear(("normed",), ("qkv",), ("q", "kv", "kv")),
        Attention(("qkv",), ("attended",), layer=0, num_heads=2, scale=0.5, rope="rope"),
        Add(("x", "attended"), ("y",)),
        Concat(("y", "features"), ("both",)),
        Activation(("both",), ("gated",), "silu", gated=True),
        TopK(("gated",), ("best", "values"), k=3),
        x="y",
        features=4,
    )
    expected = {"x": 8, "normed": 8, "qkv": 16, "attended": 8, "y": 8, "both": 12, "gated": 6, "best": 3, "values": 3}
    assert made.buffers == {**expected, "features": 4, "rows": 8, "logits": 10, "argmax": 1, "top": 1}


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Add(("x", "y"), ("z",)), "reads 'y' before it is written"),
        (Add(("x", "x"), ("x",)), "writes 'x' a second time"),
        (RMSNorm(("x",), ("z",), "bias", 1e-6), "does not fit width 8"),
        (Linear(("x",), ("z",), ("q",), ("bias",)), "biases do not fit"),
        (Linear(("x",), ("z",), ("q", "kv"), ("",)), "needs a bias name for each weight"),
        (Linear(("x", "x"), ("z",), ("kv",)), "residual does not fit"),
        (Attention(("x",), ("z",), layer=0, num_heads=2, scale=1.0), "needs inputs of width 16, not 8"),
        (Attention(("x",), ("z",), layer=0, num_heads=0, scale=1.0), "has 0 outputs"),
        (Attention(("x", "x"), ("z",), layer=0, num_heads=2, scale=1.0, q_norm="norm"), "needs norms of q and k"),
        (Activation(("x",), ("z",), "tanh", gated=False), "function is none of"),
        (LocalConv(("x", "x"), ("z",), "conv", 2), "has no side 2"),
        (LocalConv(("x", "x"), ("z",), "odd", 0), "has kernels of width 8"),
    ],
)
def test_ops_that_do_not_fit_are_refused(op: Op, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _ = program(op).buffers


def test_results_must_be_written() -> None:
    with pytest.raises(ValueError, match="no op writes 'nowhere'"):
        _ = dataclasses.replace(program(), final="nowhere").buffers


def test_a_program_is_plain_data() -> None:
    made = program(RMSNorm(("x",), ("y",), "norm", 1e-6), x="y")
    assert made == eval(repr(made))  # numbers, strings and tuples all the way down


def test_a_sum_takes_the_place_of_nothing_that_others_have() -> None:
    """Not of what the caller gave, nor of what an op may hand on as it is: here the rows that are scored, if those are all."""
    made = program(
        Linear(("features", "given"), ("a",), ("q",)), RMSNorm(("a",), ("normed",), "norm", 1e-6), Linear(("normed", "a"), ("b",), ("q",)),
        Linear(("b", "x"), ("y",), ("q",)), x="y", features=8, given=8,
    )
    assert own_buffers(made) == {"a", "b", "x"}
