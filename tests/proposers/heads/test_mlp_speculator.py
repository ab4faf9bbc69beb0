"""The MLP speculator in training: it learns in two stages, and what it exports guesses as it does."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_heads import (
    HIDDEN,
    VOCAB,
    TinyTarget,
    Training,
    accuracy_with_and_without_shift,
    check_served,
    document,
    exported,
    made_once,
    shapes,
    texts,
)

from foretoken.proposers import mlp_speculator
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.training.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorSettings

TIED = MlpSpeculatorSettings(inner_dim=32, num_positions=3)
UNTIED = MlpSpeculatorSettings(inner_dim=32, num_positions=3, tied=False, scale_input=False)
target = made_once(TinyTarget)


@pytest.mark.parametrize("settings", [TIED, UNTIED], ids=["tied", "untied"])
def test_it_learns_and_its_export_guesses_as_it_does(target: TinyTarget, tmp_path: Path, settings: MlpSpeculatorSettings) -> None:
    torch.manual_seed(0)
    head = MlpSpeculator(target.frozen, settings)
    training = Training(head, tmp_path, lr=2e-2)
    assert training.after["loss"] < 0.7 * training.before["loss"]
    assert training.after["accuracy_1"] > 0.6

    def scores(text: Sequence[int], path: Sequence[int]) -> Tensor:
        state = head.first(target.states(text[:-1])[-1])
        for position, token in enumerate([text[-1], *path]):
            state = head.advance(position, state, torch.tensor(token))
        return state @ head.output(len(path)).T

    check_served(head, target, tmp_path / "head", "mlp_speculator", mlp_speculator.load, MlpSpeculatorConfig, scores, count=3)


@pytest.mark.parametrize("settings", [TIED, UNTIED], ids=["tied", "untied"])
def test_training_takes_the_steps_of_drafting(target: TinyTarget, settings: MlpSpeculatorSettings) -> None:
    """Position p at token i: the state of token i, then tokens i + 1 to i + 1 + p one by one; it learns token i + 2 + p."""
    torch.manual_seed(0)
    head, text = MlpSpeculator(target.frozen, settings), texts(1, 24, seed=5)[0]
    losses, states, total = head.loss(document(text)), target.states(text), 0.0
    for position in range(3):
        count = len(text) - 2 - position
        for i in range(count):
            state = head.first(states[i])
            for p in range(position + 1):
                state = head.advance(p, state, torch.tensor(text[i + 1 + p]))
            logits = (state @ head.output(position).T).detach()
            total -= float(logits.log_softmax(-1)[text[i + 2 + position]])
        assert losses.metrics[f"accuracy_{position + 1}"][1] == count
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-4)


def test_the_second_stage_goes_on_from_the_first(target: TinyTarget, tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = MlpSpeculator(target.frozen, TIED)
    learned = Training(first, tmp_path / "first", lr=2e-2, steps=20).after
    second = MlpSpeculator(target.frozen, TIED)
    second.load_state_dict(first.state_dict())
    training = Training(second, tmp_path / "second", lr=1e-2, steps=20)
    assert training.before == pytest.approx(learned)
    assert training.after["loss"] < 0.95 * learned["loss"]


def test_without_the_shift_guesses_are_worse(target: TinyTarget, tmp_path: Path) -> None:
    right, wrong = accuracy_with_and_without_shift(lambda: MlpSpeculator(target.frozen, TIED), tmp_path, lr=2e-2)
    assert right > wrong + 0.2


def test_tied_tensors_are_written_once(target: TinyTarget, tmp_path: Path) -> None:
    tensors, config = exported(MlpSpeculator(target.frozen, TIED), tmp_path / "tied")
    assert shapes(tensors) == {
        "speculator.emb.0.weight": (VOCAB, 32), "speculator.head.0.weight": (VOCAB, 32), "speculator.proj.0.weight": (32, HIDDEN),
        "speculator.proj.1.weight": (32, 32), "speculator.ln.0.weight": (32,), "speculator.ln.0.bias": (32,),
    }
    assert (config["emb_dim"], config["inner_dim"], config["n_predict"], config["tie_weights"]) == (HIDDEN, 32, 3, True)
    assert len(exported(MlpSpeculator(target.frozen, UNTIED), tmp_path / "untied")[0]) == 5 * 3
