"""Bfloat16 in less memory: the same bits as packed plainly, in every place that reads weights."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_ops import After, Packed, assert_same_bits, linear, prepare, unpacked
from paged_batches import BLOCK_SIZE, Row, batch_of
from saying import said
from small_networks import random_weights
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig

from foretoken.engine.llm import LLM
from foretoken.engine.request import SamplingParams
from foretoken.kernels import native
from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.execution import Execution
from foretoken.kernels.footprint import native_weight_bytes
from foretoken.kernels.fuse import fuse
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_abi import Precision
from foretoken.kernels.native_library import ISAS
from foretoken.kernels.native_weights import PackedWeight, WeightMemory, pack

ISA = "avx512_bf16"
LIBRARY = native.load()


def runs_here() -> bool:
    isa = native.availability().isa
    return isa is not None and ISAS.index(isa) >= ISAS.index(ISA)


pytestmark = [pytest.mark.skipif(not runs_here(), reason=f"no {ISA} here"), pytest.mark.usefixtures("three_threads")]


def weight(matrix: Tensor, precision: Precision, bias: Tensor | None = None, gated: bool = False) -> tuple[PackedWeight, Packed]:
    assert LIBRARY is not None
    made = pack(LIBRARY, WeightMemory(), [matrix], bias, precision, gated)
    return made, Packed(made.struct, made.tensors[0], torch.zeros(0), torch.zeros(0))


def normal(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05).bfloat16()


def rare(outputs: int, inputs: int) -> Tensor:
    """All kinds of numbers among normal ones: zeros, denormal, infinite, NaN, some of any exponent."""
    matrix = normal(outputs, inputs, seed=1)
    some = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 3e38, 1e-30]).bfloat16()
    places = torch.randperm(matrix.numel(), generator=torch.Generator().manual_seed(2))[: 9 * 20]
    matrix.view(-1)[places] = some.repeat(20)
    matrix[:, 32:40] = 0
    return matrix


MATRICES = {"normal": normal(100, 576), "narrow": normal(2100, 40), "rare": rare(100, 800), "zeros": torch.zeros(17, 64).bfloat16()}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES.keys())
def test_every_weight_comes_out_as_it_went_in(matrix: Tensor) -> None:
    made, w = weight(matrix, Precision.COMPACT)
    assert made.struct.precision == Precision.COMPACT
    order = torch.randperm(len(matrix))
    assert_same_bits(unpacked(ISAS.index(ISA), w, order, matrix.shape[1]), matrix[order].float())


def test_three_quarters_of_the_memory() -> None:
    matrix = normal(1600, 1024)
    assert weight(matrix, Precision.COMPACT)[0].num_bytes < 0.785 * weight(matrix, Precision.BFLOAT16)[0].num_bytes


def test_plain_where_that_is_no_larger() -> None:
    bits = torch.randint(-(2**15), 2**15, (64, 256), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    assert weight(bits.view(torch.bfloat16), Precision.COMPACT)[0].struct.precision == Precision.BFLOAT16


@pytest.mark.parametrize("seed", range(8))
def test_products_have_the_bits_of_plain_weights(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    gated = seed % 2 == 1
    width, outputs = rng.choice([32, 72, 576, 1536, 20000]), rng.choice([16, 48, 208, 1056]) * (2 if gated else 1)
    matrix, bias = rare(outputs, max(width, 800)) if seed == 3 else normal(outputs, width, seed), torch.randn(outputs)
    matrix = matrix.nan_to_num(0.0, 1.0, -1.0)
    (made, compact), (_, plain) = (weight(matrix, precision, bias, gated) for precision in (Precision.COMPACT, Precision.BFLOAT16))
    assert made.struct.precision == Precision.COMPACT
    isa, after = ISAS.index(ISA), After(function="silu", gated=gated)
    for rows in (1, 2, 5, 8, 13, 14, 15, 16, 31, 40, 500):
        x = prepare(isa, torch.randn(rows, matrix.shape[1]), Precision.BFLOAT16, compact.struct.inputs)
        expected, best = linear(isa, plain, x, outputs, after)
        actual, same_best = linear(isa, compact, x, outputs, after, splits=[2] if outputs > 64 else [])
        assert_same_bits(actual, expected)
        assert [b.index for b in best] == [b.index for b in same_best]


@pytest.mark.parametrize("family", ["tied", "experts"])
def test_a_network_has_the_bits_of_one_with_plain_weights(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes["num_key_value_heads"] = 2
    sizes["vocab_size"] = 500
    config = LlamaConfig(**sizes, tie_word_embeddings=True) if family == "tied" else GptOssConfig(**sizes, head_dim=16, num_local_experts=6)
    program = fuse(decoder_program(config))
    weights, execution = random_weights(program, seed=3), Execution(torch.bfloat16)
    plain = NativeExecutor(program, weights, execution, ISA)
    monkeypatch.setattr(native, "COMPACT_FROM", 0)
    compact = NativeExecutor(program, weights, execution, ISA)
    assert compact.weight_bytes < 0.9 * plain.weight_bytes
    texts = [torch.randint(500, (length,)).tolist() for length in (1, 7, 16, 30)]
    batch = batch_of([Row(text, 0, [2 * number, 2 * number + 1]) for number, text in enumerate(texts)])
    batch = replace(batch, logits_indices=torch.arange(len(batch.token_ids)), full_logits=torch.arange(len(batch.token_ids)))
    cache = plain.allocate(8, BLOCK_SIZE)
    one, other = (executor.run(batch, cache) for executor in (plain, compact))
    assert one.logits is not None and other.logits is not None
    assert_same_bits(other.logits, one.logits)
    assert torch.equal(other.argmax, one.argmax)


@pytest.mark.parametrize("isa", ["avx512_bf16", "amx", "avx2"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_is_kept_compact(isa: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights, where vectors multiply bfloat16, and nothing else."""
    program = fuse(decoder_program(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)))
    execution = Execution(torch.bfloat16, quantization=quantization)  # type: ignore[arg-type]
    wide = replace(execution, dtype=torch.float32)
    size = native_weight_bytes(program, execution)
    for limit in (size, size + 1):
        monkeypatch.setattr(native, "COMPACT_FROM", limit)
        is_compact = isa == ISA and quantization is None and limit == size
        assert native._precision(program, execution, isa) == (Precision.COMPACT if is_compact else Precision.BFLOAT16)
        assert native._precision(program, wide, isa) == Precision.FLOAT32


@pytest.mark.skipif(native.availability().isa != ISA, reason=f"{ISA} is not what runs here")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_same_with_drafts_and_without(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)

    def answers(method: str) -> list[list[int]]:
        with LLM(None, {"method": method, "adaptive": False} if method != "off" else {"method": "off"}) as llm:
            return said(llm, ["def main():", "The capital"], params)

    expected = answers("off")
    monkeypatch.setattr(native, "COMPACT_FROM", 0)
    assert [answers(method) for method in ("off", "ngram", "draft_model", "mtp")] == [expected] * 4
