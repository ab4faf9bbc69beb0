"""The fused loss against autograd's."""

import pytest
import torch
from torch.nn import functional as F

from foretoken.proposers.training.cross_entropy import CHUNK, Teacher, linear_cross_entropy


@pytest.mark.parametrize("weight", [None, 0.7, 1.0])
def test_loss_and_gradients_are_those_of_autograd(weight: float | None) -> None:
    torch.manual_seed(0)
    count = CHUNK + 60                                   # two chunks
    hidden, head = torch.randn(count, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels, weights = torch.randint(0, 11, (count,)), torch.rand(count) * (torch.rand(count) > 0.3)
    teacher = None if weight is None else Teacher(torch.randn(count, 6), torch.randn(11, 6), weight)

    total, right = linear_cross_entropy(hidden, head, labels, weights, teacher)
    grads = torch.autograd.grad(3 * total, (hidden, head))

    logits = hidden @ head.T
    plain = F.cross_entropy(logits, labels, reduction="none")
    wanted = plain
    if teacher is not None:
        opinion = (teacher.hidden @ teacher.head.T).softmax(-1)
        wanted = teacher.weight * F.cross_entropy(logits, opinion, reduction="none") + (1 - teacher.weight) * plain
    torch.testing.assert_close(total, (plain * weights).sum())
    torch.testing.assert_close(right, (logits.argmax(-1) == labels) * weights)
    for grad, expected in zip(grads, torch.autograd.grad(3 * (wanted * weights).sum(), (hidden, head)), strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8)
    total, _ = linear_cross_entropy(hidden, head, torch.tensor([1, 2, 3, 4]), torch.ones(4))
    assert torch.autograd.grad(total, hidden)[0].abs().sum() > 0
