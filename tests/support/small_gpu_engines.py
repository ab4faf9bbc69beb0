"""Engines so small that Triton's interpreter can run them where there is no GPU, and what they are asked."""

from pathlib import Path
from typing import Any

from random_drafters import write
from saying import said

from foretoken import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], [7, 8, 7, 8, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "enable_prefix_caching": False,
}


def say(llm: LLM, **more: Any) -> list[list[int]]:
    return said(llm, PROMPTS, GREEDY, **more)


def guessing(method: str, target: Path, folder: Path) -> dict[str, Any]:
    """By a drafter of random weights in every step; "off" is by nobody."""
    if method == "off":
        return {"method": method}
    layers = {"layers": [0, 1, 2]} if method == "eagle3" else {}
    return {"method": method, "model": str(write(method, target, folder)), "num_speculative_tokens": 3, "adaptive": False, **layers}
