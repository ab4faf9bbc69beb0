"""Warm-up, stable, decay: the learning rate as a function of tokens seen and of how many there will be."""

from __future__ import annotations

from dataclasses import dataclass, replace

COOLDOWN_SHARE = 0.2


@dataclass(frozen=True)
class Schedule:
    """Rises over `warmup` tokens, stays, and falls to zero over the last `cooldown` of `total` tokens."""

    total: int
    cooldown: int
    warmup: int

    @staticmethod
    def over(total: int, warmup: int) -> Schedule:
        return Schedule(total, max(1, int(COOLDOWN_SHARE * total)), warmup)

    def factor(self, seen: int) -> float:
        """Learning rate at token `seen`, as a part of its peak, in [0, 1]."""
        return max(0.0, min(1.0, (seen + 1) / max(1, self.warmup), (self.total - seen) / self.cooldown))

    def cooling(self, seen: int) -> bool:
        return self.total - seen <= self.cooldown

    def ending_after(self, tokens: int, seen: int) -> Schedule:
        """Fall from the present learning rate to zero in the next `tokens` tokens."""
        return replace(self, total=seen + tokens, cooldown=max(1, round(tokens / max(self.factor(seen), 1e-3))))
