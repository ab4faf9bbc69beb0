"""What the target says of prompts, against transformers in float32: whole, in chunks, beside others, with a warm cache, preempted."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.engine import prompt_logprobs, scheduler
from foretoken.engine.errors import ContextTooLong, InvalidRequest
from foretoken.engine.outputs import RequestOutput
from foretoken.engine.prompt_logprobs import ROWS, Scores

OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.01, "max_num_seqs": 8, "dtype": "float32"}
ONLY_READ = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
READ_AND_GO_ON = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)


def a_prompt(length: int, seed: int = 0) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(4, 290) for _ in range(length)]


@lru_cache(maxsize=1)
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def expected(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[len - 1, V]: row i is about token i + 1."""
    with torch.inference_mode():
        return reference(folder)(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)


def check(folder: Path, output: RequestOutput, num_best: int) -> None:
    prompt, said = output.prompt_token_ids, output.prompt_logprobs
    assert said is not None and len(said) == len(prompt) and said[0] is None
    scores = expected(folder, prompt)
    for row, token, entry in zip(scores, prompt[1:], said[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=2e-4)
        best = row.topk(num_best)
        for rank, (other, logprob) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), 1):
            assert entry[other].logprob == pytest.approx(logprob, abs=2e-4) and entry[other].rank == rank
        assert entry[token].rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)  # ties, to rounding
        assert len(entry) <= num_best + 1


def llm_of(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"speculative_config": {"method": "off"}, **OPTIONS, **settings})


@pytest.mark.parametrize("budget", [8, 37, 2048])
@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_prompts_in_chunks_of_any_size(tiny_target: Path, budget: int, executor: str) -> None:
    prompts = [a_prompt(length, length) for length in (1, 2, 15, 16, 17, 150, 64)]
    with llm_of(tiny_target, max_num_batched_tokens=budget, executor=executor) as llm:
        for params in (ONLY_READ, READ_AND_GO_ON):
            for output in llm.generate(prompts, params, use_tqdm=False):
                check(tiny_target, output, params.prompt_logprobs or 0)
                assert len(output.outputs[0].token_ids) == params.max_tokens and output.outputs[0].finish_reason == "length"
        llm._running().core.check()


def test_what_the_cache_has_is_computed_anew_and_leaves_it_as_it_was(tiny_target: Path) -> None:
    prompt = a_prompt(100)
    with llm_of(tiny_target, max_num_batched_tokens=40) as llm:
        (plain,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
        (scored,) = llm.generate(prompt, READ_AND_GO_ON, use_tqdm=False)
        check(tiny_target, scored, 0)
        assert scored.num_cached_tokens == 0 and scored.outputs[0].token_ids == plain.outputs[0].token_ids
        (again,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
        assert again.num_cached_tokens == 96 and again.prompt_logprobs is None


@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
def test_beside_guesses_and_those_who_ask_for_nothing(tiny_target: Path, method: str) -> None:
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        drafter["model"] = str(tiny_target)
    prompts = [a_prompt(30 + 13 * i, i) for i in range(6)]
    quiet = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    each = [quiet, READ_AND_GO_ON, ONLY_READ, SamplingParams(seed=1, max_tokens=9, logprobs=1), ONLY_READ, quiet]
    with llm_of(tiny_target) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in zip(prompts, each, strict=True)]
    with llm_of(tiny_target, speculative_config=drafter, max_num_batched_tokens=50) as llm:
        together = llm.generate(prompts, each, use_tqdm=False)
        for one, other, params in zip(alone, together, each, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            if params.prompt_logprobs is None:
                assert other.prompt_logprobs is None
            else:
                check(tiny_target, other, params.prompt_logprobs)
        llm._running().core.check()


def test_a_request_that_is_pushed_out_goes_on_where_it_was(tiny_target: Path) -> None:
    """Sixteen blocks: the newest row has to give its places back again and again."""
    prompts = [a_prompt(60, seed) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=1, ignore_eos=True)
    with llm_of(tiny_target, max_num_batched_tokens=24, num_gpu_blocks_override=16) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            check(tiny_target, output, 1)
        assert llm.stats().num_preemptions > 0
        llm._running().core.check()


def test_few_logits_at_a_time(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the logits of 9 tokens: prompts take more steps, and never more memory than that."""
    monkeypatch.setattr(scheduler, "MAX_LOGITS_BYTES", 9 * 4 * 300)
    widths: list[int] = []
    with llm_of(tiny_target) as llm:
        runner = llm._running().core.runner
        start = runner.start

        def noted(plan: Any) -> Any:
            forward = start(plan)
            logits = forward.finish().logits
            widths.append(0 if logits is None else len(logits))
            return forward

        monkeypatch.setattr(runner, "start", noted)
        for output in llm.generate([a_prompt(40, 1), a_prompt(50, 2)], ONLY_READ, use_tqdm=False):
            check(tiny_target, output, 3)
    assert 7 <= max(widths) <= 10 and sum(widths) == 39 + 49


def test_scores_are_the_same_however_many_rows_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = torch.randn(2 * ROWS + 3, 40), [i % 40 for i in range(2 * ROWS + 3)]
    found = Scores.of(logits, token_ids, 4)
    monkeypatch.setattr(prompt_logprobs, "ROWS", len(logits))
    whole = Scores.of(logits, token_ids, 4)
    for name in Scores.__dataclass_fields__:
        assert np.array_equal(getattr(found, name), getattr(whole, name)) and len(getattr(found, name)) == len(logits)


def test_scores_that_are_not_finite_fail_their_request_alone(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm_of(tiny_target) as llm:
        executor = llm._running().model.executor
        run = executor.run

        def broken(batch: Any, *rest: Any) -> Any:
            output = run(batch, *rest)
            if output.logits is not None:
                output.logits[3] = float("nan")
            return output

        monkeypatch.setattr(executor, "run", broken)
        scored, fine = llm.generate([a_prompt(20), a_prompt(9)], [ONLY_READ, SamplingParams(temperature=0, max_tokens=3)], use_tqdm=False)
        assert scored.outputs[0].finish_reason == "error" and fine.outputs[0].finish_reason in ("stop", "length")
        llm._running().core.check()


def test_the_context_may_be_full_where_nothing_is_to_come(tiny_target: Path) -> None:
    with llm_of(tiny_target, max_model_len=64) as llm:
        (output,) = llm.generate(a_prompt(64), ONLY_READ, use_tqdm=False)
        check(tiny_target, output, 3)
        for length, params in ((65, ONLY_READ), (64, READ_AND_GO_ON)):
            with pytest.raises(ContextTooLong):
                llm.generate(a_prompt(length), params, use_tqdm=False)


@pytest.mark.parametrize("wrong", [-2, 2**31, True, 1.0])
def test_how_many_are_kept_has_a_bound(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=wrong)
