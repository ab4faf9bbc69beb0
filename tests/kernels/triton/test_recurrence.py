"""The kernels of recurrent layers beside the reference: every kind of row at once, what is written and what is left alone."""

import dataclasses
import math

import pytest
import torch
from recurrent_batches import MOST_GUESSES, SLOTS_OF_A_ROW, Row, random_rows, recurrent_batch
from triton_interpreter import DEVICE
from variants import slow_but

from foretoken.kernels.layout import RaggedBatch, StateLayerSpec, StateRoom
from foretoken.kernels.ops import CausalConv, GatedDelta, Op, StateSpace
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor, on_device
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.triton_steps import TritonKernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}  # of the norm of all that is compared
ROWS = 7


def conv_program(width: int, taps: int, bias: str, function: str) -> Program:
    op = CausalConv(("x",), ("y",), 0, "conv", bias, function)
    weights = {"conv": (width, 1, taps), **({bias: (width,)} if bias else {})}
    return _program(op, weights, {"x": width}, StateLayerSpec((taps - 1) * width, width))


def delta_program(num_k: int, num_v: int, k_dim: int, v_dim: int, is_packed: bool) -> Program:
    qkv, values = 2 * num_k * k_dim + num_v * v_dim, num_v * v_dim
    inputs = {"x": qkv, "z": values, **({"b|a": 2 * num_v} if is_packed else {"b": num_v, "a": num_v})}
    op = GatedDelta(tuple(inputs), ("y",), 0, num_k, num_v, k_dim, v_dim, "decay", "step", "norm", 1e-3)  # pyright: ignore[reportArgumentType]
    weights = {"decay": (num_v,), "step": (num_v,), "norm": (v_dim,)}
    return _program(op, weights, inputs, StateLayerSpec(values * k_dim, qkv + 2 * num_v))


def space_program(num_k: int, num_v: int, k_dim: int, v_dim: int, least: float, most: float) -> Program:
    vkq, values = 2 * num_k * k_dim + num_v * v_dim, num_v * v_dim
    op = StateSpace(("x", "a"), ("y",), 0, num_k, num_v, k_dim, v_dim, "decay", "step", "skip", least, most)
    weights = {name: (num_v,) for name in ("decay", "step", "skip")}
    return _program(op, weights, {"x": vkq, "a": num_v}, StateLayerSpec(values * k_dim, vkq + num_v))


def _program(op: Op, weights: dict[str, tuple[int, ...]], inputs: dict[str, int], layer: StateLayerSpec) -> Program:
    return Program((op,), weights, (), {}, 0, 64, ("x", "y"), "y", "", None, inputs, state_layers=(layer,))


def check(program: Program, batch: RaggedBatch, dtype: torch.dtype, room: StateRoom | None, seed: int = 0) -> None:
    """Outputs of the rows' tokens and every state and guess are the reference's; what the reference leaves alone is untouched."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {name: random(*shape) for name, shape in program.weights.items()}
    inputs = {name: random(len(batch.token_ids), width) for name, width in program.inputs.items()}
    reference = TorchExecutor(program, weights, dtype, device="cpu")
    triton = TorchExecutor(program, weights, dtype, device=DEVICE, kernels=TritonKernels())
    caches = reference.allocate(1, 4, room), triton.allocate(1, 4, room)
    assert isinstance(caches[1], TorchKV)
    walls = [_behind_a_wall(tensors) for tensors in (caches[1].states, caches[1].guesses)]
    before: list[torch.Tensor] = []
    for own, other in zip(_kept(caches[0]), _kept(caches[1]), strict=True):
        own.copy_(random(*own.shape))
        other.copy_(own)
        before.append(own.clone())
    expected = reference.run(batch, caches[0], (-1,), inputs).hidden[-1]
    found = triton.compute(on_device(batch, triton.device), caches[1], (-1,), inputs).hidden[-1].cpu()
    tokens = int(batch.query_start_loc[-1])
    assert bool(found.isfinite().all()), "padding must harm nobody"
    assert isinstance(program.ops[0], CausalConv) or not found[tokens:].any(), "padding reads nothing"
    _same(found[:tokens], expected[:tokens], dtype)
    for own, other, old in zip(_kept(caches[0]), _kept(caches[1]), before, strict=True):
        _same(other.cpu(), own, dtype)
        assert torch.equal(other.cpu()[own == old], old[own == old]), "something is written that should be left alone"
    assert all(bool((wall == 7).all()) for wall in walls), "slot -1 is written"


def _behind_a_wall(tensors: list[torch.Tensor]) -> torch.Tensor:
    """What lies in front of the only one from now on, where slot -1 would be."""
    (own,) = tensors
    room = torch.full((1 + len(own), *own.shape[1:]), 7.0, dtype=own.dtype, device=own.device)
    tensors[0] = room[1:]
    return room[0]


def _kept(kv: TorchKV) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.states[0], kv.guesses[0]


def _same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.float() - expected.float()).norm() <= TOLERANCE[dtype] * (expected.float().norm() + 1e-3)


ROOM = StateRoom(SLOTS_OF_A_ROW * ROWS, MOST_GUESSES)


CASES = {
    "conv": conv_program(40, 4, "", "silu"), "wide conv": conv_program(300, 3, "bias", ""),
    "conv of two taps": conv_program(17, 2, "bias", "gelu_tanh"), "conv of the token alone": conv_program(24, 1, "", "sigmoid"),
    "long conv": conv_program(24, 8, "", "silu"), "delta": delta_program(2, 4, 16, 16, True),
    "delta of one head": delta_program(1, 1, 8, 8, False), "odd delta": delta_program(1, 3, 12, 20, False),
    "narrow delta": delta_program(2, 2, 24, 5, True), "space": space_program(1, 2, 8, 8, 0.0, math.inf),
    "odd space": space_program(2, 4, 12, 5, 0.2, 1.5), "space of wide values": space_program(1, 3, 16, 24, 0.0, 0.1),
}
FAST = {"conv", "conv of two taps", "narrow delta", "odd space"}
VARIANTS = [(name, dtype, seed) for name in CASES for dtype in TOLERANCE for seed in range(4)]


@pytest.mark.parametrize("variant", slow_but([(name, torch.float32, 0) for name in FAST], VARIANTS), ids=str)
def test_equals_the_reference(variant: tuple[str, torch.dtype, int]) -> None:
    name, dtype, seed = variant
    check(CASES[name], recurrent_batch(random_rows(seed, ROWS), padding=3, empty_rows=2), dtype, ROOM, seed)


PROGRAMS = {"conv": conv_program(24, 4, "", "silu"), "delta": delta_program(1, 1, 8, 8, True), "space": space_program(1, 1, 8, 8, 0.0, 2.0)}
each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@each_program
def test_rows_without_states_begin_here(program: Program) -> None:
    rows = [Row([1] * 5, 0, 5), Row([1] * 2, 0, 2), Row([], 0, 0), Row([1], 0, 1)]
    for room in (None, ROOM):
        check(program, dataclasses.replace(recurrent_batch(rows, padding=2), states=None), torch.float32, room)


@each_program
def test_nothing_but_padding(program: Program) -> None:
    for states in (True, False):
        batch = recurrent_batch([], padding=5, empty_rows=3)
        check(program, batch if states else dataclasses.replace(batch, states=None), torch.float32, ROOM)


@pytest.mark.parametrize("name", slow_but(["conv", "space"], PROGRAMS))
def test_as_many_guesses_as_there_can_be(name: str) -> None:
    """The last bits of a mask are negative numbers."""
    tree = [node - 1 if node % 21 else node // 2 - 1 for node in range(64)]
    batch = recurrent_batch(
        [Row([0] * 65, 3, 1, 0, 1, 0, tree), Row([0] * 65, 64, 1, 2, 3, 0b1011 << 60), Row([0], 3, 1, 4, 5, 1, None, (2, 6))],
        padding=1,
    )
    check(PROGRAMS[name], batch, torch.float32, StateRoom(8, 64))


@each_program
def test_nothing_is_copied_where_there_is_no_slot(program: Program) -> None:
    rows = [Row([0] * 4, 5, 3, 0, 1, 0b11, None, (place, slot)) for place, slot in ((4, -1), (6, -1), (6, 2))]
    for row in rows:
        check(program, recurrent_batch([row]), torch.float32, StateRoom(3, 2))


@each_program
def test_causal_guesses_may_stand_before_a_tree(program: Program) -> None:
    batch = recurrent_batch([Row([0] * 9, 4, 5, 0, 1, 0, [-1, -1, 0, 1])])
    assert batch.states is not None
    batch.states.num_known.fill_(3)
    check(program, batch, torch.float32, StateRoom(2, 6))


@each_program
def test_a_row_says_the_same_bits_whatever_runs_beside_it(program: Program) -> None:
    """And whether its tokens are known, guessed in a chain or in a tree, or were accepted."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(*shape, generator=generator) for name, shape in program.weights.items()}
    inputs = {name: torch.randn(8, width, generator=generator).bfloat16() for name, width in program.inputs.items()}
    triton = TorchExecutor(program, weights, torch.bfloat16, device=DEVICE, kernels=TritonKernels())
    kv = triton.allocate(1, 4, StateRoom(6, 6))

    def run(rows: list[Row], order: list[int], padding: int = 0) -> torch.Tensor:
        given = {name: tensor[order + [0] * padding] for name, tensor in inputs.items()}
        return triton.compute(on_device(recurrent_batch(rows, padding), triton.device), kv, (-1,), given).hidden[-1].cpu()

    whole = run([Row([0] * 8, 0, 8)], [*range(8)])
    beside = run([Row([0] * 3, 0, 3), Row([0] * 8, 0, 8)], [5, 6, 7, *range(8)], padding=2)
    chain = run([Row([0] * 8, 0, 3, -1, 0)], [*range(8)])
    tree = run([Row([0] * 8, 0, 3, -1, 1, 0, [-1, -1, 1, 0, 2])], [0, 1, 2, 7, 3, 4, 6, 5])
    accepted = run([Row([0] * 2, 6, 2, 0, 2, 0b111), Row([0] * 2, 6, 2, 1, 3, 0b10110)], [6, 7, 6, 7])
    assert torch.equal(beside[3:11], whole) and torch.equal(chain, whole)
    assert torch.equal(tree[[0, 1, 2, 4, 5, 7]], whole[:6])
    assert torch.equal(accepted[:2], whole[6:]) and torch.equal(accepted[2:], whole[6:])
