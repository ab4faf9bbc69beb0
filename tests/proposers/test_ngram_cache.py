"""The n-gram cache: what it guesses from its table, and how its folder is read."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_runs import VOCAB, opened, resources, save
from ngram_tables import Runs, chain_of, counted, made_up, table_of, write
from safetensors.torch import load_file
from torch import Tensor

from foretoken.proposers import load, ngram_cache, open_all
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Scout
from foretoken.proposers.config import NgramCacheConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.detection import detect_method
from foretoken.proposers.loading import Opening
from foretoken.proposers.ngram_cache import LEAST_CHANCE, NgramCacheProposer
from foretoken.proposers.proposer_set import ProposerSet

RUNS: Runs = {(1,): (2, 0.5), (2,): (3, 0.75), (1, 2): (4, 0.25), (4,): (1, 1.0), (9, 8): (7, 0.5)}


def row(token_ids: Sequence[int], ceiling: int = 8, request_id: str = "r") -> DraftRow:
    return DraftRow(request_id, token_ids, 1, len(token_ids), ceiling, 0, (), (), Draw(0.0, 0, 0))


def propose(proposer: NgramCacheProposer, *rows: DraftRow) -> Draft:
    return proposer.propose(DraftContext(list(rows), 0, 16))


def proposer_of(runs: Runs, max_n: int, k: int = 8) -> NgramCacheProposer:
    return NgramCacheProposer(table_of(runs, max_n), k)


def test_a_guess_is_read_behind_the_one_before_it() -> None:
    draft = propose(proposer_of(RUNS, 2), row([5, 1]))
    assert draft.token_ids == [2, 4, 1, 2], "behind 1 2 comes 4, which is not what comes behind 2 alone"
    assert draft.confidence == [0.5, 0.25, 1.0, 0.5], "of each if those before it are right, ..."
    assert 0.5 * 0.25 * 1.0 * 0.5 >= LEAST_CHANCE > 0.5 * 0.25 * 1.0 * 0.5 * 0.25, "... but it ends by the chance of all together"
    assert (draft.parents, draft.source, draft.start_loc) == ([-1, 0, 1, 2], [0, 0, 0, 0], [0, 4])


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_answered_as_the_table_says(seed: int) -> None:
    dice = random.Random(seed)
    max_n, k = dice.randint(1, 4), dice.randint(1, 9)
    runs = made_up(dice, 60, max_n, 12)
    proposer = proposer_of(runs, max_n, k)
    for _ in range(20):
        rows = [
            row([dice.randrange(14) for _ in range(dice.randint(1, 9))], dice.randint(0, 10), f"r{i}") for i in range(dice.randint(0, 5))
        ]
        draft = propose(proposer, *rows)
        assert draft.confidence is not None and len(draft.start_loc) == len(rows) + 1
        for i, one in enumerate(rows):
            of_row = slice(draft.start_loc[i], draft.start_loc[i + 1])
            expected = chain_of(runs, max_n, one.token_ids, min(one.ceiling, k), LEAST_CHANCE)
            assert list(zip(draft.token_ids[of_row], draft.confidence[of_row], strict=True)) == expected
            assert draft.parents[of_row] == list(range(-1, len(expected) - 1)) and set(draft.source) <= {0}
        proposer.check()


def test_nothing_is_kept_of_requests() -> None:
    proposer = proposer_of(RUNS, 2)
    first = propose(proposer, row([5, 1]))
    proposer.forget("r")
    proposer.forget("never seen")
    assert propose(proposer, row([5, 1])).token_ids == first.token_ids
    assert propose(proposer, row([6])).token_ids == [] == propose(proposer).token_ids
    assert proposer.needs.hears == "nothing" and not proposer.needs.ingests
    assert not isinstance(proposer, Scout), "it nearly always has something: to look for that in every step would tell nothing"
    proposer.close()


def load_from(folder: Path, target: Path, **settings: Any) -> NgramCacheProposer:
    loaded = ngram_cache.load(NgramCacheConfig(str(folder), **settings), resources(target))
    assert loaded.is_learned
    proposer = loaded.open(opened("mine"))
    assert isinstance(proposer, NgramCacheProposer) and proposer.name == "mine"
    return proposer


@pytest.mark.parametrize("vocab_size", [VOCAB, 40_000])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int) -> None:
    """Ids take two bytes where that is enough."""
    runs = made_up(random.Random(3), 80, 4, vocab_size)
    folder = write(tmp_path / "cache", runs, 4, vocab_size)
    tensors = load_file(folder / "model.safetensors")
    ids = torch.int16 if vocab_size == VOCAB else torch.int32
    assert {(name.split(".")[0], tensor.dtype) for name, tensor in tensors.items()} == {
        ("runs", ids),
        ("next", ids),
        ("chance", torch.float16),
    }
    loaded = ngram_cache.load(NgramCacheConfig(str(folder), 3), resources(tmp_path, vocab_size=vocab_size, hidden_size=2))
    assert loaded.found == (f"{len(runs):,} runs of up to 4 tokens",)
    proposer = loaded.open(opened())
    assert isinstance(proposer, NgramCacheProposer) and proposer.max_tokens == 3
    for run, said in runs.items():
        assert proposer.table.next(run) == said


def test_a_folder_needs_no_method(tmp_path: Path) -> None:
    folder = write(tmp_path / "counted", counted([[1, 2, 3, 1, 2, 3]], 2), 2, VOCAB)
    assert detect_method(str(folder)) == "ngram_cache"
    config = parse_speculative_config({"model": str(folder), "num_speculative_tokens": 3})
    assert config.proposers == (NgramCacheConfig(str(folder), 3),) and not config.warnings
    loaded = load(config, resources(tmp_path))
    opened_all = ProposerSet(open_all(loaded, lambda name, _: Opening(name, [], num_blocks=4, block_size=16, return_probs=False)))
    assert opened_all.names == ("prediction", "ngram_cache")
    draft = opened_all.propose(DraftContext([row([7, 1], 5)], 0, 16))
    assert draft.token_ids == [2, 3, 1] and draft.source == [1, 1, 1]


def test_what_nobody_reads_is_told(tmp_path: Path) -> None:
    loaded = ngram_cache.load(NgramCacheConfig(str(folder_of(tmp_path, {}, {"runs.3": torch.zeros(1, 3)}))), resources(tmp_path))
    assert loaded.found == ("5 runs of up to 2 tokens", "unused tensors: runs.3")


def test_an_empty_length_among_others_is_fine(tmp_path: Path) -> None:
    folder = write(tmp_path / "gap", {(1, 2, 3): (4, 0.5)}, 3, VOCAB)
    proposer = load_from(folder, tmp_path)
    assert propose(proposer, row([1, 2, 3])).token_ids == [4] and not propose(proposer, row([2, 3])).token_ids


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """A sound one of RUNS with changes; None = without."""
    folder = write(path / "cache", RUNS, 2, VOCAB)
    changed = {**load_file(folder / "model.safetensors"), **tensors}
    return save(folder, {"max_n": 2, **config}, {name: tensor for name, tensor in changed.items() if tensor is not None})


def _nothing(of_each: int = 2) -> dict[str, Tensor | None]:
    none = torch.zeros(0)
    tensors: dict[str, Tensor | None] = {}
    for n in range(1, of_each + 1):
        tensors |= {f"runs.{n}": none.reshape(0, n).short(), f"next.{n}": none.short(), f"chance.{n}": none.half()}
    return tensors


BAD: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no max_n": ({"max_n": None}, {}, "'max_n' must be an integer, not None"),
    "max_n in words": ({"max_n": "2"}, {}, "'max_n' must be an integer, not '2'"),
    "max_n of 0": ({"max_n": 0}, {}, "'max_n' is 0, but must be from 1 to 8"),
    "max_n of 9": ({"max_n": 9}, {}, "'max_n' is 9, but must be from 1 to 8"),
    "longer runs missing": ({"max_n": 3}, {}, r"has no tensor 'runs\.3'"),
    "runs missing": ({}, {"runs.1": None}, r"has no tensor 'runs\.1'"),
    "next missing": ({}, {"next.2": None}, r"has no tensor 'next\.2'"),
    "chance missing": ({}, {"chance.1": None}, r"has no tensor 'chance\.1'"),
    "runs of another length": ({}, {"runs.2": torch.zeros(2, 3).short()}, r"'runs\.2' in .* is 2 x 3, but any x 2 is needed"),
    "runs that are flat": ({}, {"runs.1": torch.zeros(3).short()}, r"'runs\.1' in .* is 3, but any x 1 is needed"),
    "fewer that follow": ({}, {"next.1": torch.zeros(2).short()}, r"'next\.1' in .* is 2, but 3 is needed"),
    "more chances": ({}, {"chance.2": torch.ones(3).half()}, r"'chance\.2' in .* is 3, but 2 is needed"),
    "runs of floats": ({}, {"runs.1": torch.zeros(3, 1)}, r"'runs\.1' and 'next\.1' must be int16, int32 or int64"),
    "floats that follow": ({}, {"next.2": torch.zeros(2)}, r"'runs\.2' and 'next\.2' must be int16, int32 or int64"),
    "a chance of 0": ({}, {"chance.1": torch.tensor([0.5, 0.0, 0.5])}, r"'chance\.1' must lie above 0 and not above 1"),
    "a chance below 0": ({}, {"chance.1": torch.tensor([0.5, -0.5, 0.5])}, r"'chance\.1' must lie above 0 and not above 1"),
    "a chance above 1": ({}, {"chance.2": torch.tensor([0.5, 1.01])}, r"'chance\.2' must lie above 0 and not above 1"),
    "a chance that is none": ({}, {"chance.2": torch.tensor([0.5, torch.nan])}, "NaN"),
    "a token beyond the end": ({}, {"runs.1": torch.tensor([[1], [VOCAB], [2]])}, f"names token {VOCAB}, but the target has {VOCAB}"),
    "one that follows": ({}, {"next.2": torch.tensor([1, 2**40])}, f"names token {2**40}, but the target has {VOCAB} tokens: it was count"),
    "a token below 0": ({}, {"next.1": torch.tensor([1, -1, 2])}, "names token -1, but the target has 50 tokens"),
    "nothing at all": ({}, _nothing(), "holds no runs of tokens: nothing was counted for it"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    config, tensors, message = BAD[what]
    with pytest.raises(SpeculativeConfigError, match=message) as raised:
        load_from(folder_of(tmp_path, config, tensors), tmp_path)
    assert str(tmp_path) in str(raised.value), "which folder it is"


def test_a_sound_folder_is_not(tmp_path: Path) -> None:
    proposer = load_from(folder_of(tmp_path, {}, {}), tmp_path, num_speculative_tokens=2)
    assert propose(proposer, row([5, 1])).token_ids == [2, 4]


def test_a_folder_that_is_not_there_or_empty_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "no .safetensors files"), ("missing", "no .safetensors files")):
        with pytest.raises(SpeculativeConfigError, match=message):
            load_from(tmp_path / folder, tmp_path)
