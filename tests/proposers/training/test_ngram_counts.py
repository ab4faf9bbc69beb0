"""Runs and what follows them, against a plain count in dictionaries; which runs are kept, and what is said of held-out text."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from foretoken.proposers.checkpoint import Checkpoint
from foretoken.proposers.ngram_cache_checkpoint import MOST_N, Followed, read_table, write_table
from foretoken.proposers.training.ngram_check import check
from foretoken.proposers.training.ngram_counts import LEAST_HELP, CountLimits, count_runs
from foretoken.proposers.training.packing import LEARN, READ, UNLEARN, Document, PackedFile, write
from foretoken.server.train import options as train_options

VOCAB_SIZE = 40
Table = dict[tuple[int, ...], tuple[int, float]]


def packed(folder: Path, documents: Sequence[Document]) -> PackedFile:
    write(folder / "answers", documents, VOCAB_SIZE)
    return PackedFile(folder / "answers")


def document(token_ids: Sequence[int], num_prompt: int = 0) -> Document:
    return Document(np.array(token_ids, np.uint32), np.array([READ] * num_prompt + [LEARN] * (len(token_ids) - num_prompt), np.uint8))


def random_documents(seed: int) -> list[Document]:
    """Of a few phrases and noise; prompts of any length, the whole document or nothing."""
    chance = np.random.default_rng(seed)
    phrases = [chance.integers(0, VOCAB_SIZE, chance.integers(2, 7)).tolist() for _ in range(12)]
    found: list[Document] = []
    for _ in range(60):
        token_ids: list[int] = []
        for _ in range(chance.integers(0, 12)):
            token_ids += phrases[chance.integers(0, 12)] if chance.random() < 0.7 else chance.integers(0, VOCAB_SIZE, 2).tolist()
        found.append(document(token_ids, int(chance.integers(0, len(token_ids) + 1))))
    return found


def as_table(of_each: Sequence[Followed]) -> Table:
    return {
        tuple(run): (token_id, chance)
        for one in of_each for run, token_id, chance in zip(one.runs.tolist(), one.next.tolist(), one.chance.tolist(), strict=True)
    }


def plain(documents: Sequence[Document], limits: CountLimits) -> Table:
    """What count_runs should find, one token at a time. Ties go to the smaller token."""

    def chance_of(hits: int, seen: int) -> float:
        return max(hits - 1, 0.5) / (seen + 1)

    def said_after(found: Counter[int]) -> tuple[int, float]:
        token_id, hits = min(found.items(), key=lambda item: (-item[1], item[0]))
        return token_id, chance_of(hits, found.total())

    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    places = [
        (tuple(one.token_ids[max(0, i - limits.max_n):i].tolist()), int(one.token_ids[i]))
        for one in documents for i in range(1, len(one)) if one.learn[i] == LEARN
    ]
    for text, token_id in places:
        for begin in range(len(text)):
            followers[text[begin:]][token_id] += 1
    often = {run: found for run, found in followers.items() if found.total() >= limits.min_count}
    overall = says = {run: said_after(found) for run, found in often.items()}
    kept: Table = {}
    for _ in range(2):
        kept = {}
        for run, found in sorted(often.items(), key=lambda item: len(item[0])):
            said, sure = next((kept[run[i:]] for i in range(1, len(run)) if run[i:] in kept), (0, 0.0))
            right = chance_of(found[said], found.total())
            if found.total() * (overall[run][1] ** 2 - sure * (2 * right - sure)) >= LEAST_HELP:
                kept[run] = says[run]
        decides: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text, token_id in places:
            for run in (text[i:] for i in range(len(text)) if text[i:] in often):
                decides[run][token_id] += 1
                if run in kept:
                    break
        says = overall | {run: said_after(found) for run, found in decides.items()}
    return {run: says[run] for run in kept}


@pytest.mark.parametrize("limits", [CountLimits(1, 1), CountLimits(2, 2), CountLimits(4, 3), CountLimits(8, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_a_plain_count(seed: int, limits: CountLimits, tmp_path: Path) -> None:
    documents = random_documents(seed)
    found = as_table(of_each := count_runs(packed(tmp_path, documents), limits))
    expected = plain(documents, limits)
    assert found.keys() == expected.keys() and len(found) > 10
    for run, (token_id, chance) in expected.items():
        assert found[run] == (token_id, pytest.approx(chance)), run
    assert [one.runs.shape[1] for one in of_each] == list(range(1, limits.max_n + 1))


def test_only_answers_are_counted_and_no_run_reaches_into_another_document(tmp_path: Path) -> None:
    never_said = Document(np.array([9, 8, 9, 8], np.uint32), np.array([READ, UNLEARN, READ, UNLEARN], np.uint8))
    documents = [document([1, 2, 3], num_prompt=2), document([7, 5]), never_said, document([6], num_prompt=1)] * 4
    found = as_table(count_runs(packed(tmp_path, documents), CountLimits()))
    assert found == {(2,): (3, 0.6), (7,): (5, 0.6)}, "2 is followed by 3, what is read by nothing; (1, 2) adds nothing to (2)"


def test_a_longer_run_must_say_better_and_changes_what_the_shorter_one_is_asked(tmp_path: Path) -> None:
    # 2 is followed by 3, but behind 1 by 4; behind 5 by 3 as behind anything else, which shows when 1 no longer blurs it.
    documents = [document([1, 2, 4])] * 12 + [document([5, 2, 3])] * 6 + [document([token, 2, 3]) for token in range(20, 30)]
    found = as_table(count_runs(packed(tmp_path, documents), CountLimits()))
    assert found[1, 2] == (4, pytest.approx(11 / 13)) and (5, 2) not in found
    assert found[(2,)] == (3, pytest.approx(15 / 17)), "the twelve behind 1 are not its own"


def test_the_most_helpful_runs_stay(tmp_path: Path) -> None:
    documents = [document([token, token + 1] * (token + 2)) for token in range(0, 30, 2) for _ in range(2)]
    file = packed(tmp_path, documents)
    every = as_table(count_runs(file, CountLimits(max_n=1)))
    few = as_table(count_runs(file, CountLimits(max_n=1, max_runs=10)))
    assert len(every) >= 28 and 8 <= len(few) <= 10
    assert min(run[0] for run in few) >= 20 and few.items() <= every.items(), "those that came most often"


def test_what_is_written_is_what_is_looked_up(tmp_path: Path) -> None:
    documents = random_documents(7)
    of_each = count_runs(file := packed(tmp_path, documents), CountLimits(max_n=3, min_count=2))
    write_table(tmp_path / "cache", of_each, VOCAB_SIZE)
    table = read_table(Checkpoint(tmp_path / "cache"), VOCAB_SIZE)
    assert table.num_runs == sum(len(one.next) for one in of_each)
    for run, (token_id, chance) in as_table(of_each).items():
        assert table.next([39, 39, *run]) == (token_id, pytest.approx(chance, rel=1e-3)) or len(run) < 3
        assert table.next(run) == (token_id, pytest.approx(chance, rel=1e-3))
    found = check(table, file)
    assert found is not None and len(found.right) == sum((one.learn[1:] == LEARN).sum() for one in documents if len(one))
    assert found.share_right > 0.6, "it is what was counted"


def test_an_empty_table_and_short_files(tmp_path: Path) -> None:
    file = packed(tmp_path, [document([1], num_prompt=1), document([2])])
    assert [len(one.next) for one in count_runs(file, CountLimits(max_n=2))] == [0, 0]
    write_table(tmp_path / "cache", count_runs(packed(tmp_path, [document([1, 2] * 8)]), CountLimits()), VOCAB_SIZE)
    assert check(read_table(Checkpoint(tmp_path / "cache"), VOCAB_SIZE), file) is None


def test_chances_hold_on_text_that_was_not_counted(tmp_path: Path) -> None:
    """Followers of known chances: what the table expects is what happens, by how sure it is."""
    chance = np.random.default_rng(0)
    likeliest, sure = chance.integers(0, VOCAB_SIZE, VOCAB_SIZE), chance.uniform(0.1, 0.95, VOCAB_SIZE)

    def text() -> Document:
        token_ids = [0]
        for guessed, other in zip(chance.random(400), chance.integers(0, VOCAB_SIZE, 400).tolist(), strict=True):
            token_ids.append(int(likeliest[token_ids[-1]]) if guessed < sure[token_ids[-1]] else other)
        return document(token_ids)

    write_table(tmp_path / "cache", count_runs(packed(tmp_path, [text() for _ in range(20)]), CountLimits(max_n=1)), VOCAB_SIZE)
    table = read_table(Checkpoint(tmp_path / "cache"), VOCAB_SIZE)
    found = check(table, packed(tmp_path, [text() for _ in range(20)]))
    assert found is not None and found.share_right == pytest.approx(found.share_expected, abs=0.03)
    for low, high in ((0.0, 0.3), (0.3, 0.6), (0.6, 1.0)):
        here = (found.chances > low) & (found.chances <= high)
        if here.sum() > 200:
            assert found.right[here].mean() == pytest.approx(found.chances[here].mean(), abs=0.06)
    first, *lines = found.lines()
    assert f"in {8000:,} tokens of held-out answers" in first and len(lines) > 3


def test_limits_of_the_command_are_those_of_the_format() -> None:
    assert train_options.MOST_N == MOST_N
    options = train_options.ngram_cache_options(["--model", "m", "--data", "d", "--out", "o"])
    assert CountLimits(options.max_n, options.min_count, options.max_runs) == CountLimits()
