"""`kv_cache_dtype="fp8"` from the options to the tokens, on a GPU or where Triton's interpreter stands in for one."""

from pathlib import Path
from typing import Any

import pytest
from random_drafters import write
from saying import check_engine, said
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.kernels.fp8 import FP8, nearest
from foretoken.kernels.torch_kv import TorchKV

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[list[int]]:
    """What a network says over a wide cache of rounded numbers, in torch on the CPU."""
    write_all = TorchKV.write_all

    def write_rounded(self: TorchKV, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write_all(self, layer, slots, nearest(k).to(k), nearest(v).to(v))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TorchKV, "write_all", write_rounded)
        with LLM(tiny_target, {"method": "off"}, device="cpu", executor="torch", **OPTIONS) as llm:
            return say(llm)


def say(llm: LLM) -> list[list[int]]:
    return said(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))


@pytest.mark.parametrize(("method", "batch_invariant"), [("off", False), ("draft_model", False), ("eagle3", True)])
def test_a_server_says_what_the_rounded_numbers_mean(
    a_gpu: None, tiny_target: Path, expected: list[list[int]], method: str, batch_invariant: bool, tmp_path: Path
) -> None:
    """Drafters' own caches stay wide."""
    config: dict[str, Any] = {"method": method}
    if method != "off":
        config |= {"model": str(write(method, tiny_target, tmp_path)), "adaptive": False, "num_speculative_tokens": 3}
    config |= {"layers": [0, 1, 2]} if method == "eagle3" else {}
    with LLM(tiny_target, config, device="cuda", kv_cache_dtype="fp8_e4m3", batch_invariant=batch_invariant, **OPTIONS) as llm:
        engine = llm._running()
        assert "Triton and CUDA graphs, float32, fp8 cache" in engine.model.plan.describe()
        kv = engine.core.runner.kv
        assert isinstance(kv, TorchKV) and {cache.dtype for cache in (*kv.k, *kv.v)} == {FP8}
        assert say(llm) == expected
        if method != "off":
            assert llm.stats().num_draft_tokens > 0
            check_engine(llm)
