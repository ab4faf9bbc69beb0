"""MTP layers of every family that can be run against other code's numbers, in engines."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_guesses import check
from fixed_k import fixed
from mtp_checkpoints import CONFIGS, GATED, HIDDEN, MAX_MODEL_LEN, MtpTarget, edit, write
from pretended_engine import accept, text
from saying import check_engine, token_ids
from ten_tokens import NETWORKS
from torch import Tensor
from transformers import AutoModelForCausalLM
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.kernels.layout import KVLayerSpec

EVERY = slow_but([*CONFIGS, "qwen3_5"], [*CONFIGS, *GATED])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTarget]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: write(name, folder / name) for name in (*CONFIGS, *GATED)}


def test_beyond_the_targets_length_nothing_is_guessed(targets: dict[str, MtpTarget]) -> None:
    for target in targets.values():
        engine = target.begun(prompt=text(1, MAX_MODEL_LEN - 4))
        assert [len(engine.step(accept(0))["a"].tokens) for _ in range(4)] == [3, 2, 1, 0]


def test_k_is_the_configs_else_what_it_was_trained_for_else_the_number_of_modules(targets: dict[str, MtpTarget], tmp_path: Path) -> None:
    assert targets["mimo"].open().max_tokens == 1
    assert targets["glm"].open(num_speculative_tokens=3).max_tokens == 3
    target = write("mimo", tmp_path / "looped")
    config = tmp_path / "looped" / "config.json"
    methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "speculators_config": methods}))
    assert target.open().max_tokens == 4
    methods["proposal_methods"].insert(0, {"proposal_type": "tree", "speculative_tokens": 7})
    named = {"speculators_config": {**methods, "default_proposal_method": "greedy"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}))
    assert target.open().max_tokens == 4


def test_several_modules_are_counted_and_the_first_is_used(tmp_path: Path) -> None:
    target = write("mimo", tmp_path / "mimo")

    def three(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        first = "model.mtp_layers.0."
        more = {f"model.mtp_layers.{i}.{n.removeprefix(first)}": -t for n, t in tensors.items() for i in (1, 2) if n.startswith(first)}
        return {**tensors, **more}

    edit(target.folder, three)
    assert "3 modules, of which the first" in target.load().found[0]
    assert target.open().max_tokens == 3
    engine = target.begun()
    assert check(target, engine.step(accept(0))) == 1


@pytest.mark.parametrize("name", ["deepseek", "glm_flash"])
def test_latent_attention_keeps_a_latent_and_a_key_that_turns(targets: dict[str, MtpTarget], name: str) -> None:
    assert targets[name].load().executors[0].kv_layers == (KVLayerSpec(1, 16 + 8, 16, values_in_keys=True),)


def plain_and_guessed(folder: Path, settings: dict[str, Any], count: int, **engine: Any) -> tuple[list[Any], list[Any]]:
    speculative = {"method": "mtp", "num_speculative_tokens": count}
    with LLM(model=str(folder), speculative_config=fixed(speculative), kv_cache_gb=0.05, dtype="float32", **engine) as llm:
        prompts = [[token % HIDDEN for token in text(i, 3 + 15 * i)] for i in range(4)]

        def generate(method: str) -> list[Any]:
            each = [
                SamplingParams(max_tokens=24, seed=i, ignore_eos=True, speculation={"method": method}, **settings) for i in range(4)
            ]
            return llm.generate(prompts, each, use_tqdm=False)

        found = generate("off"), generate("mtp")
        check_engine(llm)
        return found


def check_texts(target: MtpTarget, settings: dict[str, Any], **engine: Any) -> None:
    plain, guessed = plain_and_guessed(target.folder, settings, 3, **engine)
    assert token_ids(guessed) == token_ids(plain)
    assert all(output.metrics.speculative_decoding.num_draft_tokens > 20 for output in guessed)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_texts_are_those_without_speculation(targets: dict[str, MtpTarget], name: str, settings: dict[str, Any]) -> None:
    check_texts(targets[name], settings)


@pytest.mark.parametrize("name", slow_but(["deepseek"], ["deepseek", "glm", "glm_flash"]))
def test_texts_of_targets_that_transformers_runs_are_those_without_speculation(targets: dict[str, MtpTarget], name: str) -> None:
    check_texts(targets[name], {"temperature": 0}, executor="transformers")


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3_5"])
def test_a_target_that_brings_a_layer_is_guessed_for_by_it_unless_somebody_says_otherwise(
    targets: dict[str, MtpTarget], name: str, tmp_path: Path
) -> None:
    with LLM(str(targets[name].folder), kv_cache_gb=0.05) as llm:
        assert llm._running().proposer_names == ("prediction", "mtp", "ngram")
    broken = shutil.copytree(targets[name].folder, tmp_path / "broken")
    edit(broken, lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search("mtp.*norm|hnorm", name)})
    with LLM(str(broken), kv_cache_gb=0.05) as llm:
        assert llm._running().proposer_names == ("prediction", "ngram")


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_a_target_is_loaded_without_a_word_about_its_draft_layer(
    targets: dict[str, MtpTarget], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers by itself lists all tensors that it does not use, but for the published sizes of a family."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        targets[name].load()
        assert "UNEXPECTED" not in caplog.text
        AutoModelForCausalLM.from_pretrained(targets[name].folder)
        assert "UNEXPECTED" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("executor", ["transformers", *NETWORKS])
@pytest.mark.parametrize("reads", ["token", "state"])
def test_a_perfect_layer_is_always_right(tmp_path: Path, executor: str, reads: str) -> None:
    """The target's text counts on from the last token. The layer looks at that token, or at the target's state of the one before.

    As Xiaomi publishes it, code of its own included.
    """
    target = write("mimo", tmp_path / "mimo")
    one, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)

    def counting(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor.fill_(1.0)
            elif "self_attn" not in name or "o_proj" in name:
                tensor.zero_()
        tensors["model.embed_tokens.weight"][:HIDDEN] = one
        tensors["lm_head.weight"][:HIDDEN] = one.roll(1, 0)
        parts = [nothing, one] if reads == "token" else [one.roll(1, 0), nothing]
        tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat(parts, 1)
        return tensors

    auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    edit(target.folder, counting, model_type="mimo", architectures=["MiMoForCausalLM"], auto_map=auto_map)
    plain, guessed = plain_and_guessed(target.folder, {"temperature": 0}, 3, executor=executor)
    assert token_ids(guessed) == token_ids(plain)
    assert len(set(plain[0].outputs[0].token_ids)) == 24
    for output in guessed:
        metrics = output.metrics.speculative_decoding
        assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens > 10
