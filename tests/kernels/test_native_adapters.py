"""Adapters on the native executor, against torch and against weights that they are merged into; that bits depend on a row alone is also
asked in test_native_invariance.py."""

import random
from array import array
from dataclasses import replace

import pytest
import torch
from native_ops import ISAS, OF_PRECISIONS, assert_near, assert_same_bits, each_isa, low_rank, panel_order
from paged_batches import BLOCK_SIZE, Row, batch_of
from random_adapters import check_a_refilled_slot, merged, random_pairs, with_adapters
from small_networks import random_weights, small_program
from tiny_models import FAMILIES, QUICK_FAMILIES
from torch import Tensor
from variants import slow_but

from foretoken.kernels import native, sampling
from foretoken.kernels.adapters import AdapterBank, AdapterRoom, Factors, adapted
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import FINAL, RaggedBatch
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_library import ISAS as ISA_NAMES
from foretoken.kernels.ops import Activation, Linear, RMSNorm, Scale, Softcap
from foretoken.kernels.program import Program, row_program
from foretoken.kernels.rounds import RoundsLimits, RoundsRow, adapters_of, answers
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weights import bind_program

pytestmark = pytest.mark.usefixtures("two_threads")
EXECUTIONS = {**OF_PRECISIONS, "int8 cache": Execution(torch.bfloat16, kv_cache="int8")}
FLOAT32 = EXECUTIONS["float32"]
ROOM = AdapterRoom(num_slots=3, rank=5)
WIDE = 48  # an intermediate size whose gate and up can alternate in panels; that of tiny models is 40
FEW = [Row([5, 9, 2, 7], 0, [1]), Row([11], 0, [2]), Row([3, 3, 8], 0, [3], [(4, -1), (6, 0), (1, 0)]), Row([20, 21], 0, [4])]
MANY = [*FEW, Row(list(range(30)), 0, [5, 6])]
SLOTS = (1, 0, 3, 3, 1)
each_execution = pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())


def scores(network: NativeExecutor | TorchExecutor, batch: RaggedBatch) -> Tensor:
    logits = network.run(batch, network.allocate(8, BLOCK_SIZE)).logits
    assert logits is not None
    return logits


def filled_bank(program: Program, dtype: torch.dtype = torch.float32) -> AdapterBank:
    """Slot 1 adapts all, slot 3 only some products, with fewer ranks than there is room for."""
    bank = AdapterBank.of(program, ROOM, dtype)
    bank.put(1, random_pairs(bank, 1))
    bank.put(3, random_pairs(bank, 3, rank=2, weights="o_proj"))
    return bank


def random_factors(rng: random.Random, dtype: torch.dtype, width: int, outputs: list[int]) -> Factors:
    """Of three slots, with ranks of their own; behind these, and in other slots, nothing is finite."""
    rank = rng.choice([1, 4, 6, 16, 19])
    ranks = torch.tensor([[rng.randint(0, rank) for _ in range(3)] for _ in outputs], dtype=torch.int32)
    down, ups = torch.randn(len(outputs), 3, rank, width).to(dtype), tuple(torch.randn(3, rank, out).to(dtype) for out in outputs)
    for weight, up in enumerate(ups):
        for slot in range(3):
            down[weight, slot, ranks[weight, slot] :] = torch.nan
            up[slot, ranks[weight, slot] :] = torch.nan
    return Factors(down, ups, ranks)


def added(factors: Factors, slot: int, x: Tensor) -> Tensor:
    """[rows, sum of out] in float64."""
    parts = []
    for i, up in enumerate(factors.ups):
        rank = int(factors.ranks[i, slot - 1]) if slot else 0
        parts.append(x.double() @ factors.down[i, slot - 1, :rank].double().T @ up[slot - 1, :rank].double())
    return torch.cat(parts, -1)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_factors(isa: int, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, outputs = rng.choice([1, 15, 16, 40, 130]), rng.choice([[1], [16], [33], [96, 32, 32], [50, 7, 19], [200]])
    factors = random_factors(rng, dtype, width, outputs)
    x, residual = torch.randn(rng.choice([1, 2, 3, 4, 7, 17]), width), torch.randn(1, sum(outputs)) if rng.random() < 0.5 else None
    residual = None if residual is None else residual.repeat(len(x), 1)
    for slot in range(4):
        found = low_rank(isa, factors, slot, x, residual)
        assert_near(found, added(factors, slot, x) + (0 if residual is None else residual.double()), 1e-5)
        if not slot:
            assert_same_bits(found, torch.full_like(found, -0.0) if residual is None else residual)
        for row in range(len(x)):
            assert_same_bits(low_rank(isa, factors, slot, x[row:][:1], None if residual is None else residual[:1]), found[row:][:1])
        cuts = (16,) if sum(outputs) > 16 else ()
        assert_same_bits(low_rank(isa, factors, slot, x, residual, cuts=cuts), found)


@each_isa
@pytest.mark.parametrize("outputs", [[96], [48, 48], [16, 16]])
def test_what_is_added_to_a_gated_product_stands_as_its_panels_do(isa: int, outputs: list[int]) -> None:
    factors, x = random_factors(random.Random(0), torch.float32, 24, outputs), torch.randn(5, 24)
    residual = torch.randn(5, sum(outputs))
    for given in (None, residual):
        plain, by_turns = low_rank(isa, factors, 2, x, given), low_rank(isa, factors, 2, x, given, gated=True, cuts=(16,))
        assert_same_bits(by_turns[:, panel_order(sum(outputs))], plain)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"intermediate_size": WIDE}], ids=["", "by turns"])
@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, FAMILIES))
def test_rows_are_computed_as_in_torch_and_as_if_their_adapters_were_merged(family: str, settings: dict[str, int], threads: int) -> None:
    native.set_threads(threads)
    program = small_program(family, **settings)
    weights = random_weights(program)
    bank = filled_bank(program)
    network, reference = (
        NativeExecutor(program, weights, FLOAT32, adapters=bank), TorchExecutor(program, weights, torch.float32, adapters=bank)
    )
    for rows in (FEW, MANY):
        batch = with_adapters(batch_of(rows), *SLOTS[: len(rows)])
        found = scores(network, batch)
        expected = scores(reference, batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * max(5.0, float(expected.abs().max())))
        ones = batch.rows_of_tokens == 0
        alone = scores(NativeExecutor(program, merged(weights, random_pairs(bank, 1)), FLOAT32), batch_of(rows))
        torch.testing.assert_close(found[ones], alone[ones], rtol=1e-4, atol=1e-4)
        none = batch.rows_of_tokens == 1
        assert torch.equal(found[none], scores(network, batch_of(rows))[none])


@each_execution
@pytest.mark.parametrize("isa", ISAS, ids=[ISA_NAMES[isa] for isa in ISAS])
def test_rows_have_their_bits_on_every_instruction_set(isa: int, execution: Execution) -> None:
    """Alone, beside others, with and without adapters; near those of torch."""
    program = small_program(intermediate_size=WIDE)
    weights = random_weights(program)
    bank = filled_bank(program, execution.dtype)
    network = NativeExecutor(program, weights, execution, isa=ISA_NAMES[isa], adapters=bank)
    plain = NativeExecutor(program, weights, execution, isa=ISA_NAMES[isa])
    for rows in (FEW, MANY):
        batch = with_adapters(batch_of(rows), *SLOTS[: len(rows)])
        together = scores(network, batch)
        for i, row in enumerate(rows):
            its = together[batch.rows_of_tokens == i]
            assert torch.equal(its, scores(network, with_adapters(batch_of([row]), SLOTS[i])))
            if not SLOTS[i]:
                assert torch.equal(its, scores(plain, batch_of([row])))
    if execution == FLOAT32:
        reference = TorchExecutor(program, weights, torch.float32, adapters=bank)
        torch.testing.assert_close(together, scores(reference, batch), rtol=1e-4, atol=1e-4)


@each_execution
def test_hidden_states_are_those_with_adapters(execution: Execution) -> None:
    program = small_program("qwen3", intermediate_size=WIDE)
    weights = random_weights(program)
    network = NativeExecutor(program, weights, execution, adapters=filled_bank(program, execution.dtype))
    reference = TorchExecutor(program, weights, torch.float32, adapters=filled_bank(program))
    batch = with_adapters(batch_of(MANY), *SLOTS)
    wanted = (0, 2, FINAL)
    states, expected = (each.run(batch, each.allocate(8, BLOCK_SIZE), wanted).hidden for each in (network, reference))
    for boundary in wanted:
        error = (states[boundary] - expected[boundary]).norm() / expected[boundary].norm()
        assert error < (1e-5 if execution == FLOAT32 else 0.4 if execution.quantization == "int4" else 0.05)


def test_a_slot_that_is_filled_again_forgets_what_it_held() -> None:
    program = small_program()
    bank = filled_bank(program)
    network = NativeExecutor(program, random_weights(program), FLOAT32, adapters=bank)
    batch = with_adapters(batch_of(FEW), 2, 2, 2, 2)
    check_a_refilled_slot(bank, lambda: scores(network, batch))
    bank.put(2, {})
    assert torch.equal(scores(network, batch), scores(network, batch_of(FEW))), "it leaves all weights alone"


def test_weights_are_packed_once_for_rows_with_and_without_adapters() -> None:
    program = small_program("gemma3", intermediate_size=WIDE)
    weights = random_weights(program)
    plain, network = NativeExecutor(program, weights, FLOAT32), NativeExecutor(program, weights, FLOAT32, adapters=filled_bank(program))
    entries = [{key: [*forms] for key, forms in executor.bank._entries.items()} for executor in (plain, network)]
    assert entries[0] == entries[1] and plain.weight_bytes == network.weight_bytes


def test_rows_that_have_adapters_need_room_for_them() -> None:
    program = small_program()
    weights = random_weights(program)
    plain, network = NativeExecutor(program, weights, FLOAT32), NativeExecutor(program, weights, FLOAT32, adapters=filled_bank(program))
    for executor, slots in ((plain, (1, 0, 0, 0)), (network, (4, 0, 0, 0)), (network, (1, 0, -1, 0))):
        with pytest.raises(AssertionError):
            scores(executor, with_adapters(batch_of(FEW), *slots))
    assert torch.equal(scores(plain, with_adapters(batch_of(FEW), 0, 0, 0, 0)), scores(plain, batch_of(FEW)))
    with pytest.raises(AssertionError):
        network.run_chain(with_adapters(batch_of(FEW[:1]), 1), network.allocate(8, BLOCK_SIZE), torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_natively_does_so_with_adapters(family: str) -> None:
    for settings in ({}, {"intermediate_size": WIDE}):
        program = small_program(family, **settings)
        for execution in EXECUTIONS.values():
            assert native.supports(program, execution) is None and native.supports(adapted(program), execution) is None
    network = bind_program(program, random_weights(program), FLOAT32, adapters=filled_bank(program))
    assert isinstance(network, NativeExecutor)


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_products_of_any_width_take_what_adapters_add(num_tokens: int) -> None:
    """With biases, residuals, and something behind them; a row without tokens among others."""
    shapes = {"square": (13, 13), "square_bias": (13,), "gate": (32, 13), "up": (32, 13), "odd": (7, 32), "norm": (13,)}
    ops = (
        Linear(("x",), ("a",), ("square",), ("square_bias",)), Scale(("a",), ("b",), 3.0), Linear(("b", "a"), ("c",), ("square",)),
        RMSNorm(("c",), ("n",), "norm", 1e-3), Linear(("n",), ("g",), ("gate", "up")), Activation(("g",), ("h",), "gelu", gated=True),
        Linear(("h",), ("o",), ("odd",)), Softcap(("o",), ("y",), 2.0),
    )
    program = row_program(ops, shapes, {"x": 13}, boundaries=("c", "y"))
    bank = AdapterBank.of(program, ROOM, torch.float32)
    bank.put(1, random_pairs(bank, 1))
    bank.put(2, random_pairs(bank, 2, rank=3, weights="up"))
    weights = random_weights(program)
    networks = NativeExecutor(program, weights, FLOAT32, adapters=bank), TorchExecutor(program, weights, torch.float32, adapters=bank)
    rows = [Row(list(range(count)), 0, [0, 1]) for count in (num_tokens - num_tokens // 3, 0, num_tokens // 3)]
    nowhere = torch.empty(0, dtype=torch.int64)
    batch = replace(with_adapters(batch_of(rows), 2, 1, 1), logits_indices=nowhere, full_logits=nowhere)
    x = torch.randn(num_tokens, 13, generator=torch.Generator().manual_seed(0))
    states, expected = (network.run(batch, network.allocate(1, BLOCK_SIZE), (0, 1), {"x": x}).hidden for network in networks)
    for boundary in (0, 1):
        torch.testing.assert_close(states[boundary], expected[boundary], rtol=1e-4, atol=1e-5)


@each_execution
def test_rounds_say_what_one_pass_a_token_says(execution: Execution) -> None:
    program = small_program(intermediate_size=WIDE, vocab_size=64, max_position_embeddings=128)
    bank = filled_bank(program, execution.dtype)
    network = NativeExecutor(program, random_weights(program), execution, adapters=bank)
    rng = random.Random(3)
    prompts, most_new = [[rng.randrange(64) for _ in range(4)] * 3 for _ in range(4)], 25
    blocks = [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(4)]
    for slots in ((1, 0, 3, 1), (0, 0, 0, 0)):
        said = [_one_by_one(network, prompt, slot, most_new) for prompt, slot in zip(prompts, slots, strict=True)]
        kv = network.allocate(12, BLOCK_SIZE)
        network.run(with_adapters(batch_of([Row(text[:-1], 0, its) for text, its in zip(prompts, blocks, strict=True)]), *slots), kv)
        texts, tables = [array("i", [*prompt, *[-1] * most_new]) for prompt in prompts], [array("i", its) for its in blocks]
        packed, greedy = bytearray(), sampling.neutral(1)
        greedy["temperature"] = 0.0
        for text, table, slot in zip(texts, tables, slots, strict=True):
            packed += RoundsRow(
                text.buffer_info()[0], table.buffer_info()[0], 0, 0, 12, 12, most_new, 3, 48, 0, 0, 0, 0, 12, 0, 4, 2, 4, 0, adapter=slot
            ).packed(greedy.tobytes())
        assert adapters_of(packed) == [*slots]
        output = network.run_rounds(packed, kv, RoundsLimits(most_new, 64, 60.0, False), array("i", [0]))
        assert [list(text) for text in texts] == said and any(draft.accepted for draft in output.drafts)
        assert [num_new for num_new, _, _ in answers(packed)] == [most_new] * 4
    assert said[0] != _one_by_one(network, prompts[0], 1, most_new), "adapters make no difference here"


def _one_by_one(network: NativeExecutor, prompt: list[int], slot: int, most_new: int) -> list[int]:
    kv, text, done = network.allocate(3, BLOCK_SIZE), [*prompt], 0
    for _ in range(most_new):
        output = network.run(with_adapters(batch_of([Row(text[done:], done, [0, 1, 2])]), slot), kv)
        done = len(text)
        text.append(int(output.argmax[-1]))
    return text
