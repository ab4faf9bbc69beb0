"""What every head in training is: made for a target, trained by the loop, written in its method's published layout."""

from abc import abstractmethod
from pathlib import Path

from ..frozen import FrozenTarget
from ..loop import Trainee


class Head(Trainee):
    """A Trainee for one frozen target. Subclasses take `(target, settings)`, `settings` a frozen dataclass of their own.

    Metrics of `loss`: "loss", and "accuracy_1", "accuracy_2", ...: the share of learned tokens for which the guess at that depth,
    alone, is the text's token. From these the curves and the expected accepted length are drawn.
    """

    def __init__(self, target: FrozenTarget):
        super().__init__()
        self.target = target         # no module, so not among the parameters

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors (bfloat16) in the published layout; the loaders in proposers/ read them."""
