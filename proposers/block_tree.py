"""A block's likeliest continuations as a tree instead of its likeliest one (DDTree: Ringel and Romano 2026, arXiv 2604.12989).

Places of a DFlash know nothing of each other's guesses, so what a path is worth is the product of what its tokens are worth each.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from ..kernels.started import to_lists
from .config import BlockTree
from .drafting import Feed
from .guessing import Drawing, Guesses


def grow(feeds: Sequence[Feed], logits: Tensor, drawing: Drawing, columns: Tensor | None, tree: BlockTree) -> Guesses:
    """feeds: those with count 0 have no tree. logits [sum of places_of(feed, tree), V]; columns: `Executor.token_ids`.

    Nodes are the likeliest tokens, never drawn: which of them the target chooses is the verifier's business.
    """
    guesses = Guesses([], [], [])
    assert guesses.parents is not None and guesses.confidence is not None
    scores = logits.float()
    if columns is None:
        scores = scores[:, : drawing.vocab_size]
    best, ids = torch.log_softmax(scores, -1).topk(min(tree.top_k, scores.shape[1]), -1)
    tokens, log_probs = to_lists(ids, best)
    if columns is not None:
        tokens = columns[torch.tensor(tokens)].tolist()
    start = 0
    for feed in feeds:
        end = start + places_of(feed, tree)
        nodes = likeliest(log_probs[start:end], feed.count)
        guesses.token_ids.append([tokens[start + depth][rank] for _, depth, rank in nodes])
        guesses.parents.append([parent for parent, _, _ in nodes])
        guesses.confidence.append([math.exp(min(log_probs[start + depth][rank], 0.0)) for _, depth, rank in nodes])
        start = end
    return guesses


def places_of(feed: Feed, tree: BlockTree) -> int:
    """How many places a block needs for a tree of the feed's count: no path is longer."""
    return min(feed.count, tree.depth)


def likeliest(log_probs: Sequence[Sequence[float]], count: int) -> list[tuple[int, int, int]]:
    """(parent, depth, rank) of the count likeliest nodes, parents first. log_probs: of each place's tokens, best first.

    Parent -1 is the last known token. Every node but the best child of its parent stands behind its better sibling, so that the next
    best node is always among what is below or beside those that were taken.
    """
    nodes: list[tuple[int, int, int]] = []
    if not log_probs:
        return nodes
    open_nodes = [(-log_probs[0][0], -1, 0, 0)]
    while open_nodes and len(nodes) < count:
        cost, parent, depth, rank = heappop(open_nodes)
        if rank + 1 < len(log_probs[depth]):
            beside = cost + log_probs[depth][rank] - log_probs[depth][rank + 1]
            heappush(open_nodes, (beside, parent, depth, rank + 1))
        if depth + 1 < len(log_probs):
            heappush(open_nodes, (cost - log_probs[depth + 1][0], len(nodes), depth + 1, 0))
        nodes.append((parent, depth, rank))
    return nodes
