import pytest
from speculation_figures import figures

from foretoken.engine.bench.advice import advice, recommended
from foretoken.engine.bench.speculation import Method
from foretoken.engine.bench.speculation_figures import Figures, Setting
from foretoken.proposers.config_reading import parse_speculative_config

ADAPTIVE, K3, K7 = Setting("draft_model", 7, adaptive=True), Setting("draft_model", 3), Setting("draft_model", 7)
NGRAM = Setting("ngram", 3)
METHODS = {
    "draft_model": Method("draft_model", ({"method": "draft_model", "model": "d"},)),
    "ngram": Method("ngram", ({"method": "ngram", "prompt_lookup_max": 4},)),
}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([figures(K3, 1.5), figures(K7, 1.9, rate=0.85)], ("85 %: use draft_model, k=7 (1.90x)", "higher k than the 7")),
        ([figures(K3, 1.9), figures(K7, 1.5)], ("80 %: use draft_model, k=3 (1.90x).",)),
        ([figures(ADAPTIVE, 1.9)], ("80 %: use draft_model, adaptive (1.90x).",)),
        ([figures(K3, 1.5, rate=0.65)], ("65 %: use draft_model, k=3", "70 %")),
        ([figures(K3, 1.5, rate=0.5)], ("50 %: use draft_model, k=3 (1.50x) and no higher k",)),
        ([figures(K3, 1.5, rate=0.34)], ("34 %: lower k or use n-gram",)),
        ([figures(ADAPTIVE, 1.5, rate=0.34)], ("34 %: use draft_model, adaptive", "only where it pays")),
        ([figures(K3, 2.0, 1), figures(K3, 0.6, 32)], ("it pays one request at a time, and is off with more.",)),
    ],
)
def test_where_it_pays(found: list[Figures], words: tuple[str, ...]) -> None:
    sentence = advice(found)
    assert sentence.endswith(".") and "\n" not in sentence
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([figures(K3, 0.9, decode_share=0.3)], ("30% of a request is decoding", "prefix caching")),
        ([figures(NGRAM, 1.0, rate=None, mu=0.0)], ("Nothing was guessed", "trained drafter")),
        ([figures(K3, 0.9, mu=0.5, draft=0.8, rate=0.5)], ("drafting costs 0.80 of a target pass and brings 0.50 tokens", "smaller draft")),
        ([figures(K3, 0.9, 32, mu=2.0, verify=2.9)], ("with 32 at a time verifying costs 2.90", "fewer requests")),
        ([figures(K3, 0.9, rate=0.2, mu=0.6)], ("20 %", "lower k, try n-gram, or train the draft")),
        ([figures(NGRAM, 0.9, rate=0.2, mu=0.6)], ("20 %", "lower k.")),
        ([figures(K3, 0.9, rate=0.5, mu=0.5)], ("1.50 tokens a pass do not make up",)),
        ([figures(NGRAM, 1.0, rate=None, mu=0.0), figures(K3, 0.9, rate=0.2, mu=0.6)], ("20 %", "draft_model, k=3, reaches 0.90x")),
    ],
)
def test_where_it_does_not(found: list[Figures], words: tuple[str, ...]) -> None:
    sentence = advice(found)
    assert "switch speculation off" in sentence
    assert all(word in sentence for word in words), sentence
    assert recommended(found, METHODS) == [{"method": "off"}]


def test_the_config_to_paste_says_what_was_measured() -> None:
    assert recommended([figures(ADAPTIVE, 1.9)], METHODS) == [{"method": "draft_model", "model": "d", "num_speculative_tokens": 7}]
    (fixed,) = recommended([figures(K3, 1.9, 1), figures(K3, 1.5, 8), figures(K3, 0.5, 32)], METHODS)
    read = parse_speculative_config(fixed)
    assert not read.adaptive and read.disable_by_batch_size == 8 and getattr(read.proposers[0], "num_speculative_tokens", 0) == 3
    (everywhere,) = recommended([figures(K3, 1.9, 1), figures(K3, 1.5, 32)], METHODS)
    assert (parse_speculative_config(everywhere).disable_by_batch_size or 0) > 1000, "vLLM's own limit would be 16"


def test_a_tree_keeps_its_own_size_and_heads_their_number() -> None:
    tree = {"method": "eagle", "model": "e", "eagle_topk": 4, "num_steps": 3, "num_draft_tokens": 16}
    methods = {"eagle": Method("eagle", (tree,)), "medusa": Method("medusa", ({"method": "medusa"},))}
    assert recommended([figures(Setting("eagle", 16, adaptive=True), 1.9)], methods) == [tree]
    assert recommended([figures(Setting("medusa", 4, adaptive=True), 1.9)], methods) == [{"method": "medusa"}]
    assert recommended([figures(Setting("medusa", 2), 1.9)], methods)[0]["num_speculative_tokens"] == 2
