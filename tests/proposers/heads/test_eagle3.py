"""EAGLE-3 in training: it learns the target's probabilities, several steps deep, and what it exports guesses as it does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from taught_target import TaughtTarget
from torch import Tensor
from torch.nn.functional import embedding
from training_heads import (
    HIDDEN,
    VOCAB,
    Training,
    check_documents_apart,
    check_gradients,
    check_served,
    disturbed,
    document,
    documents,
    exported,
    shapes,
    texts,
)

from foretoken.proposers import eagle
from foretoken.proposers.config import EagleConfig
from foretoken.proposers.training.heads.eagle3 import Eagle3, Eagle3Settings, draft_vocabulary, usual_taps
from foretoken.proposers.training.packing import Document, write
from foretoken.server.train.drafter_data import learned_counts

DRAFT = VOCAB - 6
SETTINGS = Eagle3Settings(draft_vocab_size=DRAFT, num_steps=3)
COUNTS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))


def made(target: TaughtTarget, settings: Eagle3Settings = SETTINGS) -> Eagle3:
    torch.manual_seed(0)
    return Eagle3(target.frozen, settings, COUNTS)


def unrolled(head: Eagle3, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """[VOCAB] scores of the token behind text + path, as training has them: path is deeper and deeper in the head's own states."""
    batch = document([*text, *path, *[0] * (1 + head.settings.num_steps)])
    features = head.target(batch, [tap - 1 for tap in head.taps])
    starts, state = list(head.states(batch, features))[len(path)]
    normed = head.norm(state[starts.tolist().index(len(text) - 2)])
    return torch.full((VOCAB,), -torch.inf).index_copy_(0, head.token_ids, head.lm_head(normed))


def check_export(head: Eagle3, target: TaughtTarget, folder: Path) -> None:
    count, scores = head.settings.num_steps, partial(unrolled, head)
    found = check_served(head, target, folder, "eagle3", eagle.load, EagleConfig, scores, count, num_speculative_tokens=count)
    assert "EAGLE-3" in found[0] and f"before layers {', '.join(map(str, head.taps))}" in found[0]


def test_it_learns_and_its_export_guesses_as_it_does(target: TaughtTarget, tmp_path: Path) -> None:
    head = made(target)
    training = Training(head, tmp_path / "training", lr=2e-2)
    print(training.before, training.after)
    assert training.after["loss"] < 0.8 * training.before["loss"]
    assert training.after["accuracy_1"] > 0.5 and training.after["accuracy_3"] > 0.3
    assert training.after["accuracy_3"] > training.before["accuracy_3"] + 0.2
    check_export(head, target, tmp_path / "head")


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, replace(SETTINGS, draft_vocab_size=None, taps=(1, 3, 5, 7), num_steps=5, intermediate_size=32)],
    ids=["usual", "four taps, whole vocabulary"],
)
def test_exports_of_random_weights_guess_as_training_does(target: TaughtTarget, tmp_path: Path, settings: Eagle3Settings) -> None:
    check_export(disturbed(made(target, settings)), target, tmp_path)


def test_the_loss_is_the_published_one(target: TaughtTarget) -> None:
    """Step s, from 0, goes on from token i for token i + 2 + s, learns what the target says of it, and counts 0.8 ** s."""
    head, text = disturbed(made(target)), texts(1, 20, seed=5)[0]
    losses = head.loss(document(text))
    total, known = torch.zeros(()), set(head.token_ids.tolist())
    opinions = (target.states(text) @ target.frozen.head.T)[:, head.token_ids].softmax(-1)
    for step in range(3):
        right = 0
        for i in range(len(text) - 2 - step):
            if text[i + 2 + step] not in known:
                continue
            scores = unrolled(head, text[: i + 2], text[i + 2 : i + 2 + step])
            total = total - 0.8**step * (opinions[i + 1 + step] * scores[head.token_ids].log_softmax(-1)).sum()
            right += int(scores.argmax()) == text[i + 2 + step]
        assert losses.metrics[f"accuracy_{step + 1}"] == (pytest.approx(right), len(text) - 2 - step)
    assert losses.weight == len(text) - 2
    check_gradients(head, losses.total, total)


def test_one_slot_is_as_published(target: TaughtTarget) -> None:
    """Written out for the first token alone: nothing to attend to but itself, so attention is the value."""
    head, text = disturbed(made(target)), texts(1, 6, seed=8)[0]
    features = target.frozen(document(text), [1, 2, 3])
    weights: dict[str, Tensor] = head.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + target.frozen.config.rms_norm_eps) * weights[name]

    state = weights["fc.weight"] @ torch.cat([features.layers[output][0] for output in (1, 2, 3)])
    embedded = embedding(torch.tensor(text[1]), target.frozen.embedding)
    read = torch.cat([norm(embedded, "midlayer.input_layernorm.weight"), norm(state, "midlayer.hidden_norm.weight")])
    values = (weights["midlayer.self_attn.v_proj.weight"] @ read).unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten()
    state = state + weights["midlayer.self_attn.o_proj.weight"] @ values
    fed = norm(state, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    state = state + down @ (torch.nn.functional.silu(gate @ fed) * (up @ fed))
    found = next(head.states(document(text), features))[1][0]
    torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-4)


def test_prompts_and_other_documents_change_only_what_is_counted(target: TaughtTarget) -> None:
    head = disturbed(made(target))
    check_documents_apart(head)
    one, other = texts(2, 11, seed=6)
    packed = documents(one, other)
    assert head.loss(replace(packed, learn=torch.arange(22) >= 16)).metrics["accuracy_3"][1] == 6


def test_the_draft_vocabulary_is_what_is_said_most(target: TaughtTarget, tmp_path: Path) -> None:
    documents = [
        Document(np.array([5, 5, 5, 9, 2, 9]), np.array([0, 0, 0, 1, 1, 1])), Document(np.array([7, 2, 9]), np.array([0, 1, 1])),
    ]
    write(tmp_path / "text", documents, VOCAB)
    counts = torch.from_numpy(learned_counts(tmp_path / "text", VOCAB))
    assert counts.sum() == 5 and counts[9] == 3 and counts[2] == 2
    assert draft_vocabulary(counts, 2, VOCAB).tolist() == [2, 9]
    assert draft_vocabulary(None, VOCAB, VOCAB).tolist() == list(range(VOCAB))
    with pytest.raises(ValueError, match="pass counts"):
        Eagle3(target.frozen, SETTINGS)


@pytest.mark.parametrize("taps", [(0, 2), (2, 2, 4), (4, 2), (3, 8)])
def test_taps_that_the_target_has_not(target: TaughtTarget, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascend within 1 to 7"):
        Eagle3(target.frozen, replace(SETTINGS, taps=taps), COUNTS)


def test_the_layout_is_the_published_one(target: TaughtTarget, tmp_path: Path) -> None:
    inner = target.frozen.config.intermediate_size
    tensors, config = exported(made(target), tmp_path)
    assert shapes(tensors) == {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,), "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (HIDDEN // 2, 2 * HIDDEN), "midlayer.self_attn.v_proj.weight": (HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN), "midlayer.mlp.gate_proj.weight": (inner, HIDDEN),
        "midlayer.mlp.up_proj.weight": (inner, HIDDEN), "midlayer.mlp.down_proj.weight": (HIDDEN, inner), "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT, HIDDEN), "d2t": (DRAFT,), "t2d": (VOCAB,),
    }
    assert torch.equal(torch.arange(DRAFT) + tensors["d2t"], COUNTS.argsort(descending=True)[:DRAFT].sort().values)
    assert tensors["t2d"].dtype == torch.bool and torch.equal(tensors["t2d"], COUNTS >= VOCAB - DRAFT)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == DRAFT
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_usual_taps_of_deep_and_of_shallow_targets() -> None:
    assert usual_taps(32) == (2, 16, 29) and usual_taps(8) == (2, 4, 5)
    assert [usual_taps(layers) for layers in (1, 2, 6)] == [(1,), (1, 2), (1, 3, 6)]
