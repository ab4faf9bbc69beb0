"""Products by blocks on the native executor: each block is the product of its own run of columns, to the bit."""

from dataclasses import replace

import pytest
import torch
from native_ops import ISAS, After, each_isa, linear, packed, prepare
from paged_batches import BLOCK_SIZE, Row, batch_of
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.native_abi import Precision
from foretoken.kernels.native_library import ISAS as NAMES
from foretoken.kernels.ops import BlockLinear, Op
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor

EXECUTIONS = {
    Precision.FLOAT32: Execution(torch.float32), Precision.BFLOAT16: Execution(torch.bfloat16),
    Precision.INT8: Execution(torch.bfloat16, quantization="int8"), Precision.INT4: Execution(torch.bfloat16, quantization="int4"),
}
each_precision = pytest.mark.parametrize("precision", EXECUTIONS, ids=lambda p: p.name.lower())  # that whole networks have
ROWS = [1, 4, 5, 17, 40]  # prepared by each thread for itself, or together
SHAPES = [(3, 10, 48, 16), (5, 64, 16, 32), (2, 96, 64, 80), (8, 32, 256, 16)]  # groups, and of each inputs, columns between and outputs

pytestmark = pytest.mark.usefixtures("three_threads")


def two_products(groups: int, inputs: int, inner: int, outputs: int) -> tuple[Program, dict[str, Tensor]]:
    """What lies between them need not be as wide as floats."""
    ops: tuple[Op, ...] = BlockLinear(("x",), ("a",), "first", groups), BlockLinear(("a",), ("y",), "second", groups)
    shapes = {"first": (groups * inner, inputs), "second": (groups * outputs, inner)}
    generator = torch.Generator().manual_seed(inputs)
    weights = {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}
    return Program(ops, shapes, (), {}, 0, 64, ("y",), "y", "", None, {"x": groups * inputs}), weights


def given(rows: int, width: int) -> Tensor:
    """Runs of columns of very different size: each must have its own scale."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * torch.logspace(0, 2, width)


def run(executor: NativeExecutor | TorchExecutor, x: Tensor) -> Tensor:
    batch = batch_of([Row([0] * len(x), 0, [1, 2, 3])])
    batch = replace(batch, logits_indices=torch.arange(0), full_logits=torch.arange(0))
    return executor.run(batch, executor.allocate(4, BLOCK_SIZE), (0,), {"x": x}).hidden[0]


@each_isa
@each_precision
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_block_is_a_product_of_its_own(shape: tuple[int, int, int, int], precision: Precision, isa: int) -> None:
    program, weights = two_products(*shape)
    groups, width = shape[0], shape[0] * shape[1]
    executor = NativeExecutor(program, weights, EXECUTIONS[precision], NAMES[isa])

    def product(x: Tensor, weight: Tensor) -> Tensor:
        w = packed([weight], precision)
        return linear(isa, w, prepare(isa, x.contiguous(), precision, w.struct.inputs), len(weight), After())[0]

    for rows in ROWS:
        x = given(rows, width)
        expected = x
        for name in ("first", "second"):
            parts = zip(expected.chunk(groups, 1), weights[name].chunk(groups), strict=True)
            expected = torch.cat([product(*part) for part in parts], 1)
        assert torch.equal(run(executor, x), expected), f"{rows} rows"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_those_of_the_torch_executor(shape: tuple[int, int, int, int]) -> None:
    program, weights = two_products(*shape)
    x = given(21, shape[0] * shape[1])
    actual = run(NativeExecutor(program, weights, EXECUTIONS[Precision.FLOAT32]), x)
    torch.testing.assert_close(actual, run(TorchExecutor(program, weights, torch.float32), x), rtol=1e-4, atol=1e-3)


@each_precision
def test_rows_have_the_same_bits_alone(precision: Precision) -> None:
    program, weights = two_products(4, 40, 32, 48)
    executor = NativeExecutor(program, weights, EXECUTIONS[precision], NAMES[ISAS[-1]])
    x = given(40, 160)
    together = run(executor, x)
    assert torch.equal(torch.cat([run(executor, row[None]) for row in x]), together)
    assert torch.equal(torch.cat([run(executor, part) for part in x.split([3, 30, 7])]), together)
