"""Recurrent layers run natively: what the torch executor computes, and a token's bits are the same however its sequence comes to it."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from native_ops import each_isa
from paged_batches import BLOCK_SIZE
from recurrent_rows import VOCAB, StateRow, lives, qwen3_5_program, state_batch
from small_networks import random_weights
from torch import Tensor

from foretoken.kernels import native
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor, KVTensors, RaggedBatch, StateLayerSpec, StateRoom
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_library import ISAS as ISA_NAMES
from foretoken.kernels.ops import Activation, ArgMax, CausalConv, Embed, GatedDelta, GatherRows, Linear, Op, StateSpace
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("two_threads")
FLOAT32, BFLOAT16 = Execution(torch.float32), Execution(torch.bfloat16)
EXECUTIONS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": Execution(torch.bfloat16, quantization="int8", kv_cache="int8")}
NUM_BLOCKS, MOST_GUESSES = 64, 64
BEST = ArgMax(("logits",), ("best", "top"))


def recurrent_program(
    taps: int = 4, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32), function: str = "silu", fused: bool = True
) -> Program:
    """A convolution and a gated delta layer between an embedding and a head. heads: key and value heads; dims: of keys and of values."""
    (num_k, num_v), (k_dim, v_dim) = heads, dims
    values, width = num_v * v_dim, 2 * num_k * k_dim + num_v * v_dim
    weights = {"embed": (VOCAB, width), "conv": (width, 1, taps), "bias": (width,), "head": (VOCAB, values)}
    weights |= {"z": (values, width), "b": (num_v, width), "a": (num_v, width), "decay": (num_v,), "step": (num_v,), "norm": (v_dim,)}
    gates: tuple[Op, ...] = tuple(Linear(("x",), (name,), (name,)) for name in "zba")
    if fused:
        gates = (gates[0], Linear(("x",), ("ba",), ("b", "a")))
    delta = GatedDelta(("c", "z", "ba"), ("y",), 1, num_k, num_v, k_dim, v_dim, "decay", "step", "norm", 1e-3)
    ops = (
        Embed((), ("x",), "embed"), *gates, CausalConv(("x",), ("c",), 0, "conv", "bias", function),
        delta if fused else replace(delta, inputs=("c", "z", "b", "a")),
        GatherRows(("y",), ("rows",)), Linear(("rows",), ("logits",), ("head",)), BEST,
    )
    states = StateLayerSpec((taps - 1) * width, width), StateLayerSpec(values * k_dim, width + 2 * num_v)
    return Program(ops, weights, (), {}, VOCAB, 512, ("x",), "y", "logits", BEST, state_layers=states)


def state_space_program(heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32), most: float = math.inf) -> Program:
    """A convolution and a state space with gates without a function behind it: one over a product of two weights, one over two buffers."""
    (num_k, num_v), (k_dim, v_dim) = heads, dims
    values, width = num_v * v_dim, 2 * num_k * k_dim + num_v * v_dim
    weights = {"embed": (VOCAB, width), "conv": (width, 1, 4), "bias": (width,), "a": (num_v, width), "head": (VOCAB, values)}
    weights |= {"decay": (num_v,), "step": (num_v,), "skip": (num_v,), "gate": (values, values), "up": (values, values)}
    ops = (
        Embed((), ("x",), "embed"), Linear(("x",), ("a",), ("a",)), CausalConv(("x",), ("c",), 0, "conv", "bias", "silu"),
        StateSpace(("c", "a"), ("y",), 1, num_k, num_v, k_dim, v_dim, "decay", "step", "skip", 0.4, most),
        Linear(("y",), ("gate|up",), ("gate", "up")), Activation(("gate|up",), ("g",), "", gated=True),
        Activation(("g", "y"), ("gy",), "", gated=True),
        GatherRows(("gy",), ("rows",)), Linear(("rows",), ("logits",), ("head",)), BEST,
    )
    states = StateLayerSpec(3 * width, width), StateLayerSpec(values * k_dim, width + num_v)
    return Program(ops, weights, (), {}, VOCAB, 512, ("x",), "gy", "logits", BEST, state_layers=states)


def texts_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def logits_of(executor: Executor, batch: RaggedBatch, kv: KVTensors) -> Tensor:
    logits = executor.run(batch, kv).logits
    assert logits is not None
    return logits


PROGRAMS = {
    "qwen3.5": qwen3_5_program,
    "one head": lambda: recurrent_program(heads=(1, 1), dims=(128, 128)),
    "odd sizes": lambda: recurrent_program(taps=3, heads=(3, 3), dims=(17, 41), function=""),
    "three value heads a key head": lambda: recurrent_program(taps=2, heads=(2, 6), dims=(5, 16), fused=False),
    "taps of the token alone": lambda: recurrent_program(taps=1, dims=(33, 70)),
    "state space": state_space_program,
    "state space of odd sizes": lambda: state_space_program((1, 3), (17, 41), most=0.9),
}


@each_isa
@pytest.mark.parametrize("name", PROGRAMS)
def test_passes_are_those_of_the_torch_executor(name: str, isa: int) -> None:
    """Wrong guesses too, and whatever was accepted, copied, or gone back to."""
    program = PROGRAMS[name]()
    weights = random_weights(program, seed=3)
    executors: tuple[Executor, ...] = (
        NativeExecutor(program, weights, FLOAT32, isa=ISA_NAMES[isa]),
        TorchExecutor(program, weights, torch.float32),
    )
    caches = [executor.allocate(NUM_BLOCKS, BLOCK_SIZE, StateRoom(9, MOST_GUESSES)) for executor in executors]
    rng = random.Random(isa)
    for state_pass in lives(texts_of(rng, 70, 40, 1), rng, NUM_BLOCKS, MOST_GUESSES):
        actual, expected = (logits_of(executor, state_pass.batch, kv) for executor, kv in zip(executors, caches, strict=True))
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)
        for kv in caches:
            kv.move(*state_pass.moves)


def test_bfloat16_is_near_float32() -> None:
    program = qwen3_5_program()
    weights = random_weights(program, seed=3)
    batch = state_batch([StateRow(text, 0, [i, i + 4], -1, -1) for i, text in enumerate(texts_of(random.Random(1), 20, 30))])
    narrow, wide = (logits_of(executor, batch, executor.allocate(8, BLOCK_SIZE)) for executor in (
        NativeExecutor(program, weights, BFLOAT16), TorchExecutor(program, weights, torch.float32)
    ))
    assert (narrow - wide).square().mean().sqrt() < 0.05 * wide.square().mean().sqrt()


@pytest.mark.parametrize("name, execution", [*(("qwen3.5", execution) for execution in EXECUTIONS), ("state space", "int8")])
@each_isa
def test_a_token_has_its_bits_however_its_sequence_comes(name: str, execution: str, isa: int) -> None:
    program = PROGRAMS[name]()
    executor = NativeExecutor(program, random_weights(program, seed=3), EXECUTIONS[execution], isa=ISA_NAMES[isa])
    rng = random.Random(5)
    texts = texts_of(rng, 150, 60, 30)
    expected = [_one_by_one(executor, text) for text in texts]
    for trial in range(8):
        rng = random.Random(trial)
        kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE, StateRoom(9, MOST_GUESSES))
        for state_pass in lives(texts, rng, NUM_BLOCKS, rng.choice([4, 20, MOST_GUESSES]), rng.choice([1, 5, 100])):
            native.set_threads(rng.choice([1, 2, 3]))
            logits = logits_of(executor, state_pass.batch, kv)
            assert logits.isfinite().all()
            for at, text, place in state_pass.right:
                assert torch.equal(logits[at], expected[text][place])
            if rng.random() < 0.3:  # no source is written
                assert torch.equal(logits_of(executor, state_pass.batch, kv), logits)
            kv.move(*state_pass.moves)


def _one_by_one(executor: NativeExecutor, text: list[int]) -> Tensor:
    """[len(text), VOCAB] of a text computed alone, one token a pass."""
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE, StateRoom(2, 0))
    blocks = list(range(len(text) // BLOCK_SIZE + 1))
    rows = [StateRow([token], i, blocks, (i + 1) % 2 if i else -1, i % 2) for i, token in enumerate(text)]
    return torch.cat([logits_of(executor, state_batch([row]), kv) for row in rows])


def test_rows_without_states_begin_at_place_0() -> None:
    program = qwen3_5_program()
    executor = NativeExecutor(program, random_weights(program, seed=3), BFLOAT16)
    text = texts_of(random.Random(2), 40)[0]
    batch = replace(state_batch([StateRow(text, 0, [0, 1, 2], -1, -1)]), states=None)
    assert torch.equal(logits_of(executor, batch, executor.allocate(4, BLOCK_SIZE)), _one_by_one(executor, text))


def test_a_row_that_is_not_finite_harms_nobody() -> None:
    program = recurrent_program()
    weights = random_weights(program, seed=3)
    weights["embed"][7] = float("nan")
    executor = NativeExecutor(program, weights, FLOAT32)
    kv = executor.allocate(1, BLOCK_SIZE, StateRoom(3, 4))
    rows = [StateRow([1, 2], 0, [0], -1, 0, guesses=[(7, -1), (3, -1)]), StateRow([7, 2], 0, [0], -1, 1)]
    first = logits_of(executor, state_batch(rows), kv)
    assert first[[0, 1, 3]].isfinite().all() and not first[[2, 4, 5]].isfinite().any()
    behind = logits_of(executor, state_batch([StateRow([4], 3, [0], 0, 2, accepted=[1])]), kv)
    assert torch.equal(behind[0], _one_by_one(executor, [1, 2, 3, 4])[3])


def test_a_cache_takes_what_its_slots_are_said_to_take() -> None:
    program = recurrent_program(taps=4, heads=(2, 4), dims=(16, 32))
    executor = NativeExecutor(program, random_weights(program), BFLOAT16)
    width = 2 * 2 * 16 + 4 * 32
    conv, delta = (3 * width, width), (4 * 16 * 32, 2 * 16 + 4 * (32 + 2))  # of guesses: keys, values, decay and strength
    for num_guesses in (0, 1, 16):
        wanted = sum(state + num_guesses * -(-guess // 16) * 16 for state, guess in (conv, delta))
        assert executor.state_slot_bytes(num_guesses) == 4 * wanted
    kv = executor.allocate(1, BLOCK_SIZE, StateRoom(5, 3))
    assert sum(memory.nbytes for memory in kv._states) == 5 * executor.state_slot_bytes(3)
    assert executor.allocate(1, BLOCK_SIZE).states is None


def test_what_the_cache_has_no_room_for_is_refused() -> None:
    program = recurrent_program()
    executor = NativeExecutor(program, random_weights(program), FLOAT32)
    row = StateRow([1], 0, [0], -1, 0, guesses=[(2, -1), (3, 0)])
    with pytest.raises(RuntimeError, match="keeps no states"):
        executor.run(state_batch([row]), executor.allocate(1, BLOCK_SIZE))
    with pytest.raises(RuntimeError, match="more guesses than the cache keeps"):
        executor.run(state_batch([row]), executor.allocate(1, BLOCK_SIZE, StateRoom(1, 1)))
    with pytest.raises(RuntimeError, match="first new token is a guess"):
        executor.run(state_batch([replace(row, known=[])]), executor.allocate(1, BLOCK_SIZE, StateRoom(1, 2)))
    assert "more than 16" in str(native.supports(recurrent_program(taps=17), FLOAT32))


def test_such_programs_are_supported() -> None:
    assert native.supports(qwen3_5_program(), BFLOAT16) is None


@pytest.mark.parametrize("kind", EXECUTIONS)
def test_chains_go_on_from_states(kind: str) -> None:
    """What the network would say token by token, of chains of different lengths beside a row that is only read; and the states behind
    what was read stay as they were."""
    program = qwen3_5_program()
    executor = NativeExecutor(program, random_weights(program, seed=3), EXECUTIONS[kind])
    rng = random.Random(5)
    texts, counts = texts_of(rng, 20, 7, 12), [5, 0, 3]
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE, StateRoom(12, 0))
    firsts = [StateRow(text[:4], 0, [3 * i, 3 * i + 1], -1, 4 * i) for i, text in enumerate(texts)]
    executor.run(state_batch(firsts), kv)
    rows = [StateRow(text[4:], 4, [3 * i, 3 * i + 1], 4 * i, 4 * i + 1) for i, text in enumerate(texts)]
    batch = state_batch(rows)
    assert batch.states is not None
    ends = torch.tensor([int(batch.query_start_loc[i + 1]) - 1 for i, count in enumerate(counts) if count])
    chain_slots = torch.tensor([[4 * i, 4 * i + 2] for i in range(3)], dtype=torch.int32)  # the source, which is read by then, and another
    batch = replace(
        batch, logits_indices=ends, full_logits=torch.empty(0, dtype=torch.int64), states=replace(batch.states, chain_slots=chain_slots)
    )
    wanted = torch.tensor([count for count in counts if count])
    for run_chain in (executor.run_chain, partial(run_chain_by_steps, executor)):
        executor.run(state_batch(firsts), kv)
        chains = run_chain(batch, kv, wanted).token_ids
        for chain, count, (i, text) in zip(chains.tolist(), wanted.tolist(), ((0, texts[0]), (2, texts[2])), strict=True):
            said = [*text]
            for _ in range(count):
                row = StateRow(said, 0, [40, 41], -1, -1)
                said.append(int(logits_of(executor, state_batch([row]), kv)[-1].argmax()))
            assert chain[:count] == said[len(text) :]
            known = logits_of(executor, state_batch([StateRow([1], len(text), [3 * i, 3 * i + 1], 4 * i + 1, -1)]), kv)
            assert torch.equal(known[-1], logits_of(executor, state_batch([StateRow([*text, 1], 0, [40, 41], -1, -1)]), kv)[-1])
