"""Every published kind of EAGLE drafter against its plain reference, number by number, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretended_target
import pytest
import torch
from eagle_checkpoints import PUBLISHED, Drafter
from eagle_reference import Reference, Target
from elsewhere import compare, drafting
from pretended_engine import EXECUTIONS, NATIVE, Guess, PretendedEngine, Request, accept, at_random, text
from pretended_target import MAX_MODEL_LEN
from safetensors.torch import load_file, save_file

from foretoken.kernels.execution import Execution
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.proposers.base import Draw
from foretoken.proposers.config import DynamicTree

MakeDrafter = Callable[..., Drafter]


@pytest.fixture
def make(tmp_path: Path) -> MakeDrafter:
    def write(name: str, target: Target | None = None) -> Drafter:
        return Drafter.write(PUBLISHED[name], tmp_path, target)

    return write


def assert_as_reference(guess: Guess, reference: Reference, count: int, first: int = 0) -> None:
    """Tokens and their probabilities, given what was guessed before each."""
    assert len(guess.tokens) == count and guess.parents == list(range(-1, count - 1))
    at_once = reference.parallel_probs(guess.text, count, first) if reference.spec.parallel and count else None
    for i, (token, confidence) in enumerate(zip(guess.tokens, guess.confidence, strict=True)):
        probs = reference.probs(guess.text, guess.tokens[:i], first) if at_once is None else at_once[i]
        assert token == int(probs.argmax())
        assert confidence == pytest.approx(float(probs[token]), abs=1e-4)


def check(engine: PretendedEngine, drafter: Drafter, guesses: dict[str, Guess], count: int = 4) -> int:
    """All rows that could guess; returns how many there were."""
    able = [guess for guess in guesses.values() if guess.tokens]
    for guess in able:
        assert_as_reference(guess, drafter.reference, count)
    return len(able)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_guesses_are_the_references(make: MakeDrafter, name: str, execution: Execution) -> None:
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=4)
    choose = at_random(0)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 2))
    checked = 0
    for step in range(6):
        if step == 2:
            engine.add("c", text(3, 14))
        checked += check(engine, drafter, engine.step(choose))
    assert checked == 5 + 5 + 3
    wanted = NativeExecutor if execution is NATIVE else TorchExecutor
    assert {type(network) for network in drafter.bound} == {wanted}


def test_a_prompt_of_one_token_is_guessed_from(make: MakeDrafter) -> None:
    drafter = make("eagle3")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", [5])
    assert not engine.step(accept(0))["a"].tokens
    assert check(engine, drafter, engine.step(accept(4))) == 1
    assert check(engine, drafter, engine.step(accept(0))) == 1


@pytest.mark.parametrize("name", ["eagle", "gumiho", "eagle3", "p-eagle"])
def test_probs_are_what_guesses_are_drawn_from(make: MakeDrafter, name: str) -> None:
    drafter = make(name)
    engine = drafter.run(return_probs=True, num_speculative_tokens=3, draft_sample_method="probabilistic")
    engine.add("a", text(1, 9), draw=Draw(1.0, 1, 0))
    engine.add("b", text(2, 5), draw=Draw(1.0, 2, 0))
    surprises = 0
    for _ in range(5):
        for guess in engine.step(at_random(0)).values():
            if guess.tokens:
                assert guess.probs is not None and guess.probs.shape == (3, drafter.spec.vocab)
                at_once = drafter.reference.parallel_probs(guess.text, 3) if drafter.spec.parallel else None
                for i, token in enumerate(guess.tokens):
                    probs = drafter.reference.probs(guess.text, guess.tokens[:i]) if at_once is None else at_once[i]
                    assert torch.allclose(guess.probs[i], probs, atol=1e-4)
                    assert probs[token] > 0
                    surprises += token != int(probs.argmax())
    assert surprises > 3


@pytest.mark.parametrize("name", ["eagle", "eagle, qwen2, prefixed"])
def test_a_shared_embedding_and_head_are_scaled_as_the_target_scales_them(make: MakeDrafter, name: str) -> None:
    """The file of the first has an embedding of its own, equal to the target's: that one is read as it is."""
    published = PUBLISHED[name]
    target = Target(published.spec, embed_scale=1.0 if published.more else 2.5, logits_scale=0.5, softcap=4.0)
    drafter = make(name, target)
    if published.more:
        drafter.target = replace(target, embed_scale=3.0)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    assert check(engine, drafter, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", ["eagle", "eagle3, speculators", "p-eagle"])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunked_prefill_changes_nothing(make: MakeDrafter, name: str, chunk: int) -> None:
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 17))
    for _ in range(-(-17 // chunk)):
        check(engine, drafter, engine.step(accept(0), chunk=chunk))  # a last chunk of one token has a guess behind it already
    assert check(engine, drafter, engine.step(accept(1))) == 1
    assert check(engine, drafter, engine.step(accept(4))) == 1


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_small_ingestion_budget_only_delays(make: MakeDrafter, name: str) -> None:
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 17))
    engine.step(accept(0))
    checked = sum(check(engine, drafter, engine.step(accept(1), ingest=4)) for _ in range(8))
    assert checked == 3  # 17 entries and one more each step, four a step: behind for five steps


@pytest.mark.parametrize("name", ["eagle", "eagle3, NVIDIA", "eagle3, latent attention", "p-eagle"])
@pytest.mark.parametrize("asks", [False, True])
def test_prefix_cache_hits_change_nothing(make: MakeDrafter, name: str, asks: bool) -> None:
    """A second request takes over three blocks of a first one, whatever follows them, while both live."""
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    first = engine.add("a", text(1, 14))
    engine.step(accept(0))
    engine.step(accept(2))  # the drafter reads the prompt
    assert engine.filled["a"] >= 12
    second = engine.add("b", text(1, 12) + [33, 34, 35, 36], shared=first.table[:3])
    third = engine.add("c", text(1, 12) + [41], shared=first.table[:3])
    assert (second.computed, third.computed) == (12, 12)
    engine.step(accept(1), asks=asks)
    assert check(engine, drafter, engine.step(accept(3))) == 3
    assert check(engine, drafter, engine.step(accept(4))) == 3
    engine.proposer.forget("a")
    del engine.requests["a"]
    assert check(engine, drafter, engine.step(accept(0))) == 2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_rows_of_a_gumiho_want_few_guesses_or_many(make: MakeDrafter, execution: Execution) -> None:
    drafter = make("gumiho")
    engine = drafter.run(execution)
    counts = {"a": 1, "b": 4, "c": 0, "d": 2, "e": 3}
    for i, name in enumerate(counts):
        engine.add(name, text(i, 5 + i))
    engine.step(accept(0))
    for ceiling in (dict.fromkeys(counts, 1), counts, dict.fromkeys(counts, 2), counts):
        for name, guess in engine.step(accept(1), ceiling).items():
            assert_as_reference(guess, drafter.reference, ceiling[name])


def test_the_order_of_the_batch_changes_nothing(make: MakeDrafter) -> None:
    def run(order: Sequence[str]) -> list[dict[str, Guess]]:
        engine = drafter.run(num_speculative_tokens=4)
        for i, name in enumerate("abc"):
            engine.add(name, text(i, 5 + 4 * i))
        return [engine.step(accept(step), order=order) for step in range(4)]

    drafter = make("eagle3, qwen3")
    for one, two in zip(run("abc"), run("cab"), strict=True):
        assert {name: guess.tokens for name, guess in one.items()} == {name: guess.tokens for name, guess in two.items()}
        for name in one:
            assert one[name].confidence == pytest.approx(two[name].confidence, abs=1e-5)


@pytest.mark.parametrize("name", ["eagle", "gumiho", "eagle3"])
@pytest.mark.parametrize("asks", [False, True])
def test_steps_without_guesses_are_made_up_for(make: MakeDrafter, name: str, asks: bool) -> None:
    """k = 0 for a while, with the drafter reading along or not asked at all."""
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    check(engine, drafter, engine.step(accept(2)))
    for _ in range(5):
        assert not engine.step(accept(0), ceiling=0, asks=asks)["a"].tokens
    assert check(engine, drafter, engine.step(accept(4)), 4) == 1
    assert check(engine, drafter, engine.step(accept(0), ceiling=2), 2) == 1


@pytest.mark.parametrize("count", [0, 4])
def test_total_rejection_and_full_acceptance(make: MakeDrafter, count: int) -> None:
    drafter = make("eagle3, speculators")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 6))
    engine.step(accept(0))
    for step in range(5):
        assert check(engine, drafter, engine.step(accept(count, then=step))) == 1
    assert len(engine.requests["a"].tokens) == 6 + 1 + 5 * (count + 1)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["eagle", "gumiho", "eagle3"])
def test_dropped_states_mean_a_new_start_behind_them(make: MakeDrafter, name: str, execution: Execution) -> None:
    """A drafter that is not asked keeps 256 states; what it guesses later it guesses from those on."""
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=4)
    engine.add("a", text(1, 300))
    for _ in range(3):
        engine.step(accept(0), chunk=100, asks=False)
    dropped = 300 - 256
    guess = engine.step(accept(2))["a"]
    assert_as_reference(guess, drafter.reference, 4, first=dropped)
    assert_as_reference(engine.step(accept(1))["a"], drafter.reference, 4, first=dropped)
    assert engine.filled["a"] == 0  # no one else may take these blocks for filled


def test_a_perfect_drafter_accepts_everything(make: MakeDrafter) -> None:
    """A target that always follows token t by t + 1: the fusing layer hands on the embedding, the head knows its successor."""
    drafter = make("eagle")
    spec, path = drafter.spec, drafter.folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("fc.bias", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name].zero_()
    tensors["fc.weight"] = torch.cat([torch.eye(spec.hidden), torch.zeros(spec.hidden, spec.hidden)], 1)
    embedding = torch.nn.functional.normalize(tensors["embed_tokens.weight"])
    tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": 20 * embedding.roll(1, 0)}
    save_file(tensors, path)

    def follow(request_id: str, guess: Guess) -> tuple[Sequence[int], int]:
        token, path = (guess.text[-1] + 1) % spec.vocab, list[int]()
        while (node := child(guess, path[-1] if path else -1, token)) is not None:
            token, path = (token + 1) % spec.vocab, [*path, node]
        return path, token

    def child(guess: Guess, parent: int, token: int) -> int | None:
        return next((i for i, (t, p) in enumerate(zip(guess.tokens, guess.parents, strict=True)) if (t, p) == (token, parent)), None)

    shapes: list[dict[str, Any]] = [{"num_speculative_tokens": 4}, {"tree": DynamicTree(2, 4, 6)}]
    for settings in shapes:
        engine = drafter.run(**settings)
        engine.add("a", [5, 3, 50])
        engine.step(follow)
        for _ in range(5):
            engine.step(follow, ceiling=6)
        assert engine.requests["a"].tokens[3:] == [(51 + i) % spec.vocab for i in range(1 + 5 * 5)]


def test_preempted_requests_start_anew(make: MakeDrafter) -> None:
    drafter = make("eagle3")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    engine.step(accept(2))
    engine.proposer.forget("a")
    before: Request = engine.requests.pop("a")
    engine.add("a", before.tokens)
    engine.step(accept(0))
    assert check(engine, drafter, engine.step(accept(2))) == 1


def test_beyond_its_own_length_nothing_is_guessed(make: MakeDrafter) -> None:
    drafter = make("eagle3")
    engine = drafter.run(num_speculative_tokens=4, max_model_len=20)
    engine.add("a", text(1, 15))
    engine.add("b", text(2, 30))
    engine.step(accept(0))
    for expected in (4, 3, 2, 1, 0, 0):  # of 16, 17, 18, ... tokens
        guesses = engine.step(accept(0))
        assert not guesses["b"].tokens
        assert_as_reference(guesses["a"], drafter.reference, expected)


def test_positions_reach_as_far_as_the_targets(make: MakeDrafter) -> None:
    """All of these drafters say max_position_embeddings 64."""
    assert make("eagle3").load().executors[0].max_model_len == MAX_MODEL_LEN


def test_k_is_the_configs_else_the_checkpoints_else_five(make: MakeDrafter) -> None:
    speculators = make("eagle3, speculators")
    assert speculators.open().max_tokens == 3
    assert speculators.open(num_speculative_tokens=2).max_tokens == 2
    assert make("eagle").open().max_tokens == 5


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_only_what_is_guessed_comes_from_a_device(make: MakeDrafter, name: str) -> None:
    drafter = make(name)

    play = drafting(drafter, {"a": text(1, 9), "b": text(2, 3)}, lambda: at_random(0))
    assert max(compare(play, pretended_target).to_host, default=0) < drafter.spec.vocab, "scores or states came to the host"
