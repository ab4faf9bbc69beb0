"""A draft model in training: it learns the text and what the target says of it."""

from pathlib import Path

import pytest
import torch
from training_heads import VOCAB, TinyTarget, document, made_once, texts, with_and_without_shift

from foretoken.proposers.training.draft import DraftTrainee
from foretoken.proposers.training.target import Shape

SHAPE = Shape(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32)
target = made_once(TinyTarget)


@pytest.mark.parametrize("teacher_weight", [0.0, 0.1])
def test_it_learns_and_a_wrong_shift_is_worse(target: TinyTarget, tmp_path: Path, teacher_weight: float) -> None:
    right, wrong = with_and_without_shift(lambda: DraftTrainee(SHAPE.build(VOCAB), target.frozen, teacher_weight), tmp_path, lr=3e-2)
    print(right.before, right.after, wrong.after)
    assert right.after["loss"] < 0.7 * right.before["loss"] and right.after["accuracy_1"] > 0.5
    assert wrong.after["loss"] > 1.2 * right.after["loss"] and wrong.after["accuracy_1"] < right.after["accuracy_1"] - 0.2


def test_the_gradient_is_that_of_the_mixture_on_learned_tokens(target: TinyTarget) -> None:
    torch.manual_seed(0)
    model, text = SHAPE.build(VOCAB), texts(1, 12, seed=4)[0]
    batch = document(text)
    batch.learn[:5] = False
    losses = DraftTrainee(model, target.frozen, teacher_weight=0.7, read_weight=0.25).loss(batch)
    (grad,) = torch.autograd.grad(losses.total, model.model.norm.weight)

    logs = model(input_ids=torch.tensor([text]), bounds=(0, 12)).logits[0, :-1].log_softmax(-1)
    teacher = (target.states(text)[:-1] @ target.frozen.head.T).softmax(-1)
    wanted = 0.7 * teacher + 0.3 * torch.nn.functional.one_hot(torch.tensor(text[1:]), VOCAB)
    weights = torch.tensor([0.25] * 4 + [1.0] * 7)
    (expected,) = torch.autograd.grad(-((wanted * logs).sum(-1) * weights).sum(), model.model.norm.weight)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert losses.weight == 8.0


def test_another_vocabulary_is_refused(target: TinyTarget) -> None:
    with pytest.raises(ValueError, match=f"{VOCAB - 10} tokens for a target of {VOCAB}"):
        DraftTrainee(SHAPE.build(VOCAB - 10), target.frozen)
