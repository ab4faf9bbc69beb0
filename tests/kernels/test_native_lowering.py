from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import transformers

from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse
from foretoken.kernels.native_lowering import Lowered, NotLowered, Product, lower
from foretoken.kernels.program import Attention, GatherRows, Linear, LocalConv, Op, Program, RMSNorm


def llama(**settings: Any) -> Program:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=100, **settings
    )
    return fuse(decoder_program(config))


def test_a_layer_is_four_products_and_an_attention() -> None:
    lowered = lower(llama())
    layer = [step for step in lowered.steps[1:6]]
    assert [type(step) for step in layer] == [Product, Attention, Product, Product, Product]
    qkv, _, out, gate_up, down = layer
    assert isinstance(qkv, Product) and qkv.norm is not None and qkv.activation is None
    assert isinstance(out, Product) and out.norm is None and len(out.inputs) == 2
    assert isinstance(gate_up, Product) and gate_up.norm is not None and gate_up.is_gated
    assert isinstance(down, Product) and down.linear.inputs[0] == gate_up.outputs[0]


def test_the_head_ends_the_network_and_its_rows_are_those_wanted() -> None:
    lowered = lower(llama())
    *_, norm, gather, head = lowered.steps
    assert isinstance(norm, RMSNorm) and norm.outputs == ("model.norm",)  # a boundary: not folded away
    assert isinstance(gather, GatherRows)
    assert isinstance(head, Product) and head.is_head
    assert lowered.for_logits == {"final.rows", "logits"}


def test_gate_and_up_alternate_only_in_whole_panels() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=120, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    lowered = lower(fuse(decoder_program(config)))
    assert not any(isinstance(step, Product) and step.is_gated for step in lowered.steps)


def test_boundaries_keep_their_buffers() -> None:
    program = llama()
    lowered = lower(program)
    assert {*program.boundaries, program.final} <= lowered.buffers.keys()


def test_a_local_conv_reads_tokens_and_not_the_rows_of_logits() -> None:
    convolved: tuple[Op, ...] = (GatherRows(("x",), ("rows",)), LocalConv(("rows", "k"), ("y",), "conv", 0))
    program = Program(convolved, {"conv": (1, 1, 8)}, (), {}, 0, 16, (), "y", "", None, {"x": 8, "k": 4})
    with pytest.raises(NotLowered, match="LocalConv over rows of two kinds"):
        lower(program)


def test_a_norm_that_a_local_conv_reads_too_is_no_part_of_a_product() -> None:
    ops: tuple[Op, ...] = (
        RMSNorm(("x",), ("n",), "norm", 1e-6), Linear(("n",), ("k",), ("kernels",)), LocalConv(("n", "k"), ("y",), "conv", 0),
    )  # fmt: skip
    weights = {"norm": (8,), "kernels": (4, 8), "conv": (1, 1, 8)}
    lowered = lower(Program(ops, weights, (), {}, 0, 16, (), "y", "", None, {"x": 8}))
    assert [type(step) for step in lowered.steps] == [RMSNorm, Product, LocalConv]


def test_memory_is_shared_only_by_buffers_that_are_never_needed_together() -> None:
    lowered = lower(llama())
    assert len(set(lowered.places)) < len(lowered.places) // 2
    _check_places(lowered)


def _check_places(lowered: Lowered) -> None:
    """Between the last use of one and the writing of the next must be a step that waits for all rows."""
    first = {name: i for i, step in reversed(list(enumerate(lowered.steps))) for name in step.outputs}
    last = {name: i for i, step in enumerate(lowered.steps) for name in (*step.inputs, *step.outputs)}
    waits = [i for i, step in enumerate(lowered.steps) if isinstance(step, Product | Attention | GatherRows)]
    for (a, place), (b, other) in combinations(zip(lowered.buffers, lowered.places, strict=True), 2):
        if place == other:
            earlier, later = sorted((a, b), key=lambda name: first[name])
            assert any(last[earlier] < wait <= first[later] for wait in waits), (earlier, later)
