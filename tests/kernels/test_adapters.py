import dataclasses

import pytest
import torch
from paged_batches import BLOCK_SIZE, Row, batch_of
from random_adapters import Pairs, check_a_refilled_slot, merged, random_pairs, with_adapters
from small_networks import random_weights, small_program
from torch import Tensor

from foretoken.kernels.adapters import AdapterBank, AdapterRoom, adaptable, adapted, adapter_bytes, slots_of_tokens
from foretoken.kernels.batch_lists import BatchLists, BatchMemory
from foretoken.kernels.layout import RaggedBatch
from foretoken.kernels.ops import Linear, LowRank
from foretoken.kernels.program import Program
from foretoken.kernels.static_batch import BlockTables, Rung, StaticBatch
from foretoken.kernels.torch_executor import TorchExecutor

ROOM = AdapterRoom(num_slots=3, rank=4)
ROWS = [Row([5, 9, 2, 7], 0, [1]), Row([11], 0, [2]), Row([3, 3, 8], 0, [3], [(4, -1), (6, 0), (1, 0)]), Row([20, 21], 0, [4])]


def scores(network: TorchExecutor, batch: RaggedBatch) -> Tensor:
    logits = network.run(batch, network.allocate(8, BLOCK_SIZE)).logits
    assert logits is not None
    return logits


def network_with_bank(program: Program, weights: dict[str, Tensor]) -> tuple[TorchExecutor, AdapterBank]:
    bank = AdapterBank.of(program, ROOM, torch.float32)
    return TorchExecutor(program, weights, torch.float32, adapters=bank), bank


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "olmo2", "qwen3_moe"])
def test_each_row_is_computed_as_if_its_adapter_were_merged(family: str) -> None:
    program = small_program(family)
    weights = random_weights(program)
    network, bank = network_with_bank(program, weights)
    first, third = random_pairs(bank, 1), random_pairs(bank, 3, rank=2, weights="v_proj" if family != "phi3" else "down")
    bank.put(1, first)
    bank.put(3, third)
    batch = batch_of(ROWS)
    found = scores(network, with_adapters(batch, 1, 0, 3, 1))
    owner = batch.rows_of_tokens
    alone = {1: first, 0: Pairs(), 3: third}
    expected = [scores(TorchExecutor(program, merged(weights, pairs), torch.float32), batch) for pairs in alone.values()]
    for row, slot in enumerate((1, 0, 3, 1)):
        torch.testing.assert_close(found[owner == row], expected[[*alone].index(slot)][owner == row], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2) and not torch.allclose(expected[2], expected[1], atol=1e-2)
    torch.testing.assert_close(scores(network, batch), expected[1])


def test_a_slot_that_is_filled_again_forgets_what_it_held() -> None:
    program = small_program()
    network, bank = network_with_bank(program, random_weights(program))
    batch = with_adapters(batch_of(ROWS), 2, 2, 2, 2)
    check_a_refilled_slot(bank, lambda: scores(network, batch))


def test_what_another_slot_holds_does_not_reach_a_row_even_if_it_is_not_finite() -> None:
    program = small_program()
    network, bank = network_with_bank(program, random_weights(program))
    bank.put(1, random_pairs(bank, 1))
    batch = with_adapters(batch_of(ROWS), 1, 0, 1, 1)
    before = scores(network, batch)
    bank.put(2, {name: (down * torch.nan, up) for name, (down, up) in random_pairs(bank, 2).items()})
    assert torch.equal(scores(network, batch), before)


def test_all_products_over_tokens_can_be_adapted_but_the_head_and_what_chooses_experts() -> None:
    names = {name for op in adaptable(small_program("qwen3_moe")) for name in op.weights}
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-2] for name in names} == kinds and not any("experts" in name for name in names)
    untied = {name for op in adaptable(small_program("llama", tie_word_embeddings=False)) for name in op.weights}
    assert {name.split(".")[-2] for name in untied} == kinds


def test_a_bank_takes_what_was_told_before_it_was_made() -> None:
    for family in ("llama", "qwen3_moe"):
        program = small_program(family)
        assert AdapterBank.of(program, ROOM, torch.bfloat16).num_bytes == adapter_bytes(program, ROOM, torch.bfloat16)


def test_a_program_with_adapters_has_the_same_weights_and_one_op_more_a_product() -> None:
    program = small_program()
    made = adapted(program)
    assert made.weights == program.weights
    assert sum(isinstance(op, LowRank) for op in made.ops) == len(adaptable(program)) == len(made.ops) - len(program.ops)
    assert made.buffers.keys() > program.buffers.keys()  # and it fits together
    for before, op in zip(made.ops, made.ops[1:], strict=False):
        if isinstance(op, Linear) and isinstance(before, LowRank):
            assert op.inputs == (before.inputs[0], before.outputs[0]) and op.weights == before.weights


def test_a_static_batch_takes_adapters_and_its_padding_has_none() -> None:
    static = StaticBatch(Rung(32, 16, 32), BlockTables(16, 4, torch.device("cpu")), BLOCK_SIZE, has_adapters=True)
    batch = with_adapters(batch_of(ROWS), 1, 0, 3, 2)
    for put in (static.fill, static.take):
        put(batch)
        assert static.batch.adapters is not None and static.batch.adapters.tolist() == [1, 0, 3, 2, *[0] * 12]
        put(dataclasses.replace(batch, adapters=None))
        assert static.batch.adapters.tolist() == [0] * 16


def test_rows_are_looked_up_anew_where_a_batch_s_memory_is_written_again() -> None:
    memory = BatchMemory()
    for starts in ([0, 1, 4], [0, 3, 4]):
        lists = BatchLists(BLOCK_SIZE, [1] * 4, [0] * 4, [0] * 4, [0] * 4, [], [], starts, [1, 1], [1, 1], [], [[0], [0]], [2, 1])
        found = slots_of_tokens(memory.batch(lists))
        assert found is not None and found.tolist() == [2] * starts[1] + [1] * (4 - starts[1])
