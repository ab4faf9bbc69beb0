"""Head, softmax and loss in one: cross-entropy with labels or with a teacher's probabilities, a chunk of tokens at a time.

Autograd would keep several [tokens, vocabulary] tensors. The gradient of a cross-entropy is `probs - wanted probs`, so it is
written down in the forward pass and only the gradients of hidden states and head are kept.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 512                          # rows of logits held at a time: 16 MB in float32 at 8k vocabulary, near the size of a cache


@dataclass(frozen=True)
class Teacher:
    """A frozen model's opinion on the same N tokens, and how much it counts beside the label."""

    hidden: Tensor                   # [N, teacher width]
    head: Tensor                     # [vocabulary, teacher width]; rows in the student's order
    weight: float                    # in [0, 1]: 1 learns from the teacher alone
    softcap: float | None = None     # of its logits

    def probs(self, rows: slice) -> Tensor:
        logits = (self.hidden[rows] @ self.head.T).float()
        return (logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()).softmax(-1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, teacher: Teacher | None
    ) -> tuple[Tensor, Tensor]:
        hidden_grad = torch.empty_like(hidden) if hidden.requires_grad else None
        head_grad = torch.zeros(head.shape) if head.requires_grad else None
        dtype = hidden.dtype
        matrix = head.to(dtype)
        losses, right = torch.zeros(len(labels)), torch.zeros(len(labels))
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            label, weight = labels[rows, None], weights[rows, None]
            logits = (hidden[rows] @ matrix.T).float()
            right[rows] = (logits.argmax(-1) == labels[rows]).float()
            probs = logits.softmax(-1)
            losses[rows] = -probs.gather(1, label)[:, 0].clamp_min(1e-20).log()
            probs.scatter_add_(1, label, torch.full(label.shape, (teacher.weight if teacher else 0.0) - 1.0))
            if teacher is not None:
                probs.sub_(teacher.probs(rows), alpha=teacher.weight)
            grad = probs.mul_(weight).to(dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = grad @ matrix
            if head_grad is not None:
                head_grad.add_(grad.T @ hidden[rows])
        ctx.hidden_grad, ctx.head_grad = hidden_grad, head_grad
        right_share = right * weights
        ctx.mark_non_differentiable(right_share)
        return (losses * weights).sum(), right_share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = grads[0]
        hidden_grad, head_grad = ctx.hidden_grad, ctx.head_grad
        if hidden_grad is not None:
            hidden_grad = hidden_grad.mul_(scale)
        if head_grad is not None:
            head_grad = head_grad.mul_(scale)
        return hidden_grad, head_grad, None, None, None


def linear_cross_entropy(
    hidden: Tensor,                  # [N, width] float type in which the products are made
    head: Tensor,                    # [vocabulary, width]
    labels: Tensor,                  # [N] int64
    weights: Tensor,                 # [N] float32: how much each token counts
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross-entropies with the labels in nats, and [N]: the weight where the label was most likely, else 0.

    The gradient is that of the cross-entropy with the labels or, with a teacher, with the mixture of label and teacher's
    probabilities (distillation, https://arxiv.org/abs/2310.08461). It can be taken once.
    """
    return _Fused.apply(hidden, head, labels, weights, teacher)
