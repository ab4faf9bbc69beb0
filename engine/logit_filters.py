"""Temperature, top_k, top_p and min_p, in this order, over rows of logits: which tokens are left, and with what scores.

The readable form of the rules, and the one that runs where the native sampler does not. Tokens are ranked by their score,
and among equals by their id, the lowest first. Scores are float32; masses are float32 exponentials added up in float64.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_FIRST_CANDIDATES = 256
"""How many of the best tokens top_p looks at first: the whole vocabulary is sorted only for very flat rows."""


class Filters(NamedTuple):
    """One row's. top_k: vocab_size = all."""

    temperature: float  # above 0
    top_k: int
    top_p: float
    log_min_p: float  # -inf = off


def narrowed(logits: Tensor, peaks: Tensor, filters: Sequence[Filters]) -> Tensor:
    """Scores [n, V] from logits [n, V] with row maxima peaks [n]: -inf = left out, the best is 0."""
    device, vocab_size = logits.device, logits.shape[1]
    # subtracting the peak first keeps tiny temperatures finite
    scores = logits - peaks[:, None]
    if any(f.temperature != 1.0 for f in filters):
        scores /= torch.tensor([f.temperature for f in filters], dtype=torch.float32, device=device)[:, None]
    rows = [i for i, f in enumerate(filters) if f.top_k < vocab_size or f.top_p < 1.0]
    if len(rows) == len(filters):
        scores = _keep_best(scores, filters)
    elif rows:
        scores[rows] = _keep_best(scores[rows], [filters[i] for i in rows])
    if any(f.log_min_p > -math.inf for f in filters):
        floor = torch.tensor([f.log_min_p for f in filters], dtype=torch.float32, device=device)
        scores.masked_fill_(scores < floor[:, None], -math.inf)
    return scores


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of scores [n, V], all of them if it has fewer: values [n, count] and ids [n, count], best first."""
    values, ids = scores.topk(min(count + 1, scores.shape[1]), -1)
    tied = values[:, :-1] == values[:, 1:]
    if not tied.any():
        return values[:, :count], ids[:, :count]
    for row in tied[:, count - 1 :].nonzero()[:, 0].tolist():  # topk takes any of the equals, ...
        ids[row, :count] = _lowest_ids(scores[row], values[row, count - 1], count).nonzero()[:, 0]
    ids = ids[:, :count].sort(-1).values  # ... in any order
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep_best(scores: Tensor, filters: Sequence[Filters]) -> Tensor:
    """top_k, then top_p on what it left: the fewest best tokens whose mass reaches top_p. Among equals the lowest ids stay.

    Rows of scores [n, V] have their maximum at 0. Left out = -inf.
    """
    device, vocab_size = scores.device, scores.shape[1]
    top_k = torch.tensor([f.top_k for f in filters], device=device)
    top_p = torch.tensor([f.top_p if f.top_p < 1.0 else math.inf for f in filters], dtype=torch.float64, device=device)
    limited = top_k < vocab_size
    width = max((f.top_k for f in filters if f.top_k < vocab_size), default=0)
    mass = torch.ones((), dtype=torch.float64, device=device)
    if any(f.top_k == vocab_size for f in filters):
        width = max(width, min(_FIRST_CANDIDATES, vocab_size))
        mass = scores.exp().sum(-1, dtype=torch.float64)  # of all tokens, in units of the best one's
    while True:
        # one more than needed, to see whether it equals the last one kept
        best, ids = scores.topk(min(width + 1, vocab_size), -1)
        upto = best[:, :width].exp().double().cumsum(-1)
        # after top_k the whole is what top_k left
        whole = torch.where(limited, upto.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0], mass)
        before = torch.nn.functional.pad(upto[:, :-1], (1, 0))
        inside = (before < (top_p * whole)[:, None]) & (torch.arange(width, device=device) < top_k[:, None])
        if width == vocab_size or not bool((inside[:, -1] & ~limited).any()):
            break
        width = min(8 * width, vocab_size)
    count = inside.sum(-1)
    inside = torch.nn.functional.pad(inside, (0, best.shape[1] - width))
    kept = torch.full_like(scores, -math.inf).scatter_(1, ids, best.masked_fill(~inside, -math.inf))
    for row in (i for i, equal in enumerate(_last_is_tied(best, count)) if equal):
        kept[row] = scores[row].where(_lowest_ids(scores[row], best[row, count[row] - 1], int(count[row])), -math.inf)
    return kept


def _last_is_tied(best: Tensor, count: Tensor) -> list[bool]:
    """Per row: whether number `count` of the descending values best [n, w] equals the next one, both finite."""
    last = best.gather(1, (count - 1).clamp(min=0)[:, None])
    following = best.gather(1, count.clamp(max=best.shape[1] - 1)[:, None])
    return ((last == following) & last.isfinite() & (count < best.shape[1])[:, None])[:, 0].tolist()


def _lowest_ids(scores: Tensor, floor: Tensor, count: int) -> Tensor:
    """Which `count` of scores [V] are the best: all above the floor, then the lowest ids of those equal to it."""
    equal = scores == floor
    above = scores > floor
    return above | (equal & (equal.cumsum(-1) <= count - above.sum()))
