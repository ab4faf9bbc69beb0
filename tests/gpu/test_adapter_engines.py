"""Adapters on a GPU, or where Triton's interpreter stands in for one: each row has its own, in graphs and overlapping steps too."""

from pathlib import Path

import pytest
import small_gpu_engines
from random_adapters import pairs_for, save_adapter
from saying import check_engine
from small_gpu_engines import guessing

from foretoken import LLM, LoRARequest
from foretoken.engine.errors import ConfigError

OPTIONS = small_gpu_engines.OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def asked(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    folders = [save_adapter(tmp_path_factory.mktemp("adapter"), pairs_for(tiny_target, seed, rank=4 * seed)) for seed in (1, 2)]
    one, two = (LoRARequest(f"number {seed}", seed, str(folder)) for seed, folder in enumerate(folders))
    return [one, None, two]


def say(llm: LLM, asked: list[LoRARequest | None]) -> list[list[int]]:
    return small_gpu_engines.say(llm, lora_request=asked)


@pytest.mark.parametrize("method", ["off", "draft_model", "eagle3", "uno"])
def test_each_row_has_its_own(a_gpu: None, tiny_target: Path, asked: list[LoRARequest | None], method: str, tmp_path: Path) -> None:
    with LLM(tiny_target, {"method": "off"}, device="cpu", executor="torch", **OPTIONS) as llm:
        expected = say(llm, asked)
        assert expected != say(llm, [None] * 3)
    config = guessing(method, tiny_target, tmp_path)
    with LLM(tiny_target, config, device="cuda", **OPTIONS) as llm:
        assert say(llm, asked) == expected
        check_engine(llm)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_narrow_weights_have_them_too(a_gpu: None, tiny_target: Path, asked: list[LoRARequest | None], quantization: str) -> None:
    with LLM(tiny_target, {"method": "off"}, device="cuda", quantization=quantization, **OPTIONS) as llm:
        plain, found = say(llm, [None] * 3), say(llm, asked)
        assert found[1] == plain[1] and found[0] != plain[0] and found[2] != plain[2]


def test_one_shape_for_all_sums_is_not_promised_with_them(a_gpu: None, tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="enable_lora and batch_invariant cannot be combined"):
        LLM(tiny_target, {"method": "off"}, device="cuda", batch_invariant=True, **OPTIONS)
