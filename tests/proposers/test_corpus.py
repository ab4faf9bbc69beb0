import random
from array import array
from pathlib import Path

import pytest

from foretoken.proposers.config import NgramConfig, SuffixConfig
from foretoken.proposers.corpus import MAX_RESPONSES, Corpora, open_corpora
from foretoken.proposers.corpus_files import CorpusFolder


def texts(corpora: Corpora, corpus_id: str) -> list[list[int]]:
    corpus = corpora.get(corpus_id)
    return [] if corpus is None else [response.token_ids.tolist() for response in corpus]


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_whatever_comes(seed: int) -> None:
    dice = random.Random(seed)
    corpora = Corpora(max_responses=dice.randint(1, 6), max_tokens=dice.randint(5, 60), max_corpora=dice.randint(1, 4))
    for _ in range(150):
        corpus_id = f"c{dice.randrange(7)}"
        if dice.random() < 0.1:
            corpora.delete(corpus_id)
        else:
            corpora.add(corpus_id, [dice.randrange(100)] * dice.randint(0, 9))
        corpora.check()


def test_the_oldest_response_of_a_full_corpus_goes_and_the_others_keep_their_numbers() -> None:
    corpora = Corpora(max_responses=2)
    for token in range(4):
        corpora.add("a", [token])
    corpus = corpora.get("a")
    assert corpus is not None and texts(corpora, "a") == [[2], [3]]
    assert (corpus.first, corpus.next) == (2, 4) and corpus[3].token_ids == array("i", [3])


def test_one_that_fills_the_memory_loses_its_own_and_not_anothers() -> None:
    corpora = Corpora(max_tokens=10)
    corpora.add("small", [1, 2])
    for token in range(9):
        corpora.add("large", [token] * 3)
    assert texts(corpora, "small") == [[1, 2]] and texts(corpora, "large") == [[7] * 3, [8] * 3]


def test_the_corpus_unused_for_longest_is_dropped() -> None:
    corpora = Corpora(max_corpora=2)
    corpora.add("a", [1])
    corpora.add("b", [1])
    corpora.use("a")
    corpora.add("c", [1])
    assert [corpus.corpus_id for corpus in corpora] == ["a", "c"] and corpora.num_deleted == 1


def test_what_is_too_much_for_this_process_stays_on_disk(tmp_path: Path) -> None:
    folder = CorpusFolder(tmp_path, "v", 100)
    corpora = Corpora(folder=folder)
    corpora.add("a", [1] * 8)
    corpora.add("b", [2] * 9)
    corpora.save()
    small = Corpora(max_tokens=10, folder=folder)
    assert small.num_tokens <= 10
    small.save()
    assert {corpus_id for corpus_id, _ in folder.read()} == {"a", "b"}


def test_what_was_saved_is_there_after_a_restart_in_the_same_order(tmp_path: Path) -> None:
    folder = CorpusFolder(tmp_path, "v", 100)
    corpora = Corpora(folder=folder)
    for number in range(5):
        corpora.add("a", [number, 99])
    corpora.add("b", [7])
    corpora.save()
    again = Corpora(folder=CorpusFolder(tmp_path, "v", 100))
    again.check()
    assert texts(again, "a") == [[number, 99] for number in range(5)] and texts(again, "b") == [[7]]
    assert texts(Corpora(max_responses=2, folder=folder), "a") == [[3, 99], [4, 99]]


def test_deleted_is_deleted_on_disk_at_once(tmp_path: Path) -> None:
    folder = CorpusFolder(tmp_path, "v", 100)
    corpora = Corpora(folder=folder)
    corpora.add("a", [1])
    corpora.save()
    assert [*tmp_path.iterdir()] and corpora.delete("a") and not corpora.delete("a")
    assert not [*tmp_path.iterdir()]
    corpora.save()
    assert not [*tmp_path.iterdir()]


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    corpora = Corpora(folder=CorpusFolder(tmp_path, "v", 100))
    corpora.add("a", [1])
    corpora.save()
    (file,) = tmp_path.iterdir()
    file.unlink()
    corpora.save()
    assert not [*tmp_path.iterdir()]
    corpora.add("a", [2])
    corpora.save()
    assert [*tmp_path.iterdir()] == [file]


def test_a_disk_that_refuses_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpora = Corpora(folder=CorpusFolder(tmp_path / "gone", "v", 100))
    corpora.add("a", [1])
    (tmp_path / "gone").rmdir()
    corpora.save()
    assert "was not saved" in caplog.text and texts(corpora, "a") == [[1]]


def test_more_corpora_on_disk_than_are_kept_stay_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpora = Corpora(folder=CorpusFolder(tmp_path, "v", 100))
    for name in "abc":
        corpora.add(name, [1])
    corpora.save()
    few = Corpora(max_corpora=2, folder=CorpusFolder(tmp_path, "v", 100))
    few.check()
    assert len([*few]) == 2 and len([*tmp_path.iterdir()]) == 3 and "1 more corpora" in caplog.text


def test_corpora_are_there_if_somebody_looks_in_them(tiny_target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert open_corpora([NgramConfig(), SuffixConfig(max_cached_requests=0)], str(tmp_path), tokenizer, 300) is None
    corpora = open_corpora([SuffixConfig(max_cached_requests=3)], str(tmp_path), tokenizer, 300)
    pooled = open_corpora([SuffixConfig(max_cached_requests=3), NgramConfig(shared_pool=True)], None, tokenizer, 300)
    assert corpora is not None and pooled is not None
    for number in range(5):
        corpora.add("a", [number])
        pooled.add("a", [number])
    assert len(texts(corpora, "a")) == 3 and len(texts(pooled, "a")) == 5 <= MAX_RESPONSES
    corpora.save()
    pooled.save()
    assert len([*tmp_path.iterdir()]) == 1
