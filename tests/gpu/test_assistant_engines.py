"""Gemma 4's assistants on a GPU, or where Triton's interpreter stands in for one: over the target's own keys and values."""

from pathlib import Path
from typing import Any

from fixed_k import fixed
from gemma4_assistants import MAX_MODEL_LEN, save_assistant, save_target
from saying import check_engine, said

from foretoken import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], list(range(100, 128))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "enable_prefix_caching": False,
}


def test_texts_and_guesses_are_those_of_a_cpu(a_gpu: None, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    config = fixed({"model": str(save_assistant(tmp_path / "assistant"))})
    found: list[tuple[list[list[int]], int, int]] = []
    for where in ({"device": "cpu", "executor": "torch"}, {"device": "cuda"}):
        with LLM(str(target), speculative_config=config, **where, **OPTIONS) as llm:
            texts, stats = said(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)), llm.stats()
            check_engine(llm)
            found.append((texts, stats.num_draft_tokens, stats.num_accepted_tokens))
    assert found[0] == found[1] and found[0][1] > 20
