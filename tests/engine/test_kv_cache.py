"""Random operations against `check()`, and the rules that a check cannot see."""

import random
import tracemalloc

import pytest

from foretoken.engine.kv_cache import KVCache


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_keep_the_books_straight(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice([1, 2, 4, 16])
    kv = KVCache(dice.randint(4, 40), size, "m", prefix_caching=dice.random() < 0.8)
    texts: dict[str, list[int]] = {}
    for number in range(400):
        act = dice.random()
        if act < 0.25 or not texts:
            text = [dice.randrange(2) for _ in range(dice.randint(1, 30))]
            request_id = f"r{number}"
            cached = kv.admit(request_id, text, dice.choice(["", "s"]))
            assert cached % size == 0 and cached < len(text)
            texts[request_id] = text
        elif act < 0.75:
            request_id = dice.choice(list(texts))
            text, table = texts[request_id], kv.tables[request_id]
            before = list(table.blocks)
            if kv.reserve(request_id, min(table.num_committed + dice.randint(1, 20), 200)):
                target = min(len(text), len(table.blocks) * size)
                kv.commit(request_id, text, dice.randint(table.num_committed, max(table.num_committed, target)))
                text.extend(dice.randrange(2) for _ in range(dice.randint(0, 3)))
            else:
                assert list(table.blocks) == before, "a refused reservation changed the table"
        elif act < 0.85:
            request_id = dice.choice(list(texts))
            kv.reserve_up_to(request_id, kv.tables[request_id].num_committed + dice.randint(0, 40))
            kv.roll_back(request_id)
        else:
            request_id = dice.choice(list(texts))
            kv.free(request_id)
            del texts[request_id]
        kv.check()
    for request_id in texts:
        kv.free(request_id)
    kv.check()
    assert kv.pool.num_free == kv.pool.num_blocks


def committed(kv: KVCache, request_id: str, tokens: list[int]) -> None:
    kv.admit(request_id, tokens)
    assert kv.reserve(request_id, len(tokens))
    kv.commit(request_id, tokens, len(tokens))


def test_a_hit_never_covers_the_last_token() -> None:
    kv = KVCache(16, 4)
    committed(kv, "a", list(range(8)))
    assert kv.admit("b", list(range(8))) == 4
    assert kv.admit("c", list(range(9))) == 8


def test_uncommitted_places_are_never_found() -> None:
    kv = KVCache(16, 4)
    kv.admit("a", list(range(8)))
    assert kv.reserve("a", 8)
    kv.commit("a", list(range(8)), 7)
    kv.check()
    assert kv.admit("b", list(range(9))) == 4


def test_a_digest_alone_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.engine import kv_cache

    monkeypatch.setattr(kv_cache, "_digest", lambda parent, tokens: b"the same for all")
    kv = KVCache(16, 4)
    committed(kv, "a", [1, 2, 3, 4, 5])
    assert kv.admit("b", [9, 9, 9, 9, 9]) == 0


def test_the_least_recently_used_prefix_goes_first() -> None:
    kv = KVCache(4, 2)
    for request_id, first in (("old", 1), ("new", 5)):
        committed(kv, request_id, [first, first + 1, first + 2, first + 3])
        kv.free(request_id)
    committed(kv, "other", [7, 7, 7])  # two blocks: those of "old"
    assert kv.admit("b", [5, 6, 7, 8, 9]) == 4
    assert kv.admit("a", [1, 2, 3, 4, 5]) == 0


def test_drafters_are_credited_for_the_blocks_they_filled() -> None:
    kv = KVCache(16, 4)
    committed(kv, "a", list(range(12)))
    kv.mark_filled("a", 1, 9)  # two full blocks
    kv.admit("b", list(range(13)))
    assert (kv.num_filled("b", 0), kv.num_filled("b", 1)) == (0, 8)


def test_a_filled_block_behind_an_unfilled_one_hides_nothing() -> None:
    """Two requests compute the same text at once, so the chain's blocks come from both of them."""
    kv, tokens = KVCache(16, 4), list(range(13))
    for request_id in ("a", "b"):
        kv.admit(request_id, tokens)
        assert kv.reserve(request_id, 13)
    kv.commit("a", tokens, 4)
    kv.commit("b", tokens, 12)  # its first block stays anonymous; the next two are known
    kv.mark_filled("b", 0, 12)
    kv.admit("c", tokens)
    assert kv.num_filled("c", 0) == 0  # the first block is that of "a"
    kv.mark_filled("c", 0, 12)
    kv.admit("d", tokens)
    assert kv.num_filled("d", 0) == 12


def test_a_guess_takes_what_is_free_and_no_more() -> None:
    kv = KVCache(3, 4)
    kv.admit("a", [1, 2, 3])
    assert kv.reserve_up_to("a", 100) == 12
    assert not kv.reserve("a", 13)
    kv.roll_back("a", keep=5)
    assert len(kv.block_table("a")) == 2


def test_what_lies_ahead_is_kept_until_a_row_looks_less_far() -> None:
    kv = KVCache(8, 4)
    kv.admit("r", [1, 2, 3])
    kv.reserve("r", 3)
    kv.look_ahead("r", 3, 7)
    assert len(kv.block_table("r")) == 3
    kv.commit("r", [1, 2, 3], 3)
    assert len(kv.block_table("r")) == 3
    kv.look_ahead("r", 3, 1)
    kv.roll_back("r")
    assert len(kv.block_table("r")) == 1
    kv.look_ahead("r", 3, 100)  # no more than there is
    assert len(kv.block_table("r")) == 8
    kv.look_ahead("r", 3, 0)
    kv.roll_back("r")
    assert len(kv.block_table("r")) == 1
    kv.check()


@pytest.mark.parametrize("block_size", [16, 256])
def test_what_is_known_of_a_block_takes_four_bytes_a_token(block_size: int) -> None:
    """Beside some that do not depend on its size."""
    kv = KVCache(64, block_size)
    tracemalloc.start()
    try:
        committed(kv, "a", [1000 * i for i in range(64 * block_size)])
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 64 * (4 * block_size + 600)
