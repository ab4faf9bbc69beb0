"""A draft model in training: a small Llama that learns what the target said, and what else it might have said (distillation)."""

from transformers import LlamaForCausalLM

from .cross_entropy import linear_cross_entropy
from .frozen import FrozenTarget, product_type
from .loop import Losses, Trainee
from .packing import Packed
from .target import last_states


class DraftTrainee(Trainee):
    """Cross-entropy with a mixture of the next token and the target's probabilities (https://arxiv.org/abs/2310.08461).

    The text is to be the target's own output: a draft is asked for nothing else.
    """

    def __init__(self, model: LlamaForCausalLM, target: FrozenTarget, teacher_weight: float = 0.7, read_weight: float = 0.0):
        """model: with packed attention, as Shape.build makes it, and the target's vocabulary; its caller saves it.

        teacher_weight: in [0, 1], the share of the target's probabilities; read_weight: what a prompt's token counts.
        Raises ValueError if the vocabularies differ.
        """
        super().__init__()
        if model.config.vocab_size != target.config.vocab_size:
            raise ValueError(f"a draft of {model.config.vocab_size} tokens for a target of {target.config.vocab_size}")
        self.model, self.target = model, target
        self.teacher_weight, self.read_weight = teacher_weight, read_weight

    def loss(self, batch: Packed) -> Losses:
        labels, answers = batch.ahead(1)
        weights = answers + self.read_weight * (batch.inside(1) - answers)
        rows = weights.nonzero()[:, 0]
        hidden = last_states(self.model, batch)[rows]
        dtype = product_type(hidden)
        teacher = None
        if self.teacher_weight:
            teacher = self.target.teacher(self.target(batch).last[rows].to(dtype), self.target.head.to(dtype), self.teacher_weight)
        total, right = linear_cross_entropy(hidden.to(dtype), self.model.lm_head.weight, labels[rows], weights[rows], teacher)
        weight = float(weights.sum())
        return Losses(total, weight, {"loss": (float(total.detach()), weight), "accuracy_1": (float(right.sum()), weight)})
