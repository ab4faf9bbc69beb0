"""`kv_cache_dtype="fp8"` from the options to the tokens, on a GPU or where Triton's interpreter stands in for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_drafters import write
from tiny_models import save_llama
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.kernels.fp8 import FP8, nearest
from foretoken.kernels.torch_kv import TorchKV

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), hidden_size=64, num_layers=2, seed=0)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    """What a network says over a wide cache of rounded numbers, in torch on the CPU."""
    write_all = TorchKV.write_all

    def write_rounded(self: TorchKV, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write_all(self, layer, slots, nearest(k).to(k), nearest(v).to(v))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TorchKV, "write_all", write_rounded)
        with LLM(target, {"method": "off"}, device="cpu", executor="torch", **OPTIONS) as llm:
            return say(llm)


def say(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("method", "batch_invariant"), [("off", False), ("draft_model", False), ("eagle3", True)])
def test_a_server_says_what_the_rounded_numbers_mean(
    a_gpu: None, target: Path, expected: list[list[int]], method: str, batch_invariant: bool, tmp_path: Path
) -> None:
    """Drafters' own caches stay wide."""
    config: dict[str, Any] = {"method": method}
    if method != "off":
        config |= {"model": str(write(method, target, tmp_path)), "adaptive": False, "num_speculative_tokens": 3}
    config |= {"layers": [0, 1, 2]} if method == "eagle3" else {}
    with LLM(target, config, device="cuda", kv_cache_dtype="fp8_e4m3", batch_invariant=batch_invariant, **OPTIONS) as llm:
        engine = llm._running()
        assert "Triton and CUDA graphs, float32, fp8 cache" in engine.model.plan.describe()
        kv = engine.core.runner.kv
        assert isinstance(kv, TorchKV) and {cache.dtype for cache in (*kv.k, *kv.v)} == {FP8}
        assert say(llm) == expected
        if method != "off":
            assert llm.stats().num_draft_tokens > 0
            assert all(health.num_failures == 0 for health in engine.core.proposers.stats()), "the drafter failed"
