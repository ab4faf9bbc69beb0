"""A small Gemma 4 and an assistant that looks at its cache, both of random weights: for tests of networks that write nothing."""

from pathlib import Path
from typing import Any, cast

import torch
from small_networks import small_program
from transformers import Gemma4TextConfig

from foretoken.kernels.fuse import fuse
from foretoken.kernels.layout import ChainOutput, Draws, Executor, KVTensors, RaggedBatch
from foretoken.kernels.program import Program
from foretoken.proposers.assistant_program import draft_program
from foretoken.proposers.loading import TargetView

WIDTH, VOCAB, MAX_MODEL_LEN = 32, 97, 64
BLOCK_SIZE, NUM_BLOCKS = 16, 8
LENGTHS, TABLES = [1, 20, 37], [[1, 0, 0], [3, 2, 0], [6, 4, 7]]
COUNTS = torch.tensor([4, 1, 3])
DRAWS = Draws(torch.tensor([0.9, 0.0, 1.2]), torch.tensor([11, 12, 13]), torch.tensor(LENGTHS) + 1, VOCAB)


def programs() -> tuple[Program, Program]:
    """(the target's, the assistant's)"""
    target = small_program("gemma4")
    embedding = "model.embed_tokens.weight"
    view = TargetView(
        Path(), {}, cast(Any, None), 4, WIDTH, VOCAB, MAX_MODEL_LEN, embedding, embedding, 1.0, 1.0, None, target.kv_layers
    )
    layers: dict[str, Any] = {
        **{"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_kv_shared_layers": 2},
        **{"num_attention_heads": 4, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    }
    return target, fuse(draft_program(Gemma4TextConfig(**layers), view, (0, 1)))


def fill(kv: KVTensors, device: str = "cpu") -> None:
    """With random keys and values in every slot."""
    generator, num_slots = torch.Generator().manual_seed(3), NUM_BLOCKS * BLOCK_SIZE
    for i, layer in enumerate(programs()[0].kv_layers):
        k, v = (torch.randn(num_slots, layer.num_kv_heads, dim, generator=generator) for dim in (layer.k_dim, layer.v_dim))
        kv.write(i, torch.arange(num_slots, device=device), k.to(device), v.to(device))


def one_each() -> RaggedBatch:
    """A token behind each text, at its position, which sees the text."""
    last = [(table[(n - 1) // BLOCK_SIZE], (n - 1) % BLOCK_SIZE) for n, table in zip(LENGTHS, TABLES, strict=True)]
    count, every = len(LENGTHS), torch.arange(len(LENGTHS))
    return RaggedBatch(
        token_ids=5 + 7 * every, positions=torch.tensor(LENGTHS),
        slot_mapping=torch.tensor([block * BLOCK_SIZE + place for block, place in last]),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32), seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_tables=torch.tensor(TABLES, dtype=torch.int32), num_causal=torch.ones(count, dtype=torch.int32),
        tree_mask=torch.zeros(count, dtype=torch.int64), logits_indices=every, full_logits=every[:0], block_size=BLOCK_SIZE,
    )


def states(device: str = "cpu") -> dict[str, torch.Tensor]:
    """What the assistant reads beside the tokens."""
    return {"feature": torch.randn(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(1)).to(device)}


def run(executor: Executor, draws: Draws | None, device: str = "cpu") -> ChainOutput:
    """Over a cache with something in every slot, which stays as it is."""
    kv, every = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), torch.arange(NUM_BLOCKS * BLOCK_SIZE, device=device)
    fill(kv, device)
    layers = range(len(programs()[0].kv_layers))
    before = [kv.gather(layer, every) for layer in layers]
    output = executor.run_chain(one_each(), kv, COUNTS, draws, states(device))
    for layer, known in zip(layers, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kv.gather(layer, every), known, strict=True))
    return output


def assert_alike(found: ChainOutput, expected: ChainOutput) -> None:
    for chain, count in enumerate(COUNTS.tolist()):
        assert found.token_ids[chain, :count].tolist() == expected.token_ids[chain, :count].tolist()
        torch.testing.assert_close(found.confidence[chain, :count], expected.confidence[chain, :count], rtol=1e-4, atol=1e-5)
