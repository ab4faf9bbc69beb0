"""Steps in rounds with an n-gram cache, beside prompt lookup and alone: what is said stays, and its guesses count as its own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_rounds import LOOKUP, OPTIONS, PROMPTS, TAKEN, Watch, core_of, drive, generate, params, requests_of, said, say_the_same
from native_only import native_only
from ngram_tables import counted, every_token, write

from foretoken import LLM
from foretoken.engine.core import EngineCore
from foretoken.engine.policy.adaptive import AdaptivePolicy
from foretoken.engine.policy.rounds_choice import RoundsChoice
from foretoken.engine.policy.table_trust import TableTrust
from foretoken.engine.rounds import Lookups

pytestmark = native_only

VOCAB = 300  # of the tiny target
BESIDE = ["ngram, ngram_cache", "ngram_cache"]


@pytest.fixture(scope="module")
def cache(plain: LLM, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Something for every token, and what follows longer runs in the first of what the target says."""
    answers = generate(plain, PROMPTS, {"temperature": 0, "max_tokens": 30})
    texts = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]
    longer = {run: said for run, said in counted(texts, 3).items() if len(run) > 1}
    folder = write(tmp_path_factory.mktemp("cache"), {**every_token(random.Random(0), VOCAB), **longer}, 3, VOCAB)
    return {"method": "ngram_cache", "model": str(folder), "num_speculative_tokens": 6}


def config_of(beside: str, cache: dict[str, Any]) -> list[dict[str, Any]]:
    return [LOOKUP if method == "ngram" else cache for method in beside.split(", ")]


@pytest.fixture(scope="module", params=BESIDE)
def looking(request: pytest.FixtureRequest, tiny_target: Path, cache: dict[str, Any]) -> Iterator[LLM]:
    with LLM(tiny_target, config_of(request.param, cache), **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _guesses_cost_nothing(guesses_much: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundsChoice, "_prices", lambda choice, running, most, pass_s: [0.0] * (most + 1))


@pytest.fixture
def watch(looking: LLM) -> Iterator[Watch]:
    watch = Watch(core_of(looking))
    yield watch
    watch.leave()
    assert not trust_of(core_of(looking))._rows, "something is kept of requests that are gone"


def trust_of(core: EngineCore) -> TableTrust:
    policy = core.controller.policy
    assert isinstance(policy, AdaptivePolicy)
    return policy._rounds._trust


def place_of(core: EngineCore, name: str = "ngram_cache") -> int:
    return core.proposers.names.index(name)


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_said_is_the_same(plain: LLM, looking: LLM, watch: Watch, kind: str) -> None:
    for prompts in (PROMPTS, PROMPTS[:1]):
        assert say_the_same(looking, plain, prompts, params(TAKEN[kind]))
    assert place_of(core_of(looking)) in {draft.proposer for draft in watch.drafts} or kind == "few tokens"


def test_what_was_counted_is_guessed_right(looking: LLM, watch: Watch) -> None:
    generate(looking, PROMPTS, {"temperature": 0, "max_tokens": 30})
    table = place_of(core_of(looking))
    drafts = [draft for draft in watch.drafts if draft.proposer == table]
    assert sum(draft.accepted for draft in drafts) > 40
    assert all(0.0 < draft.expected <= draft.drafted for draft in drafts)
    assert not any(draft.expected for draft in watch.drafts if draft.proposer != table)


def test_its_guesses_count_under_its_name(looking: LLM, watch: Watch) -> None:
    def drafted() -> dict[str, tuple[int, int]]:
        return {p.name: (p.num_draft_tokens, p.num_accepted_tokens) for p in looking.stats().proposers}

    before, of_all = drafted(), looking.stats()
    outputs = generate(looking, PROMPTS, {"temperature": 0})
    after, then = drafted(), looking.stats()
    new = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
    drafts = watch.drafts
    for place, name in enumerate(core_of(looking).proposers.names):
        in_rounds = sum(draft.drafted for draft in drafts if draft.proposer == place)
        assert new[name][0] >= in_rounds, "others may come from steps of one pass"
    assert new["ngram_cache"][0] > 0 and new["ngram_cache"][1] > 0 and new["prediction"] == (0, 0)
    assert sum(count for count, _ in new.values()) == then.num_draft_tokens - of_all.num_draft_tokens
    told = [output.metrics.speculative_decoding for output in outputs]
    assert sum(count for count, _ in new.values()) == sum(one.num_draft_tokens for one in told)
    assert sum(count for _, count in new.values()) == sum(one.num_accepted_draft_tokens for one in told)


def test_who_names_a_method_gets_its_guesses_only(plain: LLM, looking: LLM, watch: Watch) -> None:
    core = core_of(looking)
    methods = [name for name in (*core.proposers.names, "off", "auto") if name != "prediction"]
    each = [params({"temperature": 0, "speculation": {"method": method}}) for method in methods]
    prompts = PROMPTS[: len(methods)]
    assert said(looking.generate(prompts, each, use_tqdm=False)) == said(plain.generate(prompts, each[-2], use_tqdm=False))
    found: dict[str, set[int]] = {method: set() for method in methods}
    for plan, verdict in watch.calls:
        for row, told in zip(plan.rows, verdict.rows, strict=True):
            found[row.request.params.speculation_settings.method] |= {draft.proposer for draft in told.drafts}
    named = [method for method in methods if method not in ("off", "auto")]
    assert {method: found[method] for method in named} == {method: {place_of(core, method)} for method in named}
    assert not found["off"] and found["auto"] >= {place_of(core)}


def test_k_of_a_request_holds_for_the_table(looking: LLM, watch: Watch) -> None:
    told = {"method": "ngram_cache", "num_speculative_tokens": 2}
    generate(looking, PROMPTS, {"temperature": 0, "speculation": told})
    assert max(draft.drafted for draft in watch.drafts) == 2


def test_a_prediction_goes_first(plain: LLM, looking: LLM, watch: Watch) -> None:
    (before,) = generate(plain, PROMPTS[3:4], {"seed": 9})
    settings = params({"seed": 9, "prediction": before.outputs[0].token_ids})
    (after,) = looking.generate(PROMPTS[3], settings, use_tqdm=False)
    assert said([after]) == said([before])
    assert {draft.proposer for draft in watch.drafts} == {place_of(core_of(looking), "prediction")}


def test_an_abort_in_between_leaves_nothing(looking: LLM, watch: Watch) -> None:
    core = core_of(looking)
    made = requests_of(looking, "abort", {"temperature": 0, "max_tokens": 300}, ([5, 6, 7] * 4, [9, 8] * 5))
    kept: list[set[str]] = []

    def act(step: int) -> None:
        kept.append(set(trust_of(core)._rows))
        if kept.count(both) == 1 and kept[-1] == both:
            core.abort(made[0].request_id)

    both = {request.request_id for request in made}
    drive(core, made, act)
    assert made[0].finish_reason == "abort" and made[1].finish_reason == "length"
    assert kept[kept.index(both) + 1] == {made[1].request_id} and not kept[-1]


CUSTOM = """
from foretoken.proposers.base import Draft, Needs

class Guess:
    needs = Needs(hears="nothing")
    name = "custom_class"
    max_tokens = 2

    def __init__(self, *arguments, **options):
        pass

    def propose(self, context):
        return Draft.chains([[7, 7][: row.ceiling] for row in context.rows])

    def has_guess(self, row):
        return True

    def observe(self, feedback):
        pass

    def forget(self, request_id):
        pass

    def check(self):
        pass

    def close(self):
        pass
"""


@pytest.mark.parametrize("other", ["pool", "custom scout", "fixed k"])
def test_what_rounds_cannot_ask_keeps_the_engine_out_of_them(
    plain: LLM, tiny_target: Path, tmp_path: Path, cache: dict[str, Any], other: str
) -> None:
    (tmp_path / "guess.py").write_text(CUSTOM)
    config = {
        "pool": [cache, LOOKUP | {"shared_pool": True}],
        "custom scout": [cache, {"custom_class": f"{tmp_path}/guess.py:Guess"}],
        "fixed k": [cache | {"adaptive": False}],
    }[other]
    with LLM(tiny_target, config, **OPTIONS) as llm:
        core = core_of(llm)
        assert core.rounds is None
        assert say_the_same(llm, plain, PROMPTS, params({"temperature": 0}))
        if other == "fixed k":
            assert next(p for p in llm.stats().proposers if p.name == "ngram_cache").num_accepted_tokens > 20
        core.check()


def test_lookups_are_the_first_of_each_kind(looking: LLM) -> None:
    proposers = core_of(looking).proposers.proposers
    lookups = Lookups.among(proposers)
    places = [lookups.place(i) for i in range(len(proposers))]
    assert places == ([None, "text", "table"] if len(proposers) == 3 else [None, "table"])
    assert all(lookups.knows(i) for i in range(len(proposers))) and not lookups.knows(len(proposers))
    assert lookups.prediction == 0 and lookups.ngram_table is not None and (lookups.ngram is None) == (len(proposers) == 2)
    twice = Lookups.among([*proposers, *proposers])
    assert twice == lookups and not twice.knows(len(proposers))
    nobody = Lookups.among([])
    assert (nobody.prediction, nobody.text, nobody.table) == (-1, -1, -1) and nobody.place(0) is None
