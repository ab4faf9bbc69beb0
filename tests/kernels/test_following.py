"""The pass that a device lays out behind a step is the one that the host would make if it knew what the target has said."""

from array import array

import pytest
import torch
from following_rows import followers, random_followers, what_the_host_would_make
from paged_batches import assert_same_batch

from foretoken.kernels.following import Follower, following


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_batch_of_what_was_said(seed: int) -> None:
    step, rows, guesses = random_followers(seed)
    found, expected = following(followers(rows), step.answer, guesses), what_the_host_would_make(rows, step.emitted, guesses)
    assert_same_batch(found, expected)


def test_without_guesses_each_row_is_its_newest_token() -> None:
    rows = [Follower(1, 5, 0, 0, array("i", (1, 2)), False), Follower(0, 3, 0, 0, array("i", (4, 7)), True)]
    batch = following(followers(rows), torch.tensor([[2, 9, 8, 0, 1], [1, 6, 0, 0, 0]], dtype=torch.int32), None)
    assert batch.token_ids.tolist() == [6, 8] and batch.positions.tolist() == [5, 4]
    assert batch.slot_mapping.tolist() == [2 * 4 + 1, 7 * 4] and batch.full_logits.tolist() == [1]


def test_a_row_that_failed_and_ids_that_cannot_be_read_are_read_as_something_that_can() -> None:
    rows = [Follower(0, 2, 0, 2, array("i", (3, 4)), False), Follower(1, 2, 1, 0, array("i", (5,)), False)]
    answer = torch.tensor([[0, -1, 0, 0, 0], [1, 60, 0, 0, 0]], dtype=torch.int32)
    batch = following(followers(rows), answer, torch.tensor([[-7, 1 << 40], [0, 0]]))
    assert batch.token_ids.tolist() == [0, 0, 49, 49] and batch.positions.tolist() == [2, 3, 4, 2]
