import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decoding import Decoding
from tiny_models import tiny_config

from foretoken.kernels.adapters import adapted
from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse, fuse_linears, fuse_residual_adds, gated_products
from foretoken.kernels.ops import Activation, Add, Attention, GatedDelta, Linear
from foretoken.kernels.program import Program, wide_products
from foretoken.kernels.torch_executor import TorchExecutor

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}
CONFIGS = [transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), transformers.Qwen2Config(**SIZES)]


def logits(program: Program) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in program.weights.items()}
    output = Decoding(TorchExecutor(program, weights, torch.float32), num_rows=2, max_len=8).feed([[5, 6, 7, 8, 9, 10], [11, 12]])
    assert output.logits is not None
    return output.logits


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("transform", [fuse_linears, fuse_residual_adds, fuse])
def test_results_stay(config: transformers.PretrainedConfig, transform: Callable[[Program], Program]) -> None:
    program = decoder_program(config)
    transformed = transform(program)
    assert len(transformed.ops) < len(program.ops)
    torch.testing.assert_close(logits(transformed), logits(program), rtol=1e-5, atol=1e-5)


def test_a_layer_becomes_eight_ops() -> None:
    program = fuse(decoder_program(CONFIGS[1]))
    linears = [op for op in program.ops if isinstance(op, Linear)]
    assert [len(op.weights) for op in linears] == [3, 1, 2, 1] * 2 + [1]
    assert linears[0].biases == tuple(f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv")
    assert linears[1].biases == () and linears[1].inputs[1:] == ("hidden.0",)
    assert not any(isinstance(op, Add) for op in program.ops)
    assert all(len(op.inputs) == 1 for op in program.ops if isinstance(op, Attention | Activation))
    assert len(program.ops) == 1 + 8 * 2 + 4


def test_what_stays_wide_is_not_fused_with_what_becomes_narrow() -> None:
    program = fuse(decoder_program(tiny_config("qwen3_5")))
    delta = next(op for op in program.ops if isinstance(op, GatedDelta))
    packed = next(op for op in program.ops if op.outputs[0] == delta.inputs[-1])
    assert isinstance(packed, Linear) and [name.split(".")[-2] for name in packed.weights] == ["in_proj_b", "in_proj_a"]
    assert delta.inputs[1].endswith("in_proj_z") and len(delta.inputs) == 3
    assert wide_products(program) == {op.inputs[2] for op in program.ops if isinstance(op, GatedDelta)}
    with_experts = fuse(decoder_program(tiny_config("qwen3_5_moe")))
    assert {with_experts.buffers[name] for name in wide_products(with_experts)} == {8, 6, 1}  # the shared expert's gate is one column


def test_what_others_read_is_not_fused_away() -> None:
    program = decoder_program(CONFIGS[1])
    gate, attended = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.o_proj"
    watched = fuse(dataclasses.replace(program, boundaries=(*program.boundaries, gate, attended)))
    assert {gate, attended} <= watched.buffers.keys()
    assert [len(op.weights) for op in watched.ops if isinstance(op, Linear)] == [3, 1, 1, 1, 1, 3, 1, 2, 1, 1]


def test_products_that_an_activation_alone_reads_are_found() -> None:
    program = fuse(decoder_program(CONFIGS[0]))
    found = gated_products(program)
    assert [len(op.weights) for op in found] == [2, 2]
    assert all(activation.inputs == op.outputs for op, activation in found.items())


def test_a_product_that_is_read_elsewhere_is_not_gated_at_once() -> None:
    """By another op, from outside, or to add an adapter's part."""
    program = fuse(decoder_program(CONFIGS[0]))
    first, second = gated_products(program)
    read = dataclasses.replace(program, ops=(*program.ops, Add((*first.outputs, *first.outputs), ("more",))))
    assert list(gated_products(read)) == [second]
    assert list(gated_products(dataclasses.replace(program, boundaries=second.outputs))) == [first]
    assert not gated_products(decoder_program(CONFIGS[0])) and not gated_products(adapted(program))
