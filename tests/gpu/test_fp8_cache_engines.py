"""`kv_cache_dtype="fp8"` from the options to the tokens, on a GPU or where Triton's interpreter stands in for one."""

from pathlib import Path

import pytest
from saying import check_engine
from small_gpu_engines import OPTIONS, guessing, say
from torch import Tensor

from foretoken import LLM
from foretoken.kernels.fp8 import FP8, nearest
from foretoken.kernels.torch_kv import TorchKV


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


@pytest.mark.parametrize(("method", "batch_invariant"), [("off", False), ("draft_model", False), ("eagle3", True)])
def test_a_server_says_what_the_rounded_numbers_mean(
    a_gpu: None, tiny_target: Path, expected: list[list[int]], method: str, batch_invariant: bool, tmp_path: Path
) -> None:
    """Drafters' own caches stay wide."""
    config = guessing(method, tiny_target, tmp_path)
    with LLM(tiny_target, config, device="cuda", kv_cache_dtype="fp8_e4m3", batch_invariant=batch_invariant, **OPTIONS) as llm:
        engine = llm._running()
        assert "Triton and CUDA graphs, float32, fp8 cache" in engine.model.plan.describe()
        kv = engine.core.runner.kv
        assert isinstance(kv, TorchKV) and {cache.dtype for cache in (*kv.k, *kv.v)} == {FP8}
        assert say(llm) == expected
        if method != "off":
            assert llm.stats().num_draft_tokens > 0
            check_engine(llm)
