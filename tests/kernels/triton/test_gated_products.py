"""Whole networks whose few rows are gated where they are multiplied, beside the same networks in two launches."""

import pytest
import torch
from decoding import ragged
from small_networks import small_network
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels import triton_steps
from foretoken.kernels.execution import Quantization
from foretoken.kernels.layout import FINAL, ForwardOutput
from foretoken.kernels.triton import linear_int4
from foretoken.kernels.triton_steps import TritonKernels

LAYERS = 2


class InTwo(TritonKernels):
    def gated_step(self, op: object, activation: object, bind: object) -> None:
        return None


@pytest.fixture
def gated_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each activation had that was a launch of its own."""
    found: list[int] = []
    gate = triton_steps.gated_activation

    def counting(packed: Tensor, up: Tensor | None, function: str) -> Tensor:
        found.append(len(packed))
        return gate(packed, up, function)

    for module in (triton_steps, linear_int4):
        monkeypatch.setattr(module, "gated_activation", counting)
    return found


@pytest.mark.parametrize(
    ("quantization", "dtype", "tolerance"),
    [(None, torch.float32, 1e-5), (None, torch.bfloat16, 2e-2), ("fp8", torch.bfloat16, 2e-2), ("int4", torch.float32, 1e-5)],
)
def test_scores_are_those_of_two_launches(
    quantization: Quantization | None, dtype: torch.dtype, tolerance: float, gated_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more rows too, whose activation is a launch of its own."""
    monkeypatch.setattr(linear_int4, "SKINNY_ROWS", 4)

    def scores(kind: type[TritonKernels], num_tokens: int) -> ForwardOutput:
        kernels = kind(quantization=quantization, skinny_rows=4)
        network = small_network(
            "llama", dtype, DEVICE, kernels, hidden_size=64, intermediate_size=80, vocab_size=320, num_hidden_layers=LAYERS
        )
        return network.run(ragged([(list(range(num_tokens)), 0, [2, 0, 1])]), network.allocate(3, 4), (1, FINAL))

    for num_tokens, launches in [(3, 0), (9, LAYERS)]:
        in_two = scores(InTwo, num_tokens)
        gated_rows.clear()
        found = scores(TritonKernels, num_tokens)
        assert gated_rows == [num_tokens] * launches
        assert found.logits is not None and in_two.logits is not None
        for some, others in [(found.logits, in_two.logits), *((found.hidden[at], in_two.hidden[at]) for at in (1, FINAL))]:
            assert float((some.float() - others.float()).norm() / others.float().norm()) < tolerance


def test_what_does_not_depend_on_the_batch_stays_in_two(gated_rows: list[int]) -> None:
    """Many rows are gated by a launch of their own: few must be, too."""
    network = small_network("llama", device=DEVICE, kernels=TritonKernels(is_batch_invariant=True), num_hidden_layers=LAYERS)
    network.run(ragged([([1, 2, 3], 0, [0])]), network.allocate(1, 4))
    assert gated_rows == [3] * LAYERS
