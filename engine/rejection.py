"""The p/q rules for one drafted chain: how much of it stands, and what the token behind it is drawn from. Numbers only.

p [K + 1, V]: the target's distribution behind the root and behind each guess; q [K, V]: what each guess was drawn from;
guesses [K]; coins [K] independent and uniform in [0, 1). Comparisons are strict, so that no coin passes a guess with p = 0.
Both rules emit exactly p, whatever q is, if each guess was drawn from its row of q.
"""

import torch
from torch import Tensor


def token_level(p: Tensor, q: Tensor, guesses: Tensor, coins: Tensor) -> tuple[int, Tensor]:
    """(guesses that stand, weights [V] of the next token). Leviathan et al. 2023, Chen et al. 2023.

    Guess i stands if u q(x) < p(x) and all before it do; then one token ~ max(p - q, 0), or ~ p behind the last.
    """
    of_guess = guesses[:, None]
    passed = coins * q.gather(1, of_guess)[:, 0] < p[:-1].gather(1, of_guess)[:, 0]
    length = int(passed.long().cumprod(0).sum())
    return length, p[-1] if length == len(guesses) else residual(p[length], q[length])


def block(p: Tensor, q: Tensor, guesses: Tensor, coins: Tensor) -> tuple[int, Tensor]:
    """The same for block verification (Sun et al. 2024, arXiv 2403.10444), which keeps at least as many guesses on average.

    Every prefix is tested on its own, and the longest that passes stands, even behind shorter ones that did not.
    """
    kept, chances = acceptance(p, q, guesses)
    passed = (coins < chances).nonzero()[:, 0]
    length = int(passed[-1]) + 1 if len(passed) else 0
    return length, p[-1] if length == len(guesses) else residual(p[length], q[length], float(kept[length]))


def acceptance(p: Tensor, q: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """([K + 1] the paper's p_i of each prefix, empty one first; [K] its h_i, the chance that prefix i + 1 passes)."""
    of_guess = guesses[:, None]
    ratios = p[:-1].gather(1, of_guess)[:, 0] / q.gather(1, of_guess)[:, 0].clamp(min=torch.finfo(q.dtype).tiny)
    kept = [1.0]
    for ratio in ratios.tolist():
        kept.append(min(kept[-1] * ratio, 1.0))  # in this order NaN stays NaN, which passes nothing
    prefix = torch.tensor(kept, dtype=p.dtype, device=p.device)
    left = (prefix[1:-1, None] * p[1:-1] - q[1:]).clamp(min=0.0).sum(-1)  # [K - 1] what a rejection behind prefix i + 1 leaves
    inner = prefix[1:-1]
    below = torch.where(inner >= 1.0, torch.ones_like(inner), left / (left + 1.0 - inner).clamp(min=torch.finfo(p.dtype).tiny))
    return prefix, torch.cat([below, prefix[-1:]])


def residual(p: Tensor, q: Tensor, kept: float = 1.0) -> Tensor:
    """max(kept p - q, 0) [V], not normalised; p where rounding leaves nothing of it."""
    left = (kept * p - q).clamp(min=0.0)
    return left if float(left.sum()) > 0.0 else p
