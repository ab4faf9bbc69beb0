"""Recurrent networks of Triton kernels beside the reference: guesses accepted and rejected, op by op and as graphs."""

import pytest
import torch
from recurrent_rows import scores_of_two, small_cache, two_lives
from small_networks import small_network

from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import Executor, RaggedBatch
from foretoken.kernels.static_batch import Ladder
from foretoken.kernels.torch_kv import TorchKV

FAMILIES = ("qwen3_5", "lfm2", "granite_hybrid")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.12}  # of the norm of all scores; narrow ones of the reference differ by 0.05


def check(executor: Executor, expected: torch.Tensor, dtype: torch.dtype, passes: int = 1) -> TorchKV:
    """Each token whose ancestors are the text's has the scores that it has in the text, however often a pass is run."""
    kv = small_cache(executor)
    assert isinstance(kv, TorchKV)

    def run(batch: RaggedBatch) -> torch.Tensor:
        logits = None
        for _ in range(passes):
            logits = executor.run(batch, kv).logits
        assert logits is not None
        return logits

    for found, scores in two_lives(run, kv, expected):
        assert float((found - scores).norm() / scores.norm()) < TOLERANCE[dtype]
    return kv


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_change_nothing(family: str, dtype: torch.dtype, device: str) -> None:
    from foretoken.kernels.triton_steps import TritonKernels

    expected = scores_of_two(small_network(family, dtype))
    check(small_network(family, dtype, device, TritonKernels()), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_go_on_from_states(gpu: str, family: str, dtype: torch.dtype) -> None:
    network = small_network(family, dtype, gpu)
    expected = scores_of_two(small_network(family, dtype))
    captured, eager = GraphExecutor(network), GraphExecutor(network, Ladder(()))
    caches = [check(executor, expected, dtype, passes=2) for executor in (captured, eager)]
    assert captured.captured.num_graphs > 1
    for found, wanted in zip(caches[0].states, caches[1].states, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < TOLERANCE[dtype], "padding changes a state"
