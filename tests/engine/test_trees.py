"""Trees in the whole engine over a real network: random ones, partly right, change nothing but the number of steps.

The network is a tiny random Llama. What a tree step leaves behind is looked at too: texts, logprobs,
the feedback to proposers and the hidden states of accepted nodes, with cached prefixes, cut trees and preempted rows.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.engine.boot import assemble
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.core import EngineCore
from foretoken.engine.intake import Intake
from foretoken.engine.model import LoadedModel, load_model
from foretoken.engine.request import Request, SamplingParams, TokenDelta, TokenLogprobs
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.kernels import native
from foretoken.kernels.layout import FINAL, MAX_TREE_TOKENS
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Feedback, Needs
from foretoken.proposers.config import SpeculativeConfig
from foretoken.proposers.proposer_set import ProposerSet

STRINGS = ["he", "ve", "j", "G", "5", "}"]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
    "logit_bias": {"temperature": 0.9, "logit_bias": {40: 5.0, 41: -100.0}},
    "allowed ids": {"temperature": 1.0, "allowed_token_ids": list(range(60, 110))},
    "bad words": {"temperature": 0.6, "bad_words": ["e", "th", "a b"]},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "stop strings": {"temperature": 1.0, "stop": STRINGS},
    "filtered stop strings": {"temperature": 0.9, "top_k": 60, "stop": STRINGS},
    "stop strings left in": {"temperature": 1.0, "stop": STRINGS, "include_stop_str_in_output": True},
    "stop tokens": {"temperature": 1.0, "ignore_eos": False, "stop_token_ids": list(range(100, 110)), "min_tokens": 15},
    "short": {"temperature": 1.0, "max_tokens": 11},
}
MAX_TOKENS = 72


class Forester:
    """Grows random trees in which the true continuation stands on some branch as far as its dice allow; duplicates included.

    With an empty `futures` it guesses nothing. It keeps the hidden state of every token that became part of a text, and holds the
    feedback to what it proposed.
    """

    name = "forester"
    needs = Needs(hidden=(FINAL,))
    max_tokens = MAX_TREE_TOKENS

    def __init__(self, dice: random.Random, vocab_size: int, futures: Mapping[str, Sequence[int]]) -> None:
        self._dice, self._vocab_size, self._futures = dice, vocab_size, futures
        self._proposed: dict[str, tuple[list[int], list[int]]] = {}
        self.states: dict[tuple[str, int], Tensor] = {}  # (request, position) -> [H]
        self.depths: list[int] = []  # of accepted paths
        self.sizes: set[int] = set()  # of verified trees
        self.num_moved = 0  # accepted paths that did not lie in place
        self.num_cut = 0  # paths of which a stop left a part

    def propose(self, context: DraftContext) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        start_loc = [0]
        for row in context.rows:
            future = self._futures.get(row.request_id, ())[len(row.token_ids) - row.num_prompt_tokens :]
            tokens, above = self._tree(row, future) if future else ([], [])
            self._proposed[row.request_id] = tokens, above
            token_ids += tokens
            parents += above
            start_loc.append(len(token_ids))
        return Draft(token_ids, start_loc, parents, [0] * len(token_ids))

    def _tree(self, row: DraftRow, future: Sequence[int]) -> tuple[list[int], list[int]]:
        dice = self._dice
        size = dice.choice([0, dice.randint(1, 9), dice.randint(1, MAX_TREE_TOKENS), MAX_TREE_TOKENS])  # the ceiling is not its concern
        tokens: list[int] = []
        parents: list[int] = []
        right = {-1: 0}  # nodes on a true path, with their depth
        for node in range(size):
            if node and dice.random() < 0.1:  # a twin
                twin = dice.randrange(node)
                parents.append(parents[twin])
                tokens.append(tokens[twin])
            else:
                parents.append(dice.choice([max(right), node - 1, dice.randint(-1, node - 1)]))
                depth = right.get(parents[-1], len(future))
                is_right = depth < len(future) and dice.random() < 0.5
                tokens.append(future[depth] if is_right else dice.randrange(self._vocab_size))
            depth = right.get(parents[-1], len(future))
            if depth < len(future) and tokens[-1] == future[depth]:
                right[node] = depth + 1
        return tokens, parents

    def observe(self, feedback: Feedback) -> None:
        hidden = feedback.hidden[FINAL]
        assert len(hidden) == feedback.query_start_loc[-1]
        for i, request_id in enumerate(feedback.request_ids):
            start, scheduled, path = feedback.query_start_loc[i], feedback.num_scheduled[i], feedback.accepted[i]
            tokens, parents = self._proposed.pop(request_id, ([], []))
            size = feedback.num_drafted[i]
            assert start + scheduled + size == feedback.query_start_loc[i + 1]
            assert all(parents[node] == before for before, node in zip([-1, *path], path, strict=False)), "no path of the tree"
            assert all(node < size for node in path), "a node that was cut is accepted"
            emitted, said = list(feedback.emitted[i]), [tokens[node] for node in path]
            kept = min(len(path), len(emitted))
            assert emitted[:kept] == said[:kept] and len(emitted) <= len(path) + 1
            if path and len(emitted) <= len(path):
                assert feedback.finished[i], "a part of a path was lost"
                self.num_cut += 1
            first = feedback.num_committed[i] - kept - scheduled
            rows = [*range(start, start + scheduled), *(start + scheduled + node for node in path[:kept])]
            for offset, row in enumerate(rows):
                self.states[request_id, first + offset] = hidden[row].clone()
            if size:
                self.sizes.add(size)
                self.depths.append(len(path))
                self.num_moved += path != list(range(len(path)))

    def forget(self, request_id: str) -> None:
        self._proposed.pop(request_id, None)

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Said:
    """All that came out for one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ending: tuple[Any, ...] = ()

    def add(self, delta: TokenDelta) -> None:
        assert delta.finish_reason != "error", delta.error
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            self.ending = (delta.finish_reason, delta.stop_reason)


NATIVE = [("native", "bfloat16")] if native.availability().isa is not None else []


@pytest.fixture(scope="module", params=[("torch", "float32"), *NATIVE], ids=lambda of: of[0])
def model(request: pytest.FixtureRequest, tiny_target: Path) -> LoadedModel:
    executor, dtype = request.param
    return load_model(ModelConfig(str(tiny_target), dtype=dtype, executor=executor), lambda line: None)


def requests(model: LoadedModel, **changed: Any) -> list[Request]:
    """One for each of the settings; prompts share their beginnings."""
    intake = Intake(model.tokenizer, model.vocab_size, model.tokenizer_size, 512, 512, model.eos_token_ids, ["forester"])
    stems = [[(7 * i + 5 * stem) % 290 + 4 for i in range(30)] for stem in range(3)]
    made: list[Request] = []
    for i, (name, settings) in enumerate(SETTINGS.items()):
        params = SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": i, "ignore_eos": True, **settings, **changed})
        made += intake.requests(name, [*stems[i % 3][: 17 + i], 4 + i], params, float(i // 4))
    return made


def run(
    model: LoadedModel,
    arriving: list[Request],
    forester: Forester,
    num_slots: int,
    scheduler: SchedulerConfig,
    prefix_caching: bool = True,
) -> tuple[dict[str, Said], EngineCore]:
    block_size = 4 if model.plan.kind == "torch" else 16  # the native executor knows no other
    config = EngineConfig(cache=CacheConfig(block_size, enable_prefix_caching=prefix_caching), scheduler=scheduler)
    kv = model.executor.allocate(num_slots // block_size, block_size)
    runner = Runner(model.executor, kv, forester.needs.hidden, full_logits_wanted)
    core = assemble(config, SpeculativeConfig(disable_by_batch_size=64), model, runner, ProposerSet([forester]))
    said, step = {request.request_id: Said() for request in arriving}, 0
    while arriving or core.has_work:
        while arriving and arriving[0].arrival_time * 3 <= step:
            core.add_request(arriving.pop(0))
        for delta in core.step(float(step)):
            said[delta.request_id].add(delta)
        core.check()
        step += 1
    (health,) = core.proposers.stats()
    assert health.num_failures == 0, health.off_reason
    return said, core


ROOMY = SchedulerConfig(2048, 16, 1024)


@dataclass(frozen=True)
class Plain:
    """What is said without any guess and without cached prefixes."""

    said: dict[str, Said]
    states: dict[tuple[str, int], Tensor]
    futures: dict[str, list[int]]  # with what would have come behind a stop string


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> Plain:
    watcher = Forester(random.Random(0), model.vocab_size, {})
    said, _ = run(model, requests(model), watcher, 2400, ROOMY, prefix_caching=False)
    assert not watcher.sizes
    assert said["stop strings"].ending[1] in STRINGS and said["stop tokens"].ending[1] in range(100, 110)
    endless, _ = run(model, requests(model, stop=[]), Forester(random.Random(0), model.vocab_size, {}), 2400, ROOMY)
    futures = {name: more.tokens for name, more in endless.items()}
    assert all(futures[name][: len(one.tokens)] == one.tokens for name, one in said.items())
    return Plain(said, watcher.states, futures)


CASES = {
    "roomy": (2400, ROOMY),
    "few drafts a step": (2400, SchedulerConfig(2048, 16, 40)),  # ceilings cut most trees
    "few tokens a step": (2400, SchedulerConfig(24, 5, 16)),  # prompts in chunks beside trees
    "tiny cache": (160, SchedulerConfig(512, 8, 256)),  # rows push each other out
}


@pytest.mark.parametrize("case", CASES)
def test_random_trees_change_nothing(model: LoadedModel, plain: Plain, case: str) -> None:
    ends = {r.request_id: r.num_prompt_tokens + len(plain.said[r.request_id].tokens) for r in requests(model)}
    num_cut = num_moved = num_preempted = 0
    sizes, depths = set[int](), set[int]()
    for seed in range(4):
        forester = Forester(random.Random(f"{case} {seed}"), model.vocab_size, plain.futures)
        said, core = run(model, requests(model), forester, *CASES[case])
        for name, wanted in plain.said.items():
            got = said[name]
            assert (got.tokens, got.text, got.ending) == (wanted.tokens, wanted.text, wanted.ending), name
            assert [ranked(entry) for entry in got.logprobs] == [ranked(entry) for entry in wanted.logprobs]
            assert [e.logprob for e in got.logprobs] == pytest.approx([e.logprob for e in wanted.logprobs], abs=1e-4)
        for (name, position), state in forester.states.items():
            if (name, position) in plain.states:
                torch.testing.assert_close(state, plain.states[name, position], rtol=1e-4, atol=1e-4)
            else:
                assert position == ends[name] - 1, "only a text's very last token has no state without a guess"
        assert core.scheduler.kv.num_hit_tokens > 0
        sizes |= forester.sizes
        depths |= set(forester.depths)
        num_moved += forester.num_moved
        num_cut += forester.num_cut
        num_preempted += core.scheduler.num_preemptions
    assert depths >= {0, 1, 2, 3} and num_moved > 50 and num_cut > 0
    assert (num_preempted > 0) == (case == "tiny cache")
    assert case != "roomy" or MAX_TREE_TOKENS in sizes


def ranked(said: TokenLogprobs) -> tuple[int, list[int]]:
    return said.rank, [token for token, _ in said.top]
