"""Drafters with large heads guess from a shortlist: nearly the same guesses, and exactly the same answers."""

import pytest
from native_only import native_only
from saying import said
from variants import slow_but

from foretoken.engine.core import EngineCore
from foretoken.engine.llm import LLM
from foretoken.engine.request import SamplingParams
from foretoken.kernels.native import NativeExecutor

pytestmark = native_only
PROMPTS = ["Write a function that adds two numbers.", "def main():\n    ", "The capital of France"]


def core_of(llm: LLM) -> EngineCore:
    return llm._running().core


def answers(llm: LLM, temperature: float) -> tuple[list[list[int]], float]:
    """And the share of guesses that were accepted."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=60, ignore_eos=True)
    texts, sums = said(llm, PROMPTS, params), core_of(llm).controller.counts.sums
    return texts, sums.accepted_tokens / max(sums.draft_tokens, 1)


@pytest.mark.parametrize("method", slow_but(["draft_model"], ["draft_model", "eagle", "mtp"]))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_same_and_so_is_nearly_every_guess(method: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    with LLM(None, {"method": "off"}) as llm:
        plain, _ = answers(llm, temperature)
    with LLM(None, config) as llm:
        whole, accepted = answers(llm, temperature)

    shortened: list[NativeExecutor] = []

    def shorten(executor: NativeExecutor, least_bytes: int = 0) -> None:
        shortened.append(executor)
        original(executor, least_bytes=0)

    original = NativeExecutor.shorten_chains
    monkeypatch.setattr(NativeExecutor, "shorten_chains", shorten)
    with LLM(None, config) as llm:
        short, nearly = answers(llm, temperature)
        assert shortened and core_of(llm).runner.executor not in shortened
    assert plain == whole == short
    assert accepted > 0.05 and abs(nearly - accepted) < 0.05


@pytest.mark.parametrize("method", slow_but(["medusa", "pard"], ["medusa", "mlp_speculator", "pard", "dflash"]))
def test_heads_that_are_in_no_chain_have_no_copy(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened: list[NativeExecutor] = []
    monkeypatch.setattr(NativeExecutor, "shorten_chains", shortened.append)
    with LLM(None, {"method": method, "adaptive": False}):
        assert not shortened
