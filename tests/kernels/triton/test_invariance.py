"""A whole network in batch-invariant mode: a token's scores are the same bits in any batch, chunk and chain."""

import pytest
import torch
from decoding import ragged
from small_networks import random_weights, small_program
from torch import Tensor
from triton_interpreter import DEVICE
from variants import slow_but

from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.triton_steps import TritonKernels

Row = tuple[list[int], int, list[int]]  # tokens, how many are in the cache, blocks


@pytest.mark.parametrize("family", slow_but(["llama", "youtu"], ["llama", "youtu", "ministral3", "hunyuan", "cohere2", "gpt_oss"]))
def test_scores_do_not_depend_on_what_else_runs(family: str):
    """And are those of the reference."""
    program = small_program(family, hidden_size=64, intermediate_size=96, vocab_size=320)
    kernels = TritonKernels(is_batch_invariant=True)
    network = TorchExecutor(program, random_weights(program), torch.float32, device=DEVICE, kernels=kernels)
    reference = TorchExecutor(program, random_weights(program), torch.float32)
    tokens = torch.randint(320, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks, others = [5, 2, 9], [[7, 1], [3, 8]]

    def scores(passes: list[list[Row]]) -> Tensor:
        """Logits of the first row's tokens."""
        kv = network.allocate(12, 4)
        found: list[Tensor] = []
        for rows in passes:
            output = network.run(ragged(rows), kv)
            assert output.logits is not None
            found.append(output.logits[: len(rows[0][0])].cpu())
        return torch.cat(found)

    whole = scores([[(tokens, 0, blocks)]])
    in_chunks = scores([[(tokens[:7], 0, blocks)], [(tokens[7:8], 7, blocks)], [(tokens[8:], 8, blocks)]])
    in_company = scores(
        [
            [(tokens[:3], 0, blocks), ([4, 5, 6, 7, 8], 0, others[0])],
            [(tokens[3:11], 3, blocks), ([9], 5, others[0]), ([1, 2], 0, others[1])],
            [(tokens[11:], 11, blocks)],
        ]
    )
    assert torch.equal(in_chunks, whole)
    assert torch.equal(in_company, whole)
    torch.testing.assert_close(whole, reference.run(ragged([(tokens, 0, blocks)]), reference.allocate(12, 4)).logits, rtol=1e-4, atol=1e-4)
