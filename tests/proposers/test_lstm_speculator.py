"""What Arctic's speculators have of their own: gates, tables that are tied, and widths written as texts."""

from pathlib import Path

import pytest
from mlp_speculator_runs import ARCTICS as PUBLISHED
from mlp_speculator_runs import GATES, INNER, Arctics, expected, forms_held, guesses_of, load, started


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
    held = forms_held(tmp_path, PUBLISHED[layout], "_emb.")
    assert held == [count] * 3, "the gates of the first step, those of the others, which bring no table, and the head"


def test_widths_may_be_numbers_and_a_missing_method_is_the_first_one(tmp_path: Path) -> None:
    published = PUBLISHED["rnn, tied"]
    config = {**published.config, **{key: INNER for key in ("inner_dim", "emb_dim", "proj_dim")}}
    run = started(load(tmp_path, Arctics({key: x for key, x in config.items() if key != "method"}, published.tensors)))
    for _, guess in guesses_of(run):
        assert guess.tokens == [int(logits.argmax()) for logits in expected(published, guess)]
