"""Whole networks of Triton kernels beside the reference of every op, on the same device: every family, every number format."""

from itertools import chain
from typing import Any

import frozen_networks
import pytest
import torch
from decoding import ragged
from frozen_networks import DRAWS
from recurrent_batches import Row, recurrent_batch
from small_networks import random_weights, small_network, small_program
from tiny_models import FAMILIES, MORE
from variants import slow_but

from foretoken.kernels.execution import Quantization
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.int4 import Int4Matrix
from foretoken.kernels.layout import Draws, RaggedBatch
from foretoken.kernels.ops import BlockLinear
from foretoken.kernels.program import matrices_of, wide_products
from foretoken.kernels.torch_executor import TorchExecutor, on_device

BLOCK_SIZE = 4
EVERY_EXPERT = {  # are chosen in bfloat16
    **{"gpt_oss": {"num_experts_per_tok": 5}, "mixtral": {"num_experts_per_tok": 5}, "olmoe": {"num_experts_per_tok": 8}},
    "gemma4_moe": {"top_k_experts": 6},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of the norm of all scores


def networks(
    family: str, dtype: torch.dtype, device: str, has_fp8_cache: bool = False, **options: Any
) -> tuple[TorchExecutor, TorchExecutor]:
    """(reference on the CPU, Triton on the device)"""
    from foretoken.kernels.triton_steps import TritonKernels

    # rounding that chooses another expert, or moves the shares of two, changes whole rows, and these experts differ widely
    every_expert = EVERY_EXPERT.get(family, {}) if dtype == torch.bfloat16 else {}
    program = small_program(family, **SIZES, **every_expert)
    weights = random_weights(program)
    kernels = TritonKernels(**options)
    return (
        TorchExecutor(program, weights, dtype, has_fp8_cache=has_fp8_cache),
        TorchExecutor(program, weights, dtype, device=device, kernels=kernels, has_fp8_cache=has_fp8_cache),
    )


SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}


def batches(vocab_size: int) -> list[RaggedBatch]:
    """Two prompts, then a chain behind one and a single token behind the other."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    tables = [[5, 2, 9, 11], [7, 1, 3, 8]]
    return [
        ragged([(tokens(9), 0, tables[0]), (tokens(5), 0, tables[1])]),
        ragged([(tokens(4), 9, tables[0]), (tokens(1), 5, tables[1])]),
    ]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, in norms of what is expected; NaN is never small."""
    return float((found.cpu().float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", slow_but(FAMILIES, [*FAMILIES, *MORE]))
def test_every_family(family: str, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and family in MORE:
        pytest.skip("rounding chooses other experts")
    reference, triton = networks(family, dtype, device)
    whole = TorchExecutor(reference.program, random_weights(reference.program), torch.float32)
    caches = [network.allocate(12, BLOCK_SIZE) for network in (reference, triton, whole)]
    for batch in batches(reference.vocab_size):
        outputs = [network.run(batch, cache, (0, 2)) for network, cache in zip((reference, triton, whole), caches, strict=True)]
        states = [(output.logits, output.hidden[0], output.hidden[2]) for output in outputs]
        for expected, found, exact in zip(*states, strict=True):
            assert expected is not None and found is not None and exact is not None
            # What rounds has two errors of the same size against what does not; of one row they may be large.
            if dtype == torch.bfloat16:
                assert error(found, exact) < 1.5 * error(expected, exact) + 0.01
            else:
                assert error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_sums_that_take_the_place_of_their_residuals_spoil_no_state_that_is_wanted(family: str, device: str) -> None:
    """As with more rows than are multiplied here: products are torch's, and add themselves to what nobody reads any more."""
    reference, triton = networks(family, torch.float32, device, skinny_rows=0)
    boundaries = tuple(range(len(reference.program.boundaries)))
    caches = reference.allocate(12, BLOCK_SIZE), triton.allocate(12, BLOCK_SIZE)
    for batch in batches(reference.vocab_size):
        expected, found = reference.run(batch, caches[0], boundaries), triton.run(batch, caches[1], boundaries)
        assert all(error(found.hidden[boundary], expected.hidden[boundary]) < 1e-5 for boundary in boundaries)
        plain = triton.run(batch, caches[1]).logits
        assert plain is not None and found.logits is not None and torch.equal(plain, found.logits)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "youtu"])
def test_a_cache_of_8_bit_floats_holds_what_the_references_does(family: str, device: str) -> None:
    """Nearly: what is added up in another order may be rounded to the next number."""
    reference, triton = networks(family, torch.float32, device, has_fp8_cache=True)
    caches = reference.allocate(12, BLOCK_SIZE), triton.allocate(12, BLOCK_SIZE)
    for batch in batches(reference.vocab_size):
        expected, found = reference.run(batch, caches[0]).logits, triton.run(batch, caches[1]).logits
        assert expected is not None and found is not None
        assert error(found, expected) < 0.01
    src, dst = torch.tensor([20, 8]), torch.tensor([40, 20])
    layers = range(len(triton.kv_layers))
    before = [caches[1].gather(layer, src) for layer in layers]
    caches[1].move(src, dst)
    for layer in layers:
        for moved, wanted in zip(caches[1].gather(layer, dst), before[layer], strict=True):
            assert torch.equal(moved, wanted) and not torch.equal(moved[0], moved[1])


@pytest.mark.parametrize(
    ("family", "has_fp8_cache"),
    [("qwen3", False), ("qwen3", True), ("qwen3_moe", False), ("glm4_moe_lite", False), ("deepseek_v3", True)],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_batch_invariant_networks_say_the_same_bits(dtype: torch.dtype, family: str, has_fp8_cache: bool, device: str) -> None:
    """Alone, among others, as part of a chain, in a later chunk."""
    _, triton = networks(family, dtype, device, has_fp8_cache, is_batch_invariant=True)
    assert triton.is_batch_invariant
    prompt = torch.randint(320, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    others = [([7, 8, 9], 0, [8, 9, 10, 11]), ([3] * 11, 0, [4, 5, 6, 7])]
    whole = triton.run(ragged([(prompt, 0, [0, 1, 2, 3])]), triton.allocate(12, BLOCK_SIZE)).logits
    among = triton.run(ragged([others[0], (prompt, 0, [0, 1, 2, 3]), others[1]]), triton.allocate(12, BLOCK_SIZE)).logits
    kv = triton.allocate(12, BLOCK_SIZE)
    parts = [triton.run(ragged([(prompt[a:b], a, [0, 1, 2, 3])]), kv).logits for a, b in ((0, 6), (6, 7), (7, 13))]
    assert whole is not None and among is not None
    assert torch.equal(whole, among[3:16])
    assert torch.equal(whole, torch.cat([part for part in parts if part is not None]))


@pytest.mark.parametrize("family", ["llama", "mixtral", "youtu"])
def test_8_bit_weights_are_near_the_whole_ones(family: str, device: str) -> None:
    reference, triton = networks(family, torch.bfloat16, device, quantization="fp8", narrow_head=True)
    caches = reference.allocate(12, BLOCK_SIZE), triton.allocate(12, BLOCK_SIZE)
    (batch, _) = batches(320)
    expected, found = reference.run(batch, caches[0]).logits, triton.run(batch, caches[1]).logits
    assert expected is not None and found is not None
    assert error(found, expected) < 0.2


@pytest.mark.parametrize(
    ("family", "dtype", "is_batch_invariant", "tiled_rows"),
    [
        ("qwen3", torch.float32, False, 8), ("qwen3", torch.bfloat16, False, 16), ("qwen3", torch.bfloat16, False, 8),
        ("qwen3", torch.bfloat16, True, 8), ("qwen3_moe", torch.float32, False, 8), ("youtu", torch.float32, False, 8),
    ],
)
def test_4_bit_weights_are_multiplied_as_they_are(
    family: str, dtype: torch.dtype, is_batch_invariant: bool, tiled_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has the same weights made whole. A prompt of more rows than the skinny product is let have, then few tokens."""
    from foretoken.kernels.triton import linear_int4
    from foretoken.kernels.triton_steps import TritonKernels

    monkeypatch.setattr(linear_int4, "SKINNY_ROWS", 8)
    monkeypatch.setattr(linear_int4, "TILED_ROWS", tiled_rows)
    # experts that are a small part of a tile would be read for its padding; rows that are looked up are whole
    own = {"qwen3_moe": {"moe_intermediate_size": 96}, "youtu": {"tie_word_embeddings": False, "q_lora_rank": 64, "intermediate_size": 256}}
    program = small_program(family, **SIZES | own.get(family, {}))
    weights = random_weights(program)
    wide = wide_products(program)
    narrow_ops = [op for op in program.ops if not isinstance(op, BlockLinear) and not wide.intersection(op.outputs)]
    products = {name for op in narrow_ops for name in chain.from_iterable(matrices_of(op))}
    whole = {name: Int4Matrix.of(weight.to(dtype)).weight() if name in products else weight for name, weight in weights.items()}
    reference = TorchExecutor(program, whole, torch.float32)
    kernels = TritonKernels(is_batch_invariant, "int4")
    narrow = TorchExecutor(program, weights, dtype, device=device, kernels=kernels)
    caches = reference.allocate(12, BLOCK_SIZE), narrow.allocate(12, BLOCK_SIZE)
    for batch in batches(reference.vocab_size):
        expected, found = reference.run(batch, caches[0]).logits, narrow.run(batch, caches[1]).logits
        assert expected is not None and found is not None
        assert error(found, expected) < TOLERANCE[dtype]
    assert narrow.weight_bytes < 0.6 * reference.weight_bytes / 2, "as much is read as with bfloat16"


def test_a_batch_moves_as_a_whole(gpu: str) -> None:
    moved = on_device(batches(320)[0], torch.device(gpu))
    assert all(not isinstance(value, torch.Tensor) or value.is_cuda for value in vars(moved).values())
    states = on_device(recurrent_batch([Row([1, 2], 0, 1)]), torch.device(gpu)).states
    assert states is not None and all(value is None or value.is_cuda for value in vars(states).values())


def test_without_kernels_the_reference_runs_there_too(device: str) -> None:
    class Nothing:
        is_batch_invariant = False
        quantization: Quantization | None = None

        def step(self, op: object, bind: object) -> None:
            return None

        def gated_step(self, op: object, activation: object, bind: object) -> None:
            return None

    expected = small_network()
    found = small_network(device=device, kernels=Nothing())
    batch = ragged([([3, 1, 4, 1, 5], 0, [1, 0])])
    torch.testing.assert_close(
        found.run(batch, found.allocate(2, BLOCK_SIZE)).logits.cpu(),  # pyright: ignore[reportOptionalMemberAccess]
        expected.run(batch, expected.allocate(2, BLOCK_SIZE)).logits,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("draws", [None, DRAWS], ids=["best", "drawn"])
def test_chains_over_what_another_network_has_written(draws: Draws | None, device: str) -> None:
    from foretoken.kernels.triton_steps import TritonKernels

    program = frozen_networks.programs()[1]
    weights = random_weights(program)
    triton = GraphExecutor(TorchExecutor(program, weights, torch.float32, device=device, kernels=TritonKernels()))
    reference = TorchExecutor(program, weights, torch.float32)
    frozen_networks.assert_alike(frozen_networks.run(triton, draws, device), frozen_networks.run(reference, draws))
