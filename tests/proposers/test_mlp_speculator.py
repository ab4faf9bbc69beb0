"""MLP speculators of IBM's kind and of Arctic's, as they are published, compared with the formula written out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import last_state_runs
import pytest
import torch
from elsewhere import compare, with_far_states
from last_state_runs import VOCAB, WIDTH, opened, resources, save
from mlp_speculator_runs import (
    ARCTICS,
    IBMS,
    INNER,
    Ibms,
    Published,
    expected,
    guesses_of,
    is_drawn_as_the_target_would,
    load,
    started,
)
from pretended_engine import EXECUTIONS, Guess

from foretoken.kernels import noise
from foretoken.kernels.execution import Execution
from foretoken.proposers import mlp_speculator
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.config_entry import SpeculativeConfigError

PUBLISHED: dict[str, Published] = {**IBMS, **ARCTICS}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_chains_are_the_best_tokens_of_the_formula(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, execution)
    n = published.config["n_predict"]
    assert loaded.found[0].startswith(f"{n} of {n} positions") and len(loaded.found) == 1, "all tensors are known"
    guesses = guesses_of(started(loaded))
    assert len(guesses) > 25 and {len(guess.tokens) for _, guess in guesses} == set(range(1, n + 1))
    for _, guess in guesses:
        assert guess.parents == list(range(-1, len(guess.tokens) - 1))
        for token, confidence, logits in zip(guess.tokens, guess.confidence, expected(published, guess), strict=True):
            assert token == int(logits.argmax())
            assert confidence == pytest.approx(float(torch.softmax(logits, -1)[token]), abs=1e-5)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_scores_are_the_formulas_number_by_number(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    recurrence: Any = load(tmp_path, published, execution).open(opened())._heads._recurrence  # type: ignore[attr-defined]
    states, tokens = torch.randn(2, WIDTH), [[3, 7], [1, 0], [4, VOCAB - 1], [1, 1]][: published.config["n_predict"]]
    wanted = [published.steps(state, [row[i] for row in tokens]) for i, state in enumerate(states)]
    carried = recurrence.begin(states)
    for step, row in enumerate(tokens):
        scores, carried = recurrence.step(step, carried, row)
        torch.testing.assert_close(scores, torch.stack([logits[step] for logits in wanted]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["untied", "lstm", "rnn, tied"])
def test_rows_that_sample_draw_under_the_targets_own_noise(layout: str, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    run = started(load(tmp_path, published, draft_sample_method="probabilistic"), (0.0, 1.0, 0.7))
    differing = 0
    for name, guess in guesses_of(run):
        for j, (token, logits) in enumerate(zip(guess.tokens, expected(published, guess), strict=True)):
            assert is_drawn_as_the_target_would(guess, run.texts[name].draw, j, logits)
            differing += token != int(logits.argmax())
    assert differing > 5


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", ["tied", "lstm, tied embeddings, scaled", "rnn"])
def test_p_q_rules_get_the_distributions_that_tokens_were_drawn_from(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    run = started(load(tmp_path, published, execution, draft_sample_method="probabilistic"), (0.0, 1.0, 0.7), return_probs=True)
    for name, guess in guesses_of(run):
        draw = run.texts[name].draw
        assert guess.probs is not None and guess.probs.shape == (len(guess.tokens), VOCAB)
        for j, (token, probs, logits) in enumerate(zip(guess.tokens, guess.probs, expected(published, guess), strict=True)):
            if draw.temperature:
                torch.testing.assert_close(probs, torch.softmax(logits / draw.temperature, -1), rtol=1e-4, atol=1e-5)
                key = noise.keys([noise.step_stream(draw.seed, draw.choice, len(guess.text), noise.Purpose.DRAFT)], [len(guess.text) + j])
                assert token == int(noise.sample(probs.log()[None], key)[0]) or noise.margin(probs.log()[None], key)[0] < 1e-3
            else:
                assert probs[token] == 1.0 and probs.sum() == 1.0


@pytest.mark.parametrize("layout", ["tied", "lstm"])
def test_the_batch_does_not_matter(layout: str, tmp_path: Path) -> None:
    """A row that drops out takes its cell along, if it has one."""
    loaded = load(tmp_path, PUBLISHED[layout], draft_sample_method="probabilistic")
    runs = [started(loaded, (0.0, 1.0, 0.7)) for _ in range(3)]
    for run in runs:
        run.step({})
        run.step({})
    ceilings = {"r0": 1, "r1": 4, "r2": 3}
    whole, reverse = runs[0].step(ceilings), runs[1].step(ceilings, order=["r2", "r1", "r0"])
    assert {name: guess.tokens for name, guess in whole.items()} == {name: guess.tokens for name, guess in reverse.items()}
    assert [len(whole[name].tokens) for name in ceilings] == [1, 4, 3]
    assert runs[2].step({"r2": 3})["r2"].tokens == whole["r2"].tokens


@pytest.mark.parametrize("layout", ["untied", "lstm", "rnn"])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_positions_keep_the_constants_of_all(layout: str, count: int, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, num_speculative_tokens=count)
    assert len(loaded.found) == 1 and loaded.found[0].startswith(f"{count} of 4 positions") and "of width 40" in loaded.found[0]
    for _, guess in guesses_of(started(loaded)):
        assert len(guess.tokens) <= count
        assert guess.confidence == pytest.approx([float(torch.softmax(x, -1).max()) for x in expected(published, guess)], abs=1e-5)


def test_tied_weights_are_kept_once_in_memory_and_may_be_kept_once_in_the_file(tmp_path: Path) -> None:
    published = PUBLISHED["tied"]
    once = {n: t for n, t in published.tensors.items() if not any(f".{i}." in n for i in (2, 3)) and n not in _copies_of_first()}
    assert len(once) == 6
    saved = save(tmp_path / "once", published.config, once)
    whole, small = resources(tmp_path), resources(tmp_path)
    run = started(mlp_speculator.load(MlpSpeculatorConfig(str(saved)), small))
    again = started(load(tmp_path, published))
    assert [guess.tokens for _, guess in guesses_of(run)] == [guess.tokens for _, guess in guesses_of(again)]
    bound: list[int] = []

    def bind(program: Any, weights: Any, quantization: Any) -> Any:
        executor = whole.bind(program, weights, quantization)
        bound.append(sum(len(forms) for forms in executor.bank._entries.values()))
        return executor

    mlp_speculator.load(MlpSpeculatorConfig(str(saved)), replace(whole, bind=bind))
    assert bound[0] < bound[1] == bound[2] == bound[3], "positions 2 and 3 bring nothing new, position 1 a projection"


def _copies_of_first() -> set[str]:
    return {f"speculator.{part.replace('.', '.1.')}" for part in ("emb.weight", "ln.weight", "ln.bias", "head.weight")}


@pytest.mark.parametrize(
    ("change", "without", "settings", "message"),
    [
        ({"emb_dim": 32}, "", {}, "trained for states of width 32, the target has 24"),
        ({"vocab_size": 60}, "", {}, "trained for a vocabulary of 60, the target has 50"),
        ({"inner_dim": 48}, "", {}, r"'speculator\.emb\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ({"n_predict": "4"}, "", {}, "'n_predict' must be an integer"),
        ({"n_predict": 0}, "", {}, "'n_predict' must be from 1 to 64"),
        ({}, "speculator.head.3.weight", {}, r"no tensor 'speculator\.head\.3\.weight'"),
        ({}, "speculator.proj.0.weight", {}, "is no MLP speculator"),
        ({}, "", {"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, .* trained for 4"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], without: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    untied = PUBLISHED["untied"]
    changed = Ibms({**untied.config, **change}, {name: t for name, t in untied.tensors.items() if name != without})
    with pytest.raises(SpeculativeConfigError, match=message):
        load(tmp_path, changed, **settings)


@pytest.mark.parametrize(("layout", "norms"), [("tied, scaled", 0), ("lstm, tied embeddings, scaled", 4)])
@pytest.mark.parametrize(("drawn", "return_probs"), [(False, False), (True, False), (True, True)])
def test_only_what_is_guessed_comes_from_a_device(layout: str, norms: int, drawn: bool, return_probs: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"draft_sample_method": "probabilistic"} if drawn else {}

    def play(is_far: bool) -> list[dict[str, Guess]]:
        run = started(load(tmp_path / str(is_far), PUBLISHED[layout], **settings), (0.0, 1.0, 2.0), return_probs)
        if is_far:
            with_far_states(run.proposer)
        return [run.step({f"r{i}": 1 + (step + i) % 5 for i in range(3)}) for step in range(12)]

    device = compare(play, last_state_runs)
    assert max(device.to_host) < VOCAB or return_probs, "scores came to the host"
    assert device.to_device.count(INNER) == norms, "norms that no program has go there once"
