import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.kernels.layout import FINAL, KVLayerSpec
from foretoken.proposers import proposer_set
from foretoken.proposers.base import FORCED, Draft, DraftContext, DraftRow, Draw, Ended, Feedback, KnownRow, Needs, UnderWay
from foretoken.proposers.corpus import Corpora
from foretoken.proposers.corpus_files import CorpusFolder
from foretoken.proposers.proposer_set import ProposerSet

KV = (KVLayerSpec(1, 8, 8),)
FEEDBACK = Feedback([], [], [], [], [], [])


class Scripted:
    """Guesses what the script says for each request, however long; remembers what it was shown."""

    def __init__(self, name: str, guesses: dict[str, list[int]], needs: Needs | None = None, **extra: Any) -> None:
        self.name, self.guesses, self.needs = name, guesses, needs or Needs()
        self.max_tokens = max((len(g) for g in guesses.values()), default=1)
        self.extra = extra
        self.seen: list[Sequence[DraftRow]] = []
        self.heard: list[str] = []

    def propose(self, context: DraftContext) -> Draft:
        self.seen.append(context.rows)
        draft = Draft.chains([self.guesses.get(row.request_id, []) for row in context.rows])
        extra = {key: make(draft) for key, make in self.extra.items()}
        filled = {(0, row.request_id): 3 for row in context.rows} if self.needs.ingests else {}
        return replace(draft, **{"filled": filled, **extra})

    def observe(self, feedback: Feedback) -> None:
        self.heard.append("observe")

    def forget(self, request_id: str) -> None:
        self.heard.append(request_id)

    def check(self) -> None:
        assert "corrupt" not in self.heard

    def close(self) -> None:
        self.heard.append("close")


def off_reasons(proposers: ProposerSet) -> dict[str, str]:
    return {health.name: health.off_reason for health in proposers.stats() if health.off_reason is not None}


class Raising(Scripted):
    def propose(self, context: DraftContext) -> Draft:
        raise RuntimeError("no idea")


class Deaf(Scripted):
    def observe(self, feedback: Feedback) -> None:
        raise ValueError("what?")


class Finding(Scripted):
    """Has a guess for what the script names."""

    def has_guess(self, row: KnownRow) -> bool:
        return row.request_id in self.guesses


class Stumbling(Scripted):
    def has_guess(self, row: KnownRow) -> bool:
        raise RuntimeError("where am I?")


class Forgetful(Finding):
    def have_guesses(self, rows: Sequence[KnownRow]) -> list[bool]:
        return [True]


class Hasty(Scripted):
    """Wants to begin early, and stumbles the second time."""

    num_places_ahead = 5
    num_begun = 0

    def begin(self, step: UnderWay) -> None:
        self.num_begun += 1
        if self.num_begun == 2:
            raise RuntimeError("not so fast")


class Clock:
    """Time that passes only when a proposer takes it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def row(request_id: str, assigned: int = 0, ceiling: int = 4, **settings: Any) -> DraftRow:
    whole = DraftRow(request_id, [1, 2, 3], 1, 3, ceiling, assigned, [], (10, 11, 12, 13), Draw(0, 0, 0))
    return replace(whole, **settings)


def ask(proposers: ProposerSet, *rows: DraftRow, ingest: int = 8) -> tuple[list[list[int]], Draft]:
    draft = proposers.propose(DraftContext(rows, ingest, 16))
    assert len(draft.parents) == len(draft.source) == len(draft.token_ids)
    return [draft.token_ids[a:b] for a, b in zip(draft.start_loc, draft.start_loc[1:], strict=False)], draft


def test_rows_go_to_their_proposer_and_fall_through_to_the_ones_behind() -> None:
    a = Scripted("a", {"r1": [1], "r3": [1, 2]})
    b = Scripted("b", {"r1": [7], "r2": [8, 9], "r3": [7], "r4": [6]})
    guesses, draft = ask(ProposerSet([a, b]), row("r1"), row("r2"), row("r3", assigned=1), row("r4", assigned=-1), row("r5"))
    assert guesses == [[1], [8, 9], [7], [], []]
    assert (draft.source, draft.parents) == ([0, 1, 1, 1], [-1, -1, 0, -1])
    assert draft.confidence is None and draft.probs is None
    assert [r.request_id for r in a.seen[0]] == ["r1", "r2", "r5"]
    assert [r.request_id for r in b.seen[0]] == ["r2", "r3", "r5"]


def test_nobody_is_called_for_nothing() -> None:
    a = Scripted("a", {})
    assert ask(ProposerSet([a]), row("r1", ceiling=0), row("r2", assigned=-1))[0] == [[], []]
    assert a.seen == [] and ask(ProposerSet([]), row("r1"))[0] == [[]]


def test_drafts_are_cut_to_the_ceiling_trees_too() -> None:
    tree = Scripted("a", {"r": [1, 2, 3, 4]}, parents=lambda draft: [-1, -1, 0, 1] if draft.token_ids else [])
    guesses, draft = ask(ProposerSet([tree]), row("r", ceiling=3))
    assert guesses == [[1, 2, 3]] and draft.parents == [-1, -1, 0]


def test_a_row_that_does_not_reach_its_last_token_gets_no_draft() -> None:
    assert ask(ProposerSet([Scripted("a", {"r": [1]})]), row("r", computed_after=2))[0] == [[]]


def test_drafters_with_a_cache_see_every_row_that_may_speculate_but_guess_for_their_own_only() -> None:
    first = Scripted("first", {"r1": [1]})
    drafter = Scripted("drafter", {f"r{i}": [5, 6] for i in range(1, 6)}, Needs(kv_layers=KV))
    rows = row("r1"), row("r2"), row("r3", assigned=-1), row("r4", forced=[9, 9]), row("r5", computed_after=1)
    guesses, draft = ask(ProposerSet([first, drafter]), *rows)
    assert guesses == [[1], [5, 6], [], [9, 9], []]
    assert [(r.request_id, r.ceiling, r.num_filled) for r in drafter.seen[0]] == [
        *[("r1", 0, (11,)), ("r2", 4, (11,)), ("r4", 4, (11,)), ("r5", 0, (11,))]
    ]
    assert draft.filled == {(1, f"r{i}"): 3 for i in (1, 2, 4, 5)}
    ask(ProposerSet([first, drafter]), row("r1", ceiling=0))
    assert len(drafter.seen) == 2  # it keeps up though nobody wants a guess


def test_scouts_say_whether_they_have_a_guess_and_broken_ones_are_switched_off() -> None:
    proposers = ProposerSet([Scripted("a", {}), Finding("b", {"r1": [1]}), Stumbling("c", {})])
    plain, finding, stumbling = proposers.scouts
    assert plain is None and finding is not None and stumbling is not None
    assert finding([row("r1"), row("r2")]) == [True, False] and finding([]) == []
    assert all(stumbling([row("r1"), row("r2")]) == [False, False] for _ in range(5))
    assert list(off_reasons(proposers)) == ["c"] and [health.num_failures for health in proposers.stats()] == [0, 0, 3]


def test_a_scout_that_does_not_answer_for_every_row_has_no_guess() -> None:
    proposers = ProposerSet([Forgetful("a", {})])
    (forgetful,) = proposers.scouts
    assert forgetful is not None and forgetful([row("r1")]) == [True]
    assert forgetful([row("r1"), row("r2")]) == [False, False] and proposers.stats()[0].num_failures == 1


def test_where_guessing_is_weighed_drafters_with_a_cache_read_their_own_rows_only() -> None:
    first, last = Scripted("first", {"r1": [1]}), Scripted("last", {"r3": [7]})
    drafter = Scripted("drafter", {f"r{i}": [5, 6] for i in range(1, 6)}, Needs(kv_layers=KV))
    rows = row("r1"), row("r2"), row("r3"), row("r4", assigned=1), row("r5", assigned=1, ceiling=0)
    guesses, draft = ask(ProposerSet([first, drafter, last], is_weighed=True), *rows)
    assert guesses == [[1], [], [7], [5, 6], []]  # proposers without one step in as ever
    assert [(r.request_id, r.ceiling) for r in drafter.seen[0]] == [("r4", 4), ("r5", 0)]
    assert draft.filled == {(1, "r4"): 3, (1, "r5"): 3}


def test_forced_tokens_that_fill_the_room_are_the_draft() -> None:
    a = Scripted("a", {"r": [1]})
    guesses, draft = ask(ProposerSet([a]), row("r", ceiling=2, forced=[4, 5, 6]), row("s", ceiling=0, forced=[4]))
    assert guesses == [[4, 5], []] and draft.source == [FORCED, FORCED] and draft.parents == [-1, 0] and a.seen == []


def test_a_guess_goes_on_behind_the_forced_tokens_if_it_has_them_too() -> None:
    a = Scripted("a", {"agrees": [4, 5, 1, 2], "differs": [4, 6, 1, 2], "is shorter": [4], "has nothing": []})
    rows = [row(name, forced=[4, 5]) for name in a.guesses]
    guesses, draft = ask(ProposerSet([a]), *rows, row("free"))
    assert guesses == [[4, 5, 1, 2], [4, 5], [4, 5], [4, 5], []]
    assert draft.source == [FORCED, FORCED, 0, 0, *[FORCED] * 6]
    assert draft.parents == [-1, 0, 1, 2, *[-1, 0] * 3]


def test_the_subtree_behind_the_forced_tokens() -> None:
    class Tree(Scripted):
        def propose(self, context: DraftContext) -> Draft:
            #            0   1   2    3   4   5   6   7    4 -> (5 -> (1 -> 8, 2), 9), 7 -> 5
            token_ids = [7, 4, 5, 9, 5, 1, 2, 8]
            return Draft(token_ids, [0, 8], [-1, -1, 0, 1, 1, 4, 4, 5], [0] * 8, confidence=[i / 8 for i in range(8)])

    guesses, draft = ask(ProposerSet([Tree("tree", {"r": []})]), row("r", ceiling=8, forced=[4, 5]))
    assert guesses == [[4, 5, 1, 2, 8]] and draft.parents == [-1, 0, 1, 1, 2]
    assert draft.source == [FORCED, FORCED, 0, 0, 0] and draft.confidence == [1.0, 1.0, 5 / 8, 6 / 8, 7 / 8]


def test_forced_tokens_are_certain_for_the_rules_of_ratios() -> None:
    a = Scripted("a", {"r": [4, 1]}, probs=lambda draft: torch.full((len(draft.token_ids), 6), 1 / 6))
    _, draft = ask(ProposerSet([a]), row("r", forced=[4]), row("s", forced=[5]))
    assert draft.probs is not None
    assert draft.probs.tolist() == [[0, 0, 0, 0, 1, 0], pytest.approx([1 / 6] * 6), [0, 0, 0, 0, 0, 1]]


def test_confidence_and_probs_of_several_proposers() -> None:
    def probs(draft: Draft) -> torch.Tensor:
        return torch.full((len(draft.token_ids), 6), 1 / 6)

    sure = Scripted("sure", {"r1": [3]})
    soft = Scripted("soft", {"r2": [1, 2, 3]}, confidence=lambda draft: [0.5, 0.4, 0.3][: len(draft.token_ids)], probs=probs)
    _, draft = ask(ProposerSet([sure, soft]), row("r1"), row("r2", ceiling=2))
    assert draft.confidence == [1.0, 0.5, 0.4]
    assert draft.probs is not None
    assert draft.probs[0].tolist() == [0, 0, 0, 1, 0, 0] and draft.probs[1:].tolist() == probs(draft)[:2].tolist()


def test_probs_of_a_smaller_vocabulary_are_filled_up() -> None:
    narrow = Scripted("narrow", {"r1": [1]}, probs=lambda draft: torch.full((len(draft.token_ids), 2), 0.5))
    wide = Scripted("wide", {"r2": [2]}, probs=lambda draft: torch.full((len(draft.token_ids), 4), 0.25))
    _, draft = ask(ProposerSet([narrow, wide, Scripted("sure", {"r3": [5]})]), row("r1"), row("r2"), row("r3"))
    assert draft.probs is not None
    assert draft.probs.tolist() == [[0.5, 0.5, 0, 0, 0, 0], [0.25] * 4 + [0, 0], [0, 0, 0, 0, 0, 1]]
    _, draft = ask(ProposerSet([narrow], vocab_size=9), row("r1"))
    assert draft.probs is not None and draft.probs.tolist() == [[0.5, 0.5] + [0] * 7], "the target's rows are as wide"


FAULTS: dict[str, tuple[dict[str, Callable[[Draft], Any]], str]] = {
    "float ids": ({"token_ids": lambda draft: [1.0, 2]}, "no token id"),
    "negative ids": ({"token_ids": lambda draft: [1, -1]}, "no token id"),
    "ids past the vocabulary": ({"token_ids": lambda draft: [1, 100]}, "no token id"),
    "a row missing": ({"start_loc": lambda draft: [0]}, "start_loc"),
    "rows that overlap": ({"start_loc": lambda draft: [1, 2]}, "start_loc"),
    "tokens of nobody": ({"start_loc": lambda draft: [0, 1]}, "start_loc"),
    "parents of halves": ({"parents": lambda draft: [-1, -0.5]}, "a parent is no int"),
    "a child before its parent": ({"parents": lambda draft: [1, -1]}, "parent"),
    "its own parent": ({"parents": lambda draft: [0, 0]}, "parent"),
    "parents missing": ({"parents": lambda draft: [-1]}, "parents"),
    "sources missing": ({"source": lambda draft: []}, "source"),
    "confidence NaN": ({"confidence": lambda draft: [0.5, math.nan]}, "confidence"),
    "confidence infinite": ({"confidence": lambda draft: [0.5, math.inf]}, "confidence"),
    "confidence missing": ({"confidence": lambda draft: [0.5]}, "confidence"),
    "probs missing": ({"probs": lambda draft: torch.ones(1, 100)}, "probs"),
    "probs NaN": ({"probs": lambda draft: torch.full((2, 100), math.nan)}, "probs"),
    "probs too narrow": ({"probs": lambda draft: torch.full((2, 2), 0.5)}, "column"),
    "probs too wide": ({"probs": lambda draft: torch.full((2, 200), 1 / 200)}, "column"),
    "probs below 0": ({"probs": lambda draft: torch.tensor([[-1.0, 2.0, 0.0]] * 2)}, "at least 0"),
    "probs that are scores": ({"probs": lambda draft: torch.ones(2, 100)}, "a sum of 1"),
    "probs of another library": ({"probs": lambda draft: [[0.5, 0.5, 0.0]] * 2}, "no tensor of floats"),
    "filled is no mapping": ({"filled": lambda draft: 7}, "AttributeError"),
    "filled has other keys": ({"filled": lambda draft: {3: 4}}, "filled"),
    "filled counts are texts": ({"filled": lambda draft: {(0, "r"): "4"}}, "filled"),
    "no draft at all": ({"token_ids": lambda draft: None}, "TypeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_draft_costs_its_guesses_and_is_counted(name: str) -> None:
    extra, words = FAULTS[name]
    proposers = ProposerSet([Scripted("a", {"r": [1, 2]}, None, **extra), Scripted("b", {"r": [7]})], vocab_size=100)
    for _ in range(3):
        guesses, draft = ask(proposers, row("r"))
        assert guesses == [[7]] and draft.source == [1]
    assert words in off_reasons(proposers)["a"] and "3 steps in a row" in off_reasons(proposers)["a"]
    assert [(s.name, s.num_failures, s.off_reason is None) for s in proposers.stats()] == [("a", 3, False), ("b", 0, True)]


def test_the_first_failure_is_told_with_its_lines_and_leaving_python_is_one(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(Scripted):
        def propose(self, context: DraftContext) -> Draft:
            return sys.exit("leaving") if context.rows else None  # type: ignore[return-value]

    proposers = ProposerSet([Leaving("a", {"r": [1]})])
    for _ in range(2):
        assert ask(proposers, row("r"))[0] == [[]]
    first, second = caplog.records
    assert first.exc_info is not None and first.exc_text and "in propose" in first.exc_text and "SystemExit: leaving" in first.message
    assert second.exc_info is None and "SystemExit: leaving" in second.message


def test_what_is_not_even_shaped_like_a_draft_is_called_that() -> None:
    class Nothing(Scripted):
        def propose(self, context: DraftContext) -> Draft:
            return [[1]]  # type: ignore[return-value]

    proposers = ProposerSet([Nothing("a", {"r": [1]})])
    for _ in range(3):
        ask(proposers, row("r"))
    assert off_reasons(proposers)["a"].endswith("[[1]] is no Draft")


def test_who_is_off_is_asked_no_more_but_may_still_clean_up() -> None:
    broken = Raising("a", {})
    proposers = ProposerSet([broken, Scripted("b", {"r": [7, 8]})])
    for _ in range(5):
        assert ask(proposers, row("r"))[0] == [[7, 8]]
        proposers.observe(FEEDBACK)
    proposers.forget("r")
    assert proposers.stats()[0].num_failures == 3 and "RuntimeError: no idea" in off_reasons(proposers)["a"]
    assert broken.heard == ["observe", "observe", "r"]  # off since the third propose
    assert not proposers.works(0) and proposers.works(1)


def test_time_of_drafts_that_were_made_elsewhere_counts_too() -> None:
    proposers = ProposerSet([Scripted("a", {}), Scripted("b", {})], clock=lambda: 0.0)
    proposers.drafted(1, 0.5)
    proposers.drafted(1, 0.25)
    assert proposers.draft_seconds == (0.0, 0.75)


def test_a_good_step_forgives() -> None:
    flaky = Scripted("a", {"r": [1]})
    proposers = ProposerSet([flaky])
    for step in range(12):
        flaky.extra = {} if step % 3 == 2 else {"parents": lambda draft: [5]}
        ask(proposers, row("r"))
    assert off_reasons(proposers) == {} and proposers.stats()[0].num_failures == 8


def test_failing_to_listen_counts_like_failing_to_guess() -> None:
    proposers = ProposerSet([Deaf("a", {"r": [1]}), Scripted("b", {})])
    for _ in range(3):
        assert ask(proposers, row("r"))[0] == [[1]]
        proposers.observe(FEEDBACK)
    assert "ValueError: what?" in off_reasons(proposers)["a"]
    assert ask(proposers, row("r"))[0] == [[]]


def test_who_cannot_begin_early_goes_on_guessing_when_he_is_asked() -> None:
    hasty = Hasty("a", {"r": [1]})
    proposers = ProposerSet([Scripted("b", {"s": [2]}), hasty])
    step = UnderWay([], torch.zeros(0, 3), {}, 16)
    assert proposers.num_places_ahead == 5 and not proposers.may_begin
    for turn in range(4):
        assert ask(proposers, row("s"))[0] == [[2]]
        assert not proposers.may_begin, "nobody asked him"
        proposers.begin(step)
        assert ask(proposers, row("r"))[0] == [[1]]
        assert proposers.may_begin == (turn < 2)
        proposers.begin(step)
        proposers.observe(FEEDBACK)
    assert hasty.num_begun == 2 and proposers.stats()[1].num_failures == 1 and not off_reasons(proposers)


@pytest.fixture
def as_elsewhere(limit_of_a_slow_call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes longer has failed, unlike in the other tests."""
    monkeypatch.setattr(proposer_set, "SLOW_CALL_S", limit_of_a_slow_call)


@pytest.mark.usefixtures("as_elsewhere")
def test_a_slow_call_loses_its_guesses_and_time_to_ingest_is_granted() -> None:
    clock = Clock()

    def takes(seconds: float) -> Callable[[Draft], list[int]]:
        def source(draft: Draft) -> list[int]:
            clock.now += seconds
            return draft.source

        return source

    proposers = ProposerSet([Scripted("a", {"r": [1]}, source=takes(2.5))], clock)
    assert ask(proposers, row("r"))[0] == [[]]
    assert proposers.stats()[0].num_failures == 1 and proposers.stats()[0].draft_seconds == 2.5

    drafter = Scripted("a", {"r": [1]}, Needs(kv_layers=KV), source=takes(2.5))
    proposers = ProposerSet([drafter], clock)
    assert ask(proposers, row("r"), ingest=100)[0] == [[1]]
    guesses, draft = ask(proposers, row("r"), ingest=5)
    assert guesses == [[]] and draft.filled == {(0, "r"): 3}  # what it read, it has read


@pytest.mark.usefixtures("as_elsewhere")
def test_slow_listening_and_slow_scouting_end_too() -> None:
    clock = Clock()

    class Slow(Scripted):
        def observe(self, feedback: Feedback) -> None:
            clock.now += 1.5

        def has_guess(self, row: KnownRow) -> bool:
            clock.now += 1.5
            return True

    listening = ProposerSet([Slow("a", {"r": [1]})], clock)
    for turn in range(4):
        assert ask(listening, row("r"))[0] == [[1] if turn < 3 else []]
        listening.observe(FEEDBACK)
    assert off_reasons(listening)["a"].endswith("listening took 1.5 s, limit 1.0 s")
    unasked = ProposerSet([Slow("a", {"r": [1]})], clock)
    for _ in range(4):
        unasked.observe(FEEDBACK)
    assert not off_reasons(unasked), "who only writes down what is said may take his time"

    scouting = ProposerSet([Slow("a", {"r": [1]})], clock)
    (look,) = scouting.scouts
    assert look is not None
    assert [look([row("r")]) for _ in range(4)] == [[False]] * 4
    assert off_reasons(scouting)["a"].endswith("took 1.5 s, limit 1.0 s")


def test_names_needs_and_checks() -> None:
    a = Scripted("a", {"r": [1] * 3}, Needs(hidden=(2, FINAL), scratch_slots=4))
    b = Scripted("b", {"r": [1] * 7}, Needs(hidden=(2, 5), kv_layers=KV))
    c = Scripted("c", {"r": [1] * 5}, Needs(kv_layers=KV, scratch_slots=1))
    proposers = ProposerSet([a, b, c])
    assert proposers.names == ("a", "b", "c") and proposers.num_ingesting == 2
    assert proposers.needs == Needs((FINAL, 2, 5), KV + KV, scratch_slots=4)
    proposers.check()
    c.heard.append("corrupt")
    with pytest.raises(AssertionError):
        proposers.check()


def test_a_step_is_told_to_those_who_want_to_hear_of_it() -> None:
    members = [
        Scripted("all", {}, Needs(hears="every step")), Scripted("own", {"r": [1]}, Needs(hears="own steps")),
        Scripted("ends", {"r": [2]}, Needs(hears="ends")), Scripted("nothing", {"r": [3]}, Needs(hears="nothing")),
    ]
    proposers = ProposerSet(members[1:])

    def told(has_ended: bool = False) -> list[str]:
        for member in members:
            member.heard.clear()
        if proposers.listens(has_ended):
            proposers.observe(replace(FEEDBACK, finished=[has_ended]))
        return [member.name for member in members if member.heard]

    ask(proposers, row("r", assigned=1))
    assert told() == []  # a guess of somebody who learns nothing from it: nobody is told
    ask(proposers, row("r"))
    assert told() == ["own"]
    assert told() == []  # a step in which nobody was asked
    assert told(has_ended=True) == ["ends"]
    proposers = ProposerSet([members[-1]])
    assert told(has_ended=True) == []

    proposers = ProposerSet(members)
    ask(proposers, row("r", assigned=2))
    assert told() == ["all"] and told() == ["all"]
    assert told(has_ended=True) == ["all", "ends"]


def test_who_comes_behind_the_one_with_a_guess_is_not_asked() -> None:
    first, second, third = (Scripted(name, {"r": [i]}) for i, name in enumerate("abc"))
    proposers = ProposerSet([first, second, third])
    assert ask(proposers, row("r", assigned=1))[0] == [[1]]
    assert (len(first.seen), len(second.seen), len(third.seen)) == (0, 1, 0)
    assert ask(proposers, row("r", assigned=1), row("s", assigned=1))[0] == [[1], []]  # s is left for the third
    assert [seen.request_id for seen in third.seen[0]] == ["s"]


class Stuck(Scripted):
    def close(self) -> None:
        raise OSError("the disk is full")


def test_corpora_hear_of_what_ended_well_and_are_saved_whoever_fails(tmp_path: Path) -> None:
    folder, last = CorpusFolder(tmp_path, "v", 10), Scripted("last", {})
    proposers = ProposerSet([Stuck("stuck", {}), last], corpora=Corpora(folder=folder))
    proposers.observe(replace(FEEDBACK, ended=[Ended("r", "c", [1, 2])]))
    proposers.close()
    assert last.heard == ["observe", "close"] and proposers.stats()[0].num_failures == 1
    assert [*folder.read()] == [("c", [array("i", [1, 2])])]
