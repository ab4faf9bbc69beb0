"""The batches in which blocks are filled."""

import pytest
import torch

from foretoken.proposers.base import DraftRow, Draw
from foretoken.proposers.block_guessing import block_batch
from foretoken.proposers.drafting import Feed


def feed(index: int, tokens: list[int], count: int, table: list[int], first: int = 0) -> Feed:
    row = DraftRow(str(index), tokens, len(tokens), len(tokens), count, 0, table, (0,), Draw(0.0, 0, 0))
    return Feed(index, row, len(tokens) - 1, len(tokens) - 1, count, first)


def test_masks_follow_the_last_known_token() -> None:
    batch = block_batch([feed(0, [5, 6, 7], 2, [4, 9, 1]), feed(1, [8], 1, [2, 3])], 4, mask_token=99, from_anchor=False, is_causal=False)
    assert batch.token_ids.tolist() == [7, 99, 99, 8, 99]
    assert batch.positions.tolist() == [2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [18, 19, 36, 8, 9]
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert batch.seq_lens.tolist() == [5, 2]
    assert batch.block_tables.tolist() == [[4, 9], [2, 0]]
    assert batch.num_causal.tolist() == [0, 0]
    assert batch.tree_mask.tolist() == [7, 7, 7, 3, 3]  # all see all
    assert batch.logits_indices.tolist() == [1, 2, 4]
    assert batch.full_logits.tolist() == [0, 1, 2]
    assert batch.first_places is None


def test_guesses_from_the_anchor_need_a_mask_less() -> None:
    batch = block_batch([feed(0, [5, 6, 7], 2, [4, 9], first=1)], 4, mask_token=99, from_anchor=True, is_causal=True)
    assert batch.token_ids.tolist() == [7, 99]
    assert batch.logits_indices.tolist() == [0, 1]
    assert batch.num_causal.tolist() == [2]
    assert batch.tree_mask.tolist() == [0, 0]
    assert batch.first_places is not None and batch.first_places.tolist() == [1]


@pytest.mark.parametrize("count", [62, 63])
def test_the_widest_block_fills_an_int64(count: int) -> None:
    mask = block_batch([feed(0, [5], count, list(range(20)))], 4, 99, from_anchor=False, is_causal=False).tree_mask
    assert len(mask) == count + 1
    assert all(((mask >> bit) & 1).eq(1).all() for bit in range(count + 1))
    assert torch.equal(mask >> (count + 1), torch.zeros_like(mask)) or count == 63
