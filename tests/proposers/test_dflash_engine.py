"""Block drafters of random weights in the real engine: they change how fast texts come, never the texts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_checkpoints import Drafter, domino, gemma4, liquid, speculators, xpress_speculators
from block_reference import Spec
from fixed_k import fixed
from ten_tokens import DRAWN, FASTEST, GREEDY, NETWORKS, TOKEN_IDS, drafts_of
from variants import slow_but

from foretoken import LLM

DEMO = Spec(
    hidden=256,
    target_hidden=256,
    head_dim=64,
    intermediate=64,
    vocab=8192,
    draft_vocab=10,
    token_ids=TOKEN_IDS,
    mask_token=7,
    taps=(2, 3, 5),
    own_head=True,
)
DRAWN_GUESSES = {"draft_sample_method": "probabilistic"}
# What they are called in the order of the config.
METHODS = {
    "dflash": "bidirectional",
    "dflash_2": "windows, some layers causal",
    "dflash_3": "DFlash 2",
    "dflash_4": "Domino",
    "dflash_5": "XPress",
    "dspark": "rnn",
    "dspark_2": "cut by confidence, pairs",
    "dspark_3": "Gemma 4's layers",
}


def configured(folder: Path) -> list[dict[str, Any]]:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
    dspark = replace(DEMO, draft_vocab=DEMO.vocab, own_head=False, from_anchor=True, markov="vanilla", confidence="h, markov")
    published = [
        speculators(DEMO, "dflash"),
        speculators(replace(DEMO, windows=(9, None), causal=(True, False)), "dflash", sliding),
        speculators(replace(DEMO, conv_taps=2, conv_groups=16, selector_top=3), "dflash2", selector_rank=8, selector_top_k=3),
        domino(replace(DEMO, draft_vocab=DEMO.vocab, own_head=False, gru=24, gru_mixed=16, from_anchor=True), shift_label=True),
        xpress_speculators(replace(DEMO, refiner=8, refiner_mlp=16, passes=3)),
        speculators(replace(DEMO, markov="rnn"), "dspark", markov_rank=8, markov_head_type="rnn", sample_from_anchor=False),
        liquid(replace(dspark, pairs=True)),
        gemma4(replace(DEMO, from_anchor=True, markov="vanilla", gemma="keys")),
    ]
    models: list[str] = []
    for i, one in enumerate(published):
        (folder / str(i)).mkdir()
        models.append(str(Drafter.write(one, folder / str(i)).folder))
    return [
        {"model": models[0]},
        {"model": models[1], "num_speculative_tokens": 5, **DRAWN_GUESSES},
        {"model": models[2], "num_speculative_tokens": 5, **DRAWN_GUESSES},
        {"model": models[3], "num_speculative_tokens": 6, **DRAWN_GUESSES},
        {"model": models[4], "num_speculative_tokens": 4, **DRAWN_GUESSES},
        {"model": models[5], "num_speculative_tokens": 4, **DRAWN_GUESSES},
        {"model": models[6], "num_speculative_tokens": 6, "confidence_threshold": 0.5},
        {"model": models[7], "num_speculative_tokens": 5, **DRAWN_GUESSES},
    ]


@pytest.fixture(scope="module", params=NETWORKS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("blocks")
    with LLM(speculative_config=fixed(configured(folder)), kv_cache_gb=0.2, **NETWORKS[request.param]) as made:
        yield made


def check_texts(llm: LLM, settings: dict[str, Any]) -> None:
    found = drafts_of(llm, METHODS, settings)
    assert all(drafted > 30 for drafted, _ in found.values()), found
    right = sum(accepted > 0 for _, accepted in found.values())
    assert right >= len(METHODS) - 2, "weights are random, but few tokens are allowed: nearly everybody is right by chance now and then"


def test_texts_are_those_without_speculation(llm: LLM) -> None:
    check_texts(llm, GREEDY)


@pytest.mark.parametrize("llm", slow_but(FASTEST, NETWORKS), indirect=True)
@pytest.mark.parametrize("what", DRAWN)
def test_drawn_texts_are_those_without_speculation(llm: LLM, what: str) -> None:
    check_texts(llm, DRAWN[what])


def test_what_was_loaded_is_told(llm: LLM) -> None:
    told = "\n".join(llm._running().banner)
    for words in (
        "DFlash in the layout of speculators",
        "10 tokens of its own",
        "DSpark in the layout of DeepSeek, 2 layers like Gemma 4's, reads",
        "bidirectional, rotary pairs side by side, first guess",
        "Markov head: rnn",
        "DFlash 2 in the layout of speculators",
        "convolutions of 2 tokens around each sublayer, 16 groups",
        "candidate selector: of each place's best 3, rank 8",
    ):
        assert words in told
