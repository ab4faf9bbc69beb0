"""Which experts a row has, in torch: the reference of native/expert_routes.cpp and triton/expert_routes.py."""

import math

from torch import Tensor

from .ops import Experts


def routes(op: Experts, logits: Tensor, correction: Tensor | None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> each row's experts and their weights, [T, top]."""
    scores = logits.sigmoid() if op.score == "sigmoid" else logits.softmax(-1)
    keys = scores if correction is None else scores + correction
    if op.has_groups:
        groups = keys.unflatten(-1, (op.num_groups, -1))
        ranks = groups.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        left_out = ranks.new_ones(ranks.shape).scatter(-1, ranks[:, : op.top_groups], 0)
        keys = groups.masked_fill(left_out.bool()[..., None], -math.inf).flatten(1)
    chosen = keys.sort(dim=-1, descending=True, stable=True).indices[:, : op.top]
    weights = scores.gather(-1, chosen)
    if op.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * op.scale
    return chosen, weights if scales is None else weights * scales[chosen]
