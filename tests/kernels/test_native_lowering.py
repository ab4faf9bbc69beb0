from dataclasses import replace
from itertools import combinations

import pytest
from small_networks import small_program
from tiny_models import tiny_config

from foretoken.kernels.adapters import adapted
from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse
from foretoken.kernels.layout import KVLayerSpec
from foretoken.kernels.native_lowering import Lowered, NotLowered, Product, lower
from foretoken.kernels.ops import Activation, Add, Attention, BlockLinear, Concat, GatherRows, Linear, LocalConv, LowRank, Op, RMSNorm
from foretoken.kernels.program import Program


def llama() -> Program:
    return small_program(intermediate_size=128, num_hidden_layers=3)


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
    lowered = lower(small_program(intermediate_size=120))
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
    )
    weights = {"norm": (8,), "kernels": (4, 8), "conv": (1, 1, 8)}
    lowered = lower(Program(ops, weights, (), {}, 0, 16, (), "y", "", None, {"x": 8}))
    assert [type(step) for step in lowered.steps] == [RMSNorm, Product, LocalConv]


def test_latent_attention_reads_queries_where_they_are_and_writes_keys_alone() -> None:
    lowered = lower(fuse(decoder_program(tiny_config("deepseek_v3"))))
    number = next(i for i, step in enumerate(lowered.steps) if isinstance(step, Attention))
    keys, attention, values = lowered.steps[number - 1 : number + 2]
    assert isinstance(keys, Concat) and isinstance(attention, Attention) and isinstance(values, Product)
    assert attention.inputs[1:] == keys.outputs and attention.inputs[0] not in keys.inputs
    assert lowered.widths[lowered.buffers[keys.outputs[0]]] == 8 + 32  # what turns, and the latent one
    assert values.groups == 4 and values.inputs == attention.outputs
    _check_places(lowered)


def test_layers_that_share_keys_have_buffers_of_their_own() -> None:
    ops = tuple(Attention((q, "k", "v"), (f"y{layer}",), layer, 1, 1.0) for layer, q in enumerate(("q", "r")))
    lowered = lower(Program(ops, {}, (KVLayerSpec(1, 8, 8),) * 2, {}, 0, 16, (), "y1", "", None, dict.fromkeys("qrkv", 8)))
    assert len(lowered.buffers) == len(lowered.widths) == len(lowered.places) == 8


def test_blocks_are_whole_panels_and_fold_no_norm() -> None:
    ops: tuple[Op, ...] = RMSNorm(("x",), ("n",), "norm", 1e-6), BlockLinear(("n",), ("y",), "w", 2)
    program = Program(ops, {"norm": (8,), "w": (32, 4)}, (), {}, 0, 16, (), "y", "", None, {"x": 8})
    steps = lower(program).steps
    assert [type(step) for step in steps] == [RMSNorm, Product]
    with pytest.raises(NotLowered, match="8 outputs, no multiple of 16"):
        lower(replace(program, weights={"norm": (8,), "w": (16, 4)}))


def test_memory_is_shared_only_by_buffers_that_are_never_needed_together() -> None:
    lowered = lower(llama())
    assert len(set(lowered.places)) < len(lowered.places) // 2
    _check_places(lowered)


def test_products_take_what_adapters_add_and_fold_what_is_behind_them_all_the_same() -> None:
    program = llama()
    plain, lowered = lower(program), lower(adapted(program))
    layer = lowered.steps[1:12]
    kinds = [RMSNorm, LowRank, Product, Attention, LowRank, Product, RMSNorm, LowRank, Product, LowRank, Product]
    assert [type(step) for step in layer] == kinds  # norms are made once for both that read them
    products = [step for step in layer if isinstance(step, Product)]
    assert [step.is_gated for step in products] == [False, False, True, False]
    assert all(step.inputs[1].endswith("+adapter") for step in products)
    assert lowered.by_turns == {step.inputs[1] for step in lowered.steps if isinstance(step, Product) and step.is_gated}
    assert len(lowered.by_turns) == 3 and not plain.by_turns
    _check_places(lowered)


def test_gate_and_up_alternate_only_if_what_is_added_to_them_can() -> None:
    gated = Linear(("x", "r"), ("g",), ("gate", "up")), Activation(("g",), ("y",), "silu", gated=True)
    weights = {"gate": (32, 8), "up": (32, 8), "first": (24, 8), "second": (40, 8)}
    program = Program(gated, weights, (), {}, 0, 16, (), "y", "", None, {"x": 8, "r": 64})
    given = lower(program)
    assert [type(step) for step in given.steps] == [Product, Activation] and not given.by_turns
    made = replace(program, ops=(LowRank(("x",), ("r",), ("gate", "up")), *gated), inputs={"x": 8})
    assert [type(step) for step in lower(made).steps] == [LowRank, Product] and lower(made).by_turns == {"r"}
    uneven = replace(made, ops=(LowRank(("x",), ("r",), ("first", "second")), *gated))
    assert [type(step) for step in lower(uneven).steps] == [LowRank, Product, Activation]


def test_adapters_are_of_tokens_and_not_of_the_rows_of_logits() -> None:
    added: tuple[Op, ...] = GatherRows(("x",), ("rows",)), LowRank(("rows",), ("r",), ("w",)), Linear(("rows", "r"), ("y",), ("w",))
    with pytest.raises(NotLowered, match="LowRank over rows of two kinds"):
        lower(Program(added, {"w": (8, 8)}, (), {}, 0, 16, (), "y", "", None, {"x": 8}))


def test_what_adapters_add_is_for_the_product_behind() -> None:
    ops: tuple[Op, ...] = LowRank(("x",), ("r",), ("w",)), Linear(("x", "r"), ("y",), ("w",))
    again = Linear(("y", "r"), ("z",), ("w",))
    for wrong in ((*ops, again), ops[:1], (ops[0], Add(("x", "r"), ("y",))), (ops[0], Linear(("r", "x"), ("y",), ("w",)))):
        with pytest.raises(NotLowered, match="not the residual of the product behind it"):
            lower(Program(wrong, {"w": (8, 8)}, (), {}, 0, 16, (), wrong[-1].outputs[0], "", None, {"x": 8}))


def _check_places(lowered: Lowered) -> None:
    """Between the last use of one and the writing of the next must be a step that waits for all rows. What a LowRank reads is used by the
    product behind it as well."""
    first = {name: i for i, step in reversed(list(enumerate(lowered.steps))) for name in step.outputs}
    last = {name: i + isinstance(step, LowRank) for i, step in enumerate(lowered.steps) for name in (*step.inputs, *step.outputs)}
    waits = [i for i, step in enumerate(lowered.steps) if isinstance(step, Product | Attention | GatherRows)]
    for (a, place), (b, other) in combinations(zip(lowered.buffers, lowered.places, strict=True), 2):
        if place == other:
            earlier, later = sorted((a, b), key=lambda name: first[name])
            assert any(last[earlier] < wait <= first[later] for wait in waits), (earlier, later)
