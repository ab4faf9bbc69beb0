"""MTP layers of every family that can be run against other code's numbers, whatever happens in between."""

from __future__ import annotations

import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pretended_engine
import pytest
import torch
from fixed_k import fixed
from mtp_checkpoints import CONFIGS, GATED, HIDDEN, MAX_MODEL_LEN, MtpTarget, edit, write
from pretended_engine import TORCH, Guess, accept
from torch import Tensor
from transformers import AutoModelForCausalLM
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.kernels import native
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import KVLayerSpec
from foretoken.proposers.base import Draw

NATIVE = native.availability().isa is not None
text = partial(pretended_engine.text, vocab=300)
at_random = partial(pretended_engine.at_random, vocab=300)
EVERY = slow_but([*CONFIGS, "qwen3_5"], [*CONFIGS, *GATED])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTarget]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: write(name, folder / name) for name in (*CONFIGS, *GATED)}


def check(target: MtpTarget, guesses: dict[str, Guess], count: int = 4) -> int:
    """All rows that could guess; returns how many there were."""
    able = [guess for guess in guesses.values() if guess.tokens]
    for guess in able:
        assert len(guess.tokens) == count
        for i, (token, confidence) in enumerate(zip(guess.tokens, guess.confidence, strict=True)):
            probs = target.probs(guess.text, guess.tokens[:i])
            assert token == int(probs.argmax())
            assert confidence == pytest.approx(float(probs[token]), abs=1e-4)
    return len(able)


@pytest.mark.parametrize("name", EVERY)
def test_guesses_are_the_references(targets: dict[str, MtpTarget], name: str) -> None:
    check_steps(targets[name], TORCH)


@pytest.mark.skipif(not NATIVE, reason="no native executor here")
@pytest.mark.parametrize("name", ["mimo", "deepseek", "glm", "glm_flash", *GATED])
def test_native_guesses_are_the_references(targets: dict[str, MtpTarget], name: str) -> None:
    check_steps(targets[name], Execution(torch.float32))


def check_steps(target: MtpTarget, execution: Execution) -> None:
    """One module, four guesses: its own state behind the norm is fed back. Rejected guesses leave nothing behind."""
    engine = target.run(execution, num_speculative_tokens=4)
    choose = at_random(0)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 2))
    checked = 0
    for step in range(6):
        if step == 2:
            engine.add("c", text(3, 14))
        checked += check(target, engine.step(choose))
    assert checked == 5 + 5 + 3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_prefill_changes_nothing(targets: dict[str, MtpTarget], name: str, chunk: int) -> None:
    target = targets[name]
    engine = target.run(num_speculative_tokens=4)
    engine.add("a", text(1, 12))
    for _ in range(-(-12 // chunk)):
        check(target, engine.step(accept(0), chunk=chunk))
    assert check(target, engine.step(accept(1))) == 1
    assert check(target, engine.step(accept(4))) == 1


@pytest.mark.parametrize("name", EVERY)
def test_prefix_cache_hits_change_nothing(targets: dict[str, MtpTarget], name: str) -> None:
    target = targets[name]
    engine = target.run(num_speculative_tokens=4)
    first = engine.add("a", text(1, 14))
    engine.step(accept(0))
    engine.step(accept(2))
    assert engine.filled["a"] >= 12
    assert engine.add("b", text(1, 12) + [33, 34], shared=first.table[:3]).computed == 12
    engine.step(accept(1))
    assert check(target, engine.step(accept(3))) == 2


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_the_batch_changes_nothing(targets: dict[str, MtpTarget], name: str) -> None:
    def run(order: str) -> list[dict[str, Guess]]:
        engine = targets[name].run(num_speculative_tokens=4)
        for i, request in enumerate("abc"):
            engine.add(request, text(i, 5 + 4 * i))
        return [engine.step(accept(step), order=order) for step in range(4)]

    for one, two in zip(run("abc"), run("cab"), strict=True):
        assert {name: guess.tokens for name, guess in one.items()} == {name: guess.tokens for name, guess in two.items()}


@pytest.mark.parametrize("name", EVERY)
def test_steps_without_guesses_are_made_up_for(targets: dict[str, MtpTarget], name: str) -> None:
    target = targets[name]
    engine = target.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    for asks in (True, False, True):
        assert not engine.step(accept(0), ceiling=0, asks=asks)["a"].tokens
    assert check(target, engine.step(accept(4))) == 1
    assert check(target, engine.step(accept(0), ceiling=2), 2) == 1


def test_preempted_requests_start_anew(targets: dict[str, MtpTarget]) -> None:
    target = targets["deepseek"]
    engine = target.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    engine.step(accept(2))
    engine.proposer.forget("a")
    before = engine.requests.pop("a")
    engine.add("a", before.tokens)
    engine.step(accept(0))
    assert check(target, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", EVERY)
def test_probs_are_what_guesses_are_drawn_from(targets: dict[str, MtpTarget], name: str) -> None:
    target = targets[name]
    engine = target.run(return_probs=True, num_speculative_tokens=3, draft_sample_method="probabilistic")
    engine.add("a", text(1, 9), draw=Draw(1.0, 1, 0))
    surprises = checked = 0
    for _ in range(4):
        guess = engine.step(at_random(0))["a"]
        for i, token in enumerate(guess.tokens):
            assert guess.probs is not None
            probs = target.probs(guess.text, guess.tokens[:i])
            assert torch.allclose(guess.probs[i], probs, atol=1e-4)
            surprises += token != int(probs.argmax())
            checked += 1
    assert checked == 9 and surprises > 2


def test_beyond_the_targets_length_nothing_is_guessed(targets: dict[str, MtpTarget]) -> None:
    for target in targets.values():
        engine = target.run(num_speculative_tokens=4)
        engine.add("a", text(1, MAX_MODEL_LEN - 4))
        engine.step(accept(0))
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
    engine = target.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    assert check(target, engine.step(accept(0))) == 1


@pytest.mark.parametrize("name", ["deepseek", "glm_flash"])
def test_latent_attention_keeps_a_latent_and_a_key_that_turns(targets: dict[str, MtpTarget], name: str) -> None:
    assert targets[name].load().executors[0].kv_layers == (KVLayerSpec(1, 16 + 8, 16, values_in_keys=True),)


def plain_and_guessed(folder: Path, settings: dict[str, Any], count: int, **engine: Any) -> tuple[list[Any], list[Any]]:
    speculative = {"method": "mtp", "num_speculative_tokens": count}
    with LLM(model=str(folder), speculative_config=fixed(speculative), kv_cache_gb=0.05, dtype="float32", **engine) as llm:
        prompts = [{"prompt_token_ids": [token % HIDDEN for token in text(i, 3 + 15 * i)]} for i in range(4)]

        def generate(method: str) -> list[Any]:
            each = [
                SamplingParams(max_tokens=24, seed=i, ignore_eos=True, speculation={"method": method}, **settings) for i in range(4)
            ]
            return llm.generate(prompts, each, use_tqdm=False)

        found = generate("off"), generate("mtp")
        assert not any(health.num_failures for health in llm._running().core.proposers.stats())
        return found


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_texts_are_those_without_speculation(targets: dict[str, MtpTarget], name: str, settings: dict[str, Any]) -> None:
    plain, guessed = plain_and_guessed(targets[name].folder, settings, 3)
    assert [output.outputs[0].token_ids for output in guessed] == [output.outputs[0].token_ids for output in plain]
    assert all(output.metrics.speculative_decoding.num_draft_tokens > 20 for output in guessed)


@pytest.mark.parametrize("name", slow_but(["deepseek"], ["deepseek", "glm", "glm_flash"]))
def test_texts_of_targets_that_transformers_runs_are_those_without_speculation(targets: dict[str, MtpTarget], name: str) -> None:
    plain, guessed = plain_and_guessed(targets[name].folder, {"temperature": 0}, 3, executor="transformers")
    assert [output.outputs[0].token_ids for output in guessed] == [output.outputs[0].token_ids for output in plain]
    assert all(output.metrics.speculative_decoding.num_draft_tokens > 20 for output in guessed)


@pytest.mark.parametrize("name", ["mimo", "glm", "deepseek", "glm_flash", "qwen3_5"])
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


EXECUTORS = ["torch", "transformers", *(["native"] if NATIVE else [])]


@pytest.mark.parametrize("executor", EXECUTORS)
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
    assert [output.outputs[0].token_ids for output in guessed] == [output.outputs[0].token_ids for output in plain]
    assert len(set(plain[0].outputs[0].token_ids)) == 24
    for output in guessed:
        metrics = output.metrics.speculative_decoding
        assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens > 10
