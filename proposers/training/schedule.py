"""Warm-up, stable, decay along a cosine: the learning rate as a function of how much of a training is done."""

from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True)
class Schedule:
    """Shares of the training, in [0, 1]. `decay=1 - warmup` is the usual cosine schedule; less keeps the peak for a while."""

    warmup: float = 0.02
    decay: float = 0.98
    floor: float = 0.02              # of the peak, at the end

    def factor(self, done: float) -> float:
        """Learning rate after the share `done` of the training, as a part of its peak."""
        rising = (done + 1e-3) / (self.warmup + 1e-3)
        falling = max(0.0, done - (1.0 - self.decay)) / max(self.decay, 1e-9)
        return min(1.0, rising) * (self.floor + (1.0 - self.floor) * (1.0 + cos(pi * min(1.0, falling))) / 2.0)
