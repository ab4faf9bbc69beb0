"""A table that is both embedding and head lies in a GPU's memory once, whoever reads it, unless the head is made narrow."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from decoding import ragged
from small_networks import EMBEDDING, HEAD, between_tables, random_weights, small_program
from torch import Tensor
from triton_interpreter import DEVICE
from young_heap import young_heap

from foretoken.kernels.execution import Execution, Quantization
from foretoken.kernels.footprint import torch_weight_bytes
from foretoken.kernels.int4 import Int4Matrix
from foretoken.kernels.layout import Executor
from foretoken.kernels.ops import Linear
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.torch_ops import MATRIX, ROWS
from foretoken.kernels.weights import bind_program

VOCAB, WIDTH = 1232, 64  # no other weight is as large
TABLE_BYTES = VOCAB * WIDTH * 2
OWN_BYTES = (WIDTH + 1) * WIDTH * 2  # of a drafter
ON_GPU = Execution(torch.bfloat16, prefer_native=False, device="cuda" if DEVICE == "cuda" else "cpu:0")


def network(tied: bool, quantization: Quantization | None) -> tuple[Program, Executor]:
    program = small_program("llama", hidden_size=WIDTH, vocab_size=VOCAB, tie_word_embeddings=tied)
    return program, bind_program(program, random_weights(program), replace(ON_GPU, quantization=quantization))


def a_drafter(head: str) -> Program:
    return between_tables(VOCAB, WIDTH, (EMBEDDING, head), head)


def never() -> Tensor:
    raise AssertionError("it is not there")


@pytest.fixture(scope="module", autouse=True)
def none_but_ours() -> Iterator[None]:
    with young_heap():
        yield


def tables() -> set[int]:
    """Where bfloat16 tables lie, of whatever shape tensors see them in."""
    gc.collect()
    found = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), Tensor) and x.dtype == torch.bfloat16]
    return {storage.data_ptr() for storage in found if storage.nbytes() == TABLE_BYTES}


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_tied_head_is_the_embedding(quantization: Quantization | None) -> None:
    before = tables()
    program, executor = network(True, quantization)
    rows = executor.bank.get((EMBEDDING,), ROWS, torch.bfloat16, never)
    matrix = executor.bank.get((EMBEDDING,), MATRIX, torch.bfloat16, never)
    assert rows.shape == (VOCAB, WIDTH) and matrix.shape == (WIDTH, VOCAB)
    assert rows.data_ptr() == matrix.data_ptr() and tables() - before == {rows.data_ptr()}

    untied, other = network(False, quantization)
    assert len(tables() - before) == 3
    foretold = [torch_weight_bytes(program, replace(ON_GPU, quantization=quantization)) for program in (program, untied)]
    assert foretold[1] - foretold[0] == TABLE_BYTES and other.weight_bytes == executor.weight_bytes


def test_the_scores_are_those_of_a_copy() -> None:
    program, executor = network(True, None)
    batch = ragged([([3, 1, 4, 1, 5], 0, [1, 0])])
    expected = TorchExecutor(program, random_weights(program), torch.float32)
    found = [network.run(batch, network.allocate(2, 4)).logits for network in (executor, expected)]
    assert found[0] is not None and found[1] is not None
    assert (found[0].cpu() - found[1]).norm() < 0.05 * found[1].norm()


def test_a_narrow_head_is_made_beside_the_embedding() -> None:
    before = tables()
    program, executor = network(True, "int4")
    rows = executor.bank.get((EMBEDDING,), ROWS, torch.bfloat16, never)
    assert tables() - before == {rows.data_ptr()}
    head = executor.bank.get((EMBEDDING,), MATRIX, "int4", lambda: never())
    assert isinstance(head, Int4Matrix)
    products = sum(Int4Matrix.num_bytes(program.weights[name]) for op in program.ops if isinstance(op, Linear) for name in op.weights)
    norms = sum(shape[0] for shape in program.weights.values() if len(shape) == 1)
    assert torch_weight_bytes(program, replace(ON_GPU, quantization="int4")) == products + TABLE_BYTES + 2 * norms


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_drafters_read_the_targets_tables(tied: bool, quantization: Quantization | None) -> None:
    """Drafters' own products may be narrower than the target's."""
    _, executor = network(tied, None)
    before = tables()
    program = a_drafter(EMBEDDING if tied else HEAD)
    own = {"fc.weight": torch.randn(WIDTH, WIDTH), "norm.weight": torch.ones(WIDTH)}
    drafter = bind_program(program, own, replace(ON_GPU, quantization=quantization, narrow_head=True), executor.bank)
    assert drafter.bank is executor.bank and tables() == before
    assert torch_weight_bytes(program, ON_GPU) == OWN_BYTES


def test_a_drafter_of_its_own_table_keeps_that_once() -> None:
    before = tables()
    program = replace(a_drafter(EMBEDDING), shared=frozenset())
    target = network(True, None)[1]
    drafter = bind_program(program, random_weights(program), ON_GPU, target.bank)
    assert drafter.bank is target.bank and len(tables() - before) == 2, "the target's and its own"
    assert torch_weight_bytes(program, ON_GPU) == TABLE_BYTES + OWN_BYTES
