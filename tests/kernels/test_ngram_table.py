"""The hash table of the n-gram cache, against a plain dict."""

import random

import numpy as np
import pytest
from ngram_tables import Runs, chain_of, made_up, next_of, table_of

from foretoken.kernels.ngram_table import MOST_N, NgramTable, _keys

LARGEST = 2**31 - 1


def texts(dice: random.Random, runs: Runs, vocab_size: int, count: int = 200) -> list[list[int]]:
    """Random ones, and others that end with a known run, or with one that is known but for a token."""
    known = list(runs)
    found: list[list[int]] = []
    for i in range(count):
        before = [dice.randrange(vocab_size) for _ in range(dice.randint(0, 4))]
        run = list(dice.choice(known)) if i % 3 else [dice.randrange(vocab_size)]
        if i % 3 == 1:
            run[dice.randrange(len(run))] = dice.randrange(vocab_size)
        found.append(before + run)
    return found


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 300, 2**15 + 3, 2**20])
@pytest.mark.parametrize("count", [1, 3, 40, 2000])
def test_it_says_what_a_dict_says(vocab_size: int, count: int) -> None:
    dice = random.Random(count * vocab_size)
    for max_n in (1, 3, MOST_N):
        runs = made_up(dice, count, max_n, vocab_size)
        table = table_of(runs, max_n)
        assert table.num_runs == len(runs) and table.max_n == max_n
        for run in runs:
            assert table.next(run) == next_of(runs, max_n, run) == runs[run]
        for text in texts(dice, runs, vocab_size):
            assert table.next(text) == next_of(runs, max_n, text)
            most, least_chance = dice.randint(0, 12), dice.choice([0.0, 0.05, 0.3, 1.0, 1.1])
            token_ids, chances = table.chain(text, most, least_chance)
            assert list(zip(token_ids, chances, strict=True)) == chain_of(runs, max_n, text, most, least_chance)


def test_the_longest_known_run_counts() -> None:
    table = table_of({(1,): (7, 0.5), (2, 1): (8, 0.25), (4, 3, 2, 1): (9, 1.0)}, 4)
    said = [table.next(text) for text in ([1], [5, 1], [2, 1], [3, 2, 1], [4, 3, 2, 1], [6, 4, 3, 2, 1], [2], [])]
    assert said == [(7, 0.5), (7, 0.5), (8, 0.25), (8, 0.25), (9, 1.0), (9, 1.0), None, None], "a shorter one may be missing in between"


def test_a_chain_ends_where_it_is_no_longer_sure_and_where_nothing_is_known() -> None:
    table = table_of({(1,): (2, 0.75), (2,): (3, 0.5), (3,): (4, 0.75)}, 1)
    assert table.chain([1], 8, 0.0) == ([2, 3, 4], [0.75, 0.5, 0.75])
    assert table.chain([1], 8, 0.75 * 0.5) == ([2, 3], [0.75, 0.5]), "just likely enough is enough"
    assert table.chain([1], 8, 0.38) == ([2], [0.75])
    assert table.chain([1], 8, 0.76) == table.chain([9], 8, 0.0) == table.chain([], 8, 0.0) == table.chain([1], 0, 0.0) == ([], [])


def test_a_chain_goes_on_behind_its_own_guesses() -> None:
    table = table_of({(5, 6): (7, 1.0), (6, 7): (5, 1.0), (7, 5): (6, 1.0)}, 2)
    assert table.chain([5, 6], 64, 0.9)[0] == ([7, 5, 6] * 22)[:64]


def keys_of(token_ids: range) -> np.ndarray:
    return _keys(np.array(token_ids)[:, None])


@pytest.mark.parametrize("count", [1, 5, 12])
@pytest.mark.parametrize("is_low", [False, True], ids=["the highest", "the lowest"])
def test_keys_that_crowd_at_an_end(count: int, is_low: bool) -> None:
    """All of them belong to the same place: the others lie behind it, and the table goes on as far as they do."""
    order = np.argsort(keys_of(range(50_000)))
    crowd, rest = (order[:count], order[count : 2 * count]) if is_low else (order[-count:], order[-2 * count : -count])
    runs: Runs = {(int(token),): (i, 1.0) for i, token in enumerate(crowd)}
    table = table_of(runs, 1)
    assert len(set((keys_of(range(50_000))[crowd] >> np.uint64(table.shift)).tolist())) == 1
    assert table.token_ids[-1] == -1, "a search ends at an empty place"
    for run, said in runs.items():
        assert table.next(run) == said
    assert all(table.next([int(token)]) is None for token in rest)


def test_of_equal_runs_one_counts_and_empty_lengths_are_fine() -> None:
    none = np.zeros((0, 2), np.int32)
    table = NgramTable([np.array([[3], [3], [4]]), none], np.array([5, 6, 7]), np.array([0.5, 0.25, 1.0]))
    assert table.next([3]) in {(5, 0.5), (6, 0.25)} and table.next([4, 4]) == (7, 1.0)
    empty = NgramTable([none[:, :1]], np.zeros(0, np.int32), np.zeros(0, np.float32))
    assert empty.next([0]) is None and empty.chain([0, 1], 4, 0.0) == ([], []) and empty.num_runs == 0


def test_ids_of_any_size_stay_apart() -> None:
    table = table_of({(LARGEST, 5): (LARGEST, 0.5), (0, 5): (0, 0.25), (LARGEST - 1, LARGEST, 5): (LARGEST - 1, 1.0)}, 3)
    asked = ([LARGEST, 5], [0, 5], [LARGEST - 1, LARGEST, 5], [LARGEST, LARGEST, 5], [LARGEST - 1, 5], [LARGEST])
    assert [table.next(text) for text in asked] == [(LARGEST, 0.5), (0, 0.25), (LARGEST - 1, 1.0), (LARGEST, 0.5), None, None]


def test_no_more_lengths_than_native_code_has_room_for() -> None:
    with pytest.raises(ValueError, match="9 lengths"):
        NgramTable([np.zeros((0, n), np.int32) for n in range(1, MOST_N + 2)], np.zeros(0, np.int32), np.zeros(0, np.float32))


@pytest.mark.parametrize("ids", [np.int16, np.int32, np.int64])
def test_the_type_of_the_ids_does_not_matter(ids: type[np.signedinteger]) -> None:
    runs = np.array([[1, 2], [32_767, 0]], ids)
    table = NgramTable([runs[:, :1], runs], np.array([7, 8, 9, 32_767], ids), np.array([0.5, 0.5, 0.25, 0.25], np.float16))
    assert [table.next(text) for text in ([1], [1, 2], [32_767], [32_767, 0])] == [(7, 0.5), (9, 0.25), (8, 0.5), (32_767, 0.25)]


def test_it_holds_the_memory_that_native_code_reads() -> None:
    table = table_of(made_up(random.Random(0), 50, 2, 100), 2)
    assert table.addresses == tuple(array.ctypes.data for array in (table.keys, table.token_ids, table.chances))
    taken = table.token_ids >= 0
    assert np.all(np.diff(table.keys[taken].astype(object)) > 0) and taken.mean() <= 0.8
    assert [array.dtype for array in (table.keys, table.token_ids, table.chances)] == [np.uint64, np.int32, np.float32]
