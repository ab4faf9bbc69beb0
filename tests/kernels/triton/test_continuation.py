"""Where chains go on, laid out by the kernel, against the reference: all of it, padding too."""

from array import array

import pytest
import torch
from continuing import Step, ways
from paged_batches import assert_same_batch as same
from triton_interpreter import DEVICE

from foretoken.kernels.continuation import Continuation, laid_out
from foretoken.kernels.triton import continuation


@pytest.mark.parametrize("seed", range(24))
def test_it_is_what_the_reference_lays_out(seed: int) -> None:
    step = Step.random(seed, most_rows=6 if seed % 8 else 300)  # more rows than a program adds up at once
    same(continuation.laid_out(ways(step.rows, DEVICE), step.answer.to(DEVICE)), laid_out(ways(step.rows), step.answer))


def test_rows_that_failed_strange_tokens_and_long_drafts() -> None:
    rows = [
        Continuation(1, 5, 2, 1, 0, array("i", (1, 2, 3)), 0, 3),
        Continuation(0, 3, 200, 2, 7, array("i", range(60)), 1, 900),
        Continuation(2, 7, 0, 0, 3, array("i", (4, 5)), 0, 2),
    ]
    answer = torch.zeros(3, 403, dtype=torch.int32)
    answer[0, :202] = torch.arange(202)
    answer[0, 0], answer[1, 1] = 201, -1
    answer[2, :2] = torch.tensor([1, 60])
    for most in (1000, 220):
        same(continuation.laid_out(ways(rows, DEVICE, most), answer.to(DEVICE)), laid_out(ways(rows, max_model_len=most), answer))
