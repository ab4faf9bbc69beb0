"""A recurrent network of Triton kernels beside the reference: guesses accepted and rejected, op by op and as graphs."""

from __future__ import annotations

import pytest
import torch
from recurrent_batches import BLOCK_SIZE
from recurrent_networks import NUM_BLOCKS, ROOM, recurrent_network, scores_of_texts, tell

from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import Executor, RaggedBatch
from foretoken.kernels.static_batch import Ladder
from foretoken.kernels.torch_kv import TorchKV

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of the norm of all scores


def check(executor: Executor, expected: list[torch.Tensor], dtype: torch.dtype, passes: int = 1) -> TorchKV:
    """Each token whose ancestors are the text's has the scores that it has in the text, however often a pass is run."""
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE, ROOM)
    assert isinstance(kv, TorchKV)

    def run(batch: RaggedBatch) -> torch.Tensor:
        logits = None
        for _ in range(passes):
            logits = executor.run(batch, kv).logits
        assert logits is not None
        return logits

    for logits, chapter in tell(run, kv.move):
        flat, wanted = zip(*((token, expected[text][place]) for token, text, place in chapter.right), strict=True)
        found, scores = logits[list(flat)], torch.stack(wanted)
        assert float((found - scores).norm() / scores.norm()) < TOLERANCE[dtype]
    return kv


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_guesses_change_nothing(dtype: torch.dtype, device: str) -> None:
    from foretoken.kernels.triton_steps import TritonKernels

    expected = scores_of_texts(recurrent_network(dtype))
    check(recurrent_network(dtype, device, TritonKernels()), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_graphs_go_on_from_states(gpu: str, dtype: torch.dtype) -> None:
    network = recurrent_network(dtype, gpu)
    expected = scores_of_texts(recurrent_network(dtype))
    captured, eager = GraphExecutor(network), GraphExecutor(network, Ladder(()))
    caches = [check(executor, expected, dtype, passes=2) for executor in (captured, eager)]
    assert captured.captured.num_graphs > 1
    for found, wanted in zip(caches[0].states, caches[1].states, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < TOLERANCE[dtype], "padding changes a state"
