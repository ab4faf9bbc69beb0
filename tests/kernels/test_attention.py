import random
from dataclasses import replace

import pytest
import torch
from attention_reference import attention_reference
from ragged_batches import BATCHES, BLOCK_SIZE, NUM_BLOCKS, ragged

from foretoken.kernels.attention import AttentionPlan, paged_attention
from foretoken.kernels.layout import KVLayerSpec
from foretoken.kernels.torch_kv import TorchKV


def filled_cache(generator: torch.Generator, k_dim: int = 8, v_dim: int = 8, dtype: torch.dtype = torch.float32) -> TorchKV:
    kv = TorchKV((KVLayerSpec(2, k_dim, v_dim),), NUM_BLOCKS, BLOCK_SIZE, dtype)
    kv.k[0].normal_(generator=generator)
    kv.v[0].normal_(generator=generator)
    return kv


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 5.0), (7, 5.0)])
@pytest.mark.parametrize("padding", [0, 3])
def test_equals_the_reference(name: str, window: int | None, softcap: float | None, padding: int):
    generator = torch.Generator().manual_seed(1)
    batch = ragged(BATCHES[name], generator)
    if padding:
        batch = ragged(BATCHES[name], generator, padded_to=len(batch.token_ids) + padding)
    num_tokens = len(batch.token_ids)
    kv = filled_cache(generator)
    q, k, v = torch.randn(num_tokens, 6, 8, generator=generator), *torch.randn(2, num_tokens, 2, 8, generator=generator)
    out = paged_attention(q, k, v, kv, 0, AttentionPlan(batch), 0.3, window, softcap)
    real = batch.slot_mapping >= 0
    assert torch.equal(kv.k[0][batch.slot_mapping[real]], k[real])
    assert torch.equal(kv.v[0][batch.slot_mapping[real]], v[real])
    expected = attention_reference(q, kv, 0, batch, 0.3, window, softcap)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[real], expected[real], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed: int):
    """Bits may point ahead, as in a bidirectional block, and leading places without entries are never read."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows: list[tuple[int, int, list[int]]] = []
    for _ in range(rng.randint(1, 7)):
        parents = [rng.randint(-1, i - 1) for i in range(rng.choice([0, 0, 3, 9, 64]))]
        rows.append((rng.randrange(160), rng.choice([0, 1, 1, rng.randrange(5), rng.randrange(200)]), parents))
    batch = ragged(rows, generator, in_order=rng.random() < 0.5)
    if seed % 3 == 0:
        sizes = [len(parents) for _, causal, parents in rows for _ in range(causal + len(parents))]
        whole = torch.tensor([-1 if size == 64 else (1 << size) - 1 for size in sizes])
        batch = replace(batch, tree_mask=torch.where(batch.tree_mask != 0, whole, 0))
    kv = filled_cache(generator, v_dim=rng.choice([4, 8]))
    if seed % 2:
        firsts = [rng.choice([0, context, rng.randint(0, context), min(context, 1)]) for context, _, _ in rows]
        batch = replace(batch, first_places=torch.tensor(firsts, dtype=torch.int32))
        for row, first in enumerate(firsts):
            places = torch.arange(first)
            slots = batch.block_tables[row][places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
            kv.k[0][slots] = kv.v[0][slots] = torch.nan
    num_tokens, heads = len(batch.token_ids), rng.choice([4, 6])
    q, k = (torch.randn(num_tokens, count, 8, generator=generator) for count in (heads, 2))
    v = torch.randn(num_tokens, 2, kv.v[0].shape[-1], generator=generator)
    plan = AttentionPlan(batch)
    for window in (None, 1, 30, 400):
        out = paged_attention(q, k, v, kv, 0, plan, 0.3, window)
        torch.testing.assert_close(out, attention_reference(q, kv, 0, batch, 0.3, window), rtol=1e-5, atol=3e-6)


def test_attend_only_leaves_the_cache_alone():
    generator = torch.Generator().manual_seed(3)
    batch, kv = ragged([(5, 2, [])], generator), filled_cache(generator)
    before = kv.k[0].clone()
    q = torch.randn(2, 2, 8, generator=generator)
    out = paged_attention(q, None, None, kv, 0, AttentionPlan(batch), 1.0)
    assert torch.equal(kv.k[0], before)
    torch.testing.assert_close(out, attention_reference(q, kv, 0, batch, 1.0))


def test_bfloat16():
    generator = torch.Generator().manual_seed(4)
    kv = filled_cache(generator, dtype=torch.bfloat16)
    for name in ("mixed", "later chunk"):
        batch = ragged(BATCHES[name], generator)
        q, k, v = (torch.randn(len(batch.token_ids), h, 8, generator=generator).bfloat16() for h in (4, 2, 2))
        for softcap in (None, 5.0):
            out = paged_attention(q, k, v, kv, 0, AttentionPlan(batch), 0.3, 9, softcap)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, attention_reference(q, kv, 0, batch, 0.3, 9, softcap), rtol=0.02, atol=0.02)


def test_a_row_hardly_depends_on_the_other_rows():
    generator = torch.Generator().manual_seed(5)
    batch = ragged(BATCHES["mixed"], generator)
    kv = filled_cache(generator)
    q, k, v = (torch.randn(len(batch.token_ids), h, 8, generator=generator) for h in (4, 2, 2))
    together = paged_attention(q, k, v, kv, 0, AttentionPlan(batch), 0.3)
    for row in range(len(batch.seq_lens)):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        alone = replace(
            batch, token_ids=batch.token_ids[start:end], positions=batch.positions[start:end], slot_mapping=batch.slot_mapping[start:end],
            tree_mask=batch.tree_mask[start:end], query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=batch.seq_lens[row : row + 1], num_causal=batch.num_causal[row : row + 1],
            block_tables=batch.block_tables[row : row + 1],
        )
        out = paged_attention(q[start:end], None, None, kv, 0, AttentionPlan(alone), 0.3)
        torch.testing.assert_close(out, together[start:end], rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_row():
    generator = torch.Generator().manual_seed(6)
    batch = ragged([(30, 1, []), (25, 3, []), (27, 1, [])], generator)
    kv = filled_cache(generator)
    seen = torch.cat([torch.arange(int(b) * BLOCK_SIZE, int(b) * BLOCK_SIZE + BLOCK_SIZE) for b in batch.block_tables[1, :7]])
    unused = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    for row, seq_len in ((0, 31), (2, 28)):
        places = torch.arange(seq_len)
        unused[batch.block_tables[row][places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE] = False
    assert unused[seen].all()
    kv.k[0][unused] = torch.nan
    kv.v[0][unused] = torch.nan
    q = torch.randn(len(batch.token_ids), 4, 8, generator=generator)
    out = paged_attention(q, None, None, kv, 0, AttentionPlan(batch), 0.3)
    assert torch.isfinite(out[[0, 4]]).all()
    assert torch.isnan(out[1:4]).all()


def test_padding_inside_rows_changes_nothing_else():
    generator = torch.Generator().manual_seed(7)
    batch = ragged([(10, 1, []), (12, 1, []), (9, 3, [])], generator)
    kv = filled_cache(generator)
    q, k, v = (torch.randn(5, h, 8, generator=generator) for h in (4, 2, 2))
    padded = replace(batch, slot_mapping=batch.slot_mapping.clone())
    padded.slot_mapping[[0, 4]] = -1
    out = paged_attention(q, k, v, kv, 0, AttentionPlan(padded), 0.3)
    expected = attention_reference(q, kv, 0, batch, 0.3)
    torch.testing.assert_close(out[1:4], expected[1:4], rtol=1e-5, atol=2e-6)
    assert (out[[0, 4]] == 0).all()
