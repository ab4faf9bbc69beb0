"""EAGLE drafters of random weights in the real engine: they change how fast texts come, never the texts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eagle_checkpoints import EAGLE1, Drafter, Published, sizes
from eagle_reference import Latent, Spec
from fixed_k import fixed
from ten_tokens import DRAWN, FASTEST, GREEDY, NETWORKS, TOKEN_IDS, drafts_of
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.boot import boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.proposers.config_reading import parse_speculative_config

DEMO = Spec(
    hidden=256, target_hidden=256, head_dim=64, intermediate=64, vocab=8192, draft_vocab=10, token_ids=TOKEN_IDS, mask_token=7,
)
# What they are called in the order of the config.
METHODS = {
    "eagle": "EAGLE", "eagle3": "EAGLE-3", "eagle3_2": "EAGLE-3 as a tree", "eagle3_3": "EAGLE-2's tree", "eagle3_4": "P-EAGLE",
    "eagle3_5": "EAGLE-3 with latent attention", "eagle3_6": "EAGLE-2's tree with latent attention",
}


def configured(folder: Path) -> list[dict[str, Any]]:
    eagle1 = replace(DEMO, kind=EAGLE1.kind, taps=EAGLE1.taps, own_head=False, draft_vocab=DEMO.vocab)
    parallel = replace(DEMO, parallel=True)
    latent = replace(DEMO, latent=Latent(q_rank=48, rank=64, plain=32, turned=16, values=32))
    published = {
        "eagle": Published(eagle1, {"model_type": "llama", **sizes(eagle1), "tie_word_embeddings": True}),
        "eagle3": Published(DEMO, {"model_type": "llama", **sizes(DEMO), "draft_vocab_size": 10}),
        "p-eagle": Published(parallel, {"model_type": "llama", **sizes(parallel), "draft_vocab_size": 10, "mask_token_id": 7}),
        "latent": Published(latent, {"model_type": "deepseek_v3", **sizes(latent), "draft_vocab_size": 10}),
    }
    at: dict[str, str] = {}
    for name, one in published.items():
        (folder / name).mkdir()
        at[name] = str(Drafter.write(one, folder / name).folder)
    return [
        {"model": at["eagle"], "num_speculative_tokens": 3},
        {"model": at["eagle3"], "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
        {"model": at["eagle3"], "speculative_token_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]},
        {"model": at["eagle3"], "eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 14},
        {"model": at["p-eagle"], "num_speculative_tokens": 4},
        {"model": at["latent"], "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
        {"model": at["latent"], "eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 14},
    ]


@pytest.fixture(scope="module", params=NETWORKS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("eagle")
    with LLM(speculative_config=fixed(configured(folder)), kv_cache_gb=0.2, **NETWORKS[request.param]) as made:
        yield made


def check_texts(llm: LLM, settings: dict[str, Any]) -> None:
    for method, (drafted, accepted) in drafts_of(llm, METHODS, settings).items():
        assert drafted > 60, METHODS[method]
        assert accepted > 0 or method == "eagle", METHODS[method]  # whose vocabulary is the target's


def test_texts_are_those_without_speculation(llm: LLM) -> None:
    check_texts(llm, GREEDY)


@pytest.mark.parametrize("llm", slow_but(FASTEST, NETWORKS), indirect=True)
@pytest.mark.parametrize("what", DRAWN)
def test_drawn_texts_are_those_without_speculation(llm: LLM, what: str) -> None:
    check_texts(llm, DRAWN[what])


def test_a_cache_that_is_too_small_for_all_changes_no_text(tmp_path: Path) -> None:
    """Rows are preempted, lose their entries and states, and start anew."""
    speculative = replace(parse_speculative_config(configured(tmp_path)), disable_by_batch_size=64)
    engine = boot(EngineConfig(model=ModelConfig(threads=1), cache=CacheConfig(num_blocks=16), speculative=speculative))

    def run(method: str) -> dict[str, list[int]]:
        said = dict[str, list[int]]()
        for i in range(5):
            settings = {"max_tokens": 50, "seed": i, "ignore_eos": True, "allowed_token_ids": list(TOKEN_IDS)}
            asked = SamplingParams(**settings, speculation={"method": method})
            engine.core.add_request(engine.intake.requests(f"{method} {i}", [*range(5, 25), 300 + i], asked, 0.0)[0])
        while engine.core.has_work:
            for delta in engine.core.step(0.0):
                said.setdefault(delta.request_id.split()[1], []).extend(delta.token_ids)
            engine.core.check()
        return said

    plain = run("off")
    for method, what in METHODS.items():
        before = engine.core.stats().num_preemptions
        assert run(method) == plain, what
        assert engine.core.stats().num_preemptions > before, what


def test_what_was_loaded_is_told(llm: LLM) -> None:
    told = "\n".join(llm._running().banner)
    for words in ("P-EAGLE in the layout of EAGLE", "10 tokens of its own", "reads the target's states before layers 2, 4, 5"):
        assert words in told
