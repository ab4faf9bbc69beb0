"""Loss and gradients of target and draft in one pass over the vocabulary, a chunk of tokens at a time.

The target learns the text. The draft learns a mixture of the text and of what the target says about it (distillation,
https://arxiv.org/abs/2310.08461), which is what acceptance depends on. Both are cross-entropies of a softmax, whose
gradient is `probs - wanted probs`; writing it down saves autograd's copies of the [tokens, vocabulary] logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 512                          # rows of logits held at a time: 16 MB in float32, near the size of a cache


@dataclass(frozen=True)
class JointLoss:
    """Cross-entropy with the text in nats, and the gradients of what is minimised. All are sums divided by `count`."""

    target: float
    draft: float
    target_hidden_grad: Tensor       # [N, target width] float32
    draft_hidden_grad: Tensor        # [N, draft width] float32
    target_head_grad: Tensor         # [vocabulary, target width] float32
    draft_head_grad: Tensor          # [vocabulary, draft width] float32


@torch.no_grad()
def joint_loss(
    target_hidden: Tensor,           # [N, target width] any float type, in which the matrix products are made
    draft_hidden: Tensor,            # [N, draft width]
    target_head: Tensor,             # [vocabulary, target width]
    draft_head: Tensor,              # [vocabulary, draft width]
    labels: Tensor,                  # [N] int64
    distillation: float,             # weight of the target's opinion in what the draft should say, in [0, 1]
    count: int,                      # tokens of the whole batch, of which these N may be a part
) -> JointLoss:
    """Losses and gradients of N tokens; over the parts of a batch they add up to its means.

    The target's gradient does not depend on the draft.
    """
    losses = torch.zeros(2, dtype=torch.float64)
    hidden_grads = torch.empty_like(target_hidden, dtype=torch.float), torch.empty_like(draft_hidden, dtype=torch.float)
    head_grads = torch.zeros_like(target_head, dtype=torch.float), torch.zeros_like(draft_head, dtype=torch.float)
    for start in range(0, len(labels), CHUNK):
        rows = slice(start, start + CHUNK)
        label = labels[rows, None]
        target_probs = (target_hidden[rows] @ target_head.T).float().softmax(-1)
        draft_probs = (draft_hidden[rows] @ draft_head.T).float().softmax(-1)
        for index, probs in enumerate((target_probs, draft_probs)):
            losses[index] -= probs.gather(1, label).clamp_min(1e-20).log().sum()

        # draft: probs - (distillation * target_probs + (1 - distillation) * one_hot); target: probs - one_hot
        draft_probs.sub_(target_probs, alpha=distillation)
        draft_probs.scatter_add_(1, label, torch.full(label.shape, distillation - 1.0))
        target_probs.scatter_add_(1, label, torch.full(label.shape, -1.0))
        for index, (grad, hidden, head) in enumerate(
            ((target_probs, target_hidden, target_head), (draft_probs, draft_hidden, draft_head))
        ):
            grad = grad.div_(count).to(hidden.dtype)
            hidden_grads[index][rows] = grad @ head
            head_grads[index].add_(grad.T @ hidden[rows])
    target, draft = (losses / count).tolist()
    return JointLoss(target, draft, *hidden_grads, *head_grads)
