from collections.abc import Sequence

import torch

from foretoken.proposers.base import DraftContext, DraftRow, Draw, Feedback
from foretoken.proposers.drafting import Feed, OwnCache, batch_lists

TABLE = [3, 1, 7, 5, 2, 8]


def row(request_id: str, length: int, computed: int | None = None, ceiling: int = 4, filled: int = 0) -> DraftRow:
    after = length if computed is None else computed
    return DraftRow(request_id, list(range(100, 100 + length)), 1, after, ceiling, 0, TABLE, (filled,), Draw(0.0, 0, 0))


def plan(cache: OwnCache, *rows: DraftRow, budget: int = 1000) -> list[tuple[str, int, int, int]]:
    return [(f.row.request_id, f.start, f.stop, f.count) for f in _plan(cache, rows, budget)]


def _plan(cache: OwnCache, rows: Sequence[DraftRow], budget: int = 1000) -> list[Feed]:
    return cache.plan(DraftContext(rows, budget, 4))


def step(cache: OwnCache, r: DraftRow, guess: list[int], accepted: list[int], emitted: list[int]) -> tuple[int, int, int]:
    (feed,) = _plan(cache, [r])
    cache.fed([feed], [guess[:-1]])
    cache.observe(Feedback([r.request_id], [0], [len(guess)], [accepted], [emitted], [False]))
    cache.check()
    return feed.start, feed.stop, feed.count


def test_after_full_acceptance_two_tokens_are_missing_after_a_rejection_one() -> None:
    cache = OwnCache(1000, 4, 1000)
    assert step(cache, row("r", 5), [1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3, 4, 9]) == (0, 5, 4)
    assert step(cache, row("r", 10), [1, 2, 3, 4], [0], [1, 9]) == (8, 10, 4)
    assert step(cache, row("r", 12), [1, 2, 3, 4], [], [9]) == (11, 12, 4)
    assert step(cache, row("r", 13), [1], [0], [1, 9]) == (12, 13, 4)
    assert step(cache, row("r", 15), [1], [0], [1, 9]) == (13, 15, 4)


def test_a_cut_guess_that_the_target_says_itself_is_read_again() -> None:
    """Its place was given up when the draft was cut: someone else may have written there."""
    cache = OwnCache(1000, 4, 1000)
    step(cache, row("r", 5), [1, 2, 3, 4], [0], [1, 2])
    assert plan(cache, row("r", 7)) == [("r", 6, 7, 4)]


def test_what_a_call_of_its_own_has_read_is_not_read_again() -> None:
    """Guesses of before are no longer in place: others were fed there."""
    cache = OwnCache(1000, 4, 1000)
    assert cache.num_known("r") is None
    (feed,) = _plan(cache, [row("r", 5)])
    cache.fed([feed], [[100, 101, 102]])
    cache.went_on("r", 12)
    cache.observe(Feedback(["r"], [0], [3], [[0, 1]], [[100, 101, 9]], [False]))
    assert cache.num_known("r") == 12
    assert plan(cache, row("r", 14)) == [("r", 12, 14, 4)]


def test_a_path_through_anothers_tree_confirms_nothing_that_was_moved() -> None:
    cache = OwnCache(1000, 4, 1000)
    step(cache, row("r", 5), [1, 2, 3, 4], [0, 2], [1, 2, 9])
    assert plan(cache, row("r", 8)) == [("r", 6, 8, 4)]


def test_guesses_of_a_step_that_was_never_reported_are_given_up() -> None:
    cache = OwnCache(1000, 4, 1000)
    (feed,) = _plan(cache, [row("r", 5)])
    cache.fed([feed], [[100, 101, 102]])
    assert plan(cache, row("r", 8), budget=0) == []
    cache.observe(Feedback(["r"], [0], [2], [[0, 1]], [[100, 101, 9]], [False]))  # of a later draft, not this drafter's
    assert plan(cache, row("r", 11)) == [("r", 5, 11, 4)]


def test_the_oldest_catch_up_first_and_who_is_behind_guesses_nothing() -> None:
    cache = OwnCache(1000, 4, 1000)
    assert plan(cache, row("a", 3), budget=0) == []
    rows = row("b", 6), row("a", 6)
    feeds = _plan(cache, rows, budget=10)
    assert [(f.index, f.row.request_id, f.start, f.stop, f.count) for f in feeds] == [(0, "b", 0, 4, 0), (1, "a", 0, 6, 4)]
    cache.fed(feeds, [[], [1, 2, 3]])
    assert cache.filled(DraftContext(rows, 10, 4)) == {(0, "b"): 4, (0, "a"): 6}
    assert plan(cache, row("b", 6), budget=10) == [("b", 4, 6, 4)]


def test_prompt_chunks_are_followed_and_ceiling_0_keeps_up() -> None:
    cache = OwnCache(1000, 4, 1000)
    r = row("r", 10, computed=4)
    cache.fed(_plan(cache, [r]), [[]])
    assert plan(cache, row("r", 10, computed=8)) == [("r", 4, 8, 0)]
    assert plan(cache, row("r", 10, ceiling=0)) == [("r", 4, 10, 0)]


def test_filled_blocks_are_not_read_again_until_forgotten() -> None:
    cache = OwnCache(1000, 4, 1000)
    assert plan(cache, row("r", 10, filled=8)) == [("r", 8, 10, 4)]
    cache.forget("r")
    cache.forget("r")
    assert plan(cache, row("r", 10)) == [("r", 0, 10, 4)]
    assert plan(cache, row("s", 8, filled=8)) == [("s", 7, 8, 4)]  # something must be read to guess from


def test_the_drafters_own_length_is_respected() -> None:
    cache = OwnCache(12, 4, 1000)
    assert plan(cache, row("a", 9)) == [("a", 0, 9, 3)]
    assert plan(cache, row("b", 11)) == [("b", 0, 11, 1)]
    assert plan(cache, row("c", 12)) == []
    assert plan(cache, row("d", 40, computed=4)) == []
    cache.check()


def test_the_batch_of_feeds() -> None:
    feeds = [
        Feed(0, row("a", 6), 3, 6, 4),  # its chain is fed at places 6, 7, 8
        Feed(1, row("b", 9), 0, 2, 0),
        Feed(2, row("c", 5), 4, 5, 1),
    ]
    batch = batch_lists(feeds, block_size=4).batch()
    assert batch.token_ids.tolist() == [103, 104, 105, 100, 101, 104]
    assert batch.positions.tolist() == [3, 4, 5, 0, 1, 4]
    assert batch.slot_mapping.tolist() == [3 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 3 * 4 + 0, 3 * 4 + 1, 1 * 4 + 0]
    assert batch.query_start_loc.tolist() == [0, 3, 5, 6]
    assert batch.seq_lens.tolist() == [6, 2, 5]
    assert batch.block_tables.tolist() == [[3, 1, 7], [3, 0, 0], [3, 1, 0]]
    assert batch.num_causal.tolist() == [3, 2, 1]
    assert batch.logits_indices.tolist() == [2, 5]
    assert (batch.query_start_loc.dtype, batch.slot_mapping.dtype, batch.token_ids.dtype) == (torch.int32, torch.int64, torch.int64)
