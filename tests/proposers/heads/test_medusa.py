"""Medusa heads in training: they learn, and what they export guesses as they do."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from training_heads import HIDDEN, VOCAB, TinyTarget, Training, check_served, document, exported, made_once, shapes, texts

from foretoken.proposers import medusa
from foretoken.proposers.config import MedusaConfig
from foretoken.proposers.training.heads.medusa import Medusa, MedusaSettings

SETTINGS = MedusaSettings(num_heads=3)
target = made_once(TinyTarget)


@pytest.mark.parametrize("settings", [SETTINGS, MedusaSettings(num_heads=3, num_layers=2, own_heads=True)], ids=["target's", "own"])
def test_heads_learn_and_their_export_guesses_as_they_do(target: TinyTarget, tmp_path: Path, settings: MedusaSettings) -> None:
    head = Medusa(target.frozen, settings)
    training = Training(head, tmp_path, lr=1e-1)
    assert training.after["loss"] < 0.8 * training.before["loss"]
    assert training.after["accuracy_1"] > training.before["accuracy_1"] + 0.3

    def scores(text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        state = target.states(text[:-1])[-1]
        return head(state)[len(path)] @ head.output(len(path)).T

    check_served(head, target, tmp_path / "heads", "medusa", medusa.load, MedusaConfig, scores, count=3)


def test_a_new_head_is_the_targets_own(target: TinyTarget) -> None:
    states = target.states(texts(1, 20, seed=4)[0])
    for settings in (SETTINGS, MedusaSettings(num_heads=3, num_layers=2, own_heads=True)):
        head = Medusa(target.frozen, settings)
        for number, read in enumerate(head(states)):
            assert torch.equal(read @ head.output(number).T, states @ target.frozen.head.T)


def test_the_loss_is_the_published_one(target: TinyTarget) -> None:
    """Head h, from 0, reads the state of token i for token i + 2 + h; its cross-entropy counts 0.8 ** (h + 1)."""
    torch.manual_seed(0)
    head, text = Medusa(target.frozen, SETTINGS), texts(1, 30, seed=5)[0]
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) / HIDDEN**0.5
    losses = head.loss(document(text))
    states, expected = target.states(text), 0.0
    for number in range(3):
        weight, bias = head.state_dict()[f"blocks.{number}.0.linear.weight"], head.state_dict()[f"blocks.{number}.0.linear.bias"]
        x = states[: len(text) - 2 - number]
        x = x + torch.nn.functional.silu(x @ weight.T + bias)
        labels = torch.tensor(text[2 + number :])
        expected += 0.8 ** (number + 1) * float(torch.nn.functional.cross_entropy(x @ target.frozen.head.T, labels, reduction="sum"))
        assert losses.metrics[f"accuracy_{number + 1}"][1] == len(labels)
    assert losses.weight == len(text) - 2
    assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-4)


def test_layouts_are_the_published_ones(target: TinyTarget, tmp_path: Path) -> None:
    tensors, config = exported(Medusa(target.frozen, SETTINGS), tmp_path / "small")
    assert shapes(tensors) == {
        f"{head}.0.linear.{kind}": shape for head in range(3) for kind, shape in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 1

    tensors, config = exported(Medusa(target.frozen, MedusaSettings(num_heads=2, own_heads=True)), tmp_path / "large")
    assert tensors["lm_heads.1.weight"].shape == (VOCAB, HIDDEN) and tensors["blocks.1.layers.0.bias"].shape == (HIDDEN,)
    assert config["model_type"] == "medusa" and config["num_heads"] == 2 and config["medusa_fc_bias"]
