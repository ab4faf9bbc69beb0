import random
from collections.abc import Sequence

import pytest
from hash_engine import hash_core

from foretoken.engine.config import SchedulerConfig
from foretoken.engine.request import Request, SamplingParams
from foretoken.proposers import suffix
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Ended, Feedback, Proposer
from foretoken.proposers.config import NgramConfig, SpeculativeConfig, SuffixConfig
from foretoken.proposers.corpus import Corpora
from foretoken.proposers.ngram import NgramProposer
from foretoken.proposers.proposer_set import ProposerSet
from foretoken.proposers.suffix import SuffixProposer


class World:
    """A suffix proposer in its set, and requests that grow by hand."""

    def __init__(self, config: SuffixConfig = SuffixConfig(), corpora: Corpora | None = None) -> None:  # noqa: B008 - it is frozen
        self.corpora = Corpora(max_responses=max(config.max_cached_requests, 1)) if corpora is None else corpora
        self.proposer = SuffixProposer(config, corpora=self.corpora)
        self.set = ProposerSet([self.proposer], corpora=self.corpora)

    def propose(self, *rows: DraftRow) -> Draft:
        draft = self.set.propose(DraftContext(rows, 0, 16))
        self.set.check()
        assert self.set.stats()[0].num_failures == 0
        return draft

    def guess(self, row: DraftRow) -> list[int]:
        return self.propose(row).token_ids

    def finish(self, row: DraftRow) -> None:
        output = row.token_ids[row.num_prompt_tokens :]
        ended = [Ended(row.request_id, row.corpus_id, output)]
        self.set.observe(Feedback([row.request_id], [0], [0], [[]], [[]], [True], ended=ended))
        self.set.forget(row.request_id)
        self.set.check()


def row(request_id: str, prompt: Sequence[int], output: Sequence[int] = (), corpus_id: str = "c", ceiling: int = 24) -> DraftRow:
    tokens = [*prompt, *output]
    return DraftRow(request_id, tokens, len(prompt), len(tokens), ceiling, 0, (), (0,), Draw(0.0, 0, 0), corpus_id=corpus_id)


ANSWER = [10, 11, 12, 13, 14, 15, 16, 17]


def test_a_repetition_in_the_prompt_is_guessed() -> None:
    draft = World().propose(row("r", [1, 2, 3, 4, 5, 6, 9, 2, 3]))
    assert draft.token_ids == [4, 5] and draft.parents == [-1, 0]
    assert draft.confidence == [0.5, 0.5]  # of two places one has something behind it: the end of the text is the other


def test_a_finished_answer_is_known_to_others_and_its_prompt_is_not() -> None:
    world = World()
    first = row("first", [50, 51, 52, 53], ANSWER)
    world.guess(first)
    world.finish(first)
    assert world.guess(row("second", [7, 11, 12])) == [13, 14]
    assert world.guess(row("third", [7, 50, 51])) == []


def test_a_running_answer_is_known_to_others_and_forgotten_if_it_is_aborted() -> None:
    world = World()
    world.guess(row("first", [50], ANSWER))
    assert world.guess(row("second", [7, 11, 12])) == [13, 14]
    world.set.forget("first")
    assert world.guess(row("third", [7, 11, 12])) == []
    world.guess(row("first", [50], ANSWER))  # preempted, and running again
    assert world.guess(row("fourth", [7, 11, 12])) == [13, 14]


def test_an_answer_that_was_never_shown_is_learned_too() -> None:
    world = World()
    world.guess(row("other", [1], [2]))
    world.finish(row("unseen", [50], ANSWER))
    assert world.guess(row("second", [7, 11, 12])) == [13, 14]


def test_corpora_are_closed_to_each_other() -> None:
    world = World()
    theirs = row("theirs", [1], ANSWER, corpus_id="theirs")
    world.guess(theirs)
    assert world.guess(row("a", [7, 11, 12], corpus_id="ours")) == []
    world.finish(theirs)
    mixed = world.propose(row("b", [7, 11, 12], corpus_id="ours"), row("c", [7, 11, 12], corpus_id="theirs"))
    assert mixed.start_loc == [0, 0, 2]


def test_local_wins_a_tie() -> None:
    world = World()
    world.finish(row("x", [1], [5, 6, 30, 40, 5, 6]))
    assert world.guess(row("r", [5, 6, 31, 41, 5, 6])) == [31, 41]


def test_old_answers_go_as_their_corpus_forgets_them() -> None:
    world = World(SuffixConfig(max_cached_requests=2))
    for number in range(4):
        answer = row(f"r{number}", [1], [100 + number, 200 + number, 300 + number])
        world.guess(answer)
        world.finish(answer)
    known = [bool(world.guess(row(f"ask{number}", [7, 100 + number]))) for number in range(4)]
    assert known == [False, False, True, True]


def test_without_cached_requests_only_the_own_text_counts() -> None:
    world = World(SuffixConfig(max_cached_requests=0))
    world.finish(row("x", [1], ANSWER))
    assert world.guess(row("r", [7, 11, 12])) == []
    assert world.guess(row("s", [1, 2, 3, 9, 1, 2])) == [3, 9]


def test_a_deleted_corpus_is_gone_at_once() -> None:
    world = World()
    world.finish(row("x", [1], ANSWER))
    world.guess(row("warm", [7, 11, 12]))
    world.corpora.delete("c")
    assert world.guess(row("r", [7, 11, 12])) == []
    world.finish(row("y", [1], ANSWER))
    world.guess(row("warm again", [7]))
    assert world.guess(row("s", [7, 11, 12])) == [13, 14]


def test_long_prompts_and_loaded_corpora_are_taken_in_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_TOKENS_A_CALL", 8)
    corpora = Corpora()
    for first in (100, 200, 300):
        corpora.add("c", range(first, first + 6))
    world = World(corpora=corpora)
    prompt = [*range(20), 3, 4]
    guesses = [world.guess(row("r", prompt)) for _ in range(4)]
    assert guesses == [[], [], [5, 6], [5, 6]]
    for _ in range(4):
        world.guess(row("s", [9, 301, 302]))
    assert world.guess(row("s", [9, 301, 302])) == [303, 304]


def test_only_the_last_tokens_of_a_long_prompt_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_LOCAL_TOKENS", 10)
    world = World()
    assert world.guess(row("r", [1, 2, 3, 4, *range(20, 40), 1, 2])) == []
    assert world.guess(row("s", [*range(40), 1, 2, 5, 6, 7, 1, 2])) == [5, 6]


@pytest.mark.parametrize("use_tree", [False, True])
def test_drafts_are_as_long_as_allowed(use_tree: bool) -> None:
    world = World(SuffixConfig(num_speculative_tokens=5, use_tree=use_tree))
    assert world.proposer.max_tokens == 5
    text = [*range(30), 99, *range(20)]
    assert len(world.guess(row("r", text))) == 5
    assert len(world.guess(row("r", text, ceiling=3))) == 3
    assert world.guess(row("r", text, ceiling=0)) == []
    assert World(SuffixConfig(max_tree_depth=500)).proposer.max_tokens == 64


def test_a_tree_holds_several_continuations() -> None:
    world = World(SuffixConfig(max_spec_factor=2.5, use_tree=True))
    for number, continuation in enumerate(([3, 4], [3, 5], [6, 7])):
        world.finish(row(f"x{number}", [0], [1, 2, *continuation]))
    world.guess(row("warm", [0]))
    draft = world.propose(row("r", [9, 1, 2]))
    paths = {tuple(_path(draft, node)) for node in range(len(draft.token_ids))}
    assert paths == {(3,), (3, 4), (3, 5), (6,), (6, 7)} and len(draft.token_ids) == 5
    assert draft.confidence == sorted(draft.confidence or (), reverse=True)


def _path(draft: Draft, node: int) -> list[int]:
    return [] if node < 0 else [*_path(draft, draft.parents[node]), draft.token_ids[node]]


VOCAB = 6


def outputs(proposers: Sequence[Proposer], corpora: Corpora | None, seed: int) -> dict[str, list[int]]:
    """What 14 requests of two corpora say, in a pool so small that some are preempted; some are aborted, whatever runs."""
    proposer_set = ProposerSet(proposers, vocab_size=VOCAB, corpora=corpora)
    core = hash_core(VOCAB, proposer_set, SpeculativeConfig(), SchedulerConfig(48, 5, 40), num_blocks=40)
    dice = random.Random(seed)
    params = SamplingParams(temperature=0.0, detokenize=False, ignore_eos=True)
    prompts = [tuple(dice.randrange(VOCAB) for _ in range(dice.randint(1, 12))) for _ in range(3)]
    requests = [
        Request(f"r{i}", dice.choice(prompts), params, 0.0, dice.randint(5, 40), seed=0, corpus_id=dice.choice("ab")) for i in range(14)
    ]
    aborted = {request.request_id: dice.randint(1, 15) for request in requests if dice.random() < 0.2}
    for request in requests:
        core.add_request(request)
    steps = 0
    while core.has_work:
        core.step(float(steps))
        steps += 1
        for request_id, when in aborted.items():
            if when == steps:
                core.abort(request_id)
        core.check()
    assert all(health.num_failures == 0 for health in core.proposers.stats())
    assert sum(r.stats.num_accepted_tokens for r in requests) or not proposers
    return {r.request_id: r.token_ids[r.num_prompt_tokens :] for r in requests if r.request_id not in aborted}


@pytest.mark.parametrize("use_tree", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_in_an_engine_it_changes_no_output(seed: int, use_tree: bool) -> None:
    corpora = Corpora(max_responses=3)
    plain = outputs([], None, seed)
    assert outputs([SuffixProposer(SuffixConfig(max_tree_depth=6, use_tree=use_tree), corpora=corpora)], corpora, seed) == plain
    assert {corpus.corpus_id for corpus in corpora} == {"a", "b"}
    kept = [response for corpus in corpora for response in corpus]
    assert all(response.token_ids.tolist() == plain[response.request_id] for response in kept)  # none that was aborted

    pooled = NgramProposer(NgramConfig(3, 3, 2, num_branches=3, shared_pool=True), corpora=corpora)
    assert outputs([pooled], corpora, seed) == plain
