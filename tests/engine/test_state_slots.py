"""Seats and snapshots of recurrent states: which places get a copy, and which copies are found and given up."""

from foretoken.engine.kv_cache import KVCache
from foretoken.kernels.state_slots import NOWHERE, RowState, StateSlots

SIZE = 4


def cache(seats: int = 2, snapshots: int = 3) -> KVCache:
    return KVCache(64, SIZE, "m", states=StateSlots(seats, snapshots, SIZE))


def run(kv: KVCache, name: str, tokens: list[int], start: int, known: int, accepted: int = 0) -> RowState:
    """A pass over places start to known - 1, and accepted guesses behind them."""
    assert kv.reserve(name, known + accepted.bit_count())
    state = kv.row_state(name, start, known)
    assert state is not None and kv.row_state(name, start, known) == state, "asked again before the commit, the same is said"
    kv.commit(name, tokens, known + accepted.bit_count(), accepted)
    kv.check()
    return state


def test_a_pass_reads_one_slot_and_writes_the_other():
    kv, tokens = cache(), list(range(40))
    kv.admit("a", tokens[:3])
    first = run(kv, "a", tokens, 0, 3, accepted=0b101)
    second = run(kv, "a", tokens, 5, 6)
    third = run(kv, "a", tokens, 6, 7)
    assert first.source == NOWHERE and second.source == first.target and second.accepted == 0b101
    assert third.source == second.target and third.target == first.target and third.accepted == 0


def test_a_prompt_leaves_a_copy_that_the_same_prompt_can_use():
    kv, tokens = cache(), list(range(40))
    kv.admit("a", tokens[:9])
    copied = run(kv, "a", tokens, 0, 9)
    assert copied.copy_place == 8
    assert kv.admit("b", tokens[:9]) == 8
    assert run(kv, "b", tokens, 8, 9).source == copied.copy_slot
    kv.free("b")
    kv.free("a")
    kv.admit("c", tokens[:8])  # the last of 8 tokens has to be computed: what is known behind it helps nobody
    assert kv.tables["c"].num_committed == 0


def test_of_what_is_said_the_newest_full_block_has_a_copy():
    kv, tokens = cache(), list(range(40))
    kv.admit("a", tokens[:5])
    slots = [run(kv, "a", tokens, 0, 5)] + [run(kv, "a", tokens, place, place + 1) for place in range(5, 14)]
    assert [state.copy_place for state in slots] == [4, -1, -1, 8, -1, -1, -1, 12, -1, -1]
    kv.free("a")
    assert kv.admit("again", tokens[:14]) == 12
    kv.free("again")
    assert kv.admit("prompt", [*tokens[:5], 39]) == 4  # the prompt's own copy is still there ...
    kv.free("prompt")
    assert kv.admit("said", [*tokens[:9], 39]) == 4  # ... but not what the newest one has replaced


def test_a_block_that_guesses_complete_has_its_copy_in_the_pass_behind():
    kv, tokens = cache(), list(range(40))
    kv.admit("a", tokens[:6])
    run(kv, "a", tokens, 0, 6, accepted=0b111)
    assert run(kv, "a", tokens, 9, 10).copy_place == 8


def test_where_two_prompts_part_there_is_a_copy_for_the_third():
    kv, stem = cache(snapshots=8), list(range(100, 112))
    first, second, third = (stem + [tail] * 9 for tail in (1, 2, 3))
    kv.admit("a", first)
    run(kv, "a", first, 0, len(first))
    assert kv.admit("b", second) == 0  # keys and values of the stem are there, its state is not
    assert run(kv, "b", second, 0, len(second)).copy_place == len(stem)
    kv.free("a")
    assert kv.admit("c", third) == len(stem)


def test_the_least_recently_used_copy_goes_first_but_none_that_is_read():
    kv = cache(seats=3, snapshots=2)
    texts = [[10 * i + j for j in range(9)] for i in range(4)]
    for i in (0, 1):
        kv.admit(str(i), texts[i])
        run(kv, str(i), texts[i], 0, 9)
        kv.free(str(i))
    assert kv.admit("reader", texts[0]) == 8  # has not run yet: its copy must stay
    kv.admit("2", texts[2])
    run(kv, "2", texts[2], 0, 9)
    kv.free("2")
    assert kv.admit("1", texts[1]) == 0
    kv.free("1")
    run(kv, "reader", texts[0], 8, 9)


def test_without_a_seat_no_table_is_opened():
    kv = cache(seats=1)
    kv.admit("a", [1, 2, 3])
    assert not kv.has_seat and not kv.open_scratch("texts", 4)
    kv.free("a")
    assert kv.open_scratch("texts", 4)
    assert kv.row_state("texts", 0, 4) == RowState(NOWHERE, 0, 0)
    kv.scratch_passed("texts")
    kv.free("texts")
    kv.check()


def test_forgotten_prefixes_are_not_found_and_their_slots_are_free_again():
    kv, tokens = cache(snapshots=1), list(range(40))
    kv.admit("a", tokens[:9])
    run(kv, "a", tokens, 0, 9)
    assert kv.admit("b", tokens[:9]) == 8
    kv.forget_prefixes()
    kv.check()
    run(kv, "b", tokens, 8, 9)
    kv.free("a")
    kv.free("b")
    assert kv.admit("c", tokens[:9]) == 0
    assert run(kv, "c", tokens, 0, 9).copy_slot != NOWHERE


def test_another_requests_copy_is_not_given_up():
    kv, text = cache(seats=3), list(range(40))
    kv.admit("first", text[:13])
    assert run(kv, "first", text, 0, 13).copy_place == 12
    kv.admit("second", [*text[:5]])  # says the same from there on
    run(kv, "second", text, 0, 5)
    for place in range(5, 18):
        run(kv, "second", text, place, place + 1)
    kv.free("first")
    assert kv.admit("again", text[:13]) == 12


def test_a_piece_of_a_prompt_leaves_a_copy_where_it_ends():
    kv, text = cache(), list(range(40))
    kv.admit("a", text[:13])
    assert kv.reserve("a", 13)
    state = kv.row_state("a", 0, 8, is_last=False)
    assert state is not None and state.copy_place == 8
