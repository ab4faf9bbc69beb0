"""Draft models with recurrent layers: one that is the target itself is always right, whatever was cached, pushed out, short or broken."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import saying
import torch
from fixed_k import fixed
from recurrent_models import EMBEDDED, save_qwen3_5
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.kernels import native
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.layout import ChainOutput, Draws, KVTensors, RaggedBatch
from foretoken.proposers.draft_states import DraftStates, StateSeats

EXECUTORS = ["torch"] + ["native"] * (native.availability().isa is not None)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_5(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


def an_llm(folder: Path | str, executor: str, draft: Path | None, **settings: Any) -> LLM:
    config: dict[str, Any] = {"method": "off"}
    if draft is not None:
        config = fixed({"model": str(draft), "quantization": "none", "draft_sample_method": "probabilistic"})
    settings = {"dtype": "float32", "kv_cache_gb": 0.2, "max_num_seqs": 8, **settings}
    return LLM(str(folder), executor=executor, speculative_config=config, **settings)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with an_llm(folder, "torch", None, enable_prefix_caching=False) as llm:
        yield llm


def prompts(*lengths: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(4)
    return [torch.randint(40, 4000, (length,), generator=dice).tolist() for length in lengths or (1, 5, 16, 33, 70)]


def said(llm: LLM, texts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return saying.said(llm, texts, params)


def counts(llm: LLM) -> tuple[int, int]:
    """Guesses made, and kept."""
    (stats,) = (p for p in llm._running().core.stats().proposers if p.name == "draft_model")
    assert not stats.num_failures
    return stats.num_draft_tokens, stats.num_accepted_tokens


def share_kept(llm: LLM) -> float:
    """Only guesses behind the end of an answer, and those of torch's ties, are not kept."""
    made, kept = counts(llm)
    assert made >= 50
    return kept / made


def test_the_target_as_its_own_draft_is_always_right(folder: Path, executor: str, plain: LLM) -> None:
    with an_llm(folder, executor, folder) as llm:
        for params in (GREEDY, SEEDED):
            for _ in range(2):  # the second time prefixes are known
                assert said(llm, prompts(), params) == said(plain, prompts(), params)
        assert share_kept(llm) > 0.9
        llm._running().core.check()


def test_prompts_in_pieces_and_rows_pushed_out(folder: Path, executor: str, plain: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=7, ignore_eos=True)
    with an_llm(folder, executor, folder, max_num_batched_tokens=24, num_gpu_blocks_override=12) as llm:
        assert said(llm, prompts(60, 70), params) == said(plain, prompts(60, 70), params)
        assert llm._running().core.stats().num_preemptions > 0 and share_kept(llm) > 0.9


def test_a_known_prefix_is_not_read_again(folder: Path, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (stem,) = prompts(64)
    with an_llm(folder, executor, folder) as llm:
        draft: Any = next(p for p in llm._running().core.proposers.proposers if p.name == "draft_model")
        network, read = draft._guesser.network.executor, []

        def run_chain(
            batch: RaggedBatch, kv: KVTensors, counts: Tensor, draws: Draws | None = None, inputs: Mapping[str, Tensor] | None = None
        ) -> ChainOutput:
            read.append(len(batch.token_ids))
            return run_chain_by_steps(network, batch, kv, counts, draws, inputs)

        monkeypatch.setattr(network, "run_chain", run_chain)
        for tail in (50, 51, 52):
            said(llm, [[*stem, *[tail] * 20]])
            read.append(0)
        assert share_kept(llm) > 0.9
    firsts = [read[0]] + [read[i + 1] for i, count in enumerate(read[:-1]) if not count]
    assert firsts[0] >= 84 and firsts[2] <= 22


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_a_state_guess_nothing(folder: Path, executor: str, plain: LLM, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.engine.drafters.StateSeats", lambda seats, prefixes: StateSeats(rows, prefixes))
    with an_llm(folder, executor, folder) as llm:
        assert said(llm, prompts()) == said(plain, prompts())
        made, kept = counts(llm)
        assert 20 * rows <= made and kept >= 0.9 * made


def test_a_target_with_attention_only(folder: Path, executor: str) -> None:
    with an_llm(EMBEDDED, executor, None) as alone, an_llm(EMBEDDED, executor, folder) as llm:
        share = llm._running().core.runner.states
        assert share is None and any(line.startswith("states") for line in llm._running().banner)
        assert said(llm, prompts(), SEEDED) == said(alone, prompts(), SEEDED)
        assert counts(llm)[0] > 50


def test_its_first_layers(folder: Path, plain: LLM) -> None:
    config = fixed({"model": str(folder), "draft_layers": 5})
    with LLM(str(folder), executor=EXECUTORS[-1], dtype="float32", kv_cache_gb=0.2, speculative_config=config) as llm:
        assert said(llm, prompts()) == said(plain, prompts())
        assert counts(llm)[0] > 100


def test_what_cannot_be_is_told(folder: Path) -> None:
    config: dict[str, Any] = {"model": str(folder), "use_heterogeneous_vocab": True, "heterogeneous_vocab": "retokenize"}
    with pytest.raises(ConfigError, match="which a draft with recurrent layers cannot"):
        LLM(str(EMBEDDED), executor="torch", speculative_config=config)


def test_a_pass_that_failed_leaves_nobodys_state() -> None:
    states, text = DraftStates(StateSeats(2, 4), SIZE, 3), [*range(30)]
    assert states.seat("a", text, 0) == 0
    first = states.plan("a", text, 0, 9)
    states.passed("a")
    assert states.seat("a", text, 9) == 9
    second = states.plan("a", text, 9, 12)
    assert second.row[0] == first.row[1], "it goes on where the first pass ended"
    assert second.row[1] not in second.chain_slots and first.row[1] in second.chain_slots
    assert states.seat("a", text, 9) == 8, "chains may have written over what the pass read: back to the known prefix"
    assert states.seat("b", text, 6) == 0, "keys and values are there of six tokens only"
    assert states.seat("c", text, 0) is None
    states.forget("b")
    assert states.seat("c", [1, *text], 16) == 0
    states.check()
