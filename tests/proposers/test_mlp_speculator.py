"""MLP speculators of IBM's kind and of Arctic's, as they are published, compared with the formula written out."""

from pathlib import Path
from typing import Any

import last_state_runs
import pytest
import torch
from elsewhere import compare, with_far_states
from last_state_runs import VOCAB, WIDTH, check_batches, opened
from mlp_speculator_runs import (
    ARCTICS,
    IBMS,
    INNER,
    Arctics,
    Ibms,
    expected,
    forms_held,
    guesses_of,
    is_drawn_as_the_target_would,
    load,
    started,
)
from pretended_engine import EXECUTIONS, Guess

from foretoken.kernels import noise
from foretoken.kernels.execution import Execution
from foretoken.proposers.config_entry import SpeculativeConfigError

PUBLISHED: dict[str, Ibms | Arctics] = {**IBMS, **ARCTICS}


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
    check_batches(lambda: started(loaded, (0.0, 1.0, 0.7)), {"r0": 1, "r1": 4, "r2": 3})


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
    run = started(load(tmp_path / "once", Ibms(published.config, once)))
    again = started(load(tmp_path / "all", published))
    assert [guess.tokens for _, guess in guesses_of(run)] == [guess.tokens for _, guess in guesses_of(again)]
    held = forms_held(tmp_path, Ibms(published.config, once))
    assert held[0] < held[1] == held[2] == held[3], "positions 2 and 3 bring nothing new, position 1 a projection"


def _copies_of_first() -> set[str]:
    return {f"speculator.{part.replace('.', '.1.')}" for part in ("emb.weight", "ln.weight", "ln.bias", "head.weight")}


@pytest.mark.parametrize(
    ("layout", "change", "without", "settings", "message"),
    [
        ("untied", {"emb_dim": 32}, "", {}, "trained for states of width 32, the target has 24"),
        ("untied", {"vocab_size": 60}, "", {}, "trained for a vocabulary of 60, the target has 50"),
        ("untied", {"inner_dim": 48}, "", {}, r"'speculator\.emb\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ("untied", {"n_predict": "4"}, "", {}, "'n_predict' must be an integer"),
        ("untied", {"n_predict": 0}, "", {}, "'n_predict' must be from 1 to 64"),
        ("untied", {}, "speculator.head.3.weight", {}, r"no tensor 'speculator\.head\.3\.weight'"),
        ("untied", {}, "speculator.proj.0.weight", {}, "is no MLP speculator"),
        ("untied", {}, "", {"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, .* trained for 4"),
        ("lstm", {"input_hidden_dim": 32}, "", {}, "trained for states of width 32, the target has 24"),
        ("lstm", {"input_hidden_dim": None}, "", {}, "'input_hidden_dim' must be an integer"),
        ("lstm", {"vocab_size": 60}, "", {}, "trained for a vocabulary of 60, the target has 50"),
        ("lstm", {"n_predict": 0}, "", {}, "'n_predict' must be from 1 to 64"),
        ("lstm", {"tie_weights": False}, "", {}, "'tie_weights' must be true"),
        ("lstm", {"method": "sum_gru"}, "", {}, "'method' is 'sum_gru', .* take one of these"),
        ("lstm", {"method": "sum_rnn"}, "", {}, r"is no MLP speculator: it has no tensor 'proj\.0\.0\.weight'"),
        ("rnn", {"method": "sum_lstm"}, "", {}, r"is no MLP speculator: it has no tensor 'forget_proj\.0\.weight'"),
        ("rnn", {"inner_dim": "40.40"}, "", {}, r"'inner_dim' is '40\.40', a stack of layers .* not supported"),
        ("rnn", {"emb_dim": "forty"}, "", {}, "'emb_dim' must be a width such as \"4096\", not 'forty'"),
        ("rnn", {"emb_dim": 40.0}, "", {}, "'emb_dim' must be a width"),
        ("rnn", {"proj_dim": "0"}, "", {}, "'proj_dim' must be a width"),
        ("rnn", {"proj_dim": "32"}, "", {}, "'inner_dim' 40, 'emb_dim' 40, 'proj_dim' 32 must be the same"),
        ("rnn", {"inner_dim": 48, "emb_dim": 48, "proj_dim": 48}, "", {}, r"'emb\.0\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ("rnn", {"n_predict": 5}, "", {}, r"no tensor 'emb\.4\.0\.weight'"),
        ("rnn", {}, "head.3.weight", {}, r"no tensor 'head\.3\.weight'"),
        ("rnn", {}, "ln.1.0.bias", {}, r"no tensor 'ln\.1\.0\.bias'"),
        ("lstm", {}, "output_proj.1.weight", {}, r"no tensor 'output_proj\.1\.weight'"),
        ("lstm", {}, "input_emb.0.weight", {}, r"no tensor 'input_emb\.0\.weight'"),
        ("lstm", {}, "state_ln.0.bias", {}, r"no tensor 'state_ln\.0\.bias'"),
        ("lstm", {"inner_dim": 48, "emb_dim": 48, "proj_dim": 48}, "", {}, r"'forget_emb\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ("lstm", {}, "", {"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, .* trained for 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    layout: str, change: dict[str, Any], without: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published = PUBLISHED[layout]
    tensors = {name: tensor for name, tensor in published.tensors.items() if name != without}
    with pytest.raises(SpeculativeConfigError, match=message) as error:
        load(tmp_path, type(published)({**published.config, **change}, tensors), **settings)
    assert "\n" not in str(error.value)


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
