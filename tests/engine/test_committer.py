"""Where requests grow: stop rules, places, trees, statistics."""

from dataclasses import dataclass, field

import torch
from rows import a_request, a_scheduler

from foretoken.engine.committer import Committer
from foretoken.engine.detokenizer import Pushed
from foretoken.engine.draft_counts import DraftCounts, DraftSums
from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan, Verdict
from foretoken.engine.request import Request, TokenDelta
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.stats import ProposerStats
from foretoken.kernels.layout import ForwardOutput
from foretoken.proposers.base import FORCED


@dataclass
class Letters:
    """Token 1 is "a", 2 is "b" ...; stops at a "z" as if "z" were a stop string."""

    pushed: list[int] = field(default_factory=list)

    def push(self, token_ids: list[int]) -> Pushed:
        self.pushed += token_ids
        text = "".join(chr(96 + t) for t in token_ids)
        if "z" in text:
            return Pushed(text[: text.index("z")], text.index("z") + 1, "z")
        return Pushed(text)

    def finish(self) -> str:
        return "."


class Desk:
    """One running request that has read its prompt, and the committer that grows it."""

    def __init__(self, request: Request, block_size: int = 4) -> None:
        self.scheduler: Scheduler = a_scheduler(block_size=block_size)
        self.moves: list[tuple[list[int], list[int]]] = []
        self.letters = Letters()
        self.committer = Committer(
            self.scheduler.kv, self.scheduler, lambda src, dst: self.moves.append((src, dst)),
            lambda r: self.letters if r.params.detokenize else None, prediction_index=0,
        )
        self.request = request
        self.scheduler.add(request)
        self.scheduler.schedule(0.0)

    def commit(self, tokens: list[int], draft: list[int], parents: list[int], accepted: list[int], source: int = 1) -> TokenDelta:
        request, kv = self.request, self.scheduler.kv
        assert kv.reserve(request.request_id, len(request.token_ids) + len(draft))
        row = PlanRow(
            request, request.num_computed_tokens, len(request.token_ids) - request.num_computed_tokens, draft, parents,
            [source] * len(draft), kv.block_table(request.request_id), samples=True,
        )
        (delta,) = self.committer.commit(StepPlan([row], kv.block_size), Verdict([RowVerdict(accepted, tokens)]))
        self.scheduler.check()
        kv.check()
        self.committer.check()
        return delta


def test_accepted_tokens_are_computed_and_the_last_one_is_not() -> None:
    desk = Desk(a_request("r", 3))
    delta = desk.commit([5, 6, 9], [5, 6, 7], [-1, 0, 1], [0, 1])
    assert (delta.token_ids, delta.sources, delta.finish_reason) == ([5, 6, 9], [1, 1, -1], None)
    assert desk.request.token_ids == [1, 2, 3, 5, 6, 9]
    assert desk.request.num_computed_tokens == 5
    stats = desk.request.stats
    assert (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens, stats.histogram) == (1, 3, 2, [0, 0, 1])


def test_a_tree_path_is_moved_behind_the_known_tokens() -> None:
    desk = Desk(a_request("r", 3))
    desk.commit([6, 8, 9], [5, 6, 7, 8], [-1, -1, 0, 1], [1, 3])
    table = desk.scheduler.kv.block_table("r")
    slot = lambda place: table[place // 4] * 4 + place % 4  # noqa: E731
    assert desk.moves == [([slot(4), slot(6)], [slot(3), slot(4)])]


def test_nothing_follows_an_end_token_inside_a_draft() -> None:
    request = a_request("r", 3)
    request.eos_token_ids = frozenset([6])
    desk = Desk(request)
    delta = desk.commit([5, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [0, 1, 2])
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([5, 6], "stop", None)
    assert delta.stats is request.stats
    assert desk.scheduler.kv.pool.num_free == desk.scheduler.kv.pool.num_blocks


def test_ignored_end_tokens_and_stop_tokens() -> None:
    request = a_request("r", 3, ignore_eos=True, stop_token_ids=[8])
    request.eos_token_ids = frozenset([6])
    desk = Desk(request)
    delta = desk.commit([5, 6, 8, 9], [5, 6, 8], [-1, 0, 1], [0, 1, 2])
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([5, 6, 8], "stop", 8)


def test_max_tokens_cuts_a_draft() -> None:
    desk = Desk(a_request("r", 3, max_tokens=2))
    delta = desk.commit([5, 6, 7], [5, 6], [-1, 0], [0, 1])
    assert (delta.token_ids, delta.finish_reason) == ([5, 6], "length")


def test_a_stop_string_cuts_tokens_text_and_cache() -> None:
    desk = Desk(a_request("r", 3, detokenize=True))
    delta = desk.commit([1, 26, 2, 3], [1, 26, 2], [-1, 0, 1], [0, 1, 2])
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("a", [1, 26], "stop", "z")


def test_a_stop_token_has_no_text_and_the_held_text_is_flushed() -> None:
    request = a_request("r", 3, detokenize=True)
    request.eos_token_ids = frozenset([6])
    desk = Desk(request)
    assert desk.commit([1], [], [], []).text == "a"
    delta = desk.commit([2, 6], [2], [-1], [0])
    assert (delta.text, delta.token_ids, desk.letters.pushed) == ("b.", [2, 6], [1, 2])


def test_predicted_tokens_are_counted_apart() -> None:
    desk = Desk(a_request("r", 3))
    desk.commit([5, 9], [5, 6, 7], [-1, 0, 1], [0], source=0)
    assert (desk.request.stats.accepted_prediction_tokens, desk.request.stats.rejected_prediction_tokens) == (1, 2)


def test_a_row_with_an_error_fails_alone_and_frees_its_blocks() -> None:
    desk = Desk(a_request("r", 3))
    row = PlanRow(desk.request, 0, 3, [], [], [], desk.scheduler.kv.block_table("r"), samples=True)
    (delta,) = desk.committer.commit(StepPlan([row], 4), Verdict([RowVerdict([], [], error="not finite")]))
    assert (delta.finish_reason, delta.error, delta.error_code) == ("error", "not finite", "numerical_error")
    assert delta.queue_time_s == 0.0  # it ran
    assert not desk.scheduler.has_work
    desk.scheduler.kv.check()


def test_predicted_tokens_behind_the_end_are_not_accepted() -> None:
    desk = Desk(a_request("r", 3, stop_token_ids=[6]))
    delta = desk.commit([5, 6, 7, 8, 9], [5, 6, 7, 8], [-1, 0, 1, 2], [0, 1, 2, 3], source=0)
    assert delta.token_ids == [5, 6]
    stats = desk.request.stats
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens, stats.num_accepted_tokens) == (2, 2, 4)


def test_every_delta_says_what_was_cached() -> None:
    desk = Desk(a_request("r", 3))
    desk.request.num_cached_tokens = 2
    assert desk.commit([5], [], [], []).num_cached_tokens == 2
    assert desk.committer.fail(desk.request, "no", "engine_error").num_cached_tokens == 2


def test_forced_tokens_are_no_prediction() -> None:
    desk = Desk(a_request("r", 3))
    committer = Committer(desk.scheduler.kv, desk.scheduler, lambda src, dst: None, lambda request: None)  # no prediction proposer
    row = PlanRow(desk.request, 0, 3, [5], [-1], [FORCED], desk.scheduler.kv.block_table("r"), samples=True)
    committer.commit(StepPlan([row], 4), Verdict([RowVerdict([0], [5, 6])]))
    assert (desk.request.stats.num_accepted_tokens, desk.request.stats.accepted_prediction_tokens) == (1, 0)


def test_a_proposer_answers_for_its_guesses_behind_forced_tokens_alone() -> None:
    desk = Desk(a_request("r", 3))
    row = PlanRow(desk.request, 0, 3, [5, 6, 7, 8], [-1, 0, 1, 2], [FORCED, 0, 0, 0], desk.scheduler.kv.block_table("r"), samples=True)
    plan, verdict = StepPlan([row], 4), Verdict([RowVerdict([0, 1], [5, 6, 9])])
    desk.committer.commit(plan, verdict)
    stats = desk.request.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.of_proposer) == (4, 2, {0: (1, 1)})
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (1, 2)
    counts = DraftCounts(["prediction"])
    counts.add(plan, verdict, 0.0, 7.0)
    assert (counts.sums, counts.accepted_per_position) == (DraftSums(1, 4, 2), (1, 1))
    assert counts.totals == (ProposerStats("prediction", 1, 3, 1, verify_seconds=3.0),)


def test_feedback_says_what_was_really_appended() -> None:
    desk = Desk(a_request("r", 3, stop_token_ids=[6]))
    assert desk.scheduler.kv.reserve("r", 6)
    row = PlanRow(desk.request, 0, 3, [5, 6, 7], [-1, 0, 1], [1] * 3, desk.scheduler.kv.block_table("r"), samples=True)
    plan, verdict = StepPlan([row], 4), Verdict([RowVerdict([0, 1, 2], [5, 6, 7, 8])])
    desk.committer.commit(plan, verdict)
    assert verdict.feedback(plan, ForwardOutput(torch.zeros(0), torch.zeros(0), None)).emitted == [[5, 6]]


def test_a_text_that_cannot_be_written_fails_its_request_alone() -> None:
    class Broken(Letters):
        def push(self, token_ids: list[int]) -> Pushed:
            raise UnicodeError("no such letter")

    desk = Desk(a_request("r", 3, detokenize=True))
    desk.letters = Broken()
    delta = desk.commit([5], [], [], [])
    assert (delta.finish_reason, delta.error_code, delta.token_ids) == ("error", "engine_error", [])
    assert not desk.scheduler.has_work
