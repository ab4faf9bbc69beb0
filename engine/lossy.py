"""Acceptance rules that change what is said: typical acceptance, and acceptance by decree for benchmarks. Numbers only.

Whoever switches one of these on is told so in every response.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..proposers.config import Typical


def typical_path(p: Tensor, draft_token_ids: Sequence[int], parents: Sequence[int], rule: Typical) -> list[int]:
    """The accepted path under typical acceptance (Cai et al. 2024, Medusa): indices into the draft, root to leaf.

    p [1 + T, V]: the target's distribution at each node of a row. A guess passes if p(x) > min(threshold, alpha exp(-H(p))):
    it need not be what the target would have drawn, only plausible. The longest path stands; among equals the likelier.
    """
    entropy = torch.special.entr(p).sum(-1)
    bars = torch.minimum(torch.full_like(entropy, rule.threshold), rule.alpha * torch.exp(-entropy)).tolist()
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # node -> length and log-likelihood of the path to it, if all of it passes
    best = -1
    for i, (token, parent) in enumerate(zip(draft_token_ids, parents, strict=True)):
        likely = float(p[parent + 1, token])
        if parent in reached and likely > bars[parent + 1]:
            length, log_likelihood = reached[parent]
            reached[i] = (length + 1, log_likelihood + math.log(likely))
            if reached[i] > reached[best]:
                best = i
    path: list[int] = []
    while best >= 0:
        path.append(best)
        best = parents[best]
    return path[::-1]


def decreed_path(parents: Sequence[int], rates: Sequence[float], coins: Sequence[float]) -> list[int]:
    """The accepted path when guess i is taken with chance rates[i] after those before it; the last rate holds for all behind.

    coins: one in [0, 1) for each level. In a tree the first child of each node is followed.
    """
    path: list[int] = []
    at = -1
    for i, parent in enumerate(parents):
        if parent == at:
            depth = len(path)
            if coins[depth] >= rates[min(depth, len(rates) - 1)]:
                break
            path.append(i)
            at = i
    return path
