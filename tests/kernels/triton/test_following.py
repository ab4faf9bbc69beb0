"""The pass behind a step, laid out by the kernel, against the reference."""

from array import array

import pytest
import torch
from following_rows import followers, random_followers
from paged_batches import assert_same_batch as same
from triton_interpreter import DEVICE

from foretoken.kernels.following import Follower, laid_out
from foretoken.kernels.triton import following


@pytest.mark.parametrize("seed", range(24))
def test_it_is_what_the_reference_lays_out(seed: int) -> None:
    step, rows, guesses = random_followers(seed, most_rows=6 if seed % 8 else 40)
    found = following.laid_out(followers(rows, DEVICE), step.answer.to(DEVICE), guesses.to(DEVICE))
    same(found, laid_out(followers(rows), step.answer, guesses))


def test_rows_that_failed_strange_ids_long_chains_and_none_at_all() -> None:
    rows = [
        Follower(1, 5, 1, 100, array("i", range(40)), False),
        Follower(0, 3, 0, 32, array("i", range(50, 70)), True),
        Follower(2, 7, 0, 0, array("i", (4, 5)), False),
    ]
    answer = torch.tensor([[0, -1, 0, 0, 0], [2, 9, 8, 0, 1], [1, 60, 0, 0, 0]], dtype=torch.int32)
    guesses = torch.arange(-60, 140).view(2, 100)
    same(following.laid_out(followers(rows, DEVICE), answer.to(DEVICE), guesses.to(DEVICE)), laid_out(followers(rows), answer, guesses))
    plain = [rows[2], Follower(1, 6, 0, 0, array("i", (8, 9)), True)]
    same(following.laid_out(followers(plain, DEVICE), answer.to(DEVICE), None), laid_out(followers(plain), answer, None))
