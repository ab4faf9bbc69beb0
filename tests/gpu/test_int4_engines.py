"""`quantization="int4"` from the options to the tokens, on a GPU or where Triton's interpreter stands in for one.

What is planned, loaded, quantised and run is all real there too.
"""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from saying import check_engine
from small_gpu_engines import OPTIONS, guessing, say

from foretoken import LLM
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.int4 import Int4Matrix


@pytest.fixture(scope="module")
def expected(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What a network says whose weights were made narrow and whole again, in torch on the CPU."""
    folder = tmp_path_factory.mktemp("whole")
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_target / "model.safetensors")
    is_product = re.compile(r"proj\.weight|lm_head")
    whole = {name: Int4Matrix.of(tensor).weight() if is_product.search(name) else tensor for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    with LLM(folder, {"method": "off"}, device="cpu", executor="torch", **OPTIONS) as llm:
        return say(llm)


def test_a_server_of_4_bit_weights_says_what_they_mean(a_gpu: None, tiny_target: Path, expected: list[list[int]]) -> None:
    with LLM(tiny_target, {"method": "off"}, device="cuda", quantization="int4", **OPTIONS) as llm:
        engine = llm._running()
        assert isinstance(engine.model.executor, GraphExecutor)
        assert "Triton and CUDA graphs, int4 weights, float32" in engine.model.plan.describe()
        found = say(llm)
    assert found == expected


@pytest.mark.parametrize(("method", "quantization"), [("draft_model", "int4"), ("eagle3", "int4"), ("eagle3", None)])
def test_drafters_take_them_too(
    a_gpu: None, tiny_target: Path, expected: list[list[int]], method: str, quantization: str | None, tmp_path: Path
) -> None:
    """With a head that the target has narrow already, whatever the drafter's own weights are."""
    config = guessing(method, tiny_target, tmp_path)
    config |= {} if quantization is None else {"quantization": quantization}
    with LLM(tiny_target, config, device="cuda", quantization="int4", batch_invariant=quantization is None, **OPTIONS) as llm:
        found = say(llm)
        assert llm.stats().num_draft_tokens > 0
        check_engine(llm)
    assert found == expected
