"""Which continuation of a context a suffix tree thinks likeliest, and how many of its tokens it expects to be right.

Scores are Arctic Inference's. Reads a tree and never changes it.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass
from functools import lru_cache

from ..kernels.record import record
from .suffix_tree import SuffixTree

ROUNDING = 1e-9
"""Products of the same ratios in another order differ by less; so do the sums."""


@record
class SuffixGuess:
    """A draft of one row; parents as in `Draft`."""

    token_ids: list[int]
    parents: list[int]
    probs: list[float]  # of each token with all before it, estimated from counts
    score: float  # their sum: the expected number of accepted tokens
    match_length: int  # tokens of the context that were found

    def __bool__(self) -> bool:
        return bool(self.token_ids)


NO_GUESS = SuffixGuess([], [], [], 0.0, 0)


@dataclass(frozen=True)
class Scoring:
    """The rules of a guess. A match of m tokens may be followed by floor(m * max_factor) tokens, none less likely than min_prob."""

    max_factor: float
    min_prob: float
    use_tree: bool  # the likeliest nodes in any branch instead of one path

    def best(self, tree: SuffixTree, context: array[int], max_tokens: int) -> SuffixGuess:
        """The guess of the highest score over all suffixes of the context that the tree knows; among equals the longest match's.

        context: the row's last tokens, tree.max_depth of them suffice; a suffix is shorter than the context. Steps are bounded
        by max_depth and max_tokens, whatever the tree holds.
        """
        best = NO_GUESS
        deepest = None if self.use_tree else tree.max_depth
        for match_length, limit in _promising(_longest_match(tree, context), max_tokens, self.max_factor, deepest):
            if limit < best.score - ROUNDING:
                break
            if limit <= best.score + ROUNDING and match_length < best.match_length:
                continue
            found = tree.find(context, len(context) - match_length)
            assert found is not None
            guess = (self._branches if self.use_tree else self._path)(tree, *found, limit, match_length)
            gain = guess.score - best.score
            if gain > ROUNDING or (gain >= -ROUNDING and match_length > best.match_length):
                best = guess
        return best if best.token_ids else NO_GUESS

    def _path(self, tree: SuffixTree, node: int, place: int, limit: int, match_length: int) -> SuffixGuess:
        """From `place` tokens into the node's label, always on to the child that was counted most."""
        token_ids: list[int] = []
        probs: list[float] = []
        prob, score = 1.0, 0.0
        while True:
            first = tree.start[node] + place
            run = tree.labels[node][first : min(tree.end[node], first + limit - len(token_ids))]
            token_ids.extend(run)
            probs.extend([prob] * len(run))
            score += prob * len(run)
            ranked = tree.ranked[node]
            if len(token_ids) == limit or not ranked:
                break
            prob *= tree.count[ranked[0]] / tree.count[node]
            if prob < self.min_prob - ROUNDING:
                break
            node, place = ranked[0], 0
        return SuffixGuess(token_ids, list(range(-1, len(token_ids) - 1)), probs, score, match_length)

    def _branches(self, tree: SuffixTree, node: int, place: int, limit: int, match_length: int) -> SuffixGuess:
        """The `limit` likeliest tokens below, most likely first."""
        token_ids: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        order = 0  # equally likely ones: first come, first served
        queue = [(-1.0, order, node, tree.start[node] + place, -1)]
        while queue and len(token_ids) < limit:
            negative, _, node, position, parent = heapq.heappop(queue)
            if position < tree.end[node]:
                token_ids.append(tree.labels[node][position])
                parents.append(parent)
                probs.append(-negative)
                order += 1
                heapq.heappush(queue, (negative, order, node, position + 1, len(token_ids) - 1))
                continue
            for child in (tree.ranked[node] or ())[: limit - len(token_ids)]:
                prob = -negative * tree.count[child] / tree.count[node]
                if prob < self.min_prob - ROUNDING:
                    break
                order += 1
                heapq.heappush(queue, (-prob, order, child, tree.start[child], parent))
        return SuffixGuess(token_ids, parents, probs, sum(probs), match_length)


@lru_cache(maxsize=4096)
def _promising(longest: int, max_tokens: int, max_factor: float, deepest: int | None) -> tuple[tuple[int, int], ...]:
    """(match length, most tokens that may follow it), the longest guesses first: a token scores 1 at most, so few need a look.

    deepest: match and path together are no longer; None = branches, of which there are more than any path has tokens.
    """
    limits = [(m, min(max_tokens, int(m * max_factor + 1e-6))) for m in range(1, longest + 1)]
    if deepest is not None:
        limits = [(m, min(limit, deepest - m)) for m, limit in limits]
    return tuple(sorted((pair for pair in limits if pair[1] > 0), key=lambda pair: (-pair[1], -pair[0])))


def _longest_match(tree: SuffixTree, context: array[int]) -> int:
    """Tokens of the longest suffix, shorter than the context, that the tree knows with something behind it; 0 = none.

    What goes on after a suffix goes on after all shorter ones: so halving finds it.
    """
    low, high = 0, min(len(context), tree.max_depth) - 1
    while low < high:
        middle = (low + high + 1) // 2
        found = tree.find(context, len(context) - middle)
        if found is not None and (tree.start[found[0]] + found[1] < tree.end[found[0]] or tree.ranked[found[0]]):
            low = middle
        else:
            high = middle - 1
    return max(low, 0)
