"""EAGLE and block drafters of random weights in the real engine: they change how fast texts come, never the texts.

Requests may say ten tokens only, and the drafters know just these: so even random guesses are often right, in trees most often.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_checkpoints
import block_reference
import eagle_checkpoints
import eagle_reference
import pytest
from block_checkpoints import domino, gemma4, liquid, speculators, xpress_speculators
from eagle_checkpoints import EAGLE1, Published, sizes
from fixed_k import fixed
from ten_tokens import DRAWN, FASTEST, GREEDY, NETWORKS, TOKEN_IDS, drafts_of
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.proposers.config_reading import parse_speculative_config

_SIZES: dict[str, Any] = {"hidden": 256, "target_hidden": 256, "head_dim": 64, "intermediate": 64, "vocab": 8192}
_SUBSET: dict[str, Any] = {"draft_vocab": 10, "token_ids": TOKEN_IDS, "mask_token": 7}
EAGLE = eagle_reference.Spec(**_SIZES, **_SUBSET)
BLOCKS = block_reference.Spec(**_SIZES, **_SUBSET, taps=(2, 3, 5), own_head=True)
DRAWS: dict[str, Any] = {"draft_sample_method": "probabilistic"}


def eagle(folder: Path) -> list[dict[str, Any]]:
    eagle1 = replace(EAGLE, kind=EAGLE1.kind, taps=EAGLE1.taps, own_head=False, draft_vocab=EAGLE.vocab)
    parallel = replace(EAGLE, parallel=True)
    latent = replace(EAGLE, latent=eagle_reference.Latent(q_rank=48, rank=64, plain=32, turned=16, values=32))
    published = {
        "eagle": Published(eagle1, {"model_type": "llama", **sizes(eagle1), "tie_word_embeddings": True}),
        "eagle3": Published(EAGLE, {"model_type": "llama", **sizes(EAGLE), "draft_vocab_size": 10}),
        "p-eagle": Published(parallel, {"model_type": "llama", **sizes(parallel), "draft_vocab_size": 10, "mask_token_id": 7}),
        "latent": Published(latent, {"model_type": "deepseek_v3", **sizes(latent), "draft_vocab_size": 10}),
    }
    at: dict[str, str] = {}
    for name, one in published.items():
        (folder / name).mkdir()
        at[name] = str(eagle_checkpoints.Drafter.write(one, folder / name).folder)
    return [
        {"model": at["eagle"], "num_speculative_tokens": 3},
        {"model": at["eagle3"], "num_speculative_tokens": 4, **DRAWS},
        {"model": at["eagle3"], "speculative_token_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]},
        {"model": at["eagle3"], "eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 14},
        {"model": at["p-eagle"], "num_speculative_tokens": 4},
        {"model": at["latent"], "num_speculative_tokens": 4, **DRAWS},
        {"model": at["latent"], "eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 14},
    ]


def blocks(folder: Path) -> list[dict[str, Any]]:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
    dspark = replace(BLOCKS, draft_vocab=BLOCKS.vocab, own_head=False, from_anchor=True, markov="vanilla", confidence="h, markov")
    published = [
        speculators(BLOCKS, "dflash"),
        speculators(replace(BLOCKS, windows=(9, None), causal=(True, False)), "dflash", sliding),
        speculators(replace(BLOCKS, conv_taps=2, conv_groups=16, selector_top=3), "dflash2", selector_rank=8, selector_top_k=3),
        domino(replace(BLOCKS, draft_vocab=BLOCKS.vocab, own_head=False, gru=24, gru_mixed=16, from_anchor=True), shift_label=True),
        xpress_speculators(replace(BLOCKS, refiner=8, refiner_mlp=16, passes=3)),
        speculators(replace(BLOCKS, markov="rnn"), "dspark", markov_rank=8, markov_head_type="rnn", sample_from_anchor=False),
        liquid(replace(dspark, pairs=True)),
        gemma4(replace(BLOCKS, from_anchor=True, markov="vanilla", gemma="keys")),
    ]
    models: list[str] = []
    for i, one in enumerate(published):
        (folder / str(i)).mkdir()
        models.append(str(block_checkpoints.Drafter.write(one, folder / str(i)).folder))
    return [
        {"model": models[0]},
        {"model": models[1], "num_speculative_tokens": 5, **DRAWS},
        {"model": models[2], "num_speculative_tokens": 5, **DRAWS},
        {"model": models[3], "num_speculative_tokens": 6, **DRAWS},
        {"model": models[4], "num_speculative_tokens": 4, **DRAWS},
        {"model": models[5], "num_speculative_tokens": 4, **DRAWS},
        {"model": models[6], "num_speculative_tokens": 6, "confidence_threshold": 0.5},
        {"model": models[7], "num_speculative_tokens": 5, **DRAWS},
    ]


KINDS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {"eagle": eagle, "blocks": blocks}


RUNS = [f"{kind}, {network}" for kind in KINDS for network in NETWORKS]
WITH_THE_TARGETS_VOCABULARY = ("eagle", "dflash_4", "dspark_2")
"""They say one of the ten tokens by chance only."""


@pytest.fixture(scope="module", params=RUNS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    kind, network = request.param.split(", ")
    speculative = fixed(KINDS[kind](tmp_path_factory.mktemp(kind)))
    with LLM(speculative_config=speculative, kv_cache_gb=0.2, **NETWORKS[network]) as made:
        yield made


def methods_of(engine: Engine) -> list[str]:
    return [name for name in engine.proposer_names if name != "prediction"]


def check_texts(llm: LLM, settings: dict[str, Any]) -> None:
    found = drafts_of(llm, methods_of(llm._running()), settings)
    assert all(drafted > 60 for drafted, _ in found.values()), found
    assert {name for name, (_, accepted) in found.items() if not accepted} <= {*WITH_THE_TARGETS_VOCABULARY}, found


def test_texts_are_those_without_speculation(llm: LLM) -> None:
    check_texts(llm, GREEDY)


@pytest.mark.parametrize("llm", slow_but([f"{kind}, {FASTEST[0]}" for kind in KINDS], RUNS), indirect=True)
@pytest.mark.parametrize("what", DRAWN)
def test_drawn_texts_are_those_without_speculation(llm: LLM, what: str) -> None:
    check_texts(llm, DRAWN[what])


def test_a_cache_that_is_too_small_for_all_changes_no_text(tmp_path: Path) -> None:
    """Rows are preempted, lose their entries and states, and start anew."""
    speculative = replace(parse_speculative_config(eagle(tmp_path)), disable_by_batch_size=64)
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
    for method in methods_of(engine):
        before = engine.core.stats().num_preemptions
        assert run(method) == plain, method
        assert engine.core.stats().num_preemptions > before, method


TOLD = {
    "eagle": ("P-EAGLE in the layout of EAGLE", "10 tokens of its own", "reads the target's states before layers 2, 4, 5"),
    "blocks": (
        "DFlash in the layout of speculators",
        "10 tokens of its own",
        "DSpark in the layout of DeepSeek, 2 layers like Gemma 4's, reads",
        "bidirectional, rotary pairs side by side, first guess",
        "Markov head: rnn",
        "DFlash 2 in the layout of speculators",
        "convolutions of 2 tokens around each sublayer, 16 groups",
        "candidate selector: of each place's best 3, rank 8",
    ),
}


def test_what_was_loaded_is_told(llm: LLM) -> None:
    engine = llm._running()
    told = "\n".join(engine.banner)
    assert all(words in told for words in TOLD["eagle" if "eagle" in engine.proposer_names else "blocks"]), told
