"""An MTP layer in training: it learns, and what it exports guesses as it does, looped too."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_heads import (
    TinyTarget,
    Training,
    accuracy_with_and_without_shift,
    check_documents_apart,
    check_served,
    disturbed,
    document,
    exported,
    llama_config,
    made_once,
    texts,
)
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from foretoken.proposers import mtp
from foretoken.proposers.config import MtpConfig
from foretoken.proposers.training.heads.mtp import Mtp, MtpSettings
from foretoken.proposers.training.unrolled_attention import Unroll

STEPS = 3
target = made_once(TinyTarget)


def recomputed(head: Mtp, target: TinyTarget, text: Sequence[int], path: Sequence[int]) -> Tensor:
    """[hidden] behind text and then path: the whole layer over all tokens again for every guess."""
    tokens, states = [*text[1:], *path], target.states(text[:-1])
    for end in range(len(text) - 1, len(tokens) + 1):
        output = head(states, torch.tensor(tokens[:end]), 1 + torch.arange(end), Unroll((0, end), torch.arange(0)))
        states = torch.cat([states, output[-1:]])
    return states[-1]


def check_export(head: Mtp, target: TinyTarget, folder: Path) -> None:
    def scores(text: Sequence[int], path: Sequence[int]) -> Tensor:
        return recomputed(head, target, text, path) @ target.frozen.head.T

    check_served(head, target, folder, "mtp", mtp.load, MtpConfig, scores, count=4, num_speculative_tokens=4)


def test_it_learns_and_its_export_guesses_as_it_does(target: TinyTarget, tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = Mtp(target.frozen, MtpSettings(STEPS))
    training = Training(head, tmp_path, lr=1e-2)
    assert training.after["loss"] < 0.7 * training.before["loss"]
    assert training.after["accuracy_1"] > 0.6 and training.after["accuracy_2"] > 0.5
    check_export(head, target, tmp_path / "head")


KINDS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**llama_config().to_diff_dict(), "model_type": "qwen2"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**llama_config(tie_word_embeddings=False).to_diff_dict(), "model_type": "qwen3"})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_of_the_targets_kind(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    target = TinyTarget(tmp_path / "target", KINDS[kind]())
    check_export(disturbed(Mtp(target.frozen), norms=0.1), target, tmp_path / "head")


def test_unrolled_steps_are_those_of_drafting(target: TinyTarget) -> None:
    """Step s at token i: the states of tokens up to i beside the tokens they chose, then s - 1 tokens beside its own states."""
    torch.manual_seed(0)
    head, text = Mtp(target.frozen, MtpSettings(STEPS)), texts(1, 16, seed=5)[0]
    for step, (starts, states) in enumerate(head.states(document(text))):
        assert set(range(len(text) - 2 - step)) <= set(starts.tolist())
        for i, state in zip(starts.tolist(), states, strict=True):
            if i + 2 + step < len(text):
                expected = recomputed(head, target, text[: i + 2], text[i + 2 : i + 2 + step])
                torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def test_documents_do_not_see_each_other(target: TinyTarget) -> None:
    check_documents_apart(Mtp(target.frozen, MtpSettings(STEPS)))


def test_without_the_shift_guesses_are_worse(target: TinyTarget, tmp_path: Path) -> None:
    right, wrong = accuracy_with_and_without_shift(lambda: Mtp(target.frozen, MtpSettings(STEPS)), tmp_path, lr=1e-2)
    assert right > wrong + 0.2


def test_the_config_names_layer_and_target(target: TinyTarget, tmp_path: Path) -> None:
    _, config = exported(Mtp(target.frozen, MtpSettings(STEPS)), tmp_path)
    assert config["speculators_model_type"] == "mtp" and config["num_nextn_predict_layers"] == 1
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == STEPS
