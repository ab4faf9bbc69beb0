"""Networks that look at what another one has written: all executors agree, chains stay where they begin, nothing is written."""

import pytest
import torch
from frozen_networks import (
    BLOCK_SIZE,
    COUNTS,
    DRAWS,
    LENGTHS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    TABLES,
    assert_alike,
    fill,
    one_each,
    programs,
    run,
    states,
)
from small_networks import random_weights

from foretoken.kernels import native
from foretoken.kernels.execution import Execution
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import FINAL, Draws, Executor
from foretoken.kernels.torch_executor import TorchExecutor


def executors() -> dict[str, Executor]:
    target, program = programs()
    weights = random_weights(program)
    found: dict[str, Executor] = {"torch": TorchExecutor(program, weights, torch.float32)}
    found["device"] = GraphExecutor(TorchExecutor(program, weights, torch.float32))
    if native.availability().isa is not None:
        found["native"] = native.NativeExecutor(program, weights, Execution(torch.float32))
    return found


@pytest.mark.parametrize("draws", [None, DRAWS], ids=["best", "drawn"])
def test_executors_agree(draws: Draws | None) -> None:
    first, *others = [run(executor, draws) for executor in executors().values()]
    for other in others:
        assert_alike(other, first)


def test_a_chain_is_pass_after_pass_at_one_place() -> None:
    for executor in executors().values():
        chain = run(executor, None)
        kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
        fill(kv)
        batch, given = one_each(), states()
        for step in range(4):
            output = executor.run(batch, kv, (FINAL,), given)
            for row, count in enumerate(COUNTS.tolist()):
                assert step >= count or output.argmax[row] == chain.token_ids[row, step]
            batch.token_ids.copy_(output.argmax)
            given = {"feature": output.hidden[FINAL].float().contiguous()}


def test_what_a_row_sees_ends_before_its_token() -> None:
    """Neither what lies behind its text nor what its window has left behind counts, but all else does."""
    program, executor = programs()[0], executors()["torch"]
    sliding = 0
    window = program.kv_layers[sliding].window
    assert window is not None

    def said(layer: int, places: list[int]) -> torch.Tensor:
        kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
        fill(kv)
        slots = torch.tensor([TABLES[1][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places], dtype=torch.int64)
        k, v = kv.gather(layer, slots)
        kv.write(layer, slots, k + 1, v - 1)
        return executor.run(one_each(), kv, (FINAL,), states()).hidden[FINAL][1]

    length = LENGTHS[1]
    for layer, seen in ((sliding, range(length - window, length)), (1, range(length))):
        unchanged = said(layer, [])
        assert torch.equal(said(layer, [place for place in range(32) if place not in seen]), unchanged)
        for place in (seen[0], seen[-1]):
            assert not torch.equal(said(layer, [place]), unchanged)


def test_programs_with_queries_alone_are_checked() -> None:
    program = programs()[1]
    assert program.is_frozen and not programs()[0].is_frozen and program.max_model_len == MAX_MODEL_LEN
    assert executors()["torch"].kv_layers == programs()[0].kv_layers
