"""The embedded target where it may say ten tokens only: drafters of random weights that know just these are often right, in trees
most often."""

from collections.abc import Iterable
from typing import Any

from saying import check_engine, token_ids

from foretoken import LLM, SamplingParams
from foretoken.kernels import native

TOKEN_IDS = (300, 301, 350, 411, 478, 502, 555, 613, 777, 901)
NETWORKS: dict[str, dict[str, Any]] = {"torch": {"executor": "torch", "dtype": "float32"}}
if native.availability().isa is not None:
    NETWORKS["native"] = {"executor": "native", "dtype": "bfloat16"}
FASTEST = [*NETWORKS][-1:]
GREEDY: dict[str, Any] = {"temperature": 0, "frequency_penalty": 0.5}
DRAWN: dict[str, dict[str, Any]] = {"seeded": {"temperature": 1.0}, "filtered": {"temperature": 0.7, "top_p": 0.9}}


def drafts_of(llm: LLM, methods: Iterable[str], settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each method, the tokens that it drafted and those that were accepted. Its texts must be those without speculation."""
    plain = token_ids(_generate(llm, "off", settings))
    found: dict[str, tuple[int, int]] = {}
    for method in methods:
        outputs = _generate(llm, method, settings)
        assert token_ids(outputs) == plain, method
        metrics = [output.metrics.speculative_decoding for output in outputs]
        found[method] = sum(m.num_draft_tokens for m in metrics), sum(m.num_accepted_draft_tokens for m in metrics)
    check_engine(llm)
    return found


def _generate(llm: LLM, method: str, settings: dict[str, Any]) -> list[Any]:
    """Six requests at once, three of them with a common beginning of several blocks."""
    beginning = llm.get_tokenizer().encode("Once upon a time there was a princess who lived in a castle. " * 4)
    prompts = [[*beginning, 300], [5], [*beginning, 301, 777], [9, 8, 7], [300] * 18, beginning]
    each = [
        SamplingParams(
            max_tokens=20 + i, seed=i, ignore_eos=True, allowed_token_ids=list(TOKEN_IDS), speculation={"method": method}, **settings
        )
        for i in range(len(prompts))
    ]
    return llm.generate(prompts, each, use_tqdm=False)
