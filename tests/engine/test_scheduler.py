"""Who runs, with how many tokens and guesses."""

import time
from collections.abc import Sequence

import pytest
import torch
from rows import VOCAB, a_request, a_scheduler, computed

from foretoken.engine.grammar import GrammarState
from foretoken.engine.request import Status
from foretoken.engine.scheduler import Scheduler
from foretoken.proposers.base import Draft


def running(scheduler: Scheduler, count: int, **settings: int) -> None:
    """`count` requests past their prompt, each about to decode."""
    for i in range(count):
        scheduler.add(a_request(f"r{i}", arrival=float(i), **settings))
    scheduler.schedule(0.0)
    for request in list(scheduler.running):
        computed(scheduler, request)
    assert len(scheduler.running) == count


def test_first_come_first_served_inside_a_priority() -> None:
    scheduler = a_scheduler(max_num_seqs=3)
    for name, arrival, priority in (("late", 3.0, 0), ("urgent", 4.0, -1), ("early", 1.0, 0), ("never", 0.0, 5)):
        scheduler.add(a_request(name, arrival=arrival, priority=priority))
    rows = scheduler.schedule(0.0).rows
    assert [row.request.request_id for row in rows] == ["urgent", "early", "late"]
    assert [r.request_id for r in scheduler.waiting] == ["never"]
    scheduler.check()


def test_prompts_are_read_in_chunks_under_the_budget() -> None:
    scheduler = a_scheduler(budget=16)
    request = a_request("long", 40)
    scheduler.add(request)
    chunks = []
    while request.num_computed_tokens < 40:
        (row,) = scheduler.schedule(0.0).rows
        chunks.append(row.num_scheduled)
        assert row.samples == (sum(chunks) == 40)
        request.num_computed_tokens += row.num_scheduled
        scheduler.kv.commit("long", request.token_ids, request.num_computed_tokens)
    assert chunks == [16, 16, 8]


def test_a_step_never_exceeds_the_budget_and_drafts_come_before_prompts() -> None:
    scheduler = a_scheduler(budget=24, max_drafts=8, max_num_seqs=4)
    running(scheduler, 2)
    scheduler.add(a_request("long", 100, arrival=9.0))
    grants = scheduler.schedule(0.0)
    ceilings = {row.request.request_id: row.ceiling for row in grants.rows}
    assert ceilings == {"r0": 4, "r1": 4, "long": 0}
    assert sum(row.num_scheduled + row.ceiling for row in grants.rows) <= 24
    assert grants.rows[2].num_scheduled == 24 - 2 - 8


def test_a_drafter_that_reads_the_context_is_paid_from_the_budget() -> None:
    scheduler = a_scheduler(budget=24, num_ingesting=1)
    scheduler.add(a_request("long", 100))
    grants = scheduler.schedule(0.0)
    assert grants.rows[0].num_scheduled == 12
    assert grants.max_ingest_tokens == 12


def test_exactly_the_threshold_speculates_and_one_more_does_not() -> None:
    for count, ceilings, reason in ((3, {4}, None), (4, {0}, "batch size")):
        scheduler = a_scheduler(disable_by_batch_size=3)
        running(scheduler, count)
        grants = scheduler.schedule(0.0)
        assert {row.ceiling for row in grants.rows} == ceilings
        assert scheduler.controller.latest.off == reason


def test_prefilling_rows_count_for_the_threshold() -> None:
    scheduler = a_scheduler(disable_by_batch_size=2, budget=24)
    running(scheduler, 2)
    scheduler.add(a_request("long", 100, arrival=9.0))
    assert {row.ceiling for row in scheduler.schedule(0.0).rows} == {0}


def test_k_by_batch_size() -> None:
    scheduler = a_scheduler(per_batch_size=((1, 2, 3), (3, 8, 0)))
    running(scheduler, 2)
    assert {row.ceiling for row in scheduler.schedule(0.0).rows} == {3}
    scheduler = a_scheduler(per_batch_size=((1, 2, 3), (3, 8, 0)))
    running(scheduler, 3)
    assert {row.ceiling for row in scheduler.schedule(0.0).rows} == {0}


def test_no_more_guesses_than_the_request_may_still_have() -> None:
    scheduler = a_scheduler()
    running(scheduler, 1, max_tokens=4)  # one token is there, three to come: two guesses and the target's own
    assert scheduler.schedule(0.0).rows[0].ceiling == 2


def test_a_request_decides_about_its_own_speculation() -> None:
    scheduler = a_scheduler()
    for name, wish in (("off", {"method": "off"}), ("two", {"num_speculative_tokens": 2}), ("named", {"method": "guess"})):
        scheduler.add(a_request(name, speculation=wish))
    scheduler.schedule(0.0)
    for request in list(scheduler.running):
        computed(scheduler, request)
    rows = {row.request.request_id: row for row in scheduler.schedule(0.0).rows}
    assert {name: row.ceiling for name, row in rows.items()} == {"off": 0, "two": 2, "named": 4}
    assert {name: row.assigned for name, row in rows.items()} == {"off": -1, "two": 1, "named": 1}


def test_a_prediction_is_asked_first() -> None:
    scheduler = a_scheduler()
    request = a_request("p")
    request.prediction = (1, 2, 3)
    scheduler.add(request)
    scheduler.schedule(0.0)
    computed(scheduler, request)
    (row,) = scheduler.schedule(0.0).rows
    assert (row.assigned, row.ceiling) == (0, 9)


def test_a_guess_preempts_nobody_and_a_known_token_preempts_the_newest() -> None:
    scheduler = a_scheduler(num_blocks=4, block_size=4, prefix_caching=False)
    old, new = a_request("old", 7), a_request("new", 7, arrival=1.0)
    for request in (old, new):
        scheduler.add(request)
    scheduler.schedule(0.0)
    for request in (old, new):
        computed(scheduler, request)  # both know 8 tokens in two blocks; no block is free
    grants = scheduler.schedule(0.0)
    assert [row.ceiling for row in grants.rows] == [0, 0]
    for request in (old, new):
        computed(scheduler, request)  # both need a third block now
    grants = scheduler.schedule(0.0)
    assert [row.request for row in grants.rows] == [old]
    assert new.status is Status.WAITING and new.num_computed_tokens == 0 and new.num_preemptions == 1
    assert scheduler.num_preemptions == 1
    scheduler.check()
    scheduler.kv.check()


def test_what_a_preempted_request_finds_of_itself_is_no_hit() -> None:
    scheduler = a_scheduler(num_blocks=4, block_size=4, k=0)
    old, new = a_request("old", 7), a_request("new", 7, arrival=1.0)
    new.token_ids[0] += 1  # nothing in common
    for request in (old, new):
        scheduler.add(request)
    for _ in range(2):
        scheduler.schedule(0.0)
        for request in (old, new):
            computed(scheduler, request)
    scheduler.schedule(0.0)
    assert (new.status, new.num_preemptions) == (Status.WAITING, 1)
    scheduler.finish(old)
    scheduler.schedule(0.0)
    assert new.num_computed_tokens > 0, "it goes on from the blocks that it had"
    assert (scheduler.kv.num_queried_tokens, scheduler.kv.num_hit_tokens) == (14, 0)


def test_settle_cuts_what_was_not_granted_and_what_is_not_a_token() -> None:
    scheduler = a_scheduler(k=3)
    running(scheduler, 4)
    grants = scheduler.schedule(0.0)
    guesses = [[1, 2, 3, 4, 5], [1, VOCAB, 2], [-1, 2], []]
    draft = Draft.chains(guesses)
    plan = scheduler.settle(grants, draft)
    assert [row.draft_token_ids for row in plan.rows] == [[1, 2, 3], [1], [], []]
    assert all(row.is_chain for row in plan.rows)
    scheduler.kv.check()


def test_settle_cuts_a_tree_at_the_first_orphan() -> None:
    scheduler = a_scheduler(k=4)
    running(scheduler, 1)
    grants = scheduler.schedule(0.0)
    plan = scheduler.settle(grants, Draft([5, 6, 7, 8], [0, 4], [-1, -1, 1, 3], [0] * 4))
    assert plan.rows[0].draft_token_ids == [5, 6, 7]
    assert not plan.rows[0].is_chain


class Lawful(GrammarState):
    """A language of digits below 10, of which some come without a choice; no matcher behind it."""

    def __init__(self, forced: list[int]) -> None:
        self.run = forced

    def forced(self, limit: int) -> list[int]:
        return self.run[:limit]

    def legal(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        kept: list[int] = []
        for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if token < 10 and (parent < 0 or parent in kept):
                kept.append(node)
        return kept


def test_settle_cuts_what_the_grammar_forbids_and_gives_its_places_back() -> None:
    scheduler = a_scheduler(block_size=1, k=6)
    running(scheduler, 3)
    for request in scheduler.running:
        request.grammar = Lawful([])
    grants = scheduler.schedule(1.0)
    draft = Draft([5, 11, 6, 12, 5, 5, 12, 6, 7], [0, 3, 5, 9], [-1, 0, 1, -1, 0, -1, -1, 0, 2], [0, 0, 0, 0, 0, 3, 4, 5, 6])
    free = scheduler.kv.pool.num_free
    plan = scheduler.settle(grants, draft)
    assert [(row.draft_token_ids, row.parents, row.source) for row in plan.rows] == [
        ([5], [-1], [0]),
        ([], [], []),
        ([5, 6, 7], [-1, 0, 1], [3, 5, 6]),
    ]
    assert scheduler.kv.pool.num_free == free + sum(row.ceiling for row in grants.rows) - 4
    scheduler.kv.check()


def test_a_drawn_guess_stays_for_the_rule_to_refuse_it() -> None:
    """Dropping it would let what is likelier under p than under q come too rarely."""
    scheduler = a_scheduler(k=6)
    running(scheduler, 2)
    for request in scheduler.running:
        request.grammar = Lawful([])
    probs = torch.arange(7.0)[:, None].expand(7, VOCAB)
    draft = Draft([5, 11, 6, 12, 5, 6, 7], [0, 4, 7], [-1, 0, 1, 2, -1, 0, 1], [0] * 7, probs=probs)
    plan = scheduler.settle(scheduler.schedule(1.0), draft)
    assert [row.draft_token_ids for row in plan.rows] == [[5, 11], [5, 6, 7]]
    assert plan.draft_probs is not None and plan.draft_probs[:, 0].tolist() == [0, 1, 4, 5, 6]


def test_forced_tokens_come_on_top_of_a_rows_share() -> None:
    scheduler = a_scheduler(k=2, max_drafts=16)
    running(scheduler, 3)
    long, short, free = scheduler.running
    long.grammar, short.grammar = Lawful([1, 2, 3, 4, 5, 6, 7]), Lawful([1])
    grants = scheduler.schedule(1.0)
    assert [(row.ceiling, list(row.forced)) for row in grants.rows] == [(7, [1, 2, 3, 4, 5, 6, 7]), (2, [1]), (2, [])]
    assert [list(row.forced) for row in grants.draft_context().rows] == [[1, 2, 3, 4, 5, 6, 7], [1], []]
    assert all(row.ceiling <= len(row.block_table) * 4 - len(row.request.token_ids) for row in grants.rows)


def test_forced_tokens_stay_inside_the_budget_and_the_length() -> None:
    scheduler = a_scheduler(k=2, max_drafts=4)
    running(scheduler, 2, max_tokens=6)
    for request in scheduler.running:
        request.grammar = Lawful([1] * 9)
    assert [row.ceiling for row in scheduler.schedule(1.0).rows] == [2, 2]
    wide = a_scheduler(k=2, max_drafts=32)
    running(wide, 1, max_tokens=6)
    wide.running[0].grammar = Lawful([1] * 9)
    assert [row.ceiling for row in wide.schedule(1.0).rows] == [4]  # one token is there, and a step brings one of its own


def test_no_forced_tokens_where_nobody_may_guess() -> None:
    scheduler = a_scheduler(disable_by_batch_size=1)
    running(scheduler, 2)
    for request in scheduler.running:
        request.grammar = Lawful([1, 2])
    assert [list(row.forced) for row in scheduler.schedule(1.0).rows] == [[], []]
    alone = a_scheduler()
    alone.add(a_request("off", speculation={"method": "off"}))
    alone.schedule(0.0)
    computed(alone, alone.running[0])
    alone.running[0].grammar = Lawful([1, 2])
    assert [list(row.forced) for row in alone.schedule(1.0).rows] == [[]]


def test_places_that_no_guess_used_go_back() -> None:
    scheduler = a_scheduler(block_size=1)
    running(scheduler, 1)
    free = scheduler.kv.pool.num_free
    grants = scheduler.schedule(0.0)
    assert scheduler.kv.pool.num_free == free - 1 - 4
    scheduler.settle(grants, Draft.empty(1))
    assert scheduler.kv.pool.num_free == free - 1


def test_an_aborted_request_leaves_nothing_behind() -> None:
    scheduler = a_scheduler()
    running(scheduler, 2)
    scheduler.add(a_request("w", arrival=9.0))
    for name in ("r0", "w"):
        scheduler.finish(scheduler.requests[name])
        scheduler.check()
        scheduler.kv.check()
    assert [r.request_id for r in scheduler.running] == ["r1"] and not scheduler.waiting


def test_to_leave_a_long_queue_takes_no_look_at_all_of_it() -> None:
    scheduler, count = a_scheduler(), 20_000
    requests = [a_request(f"r{i}", 3, arrival=float(i), priority=i % 3) for i in range(count)]
    for request in requests:
        scheduler.add(request)
    started = time.process_time()
    for request in requests[1:]:
        scheduler.finish(request)
    assert time.process_time() - started < 3  # by looking at all of it in turn: 15 s and more
    assert scheduler.waiting == requests[:1]
    scheduler.check()


@pytest.mark.parametrize("num_ingesting", [0, 1, 3])
def test_the_smallest_budget_still_reads_prompts(num_ingesting: int) -> None:
    scheduler = a_scheduler(budget=1, max_num_seqs=1, num_ingesting=num_ingesting)
    scheduler.add(a_request("r", 5))
    assert [row.num_scheduled for row in scheduler.schedule(0.0).rows] == [1]


def test_a_prompt_chunk_has_its_proposer_already() -> None:
    """Drafters that read the context must know from the first chunk on whether the row will ever guess."""
    scheduler = a_scheduler(budget=16)
    for name, wish in (("on", {}), ("off", {"method": "off"})):
        scheduler.add(a_request(name, 10, speculation=wish))
    rows = {row.request.request_id: row for row in scheduler.schedule(0.0).rows}
    assert not rows["off"].samples
    assert (rows["on"].ceiling, rows["on"].assigned, rows["off"].assigned) == (0, 1, -1)
