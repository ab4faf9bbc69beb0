"""Targets with recurrent layers: what they say is what transformers says, whatever is guessed, cached, pushed out or short."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from recurrent_models import save_qwen3_5
from saying import said
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.boot import boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.engine.errors import ConfigError
from foretoken.kernels import native
from foretoken.proposers.config import SpeculativeConfig

NATIVE = native.availability().isa is not None
EXECUTORS = slow_but(["native"], ["native", "torch"]) if NATIVE else ["torch"]
TOKENS = 40
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5}
SUFFIX = {"method": "suffix"}
TREE = {**LOOKUP, "num_speculative_tokens": 9, "num_branches": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_5(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


def an_llm(folder: Path, executor: str, speculation: dict[str, Any] | list[dict[str, Any]], **settings: Any) -> LLM:
    settings = {"dtype": "float32", "kv_cache_gb": 0.2, "max_num_seqs": 8, **settings}
    return LLM(str(folder), executor=executor, speculative_config=fixed(speculation), **settings)


def prompts() -> list[list[int]]:
    dice = torch.Generator().manual_seed(4)
    texts = [torch.randint(40, 4000, (length,), generator=dice).tolist() for length in (1, 5, 16, 33, 70)]
    return [text + text[:4] for text in texts]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with an_llm(folder, "torch", {"method": "off"}, enable_prefix_caching=False) as llm:
        yield llm


def test_it_says_what_transformers_says(folder: Path, plain: LLM):
    from transformers import Qwen3_5ForCausalLM

    model: Any = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for asked, got in zip(prompts(), said(plain, prompts(), GREEDY), strict=True):
        ids = torch.tensor([asked])
        expected = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)[0, ids.shape[1] :]
        assert got == expected.tolist()


@pytest.mark.parametrize("speculation", [LOOKUP, SUFFIX, TREE], ids=["chain", "suffix", "tree"])
def test_guesses_change_nothing(folder: Path, executor: str, plain: LLM, speculation: dict[str, Any]):
    with an_llm(folder, executor, speculation) as llm:
        for params in (GREEDY, SEEDED):
            for _ in range(2):  # the second time suffixes know what will be said, and prefixes are cached
                assert said(llm, prompts(), params) == said(plain, prompts(), params)
        (stats,) = (p for p in llm._running().core.stats().proposers if p.num_draft_tokens)
        assert stats.num_draft_tokens > 50
        if speculation is SUFFIX:
            assert stats.num_accepted_tokens > 100


def test_prompts_in_pieces_and_rows_pushed_out(folder: Path, executor: str, plain: LLM):
    # 12 blocks hold two of the longer texts: others are pushed out and computed anew.
    with an_llm(folder, executor, [LOOKUP, SUFFIX], max_num_batched_tokens=24, num_gpu_blocks_override=12) as llm:
        assert said(llm, prompts(), SEEDED) == said(plain, prompts(), SEEDED)
        assert llm._running().core.stats().num_preemptions > 0


def test_a_conversation_goes_on_where_it_was(folder: Path, executor: str, plain: LLM):
    text = prompts()[-1]
    with an_llm(folder, executor, LOOKUP) as llm:
        (answer,) = said(llm, [text], GREEDY)
        asked = [[*text, *answer, 77, 78]]
        result = llm.generate(asked, GREEDY, use_tqdm=False)[0]
        # All full blocks of the first turn but the last, whose state nobody came past, or that one too.
        assert (result.num_cached_tokens or 0) >= (len(text) + len(answer)) // 16 * 16 - 16
        assert list(result.outputs[0].token_ids) == said(plain, asked, GREEDY)[0]


def test_a_shared_beginning_is_computed_twice_and_then_known(folder: Path, executor: str, plain: LLM):
    stem = torch.randint(40, 4000, (64,), generator=torch.Generator().manual_seed(9)).tolist()
    with an_llm(folder, executor, LOOKUP) as llm:
        cached = []
        for tail in (50, 51, 52):
            asked = [[*stem, *[tail] * 20]]
            result = llm.generate(asked, GREEDY, use_tqdm=False)[0]
            cached.append(result.num_cached_tokens)
            assert list(result.outputs[0].token_ids) == said(plain, asked, GREEDY)[0]
    assert cached == [0, 0, 64]


def test_choices_scores_and_texts_to_embed(folder: Path, executor: str, plain: LLM):
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    with an_llm(folder, executor, LOOKUP) as llm:
        results = (some.generate(prompts(), params, use_tqdm=False) for some in (llm, plain))
        for one, other in zip(*results, strict=True):
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
            for a, b in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
                assert (a is None) == (b is None)
                for token in a or {}:
                    assert math.isclose((a or {})[token].logprob, (b or {})[token].logprob, abs_tol=1e-3)
        for one, other in zip(llm.embed(prompts()), plain.embed(prompts()), strict=True):
            torch.testing.assert_close(torch.tensor(one.outputs.embedding), torch.tensor(other.outputs.embedding), atol=1e-4, rtol=0)


def test_requests_wait_for_a_state(folder: Path, executor: str, plain: LLM):
    with an_llm(folder, executor, LOOKUP, kv_cache_gb=0.004) as llm:
        share = llm._running().core.runner.states
        assert share is not None and share.num_seats < len(prompts())
        assert any(line.startswith("states") for line in llm._running().banner)
        assert said(llm, prompts(), SEEDED) == said(plain, prompts(), SEEDED)


@pytest.mark.parametrize("caching", [True, False])
def test_costs_are_measured_and_guesses_adapt(
    folder: Path, executor: str, plain: LLM, caching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    settings = {"dtype": "float32", "kv_cache_gb": 0.2, "max_num_seqs": 8, "enable_prefix_caching": caching}
    with LLM(str(folder), executor=executor, speculative_config=[LOOKUP, SUFFIX], **settings) as llm:
        assert [*tmp_path.rglob("*.json")]
        assert said(llm, prompts(), SEEDED) == said(plain, prompts(), SEEDED)


def test_too_little_room_for_one_state_is_told(folder: Path):
    cache = CacheConfig(kv_cache_gb=0.0001)
    with pytest.raises(ConfigError, match=r"recurrent states of one request need .*set kv_cache_gb to at least"):
        boot(EngineConfig(ModelConfig(str(folder), executor="torch"), cache, speculative=SpeculativeConfig(off=True)))
