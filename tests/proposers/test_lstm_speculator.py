"""What Arctic's speculators have of their own: gates, tables that are tied, and widths written as texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from last_state_runs import resources, save
from mlp_speculator_runs import ARCTICS as PUBLISHED
from mlp_speculator_runs import GATES, INNER, Arctics, expected, guesses_of, load, started

from foretoken.proposers import mlp_speculator
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.config_entry import SpeculativeConfigError


@pytest.mark.parametrize("held", GATES)
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_tied_tensors_may_be_kept_once_in_the_file_under_any_of_their_names(held: str, prefix: str, tmp_path: Path) -> None:
    published = PUBLISHED["lstm, tied embeddings, scaled"]
    gone = {f"{gate}_emb.0.weight" for gate in GATES if gate != held} | {f"head.{i}.weight" for i in (0, 1, 3)}
    once = {prefix + name: tensor for name, tensor in published.tensors.items() if name not in gone}
    again = started(load(tmp_path / "all", published))
    run = started(load(tmp_path / "once", Arctics(published.config, once)))
    assert [guess.tokens for _, guess in guesses_of(run)] == [guess.tokens for _, guess in guesses_of(again)]


@pytest.mark.parametrize(("layout", "count"), [("lstm", 4), ("lstm, tied embeddings, scaled", 1)])
def test_tables_are_kept_once_in_memory(layout: str, count: int, tmp_path: Path) -> None:
    given = resources(tmp_path)
    held: list[int] = []

    def bind(program: Any, weights: Any, quantization: Any) -> Any:
        executor = given.bind(program, weights, quantization)
        held.append(sum(len(forms) for names, forms in executor.bank._entries.items() if "_emb." in str(names)))
        return executor

    saved = save(tmp_path / "speculator", PUBLISHED[layout].config, PUBLISHED[layout].tensors)
    mlp_speculator.load(MlpSpeculatorConfig(str(saved)), replace(given, bind=bind))
    assert held == [count] * 3, "the gates of the first step, those of the others, which bring no table, and the head"


@pytest.mark.parametrize(
    ("layout", "change", "without", "settings", "message"),
    [
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
    changed = Arctics({**published.config, **change}, {name: t for name, t in published.tensors.items() if name != without})
    with pytest.raises(SpeculativeConfigError, match=message) as error:
        load(tmp_path, changed, **settings)
    assert "\n" not in str(error.value)


def test_widths_may_be_numbers_and_a_missing_method_is_the_first_one(tmp_path: Path) -> None:
    published = PUBLISHED["rnn, tied"]
    config = {**published.config, **{key: INNER for key in ("inner_dim", "emb_dim", "proj_dim")}}
    run = started(load(tmp_path, Arctics({key: x for key, x in config.items() if key != "method"}, published.tensors)))
    for _, guess in guesses_of(run):
        assert guess.tokens == [int(logits.argmax()) for logits in expected(published, guess)]
