"""docs/compatibility.md, cell by cell: every proposer with every feature says what the target says alone, or is refused with a sentence."""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from ngram_tables import every_token
from ngram_tables import write as write_table
from random_drafters import MAKERS, write
from recurrent_models import save_qwen3_5
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.boot import Engine
from foretoken.kernels import native
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "engine" / "demo_model" / "target"
TREE = [[0], [1], [0, 0], [1, 0]]
VOCAB = 8192
WINDOW = 20
NATIVE = native.availability().isa is not None

MODEL_FREE: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "disable_by_batch_size": 64},
    "suffix": {"method": "suffix"},
    "ngram_cache": {"method": "ngram_cache", "num_speculative_tokens": 3},
    "lookahead": {"method": "lookahead", "max_window_size": 3},
}
TREES: dict[str, dict[str, Any]] = {
    "ngram": {"num_branches": 3},
    "suffix": {"use_tree": True},
    "eagle": {"speculative_token_tree": TREE},
    "eagle3": {"eagle_topk": 2, "num_steps": 2, "num_draft_tokens": 6},
    "medusa": {"speculative_token_tree": TREE},
    "hydra": {"speculative_token_tree": TREE},
    "redrafter": {"speculative_token_tree": TREE},
    **dict.fromkeys(("dflash", "dflare"), {"eagle_topk": 3, "num_draft_tokens": 9}),
}
LENGTHS = dict.fromkeys(("draft_model", "pard", "pard2", "eagle", "eagle3", "peagle", "redrafter", "mtp", "uno"), 3)
PROPOSERS = (*MODEL_FREE, "prediction", *MAKERS)
ALWAYS_TREES = "lookahead"
NOT_RECURRENT = ("uno",)  # which runs the target itself
# Found in a checkpoint of that method.
NAMED = {"gumiho": "eagle", "peagle": "eagle3", "pard2": "pard", "dflare": "dflash", "dflash2": "dflash"}

ENGINES: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 1280, "max_num_seqs": 24, "enable_prefix_caching": False},
    "prefix cache": {"enable_prefix_caching": True},
    "sliding window": {},
    "transformers target": {"executor": "transformers"},
    "recurrent target": {"max_num_seqs": 12},
} | ({"int8 weights": {"quantization": "int8"}, "int8 cache": {"kv_cache_dtype": "int8"}} if NATIVE else {})
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "seed": 1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "n": {"temperature": 0.9, "n": 2, "seed": 3},
}
ALWAYS = ["penalties"]  # of the features, with every engine; logprobs and choices are made by the same code for all of them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded model, and a tiny one whose layers slide."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("sliding")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=WINDOW, max_position_embeddings=512,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    for file in TARGET.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return {"embedded": TARGET, "sliding window": folder, "recurrent target": save_qwen3_5(tmp_path_factory.mktemp("recurrent"))}


def configs(target: Path, folder: Path) -> list[dict[str, Any]]:
    table = write_table(folder / "ngram_cache", every_token(random.Random(0), VOCAB), 1, VOCAB)
    chains = [{**config, **({"model": str(table)} if name == "ngram_cache" else {})} for name, config in MODEL_FREE.items()]
    for seed, method in enumerate(MAKERS):
        k = {"num_speculative_tokens": LENGTHS[method]} if method in LENGTHS else {}
        chains.append({"model": str(write(method, target, folder / method, seed)), **k})
    trees = [{**MODEL_FREE.get(name, {"model": str(folder / name)}), **tree} for name, tree in TREES.items()]
    return chains + trees


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LLM]]:
    target = folders.get(request.param, TARGET)
    left_out = NOT_RECURRENT if request.param == "recurrent target" else ()
    every = configs(target, tmp_path_factory.mktemp("drafters"))
    every = [config for config in every if Path(config.get("model", "")).name not in left_out]
    with LLM(str(target), speculative_config=fixed(every), kv_cache_gb=0.3, **ENGINES[request.param]) as llm:
        yield request.param, llm


def parts_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def outputs(llm: LLM, methods: list[str], settings: dict[str, Any]) -> list[list[Any]]:
    """Twice the same texts, so that the second half may find the first half's blocks; token ids and logprobs of all choices."""
    torch.manual_seed(2)
    stem = torch.randint(40, 4000, (50,)).tolist()
    # The end repeats itself, so that lookup has something to find at once.
    prompts = [{"prompt_token_ids": stem[: 40 + i % 7] + [60 + i, 99] * 3} for i in range(len(methods))]
    params = [
        SamplingParams(
            max_tokens=24, ignore_eos=True, prediction=stem[:12] if method == "prediction" else None,
            speculation={"method": "auto" if method == "prediction" else method}, **settings,
        )
        for method in methods
    ]
    results = llm.generate(prompts, params, use_tqdm=False)
    return [[(tuple(o.token_ids), _rounded(o.logprobs)) for o in result.outputs] for result in results]


def _rounded(logprobs: Any) -> Any:
    return None if logprobs is None else [{token: round(said.logprob, 3) for token, said in place.items()} for place in logprobs]


def check_every_proposer_with(engine: tuple[str, LLM], feature: str) -> None:
    name, llm = engine
    parts = parts_of(llm)
    methods = list(parts.proposer_names)
    left_out = NOT_RECURRENT if name == "recurrent target" else ()
    assert {re.sub(r"_\d$", "", method) for method in methods} == {NAMED.get(p, p) for p in PROPOSERS if p not in left_out}
    plain = outputs(llm, ["off"] * len(methods), FEATURES[feature])
    for _ in range(2):  # the second time with everything in the prefix cache
        for method, expected, got in zip(methods, plain, outputs(llm, methods, FEATURES[feature]), strict=True):
            if parts.model.executor.is_batch_invariant:
                assert got == expected, f"{method} with {name} and {feature}"
            else:  # rounding differs with the batch: a near tie may fall otherwise, and from there on the text is another
                alike = sum(a == b for one, two in zip(expected, got, strict=True) for a, b in zip(one[0], two[0], strict=True))
                assert alike >= 8 * len(expected), f"{method} with {name} and {feature}"
    failed = [(p.name, p.off_reason) for p in parts.core.proposers.stats() if p.num_failures]
    assert not failed, f"with {name} and {feature}"


@pytest.mark.parametrize("feature", ALWAYS)
def test_every_proposer_with(engine: tuple[str, LLM], feature: str) -> None:
    check_every_proposer_with(engine, feature)


@pytest.mark.parametrize("engine", slow_but([*ENGINES][:2], ENGINES), indirect=True)
@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature not in ALWAYS])
def test_and_with_any_other_feature(engine: tuple[str, LLM], feature: str) -> None:
    check_every_proposer_with(engine, feature)


def test_everybody_guessed(engine: tuple[str, LLM]) -> None:
    stats = parts_of(engine[1]).core.stats()
    assert not [p.name for p in stats.proposers if not p.num_draft_tokens]


@pytest.mark.parametrize("method", ["draft_model", "pard", "mtp", "mlp_speculator", "dflash", "dspark"])
def test_trees_where_there_are_none_are_told(method: str) -> None:
    mapping = {"method": method, "model": "X", "speculative_token_tree": TREE}
    try:
        warnings = parse_speculative_config(mapping).warnings
    except SpeculativeConfigError as error:
        warnings = (str(error),)
    assert any("speculative_token_tree" in warning for warning in warnings)


def test_the_table_names_what_is_tested() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, body = rows[0], rows[2:]
    networks = ["int8 weights", "int8 cache", "sliding window", "transformers target", "recurrent target"]
    tested = ["chunked prefill", "prefix cache", *networks, *FEATURES, "trees"]
    assert header == ["", *tested]
    assert [row[0].strip("`") for row in body] == list(PROPOSERS)
    for row in body:
        name, trees = row[0].strip("`"), row[-1]
        works = ["no" if name in NOT_RECURRENT and feature == "recurrent target" else "yes" for feature in tested[:-1]]
        assert row[1:-1] == works, f"{name}: everything else is tested to work"
        assert trees == ("yes" if name in TREES or name == ALWAYS_TREES else "no"), f"{name}: trees"
