"""EAGLE-1 in training: it learns the target's next states, and what it exports guesses as it does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from taught_target import TaughtTarget
from torch import Tensor
from torch.nn.functional import silu
from training_heads import (
    HIDDEN,
    Training,
    check_documents_apart,
    check_gradients,
    check_served,
    disturbed,
    document,
    exported,
    shapes,
    texts,
)

from foretoken.proposers import eagle
from foretoken.proposers.config import EagleConfig
from foretoken.proposers.training.heads.eagle import MEASURED, Eagle, EagleSettings, states_by_depth

QUIET = EagleSettings(noise=0.0)


def made(target: TaughtTarget, settings: EagleSettings | None = None) -> Eagle:
    torch.manual_seed(0)
    return Eagle(target.frozen, settings)


def unrolled(head: Eagle, target: TaughtTarget, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """[HIDDEN] the state that the token behind text + path is read from, path deeper and deeper in the head's own states."""
    tokens = [*text, *path, *[0] * (1 + MEASURED)]
    starts, state = list(states_by_depth(head, document(tokens), target.states(tokens), MEASURED))[len(path)]
    return state[starts.tolist().index(len(text) - 2)]


def check_export(head: Eagle, target: TaughtTarget, folder: Path) -> None:
    def scores(text: Sequence[int], path: Sequence[int]) -> Tensor:
        return unrolled(head, target, text, path) @ target.frozen.head.T

    found = check_served(head, target, folder, "eagle", eagle.load, EagleConfig, scores, count=4, num_speculative_tokens=4)
    assert found[0].startswith("EAGLE in the layout of EAGLE, 1 layer, reads the target's last state")
    assert found[1].endswith("embedding: the target's, head: the target's")


def test_it_learns_and_its_export_guesses_as_it_does(target: TaughtTarget, tmp_path: Path) -> None:
    head = made(target)
    training = Training(head, tmp_path / "training", lr=1e-2)
    print(training.before, training.after)
    assert training.after["loss"] < 0.8 * training.before["loss"]
    assert training.after["accuracy_1"] > max(0.4, training.before["accuracy_1"] + 0.2)
    check_export(head, target, tmp_path / "head")


def test_exports_of_random_weights_guess_as_training_does(target: TaughtTarget, tmp_path: Path) -> None:
    check_export(disturbed(made(target, EagleSettings(intermediate_size=32))), target, tmp_path)


def test_the_loss_is_the_published_one(target: TaughtTarget) -> None:
    """From the state of token i and token i + 1, at every place: the target's state of token i + 1, and what it says of token i + 2."""
    settings = replace(QUIET, state_weight=0.7, token_weight=0.2)
    head, text = disturbed(made(target, settings)), texts(1, 20, seed=5)[0]
    losses = head.loss(document(text))
    states, total = target.states(text), torch.zeros(())
    for i in range(len(text) - 2):
        state, wanted = unrolled(head, target, text[: i + 2], []), states[i + 1]
        distance = (state - wanted).abs()
        total = total + 0.7 * torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean()
        opinion = (wanted @ target.frozen.head.T).softmax(-1)
        total = total - 0.2 * (opinion * (state @ target.frozen.head.T).log_softmax(-1)).sum()
    assert losses.weight == len(text) - 2
    check_gradients(head, losses.total, total)


def test_one_slot_is_as_published(target: TaughtTarget) -> None:
    """Written out for the first token alone: nothing to attend to but itself, so attention is the value."""
    head, text = disturbed(made(target, QUIET)), texts(1, 6, seed=8)[0]
    weights: dict[str, Tensor] = head.state_dict()
    x = weights["fc.weight"] @ torch.cat([target.frozen.embedding[text[1]], target.states(text)[0]])
    values = (weights["layer.self_attn.v_proj.weight"] @ x).unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten()
    x = x + weights["layer.self_attn.o_proj.weight"] @ values
    fed = x * torch.rsqrt(x.square().mean() + target.frozen.config.rms_norm_eps) * weights["layer.post_attention_layernorm.weight"]
    gate, up, down = (weights[f"layer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    torch.testing.assert_close(unrolled(head, target, text[:2], []), x + down @ (silu(gate @ fed) * (up @ fed)), rtol=1e-4, atol=1e-4)


def test_noise_belongs_to_the_batch_and_to_training(target: TaughtTarget) -> None:
    head, text = disturbed(made(target, EagleSettings(noise=0.5))), texts(1, 20, seed=5)[0]
    one, other = document(text), replace(document(text), number=1)
    losses = [float(head.loss(batch).total.detach()) for batch in (one, one, other)]
    assert losses[0] == losses[1] != losses[2]
    with torch.no_grad():
        measured = head.loss(one)
        assert float(measured.total) == float(head.loss(other).total)
    assert set(measured.metrics) == {"loss", *(f"accuracy_{depth}" for depth in range(1, 1 + MEASURED))}


def test_documents_do_not_see_each_other(target: TaughtTarget) -> None:
    check_documents_apart(disturbed(made(target, QUIET)))


def test_the_layout_is_the_published_one(target: TaughtTarget, tmp_path: Path) -> None:
    inner = target.frozen.config.intermediate_size
    tensors, config = exported(made(target), tmp_path)
    assert shapes(tensors) == {
        "fc.weight": (HIDDEN, 2 * HIDDEN), "layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN), "layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN), "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.mlp.gate_proj.weight": (inner, HIDDEN), "layers.0.mlp.up_proj.weight": (inner, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, inner),
    }
    assert config["model_type"] == "llama" and config["bias"] is False and config["num_hidden_layers"] == 1
