"""Steps in rounds, as tests see them: requests that may be in one, and an engine whose steps in rounds are watched."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.core import EngineCore
from foretoken.engine.outputs import RequestOutput
from foretoken.engine.plan import RoundsPlan, RoundsVerdict, Settled
from foretoken.engine.request import Request

PROMPTS = ["The quick brown fox", "one two one two one two one", "def add(a, b):", "x", "a b a b a b a b a b"]
OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.005, "max_num_seqs": 8, "dtype": "float32"}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
TAKEN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 11},
    "filtered": {"seed": 5, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    "several choices": {"seed": 3, "n": 3},
    "a stop token": {"temperature": 0, "stop_token_ids": list(range(40, 60)), "ignore_eos": False},
    "a stop string": {"seed": 4, "stop": ["a", "e"]},
    "its end": {"seed": 4, "temperature": 1.5, "ignore_eos": False},
    "few tokens": {"temperature": 0, "max_tokens": 2},
    "no text": {"seed": 1, "detokenize": False},
}


def params(settings: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | settings)


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str | None, Any]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


def say_the_same(one: LLM, other: LLM, prompts: Sequence[str], each: SamplingParams | list[SamplingParams]) -> bool:
    return said(one.generate(list(prompts), each, use_tqdm=False)) == said(other.generate(list(prompts), each, use_tqdm=False))


def generate(llm: LLM, prompts: list[str], settings: dict[str, Any]) -> list[RequestOutput]:
    return llm.generate(prompts, params(settings), use_tqdm=False)


def requests_of(llm: LLM, name: str, settings: dict[str, Any], prompts: Sequence[str | list[int]] = PROMPTS) -> list[Request]:
    tokens = [llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return [one for i, ids in enumerate(tokens) for one in llm._running().intake.requests(f"{name}-{i}", ids, params(settings), 0.0)]


def predicted(llm: LLM, answer: RequestOutput, settings: dict[str, Any]) -> Request:
    """Asked again, with the answer as its prediction."""
    told = params(settings | {"prediction": answer.outputs[0].token_ids})
    (request,) = llm._running().intake.requests("predicted", answer.prompt_token_ids, told, 0.0)
    drive(core_of(llm), [request])
    return request


def answered(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def core_of(llm: LLM) -> EngineCore:
    return llm._running().core


class Watch:
    """What the steps in rounds of an engine were."""

    def __init__(self, core: EngineCore) -> None:
        assert core.rounds is not None, "the engine has no rounds"
        self.calls: list[tuple[RoundsPlan, RoundsVerdict]] = []
        self._core = core
        self._run = core.rounds.run
        core.rounds.run = self._watched  # type: ignore[method-assign]

    def _watched(self, plan: RoundsPlan) -> RoundsVerdict:
        verdict = self._run(plan)
        self.calls.append((plan, verdict))
        return verdict

    @property
    def num_passes(self) -> int:
        return sum(len(verdict.tokens) for _, verdict in self.calls)

    @property
    def drafts(self) -> list[Settled]:
        return [draft for _, verdict in self.calls for row in verdict.rows for draft in row.drafts]

    @property
    def requests(self) -> set[str]:
        return {row.request.request_id for plan, _ in self.calls for row in plan.rows}

    def leave(self) -> None:
        """The engine as it was."""
        assert self._core.rounds is not None
        self._core.rounds.run = self._run  # type: ignore[method-assign]
        self._core.check()


def check_one_that_wants_none(plain: LLM, llm: LLM, watch: Watch) -> None:
    """A request without guesses beside one with them."""
    each = [params({"temperature": 0, "speculation": {"method": method}}) for method in ("off", "auto")]
    outputs = llm.generate(PROMPTS[1:3], each, use_tqdm=False)
    assert said(outputs) == said(plain.generate(PROMPTS[1:3], each, use_tqdm=False))
    assert watch.calls and outputs[0].metrics.speculative_decoding.num_draft_tokens == 0


def check_up_to_the_end(folder: Path, config: dict[str, Any]) -> None:
    """All answers reach the end of the context."""
    options, to_the_end = OPTIONS | {"max_model_len": 64}, {"temperature": 0, "max_tokens": None}
    with LLM(folder, config, **options) as llm, LLM(folder, {"method": "off"}, **options) as without:
        watch = Watch(core_of(llm))
        answers = generate(llm, PROMPTS, to_the_end)
        assert said(answers) == said(generate(without, PROMPTS, to_the_end)) and watch.calls
        assert {output.outputs[0].finish_reason for output in answers} == {"length"}


def fail(core: EngineCore, patch: pytest.MonkeyPatch, count: int) -> None:
    """The next calls break, so many of them."""
    assert core.rounds is not None
    run, failures = core.rounds.run, iter(range(count))

    def broken(plan: RoundsPlan) -> RoundsVerdict:
        if next(failures, None) is not None:
            raise RuntimeError("broken")
        return run(plan)

    patch.setattr(core.rounds, "run", broken)


def drive(core: EngineCore, requests: list[Request], act: Callable[[int], object] = lambda step: None) -> None:
    for request in requests:
        core.add_request(request)
    step = 0
    while core.has_work:
        core.step(float(step))
        core.check()
        act(step)
        step += 1
