"""Guesses as a tree, grown level by level by a drafter that feeds its own states back (EAGLE: Li et al. 2024; EAGLE-2: Li et al. 2024).

Knows no checkpoint. Nodes are the likeliest tokens, never drawn: which of them the target chooses is the verifier's business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels.batch_lists import BatchLists
from ..kernels.layout import MAX_TREE_TOKENS, RaggedBatch
from ..kernels.started import to_lists
from .config import DynamicTree, StaticTree, Tree
from .drafting import Feed, batch_lists
from .guessing import FEATURE, Drawing, Guesses, Network, feature_input


@dataclass(slots=True)
class _Node:
    token: int
    parent: int  # index among the tree's nodes, -1 = the last known token
    depth: int  # 0 = a child of the last known token
    log_prob: float  # of the token, given its parent
    score: float  # sum of log_prob along the path
    rank: int  # among its siblings, best first
    place: int = -1  # among the nodes that were run through the network, -1 = not yet


@dataclass(slots=True)
class _Growing:
    """One row's tree in the making."""

    feed: Feed
    nodes: list[_Node] = field(default_factory=list)
    run: list[int] = field(default_factory=list)  # nodes that were run, in the order of their places
    inputs: list[Tensor] = field(default_factory=list)  # [n] what each of them is paired with: its parent's state
    states: dict[int, Tensor] = field(default_factory=dict)  # node -> [n] its own state, a row of its pass's; -1 = the last known token's

    def path(self, node: int) -> tuple[int, ...]:
        """Ranks from the root to the node; () for -1."""
        ranks: list[int] = []
        while node >= 0:
            ranks.append(self.nodes[node].rank)
            node = self.nodes[node].parent
        return tuple(reversed(ranks))

    def mask(self, place: int) -> int:
        """Bits of the places that the node at this place sees: its ancestors' and its own."""
        bits, node = 0, self.run[place]
        while node >= 0:
            bits |= 1 << self.nodes[node].place
            node = self.nodes[node].parent
        return bits - (1 << 64) if bits >> 63 else bits  # as int64


class TreeGuesser:
    """Static trees expand the ranks they name; dynamic ones the likeliest nodes of each level, and keep the likeliest of all.

    Each level is one pass over all rows. Nodes of earlier levels run again in it: they are few, and a pass then needs no places
    but its own. All entries of nodes are worthless afterwards.
    """

    def __init__(self, network: Network, drawing: Drawing, tree: Tree) -> None:
        """network.executor must be recurrent: its boundary state is what a child is paired with."""
        assert network.executor.recurrent is not None
        self._network = network
        self._drawing = drawing
        self._tree = tree
        self._state = network.executor.recurrent[1]
        self._ranks_below: dict[tuple[int, ...], list[int]] = {}  # path -> ranks of its children, static trees only
        if isinstance(tree, StaticTree):
            for path in tree.paths:
                self._ranks_below.setdefault(path[:-1], []).append(path[-1])
        num_run = len(self._ranks_below) - 1 if isinstance(tree, StaticTree) else tree.top_k * (tree.depth - 1)
        self.scratch_slots = min(num_run, MAX_TREE_TOKENS)

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        network = self._network
        batch = batch_lists(feeds, block_size).batch()
        every = torch.arange(len(batch.logits_indices))
        output = network.executor.run(
            replace(batch, full_logits=every), network.kv, (self._state,), inputs=feature_input(network, states)
        )
        growing: list[_Growing] = []
        for feed, last in zip([feed for feed in feeds if feed.count], batch.logits_indices.tolist(), strict=True):
            growing.append(_Growing(feed, states={-1: output.hidden[self._state][last]}))
        if growing:
            assert output.logits is not None
            self._add_children([(tree, -1) for tree in growing], output.logits)
            while level := self._next_level(growing):
                self._run_level(level, block_size)
        kept = iter([self._kept(tree) for tree in growing])
        found = [next(kept) if feed.count else ([], [], []) for feed in feeds]
        return Guesses([f[0] for f in found], [f[1] for f in found], [f[2] for f in found])

    def _next_level(self, growing: Sequence[_Growing]) -> list[tuple[_Growing, list[int]]]:
        """The nodes of each tree that are expanded next; trees that are done are left out."""
        level: list[tuple[_Growing, list[int]]] = []
        for tree in growing:
            depth = tree.nodes[tree.run[-1]].depth + 1 if tree.run else 0
            if depth >= self._deepest(tree.feed.count):
                continue
            candidates = [i for i, node in enumerate(tree.nodes) if node.depth == depth]
            if isinstance(self._tree, DynamicTree):
                chosen = sorted(sorted(candidates, key=lambda i: -tree.nodes[i].score)[: self._tree.top_k])
            else:
                chosen = [i for i in candidates if tree.path(i) in self._ranks_below]
            chosen = chosen[: MAX_TREE_TOKENS - len(tree.run)]
            if chosen:
                level.append((tree, chosen))
        return level

    def _deepest(self, count: int) -> int:
        """Depth of the deepest node that can be among `count` kept ones, all its ancestors with it."""
        if isinstance(self._tree, DynamicTree):
            return min(self._tree.depth, count) - 1
        return len(self._tree.paths[:count][-1]) - 1

    def _run_level(self, level: Sequence[tuple[_Growing, list[int]]], block_size: int) -> None:
        for tree, chosen in level:
            for node in chosen:
                tree.nodes[node].place = len(tree.run)
                tree.run.append(node)
                tree.inputs.append(tree.states[tree.nodes[node].parent])
        batch = _tree_batch([tree for tree, _ in level], [len(chosen) for _, chosen in level], block_size)
        inputs = {FEATURE: torch.stack([state for tree, _ in level for state in tree.inputs]).float()}
        output = self._network.executor.run(batch, self._network.kv, (self._state,), inputs=inputs)
        assert output.logits is not None
        states = output.hidden[self._state]
        wanted = [(tree, node) for tree, chosen in level for node in chosen]
        for (tree, node), row in zip(wanted, batch.logits_indices.tolist(), strict=True):
            tree.states[node] = states[row]
        self._add_children(wanted, output.logits)

    def _add_children(self, parents: Sequence[tuple[_Growing, int]], logits: Tensor) -> None:
        """logits [n, V]: of the parents, node -1 being a row's last known token."""
        columns = self._network.executor.token_ids
        scores = logits.float()
        if columns is None and scores.shape[1] > self._drawing.vocab_size:
            scores = scores[:, : self._drawing.vocab_size]
        log_probs = torch.log_softmax(scores, -1)
        width = self._tree.top_k if isinstance(self._tree, DynamicTree) else 1 + max(path[-1] for path in self._tree.paths)
        best, ids = log_probs.topk(min(width, log_probs.shape[1]), -1)
        tokens, likely = to_lists(ids, best)
        if columns is not None:
            tokens = columns[torch.tensor(tokens)].tolist()
        for (tree, parent), row_tokens, row_best in zip(parents, tokens, likely, strict=True):
            above = None if parent < 0 else tree.nodes[parent]
            depth, score = (0, 0.0) if above is None else (above.depth + 1, above.score)
            ranks = range(len(row_tokens)) if isinstance(self._tree, DynamicTree) else self._ranks_below[tree.path(parent)]
            for rank in ranks:
                if rank < len(row_tokens):
                    log_prob = row_best[rank]
                    tree.nodes.append(_Node(row_tokens[rank], parent, depth, log_prob, score + log_prob, rank))

    def _kept(self, tree: _Growing) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and confidence of the nodes that are proposed: at most the row's count, parents first."""
        nodes = tree.nodes
        limit = tree.feed.count if isinstance(self._tree, StaticTree) else min(self._tree.num_nodes, tree.feed.count)
        # A child's score never exceeds its parent's, so the best nodes hang together; among equals the earlier one is the parent.
        order = sorted(range(len(nodes)), key=lambda i: -nodes[i].score) if isinstance(self._tree, DynamicTree) else range(len(nodes))
        kept = sorted(list(order)[:limit])
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        confidence = [math.exp(min(nodes[i].log_prob, 0.0)) for i in kept]
        return [nodes[i].token for i in kept], [new[nodes[i].parent] for i in kept], confidence


def _tree_batch(trees: Sequence[_Growing], num_new: Sequence[int], block_size: int) -> RaggedBatch:
    """All nodes run so far of each tree, scores wanted for its last num_new ones."""
    counts = [len(tree.run) for tree in trees]
    known = [len(tree.feed.row.token_ids) for tree in trees]
    ends = [0, *accumulate(counts)]
    tables = [t.feed.row.block_table[: -(-(k + c) // block_size)] for t, k, c in zip(trees, known, counts, strict=True)]
    wanted = [place for end, new in zip(ends[1:], num_new, strict=True) for place in range(end - new, end)]
    lists = BatchLists(
        block_size,
        token_ids=[tree.nodes[node].token for tree in trees for node in tree.run],
        positions=[first + tree.nodes[node].depth for tree, first in zip(trees, known, strict=True) for node in tree.run],
        tree_mask=[tree.mask(place) for tree in trees for place in range(len(tree.run))],
        logits_indices=wanted,
        full_logits=[*range(len(wanted))],
        query_start_loc=ends,
        seq_lens=[k + c for k, c in zip(known, counts, strict=True)],
        num_causal=[0] * len(trees),
        first_places=[tree.feed.first for tree in trees],
        tables=tables,
    )
    for table, first, count in zip(tables, known, counts, strict=True):
        lists.add_slots(table, first, first + count)
    return lists.batch()
