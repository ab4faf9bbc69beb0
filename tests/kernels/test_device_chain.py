from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
from decoding import assert_same_chains, ragged
from small_networks import random_weights, small_network, small_program
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.kernels import device_chain, noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.device_chain import ChainDraws, Choosing
from foretoken.kernels.following import Follower, Followers, following
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import Draws, RaggedBatch
from foretoken.kernels.matching import Guesses
from foretoken.kernels.static_batch import BlockTables, Rung, StaticBatch
from foretoken.kernels.torch_executor import Computed, TorchExecutor
from foretoken.kernels.torch_kv import TorchKV

if TYPE_CHECKING:
    from torch._ops import OpOverload

BLOCK_SIZE, NUM_BLOCKS = 4, 16
STREAMS = [noise.stream(seed, 0) for seed in (5, 6, 7)]


def texts(chains: list[int]) -> RaggedBatch:
    """Four rows, chains behind the last tokens of some."""
    rows = [([5, 6, 7, 8, 9], 0, [0, 1, 2, 3]), ([10, 11], 0, [4, 5, 6, 7]), ([12, 13, 14], 0, [8, 9, 10, 11]), ([20], 0, [12, 13, 14, 15])]
    batch = ragged(rows, all_logits=False)
    return dataclasses.replace(batch, logits_indices=batch.logits_indices[chains], full_logits=torch.zeros(0, dtype=torch.int64))


def mapped_network() -> TorchExecutor:
    """One whose columns are every other token."""
    program = small_program()
    program = dataclasses.replace(program, token_map="ids", weights={**program.weights, "ids": (program.vocab_size,)})
    weights = random_weights(program)
    weights["ids"] = torch.arange(program.vocab_size) * 2 % 97
    return TorchExecutor(program, weights, torch.float32)


def draws(temperatures: list[float], vocab_size: int, keep_logits: bool = False) -> Draws:
    count = len(temperatures)
    return Draws(torch.tensor(temperatures), torch.tensor(STREAMS[:count]), torch.arange(count) * 10, vocab_size, keep_logits)


DRAWING = {"best": None, "cut": draws([0.0, 0.0, 0.0], 60), "drawn": draws([0.7, 0.0, 1.5], 60, keep_logits=True)}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("drawing", DRAWING.values(), ids=DRAWING)
def test_a_chain_on_the_device_is_the_chain_by_steps(mapped: bool, drawing: Draws | None) -> None:
    executor = mapped_network() if mapped else small_network()
    batch, counts = texts([0, 2, 3]), torch.tensor([4, 1, 6])
    kv, expected_kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    for cache in (*kv.k, *kv.v, *expected_kv.k, *expected_kv.v):
        cache.fill_(7.0)
    expected = run_chain_by_steps(executor, batch, expected_kv, counts, drawing)
    found = GraphExecutor(executor).run_chain(batch, kv, counts, drawing)
    assert_same_chains(found, expected, counts)
    for a, b in zip((*kv.k, *kv.v), (*expected_kv.k, *expected_kv.v), strict=True):
        torch.testing.assert_close(a, b)  # nothing else is written


def test_a_padded_chain_is_the_same() -> None:
    executor = GraphExecutor(small_network())
    batch, counts = texts([1, 3]), torch.tensor([5, 3])
    kv, padded_kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert isinstance(kv, TorchKV) and isinstance(padded_kv, TorchKV)
    for cache in (*kv.k, *padded_kv.k, *kv.v, *padded_kv.v):
        cache.fill_(7.0)
    expected = executor.run_chain(batch, kv, counts)
    static = StaticBatch(Rung(16, 8, 8), BlockTables(8, 6, torch.device("cpu")), BLOCK_SIZE)
    static.fill(batch)
    padded = torch.nn.functional.pad(counts, (0, 6), value=1)
    found = executor._chain_by_ops(static.batch, padded_kv, padded, 5, None, None, None)
    assert_same_chains(found, expected, counts)
    for a, b in zip((*kv.k, *kv.v), (*padded_kv.k, *padded_kv.v), strict=True):
        torch.testing.assert_close(a, b)


def test_a_pass_may_follow_one_that_nobody_has_seen_the_end_of() -> None:
    """Its tokens are those that the other one says, from where they are."""
    executor = GraphExecutor(small_network())
    kv, other = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    first = ragged([([3, 1, 4], 0, [0, 1]), ([1, 5], 0, [2, 3])], all_logits=False)
    known = executor.run(first, other).argmax.tolist()
    expected = executor.run(ragged([([known[0]], 3, [0, 1]), ([known[1]], 2, [2, 3])]), other)
    started = executor.start(first, kv)
    answer = started.match(Guesses.of([((), (), False)] * 2), None)
    rows = [Follower(0, 3, 0, 0, array("i", (0, 1)), True), Follower(1, 2, 0, 0, array("i", (2, 3)), True)]
    found = executor.start(following(Followers.of(rows, executor.device, BLOCK_SIZE, executor.vocab_size), answer, None), kv)
    assert started.finish().argmax.tolist() == known
    assert torch.equal(found.finish().argmax, expected.argmax)
    torch.testing.assert_close(found.finish().logits, expected.logits)


class _Wide(TorchDispatchMode):
    """What reads a whole row of scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2 and args[0].shape[1] == self.width and not func.is_view:
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("vocab_size", "is_found_again"), [(None, False), (97, False), (120, False), (60, True)])
def test_what_a_pass_has_found_is_not_looked_for_again(vocab_size: int | None, is_found_again: bool) -> None:
    """A vocabulary is long: each op over it costs a launch and a way through memory in every step of every chain."""
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(1)).bfloat16()
    top, argmax = logits.max(-1)

    def compute(*_: object) -> Computed:
        return Computed(argmax, top.float(), logits, {})

    choosing = Choosing.of(None, 97, vocab_size)
    width = choosing.width if is_found_again else 97
    assert width is not None
    with torch.inference_mode(), _Wide(width) as wide:
        found = device_chain.chain(compute, texts([0, 1, 2, 3]), torch.ones(4, dtype=torch.int64), 1, choosing, 64)
    scores = logits[:, :width].float()
    assert found.token_ids[:, 0].tolist() == scores.argmax(-1).tolist()
    torch.testing.assert_close(found.confidence[:, 0], torch.softmax(scores, -1).amax(-1))
    assert wide.ops == [*["max"] * is_found_again, "sub", "exp_", "sum"]


@pytest.mark.parametrize("best", [torch.inf, -torch.inf, torch.nan])
def test_scores_that_are_not_finite_are_no_confidence(best: float) -> None:
    logits = torch.full((4, 97), best)
    top, argmax = logits.max(-1)
    draws = ChainDraws(torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64))
    for drawing in (None, draws):
        found = device_chain.chain(
            lambda *_: Computed(argmax, top, logits, {}), texts([0, 1, 2, 3]), torch.ones(4, dtype=torch.int64), 1,
            Choosing.of(None, 97, None), 64, draws=drawing,
        )
        assert bool(found.confidence.isnan().all())
