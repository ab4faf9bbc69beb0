"""Cross-entropy of guesses at several depths: the loss of heads that learn the text's own tokens. Knows no networks.

Depth d (from 1) at token i is the guess of token i + 1 + d: the target itself says token i + 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cross_entropy import linear_cross_entropy
from ..frozen import product_type
from ..loop import Losses
from ..packing import Packed


@dataclass(frozen=True)
class Depth:
    """What the guesses of one depth are read from."""

    states: Tensor                   # [R, width]
    head: Tensor                     # [vocabulary, width]
    share: float = 1.0               # of this depth in the loss
    starts: Tensor | None = None     # [R] int64: the tokens that the guesses begin at; None: all tokens of the batch


def depth_losses(batch: Packed, depths: Iterable[Depth]) -> Losses:
    """Every depth's cross-entropy with the learned tokens, times its share. The weight is the number of tokens of the first depth."""
    totals: list[Tensor] = []
    metrics: dict[str, tuple[float, float]] = {}
    for number, depth in enumerate(depths, 1):
        labels, weights = batch.ahead(1 + number)
        if depth.starts is not None:
            labels, weights = labels[depth.starts], weights[depth.starts]
        rows = weights.nonzero()[:, 0]           # half of the tokens are prompts, and products with the head most of the work
        states = depth.states[rows]
        total, right = linear_cross_entropy(states.to(product_type(states)), depth.head, labels[rows], weights[rows])
        totals.append(depth.share * total)
        metrics[f"accuracy_{number}"] = float(right.sum()), float(len(rows))
    loss, weight = torch.stack(totals).sum(), metrics["accuracy_1"][1]
    return Losses(loss, weight, {"loss": (float(loss.detach()), weight), **metrics})
