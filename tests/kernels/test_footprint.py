"""Bytes foretold from shapes are the bytes that are taken, also at the worst moment of loading."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import small_networks
import torch
import transformers
from native_only import native_only
from safetensors.torch import save_file
from tiny_models import RECURRENT, random_model, tiny_config
from variants import slow_but

from foretoken.kernels import native
from foretoken.kernels.execution import Execution, Quantization
from foretoken.kernels.footprint import cache_bytes, native_cache_bytes, native_weight_bytes, product_bytes, torch_weight_bytes
from foretoken.kernels.int4 import Int4Matrix
from foretoken.kernels.ops import BlockLinear, Linear
from foretoken.kernels.program import Program, wide_products
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weights import network_program


def network(tied: bool = False, **sizes: int) -> transformers.LlamaConfig:
    shape: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **sizes}
    return transformers.LlamaConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64
    )


def random_weights(program: Program) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in small_networks.random_weights(program).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_torch_keeps_a_tied_embedding_twice_where_it_is_turned(tied: bool) -> None:
    """That is in float32 on a CPU."""
    program = network_program(network(tied))
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert torch_weight_bytes(program, Execution(torch.float32)) == 4 * (2 * 99 * 64 + 2 * layer + 64)
    for execution in (Execution(torch.bfloat16), Execution(torch.bfloat16, device="cuda"), Execution(torch.float32, device="cuda")):
        assert torch_weight_bytes(program, execution) == execution.dtype.itemsize * ((2 - tied) * 99 * 64 + 2 * layer + 64)
    executor = TorchExecutor(program, random_weights(program), torch.bfloat16)
    assert executor.weight_bytes == 2 * (99 * 64 + 2 * (layer - 2 * 64))  # no norms, no lookup of rows
    assert executor.kv_block_bytes(16) == cache_bytes(program, Execution(torch.bfloat16), 16) == 16 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("family", RECURRENT)
def test_weights_that_are_parts_of_one_count_as_much_as_the_whole(family: str) -> None:
    model = random_model(tiny_config(family))
    kept = [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]  # corrections of experts' scores
    parameters = sum(tensor.numel() for tensor in (*model.parameters(), *kept))
    assert torch_weight_bytes(network_program(model.config), Execution(torch.bfloat16)) == 2 * parameters


def test_an_fp8_cache_is_half_of_a_bfloat16_one() -> None:
    program = network_program(network())
    wide, narrow = (
        TorchExecutor(program, random_weights(program), torch.bfloat16, has_fp8_cache=has_fp8_cache) for has_fp8_cache in (False, True)
    )
    execution = Execution(torch.bfloat16, kv_cache="fp8", device="cuda")
    assert narrow.kv_block_bytes(16) == cache_bytes(program, execution, 16) == wide.kv_block_bytes(16) // 2
    kv = narrow.allocate(3, 16)
    assert sum(cache.nbytes for cache in (*kv.k, *kv.v)) == 3 * narrow.kv_block_bytes(16)


@pytest.mark.parametrize("tied", [False, True])
def test_4_bit_weights_are_as_large_as_foretold(tied: bool) -> None:
    """Rows of a tied embedding are looked up in bfloat16 beside the narrow head."""
    program = network_program(network(tied))
    products = {name: shape for name, shape in program.weights.items() if len(shape) == 2 and (tied or "embed" not in name)}
    made = [Int4Matrix.of(torch.zeros(shape)) for shape in products.values()]
    in_products = sum(tensor.nbytes for matrix in made for tensor in (matrix.words, matrix.group_scales, matrix.scales))
    assert product_bytes(program, torch.bfloat16, "int4") == in_products
    assert torch_weight_bytes(program, Execution(torch.bfloat16, "int4", device="cuda")) == in_products + 2 * (99 * 64 + 5 * 64)


@pytest.mark.parametrize("family, heavy", [("qwen3_5", ("in_proj_a", "in_proj_b")), ("granite_hybrid", ("in_proj.2",))])
def test_few_columns_that_weigh_heavily_keep_their_bits(family: str, heavy: tuple[str, ...]) -> None:
    program = network_program(tiny_config(family))
    assert sum(program.buffers[name] for name in wide_products(program)) == 2 * len(heavy) * 4  # two such layers, each of four heads
    kept = [shape for name, shape in program.weights.items() if any(part in name for part in heavy)]
    products_alone = replace(program, ops=tuple(op for op in program.ops if isinstance(op, Linear)))  # which do not say what they weigh
    foretold, narrow = (product_bytes(some, torch.bfloat16, "int4") for some in (program, products_alone))
    assert foretold - narrow == sum(2 * outputs * inputs - Int4Matrix.num_bytes((outputs, inputs)) for outputs, inputs in kept)


def test_8_bit_weights_leave_the_head() -> None:
    program = network_program(network())
    wide, narrow = (torch_weight_bytes(program, Execution(torch.bfloat16, quantization, device="cuda")) for quantization in (None, "fp8"))
    layers = [shape for name, shape in program.weights.items() if "proj" in name]
    assert wide - narrow == sum(outputs * inputs - 4 * outputs for outputs, inputs in layers)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_blocks_keep_their_bits_on_a_gpu(quantization: Quantization) -> None:
    program = network_program(tiny_config("youtu"))
    blocks = [program.weights[op.weight] for op in program.ops if isinstance(op, BlockLinear)]
    assert len(blocks) == 2 * len(program.kv_layers)
    others = replace(program, ops=tuple(op for op in program.ops if not isinstance(op, BlockLinear)))
    foretold, narrow = (product_bytes(some, torch.bfloat16, quantization) for some in (program, others))
    assert foretold - narrow == sum(2 * outputs * inputs for outputs, inputs in blocks)


LATENT = tiny_config("deepseek_v3", first_k_dense_replace=3, qk_rope_head_dim=32, attention_bias=False)


@native_only
@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_values_in_keys_are_kept_once_but_in_the_native_executor(kv_cache: Literal["int8"] | None) -> None:
    program, execution = network_program(LATENT), Execution(torch.bfloat16, kv_cache=kv_cache)
    weights, of_keys, of_values = random_weights(program), 3 * (32 + 32), 3 * 32  # in each layer what turns, and the latent one
    stored_once = TorchExecutor(program, weights, torch.bfloat16).kv_block_bytes(16)
    assert stored_once == cache_bytes(program, Execution(torch.bfloat16), 16) == 16 * of_keys * 2
    scales = 3 * 2 * 4 * 16 if kv_cache else 0
    assert native.NativeExecutor(program, weights, execution).kv_block_bytes(16) == native_cache_bytes(program, execution, 16) + scales
    assert native_cache_bytes(program, execution, 16) == 16 * (of_keys + of_values) * (1 if kv_cache else 2)


@native_only
@pytest.mark.parametrize(
    "config", [network(), tiny_config("qwen3_5"), tiny_config("granite_hybrid"), LATENT], ids=lambda config: config.model_type
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_native_weights_are_as_large_as_foretold(quantization: Quantization | None, config: transformers.PretrainedConfig) -> None:
    """With an embedding of its own: rows of dtype that no pass reads whole."""
    config.tie_word_embeddings = False
    program, execution = network_program(config), Execution(torch.bfloat16, quantization)
    executor = native.NativeExecutor(program, random_weights(program), execution)
    embedding = 112 * config.hidden_size * 2  # outputs padded to 16
    assert executor.weight_bytes == native_weight_bytes(program, execution) - embedding


@native_only
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_stay_wide_are_as_large_as_foretold(tied: bool) -> None:
    """Rows of an embedding that is the head as well are then the head's own."""
    program = network_program(network(tied))
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    program, execution = replace(program, wide=frozenset({head})), Execution(torch.bfloat16, "int8")
    executor = native.NativeExecutor(program, random_weights(program), execution)
    assert executor.weight_bytes == native_weight_bytes(program, execution) - (not tied) * 112 * 64 * 2
    assert executor.weight_bytes > native_weight_bytes(replace(program, wide=frozenset()), execution) - 112 * 64 * 2


def test_shared_weights_are_another_networks() -> None:
    program = network_program(network())
    borrowing = replace(program, shared=frozenset({"model.embed_tokens.weight", "lm_head.weight"}))
    tables = 2 * 99 * 64
    in_torch = Execution(torch.float32)
    assert torch_weight_bytes(program, in_torch) - torch_weight_bytes(borrowing, in_torch) == 4 * tables
    execution = Execution(torch.bfloat16)
    assert native_weight_bytes(program, execution) - native_weight_bytes(borrowing, execution) == 2 * 2 * 112 * 64


LOAD = """
import sys, threading, time
from pathlib import Path
import torch, transformers
from foretoken.kernels.execution import Execution
from foretoken.kernels.native import resident_bytes
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.kernels.weights import load_program_executor, network_program

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))

def watch():
    global peak
    while watching:
        peak = max(peak, anonymous())
        time.sleep(0.001)

folder, quantization = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
config = transformers.AutoConfig.from_pretrained(folder)
execution = Execution(torch.bfloat16, None if quantization == "none" else quantization)
packed = resident_bytes(network_program(config), execution)
before = peak = anonymous()
watching = True
thread = threading.Thread(target=watch)
thread.start()
executor = load_program_executor(read_tensors([folder / "model.safetensors"]), config, execution)
watching = False
thread.join()
print(packed, peak - before)
"""


def loaded(folder: Path, config: transformers.LlamaConfig, weights: dict[str, torch.Tensor], quantization: str) -> tuple[int, int]:
    """Bytes of the weights as they are packed by what shapes say, and of anonymous memory at the worst moment of loading them."""
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-c", LOAD, str(folder), quantization]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    packed, peak = map(int, done.stdout.split())
    return packed, peak


@native_only
@pytest.mark.parametrize("quantization", slow_but(["int8"], ["none", "int8", "int8 of fp8"]))
def test_loading_takes_hardly_more_than_the_packed_weights(quantization: str, tmp_path: Path) -> None:
    """A tensor in hand is a view of the mapped file, or made of one; only what is packed, and a little, is memory of our own."""
    config = network(vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    weights = random_weights(network_program(config))
    if "fp8" in quantization:
        config.quantization_config = {"quant_method": "fp8"}
        stored = {name: tensor.to(torch.float8_e4m3fn) if "proj" in name else tensor for name, tensor in weights.items()}
        weights = stored | {f"{name}_scale": torch.tensor(1.0) for name in weights if "proj" in name}
    packed, peak = loaded(tmp_path, config, weights, quantization.split()[0])
    assert packed > 30e6
    assert peak <= 1.15 * packed, f"{peak / 1e6:.1f} MB for {packed / 1e6:.1f} MB of packed weights"


@native_only
@pytest.mark.skipif(native.availability().isa not in native.COMPACT_ISAS, reason="keeps plain weights")
def test_nothing_that_is_freed_stays_among_what_is_kept(tmp_path: Path) -> None:
    """Weights in 12 bits, made piece by piece, some parts of which are kept as they are."""
    config = network(vocab_size=150_000, hidden_size=256)
    packed, peak = loaded(tmp_path, config, random_weights(network_program(config)), "none")
    plain = 2 * 2 * 150_000 * 256
    assert plain * 0.75 < packed < plain * 0.85
    assert 0.9 * packed < peak <= 1.1 * packed, f"{peak / 1e6:.1f} MB for {packed / 1e6:.1f} MB of packed weights"
