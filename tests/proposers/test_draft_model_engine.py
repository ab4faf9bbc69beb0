"""Draft models in the real engine: whatever guesses, texts are the target's own, and the target's weights are kept once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from saying import check_engine, said, token_ids
from ten_tokens import FASTEST, NETWORKS
from transformers import AutoModelForCausalLM, AutoTokenizer
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.kernels.weight_bank import WeightBank

DEMO = Path(__file__).parents[2] / "engine" / "demo_model"
TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft_model")
TEXTS = ["Once upon a time there was a", "def add(a, b):", "The capital of France is", "Hello! How are"]


def configs(kind: str, tiny_draft: Path) -> dict[str, tuple[float, dict[str, Any]]]:
    """What it is -> the least share of its guesses that is accepted at temperature 0, how it is asked for."""
    sampled = {"draft_sample_method": "probabilistic"}
    found: dict[str, tuple[float, dict[str, Any]]] = {
        "greedy": (0.15, {"model": DRAFT}),
        "sampling, ends in doubt": (0.2, {"model": DRAFT, "confidence_threshold": 0.4, **sampled}),
        "all of the target's layers": (1.0, {"model": TARGET, "draft_layers": 8, **sampled}),
        "half of the target's layers": (0.0, {"model": TARGET, "draft_layers": 4}),
        "half of the draft's layers": (0.0, {"model": DRAFT, "draft_layers": 1}),
        "another tokenizer": (0.0, {"model": str(tiny_draft), "heterogeneous_vocab": "retokenize"}),
    }
    if kind == "native":
        found["the target in int8"] = (0.9, {"model": TARGET, "quantization": "int8"})
        found["the target in int4"] = (0.5, {"model": TARGET, "quantization": "int4", **sampled})
    return found


@pytest.fixture(scope="module", params=NETWORKS)
def running(request: pytest.FixtureRequest, tiny_draft: Path) -> Iterator[tuple[LLM, dict[str, tuple[float, str]]]]:
    """With the name that each config got."""
    asked = configs(request.param, tiny_draft)
    every = [{**config, "num_speculative_tokens": 4} for _, config in asked.values()]
    with LLM(TARGET, speculative_config=fixed(every), kv_cache_gb=0.3, **NETWORKS[request.param]) as llm:
        names = [name for name in llm._running().proposer_names if name.startswith("draft_model")]
        yield llm, {what: (share, name) for (what, (share, _)), name in zip(asked.items(), names, strict=True)}


def generate(llm: LLM, method: str, **settings: Any) -> tuple[list[list[int]], int, int]:
    """Texts, guesses, accepted guesses."""
    params = SamplingParams(max_tokens=32, ignore_eos=True, seed=3, speculation={"method": method}, **settings)
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    counts = [output.metrics.speculative_decoding for output in outputs]
    return token_ids(outputs), sum(c.num_draft_tokens for c in counts), sum(c.num_accepted_draft_tokens for c in counts)


def check_texts(running: tuple[LLM, dict[str, tuple[float, str]]], settings: dict[str, Any]) -> None:
    llm, methods = running
    plain = generate(llm, "off", **settings)[0]
    for what, (share, name) in methods.items():
        texts, drafted, accepted = generate(llm, name, **settings)
        assert texts == plain, what
        assert drafted > 20, what
        assert settings["temperature"] or accepted >= share * drafted, what
    check_engine(llm)


def test_texts_are_those_without_speculation(running: tuple[LLM, dict[str, tuple[float, str]]]) -> None:
    check_texts(running, {"temperature": 0})


DRAWN: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("running", slow_but(FASTEST, NETWORKS), indirect=True)
@pytest.mark.parametrize("what", DRAWN)
def test_drawn_texts_are_those_without_speculation(running: tuple[LLM, dict[str, tuple[float, str]]], what: str) -> None:
    check_texts(running, DRAWN[what])


def prepared(bank: WeightBank) -> dict[Any, set[Any]]:
    return {key: set(forms) for key, forms in bank._entries.items()}


def held_by(network: str, **speculative: Any) -> tuple[dict[Any, set[Any]], LLM]:
    config = {"speculative_config": fixed(speculative)} if speculative else {}
    llm = LLM(TARGET, kv_cache_gb=0.1, **NETWORKS[network], **config)
    return prepared(llm._running().model.executor.bank), llm


@pytest.mark.parametrize("network", NETWORKS)
def test_layers_that_are_the_targets_are_kept_once(network: str) -> None:
    alone, llm = held_by(network)
    llm.shutdown()
    assert len(alone) > 8
    same, llm = held_by(network, model=TARGET, draft_layers=5)
    with llm:
        draft: Any = next(p for p in llm._running().core.proposers.proposers if p.name == "draft_model")
        executor = draft._guesser.network.executor
        assert executor.bank is llm._running().model.executor.bank and len(executor.kv_layers) == 5
        assert same == alone
    if network == "native":
        narrow, llm = held_by(network, model=TARGET, draft_layers=5, quantization="int4")
        llm.shutdown()
        assert narrow.keys() == alone.keys() and sum(map(len, narrow.values())) > sum(map(len, alone.values()))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": DRAFT, "draft_layers": 1, "use_heterogeneous_vocab": True}, "draft_layers goes with"),
        ({"model": TARGET, "draft_layers": 9}, "draft_layers 9 is above the 8 layers"),
    ],
)
def test_layers_that_cannot_be_left_out_are_told(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(TARGET, speculative_config=config)


@torch.no_grad()
def test_transformers_assisted_generation_says_the_same(tiny_draft: Path) -> None:
    """Greedy, with a draft of the same vocabulary and with one of another (universal assisted generation)."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for folder, others in ((DRAFT, {}), (str(tiny_draft), {"heterogeneous_vocab": "retokenize"})):
        assistant: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizers = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(folder)} if others else {}
        with LLM(TARGET, speculative_config=fixed({"model": folder, **others}), kv_cache_gb=0.1, **NETWORKS["torch"]) as llm:
            params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
            ours = said(llm, TEXTS[:2], params)
        for text, expected in zip(TEXTS, ours, strict=False):
            ids = torch.tensor([tokenizer.encode(text)])
            theirs = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, do_sample=False, max_new_tokens=16, eos_token_id=None,
                **tokenizers,
            )
            assert theirs[0, ids.shape[1] :].tolist() == expected
