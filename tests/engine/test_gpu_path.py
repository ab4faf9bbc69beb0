"""The whole path that a GPU takes, run on a CPU: executors that start and finish, chains without a host, steps that overlap.

Everything but graphs and kernels is the same code, so outputs must be those of the plain torch executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from random_drafters import write
from tiny_models import save_llama
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.engine import drafters
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.kernels import weights as weights_module
from foretoken.kernels.execution import Execution
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weight_bank import WeightBank

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], [33] * 20, [7, 8, 7, 8, 7, 8, 7]]
OPTIONS: dict[str, Any] = {"executor": "torch", "dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 256, "max_num_seqs": 8}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    "eagle": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 3},
    "medusa": {"num_speculative_tokens": 2},
    "dflash": {},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), hidden_size=64, num_layers=8, seed=0)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(program: Program, weights: Mapping[str, Tensor], execution: Execution, bank: WeightBank | None = None) -> GraphExecutor:
        return GraphExecutor(TorchExecutor(program, weights, execution.dtype, bank))

    monkeypatch.setattr(weights_module, "bind_program", bind)
    monkeypatch.setattr(drafters, "bind_program", bind)


def say(llm: LLM, method: str, **params: Any) -> list[list[int]]:
    each = [
        SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": i, "speculation": {"method": method}, **params})
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], each, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_the_plain_executor(
    method: str, target: Path, tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"method": method, "adaptive": False, **METHODS[method]}
    if method != "ngram":
        config["model"] = str(write(method, target, tmp_path / method))
    with LLM(target, config, **OPTIONS) as llm:
        runner = llm._running().core.runner
        assert isinstance(runner, OverlappedRunner)
        found = {name: say(llm, name, temperature=temperature) for name, temperature in (("off", 0), (method, 0))}
        drawn = say(llm, method, temperature=0.9, top_p=0.9)
        assert runner.num_used >= 10 and llm.stats().num_draft_tokens > 0
        assert all(health.num_failures == 0 for health in llm._running().core.proposers.stats()), "the drafter failed"
        llm._running().core.check()
    monkeypatch.undo()
    with LLM(target, {"method": "off"}, **OPTIONS) as plain:
        expected, expected_drawn = say(plain, "off", temperature=0), say(plain, "off", temperature=0.9, top_p=0.9)
    assert found["off"] == found[method] == expected
    assert drawn == expected_drawn


def test_a_cache_that_runs_out_changes_nothing(target: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places kept for the next step are few, and go when others need them."""
    with LLM(target, {"method": "off"}, **{**OPTIONS, "num_gpu_blocks_override": 7}) as llm:
        found = say(llm, "off", temperature=0)
        assert llm.stats().num_preemptions > 0
        llm._running().core.check()
    monkeypatch.undo()
    with LLM(target, {"method": "off"}, **OPTIONS) as plain:
        assert say(plain, "off", temperature=0) == found


def test_states_and_logits_may_stay_on_the_device(target: Path, as_on_a_gpu: None) -> None:
    with LLM(target, {"method": "off"}, **OPTIONS) as llm:
        executor = llm._running().model.executor
        assert isinstance(executor, GraphExecutor) and executor.captured.num_graphs == 0 and executor.device == torch.device("cpu")
