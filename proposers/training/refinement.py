"""A target in refinement: it learns its good answers, and unlearns what it should not have said.

Unlikelihood (https://arxiv.org/abs/1908.04319): a token to be unlearned costs -log(1 - p). Trained on good answers alone, a small model
goes on saying things over and over, since what is likely after two rounds is a third.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .cross_entropy import linear_cross_entropy
from .frozen import product_type
from .loop import Losses, Trainee
from .packing import Packed
from .target import last_states

UNLEARNING = 0.5                     # weight of a token to be unlearned; one to be learned has 1
SUREST = 0.999                       # probability beyond which there is no gradient: it would be without bound


class RefinementTrainee(Trainee):
    """Cross-entropy of the tokens to be learned, unlikelihood of those to be unlearned; what is only read costs nothing."""

    def __init__(self, model: LlamaForCausalLM):
        super().__init__()
        self.model = model

    def loss(self, batch: Packed) -> Losses:
        hidden = last_states(self.model, batch)
        labels, weights = batch.ahead(1)
        total, _ = linear_cross_entropy(hidden.to(product_type(hidden)), self.model.lm_head.weight, labels, weights)
        weight = float(weights.sum())
        metrics = {"loss": (float(total.detach()), weight)}
        if batch.unlearn is not None:
            before = torch.nonzero(batch.unlearn.roll(-1) & (batch.inside(1) > 0))[:, 0]
            unlikelihood = self._unlikelihood(hidden[before], labels[before])
            metrics["loss_unlearned"] = (float(unlikelihood.detach()), float(len(before)))
            total = total + UNLEARNING * unlikelihood
        return Losses(total, weight, metrics)

    def _unlikelihood(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sum of -log(1 - p). hidden: [M, hidden]; labels: [M]."""
        logits = self.model.lm_head(hidden).float()
        chance = logits.log_softmax(-1).gather(1, labels[:, None]).float().exp()
        return -torch.log1p(-chance.clamp_max(SUREST)).sum()
