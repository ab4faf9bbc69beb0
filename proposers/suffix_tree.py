"""A suffix tree that grows token by token and forgets whole texts: which phrases have occurred, how often, and what came next.

Owns the tree's shape and counts. Knows no request and no score: those are suffix_scoring.py's and suffix.py's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

ROOT = 0
TOKEN_TYPE = "i"  # of arrays of token ids: 4 bytes each


class Text:
    """One text of a tree: what was appended, and where in the tree its last tokens lie. Only the tree writes it."""

    __slots__ = ("ends", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array(TOKEN_TYPE)
        self.ends: list[int] = []  # the nodes at which the suffixes of len(ends), ..., 2, 1 tokens end


class SuffixTree:
    """A path-compressed trie of all substrings of its texts up to `max_depth` tokens, as in suffix decoding (Oliaro et al. 2025).

    A node's count is how many suffixes pass through it or end there. Inside a label (the tokens between a node and its parent)
    counts do not change, so a suffix always ends at a node, and a child's count is below its parent's. One more token costs
    at most max_depth small steps, however much the tree holds; there are at most two nodes a token. Children are kept in
    descending order of count, the one that was counted last first among equals.

    Nodes are numbers and their fields columns: a million of them are no work for the garbage collector.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0  # of all texts
        # Columns, by node. A node's label is labels[node][start[node]:end[node]], tokens of a text that passed there.
        self.count = array("i")
        self.labels: list[array[int]] = []
        self.start = array("i")
        self.end = array("i")
        self.parent = array("i")
        self.children: list[dict[int, int] | None] = []  # first token of its label -> child
        self.ranked: list[list[int] | None] = []  # children, most counted first; not kept for the root
        self.rank = array("i")  # place among the parent's ranked
        self._free: list[int] = []
        self._new_node(array(TOKEN_TYPE), 0, 0, ROOT, 0)
        self.children[ROOT] = {}

    @property
    def num_nodes(self) -> int:
        """The root not counted."""
        return len(self.count) - len(self._free) - 1

    def find(self, context: array[int], first: int) -> tuple[int, int] | None:
        """Where context[first:] leads to: (node, tokens into its label), None if no text has it."""
        node, place, length = ROOT, first, len(context)
        while True:
            children = self.children[node]
            node = children.get(context[place], ROOT) if children else ROOT
            if node == ROOT:
                return None
            start = self.start[node]
            size = min(self.end[node] - start, length - place)
            if size > 1 and self.labels[node][start + 1 : start + size] != context[place + 1 : place + size]:
                return None
            place += size
            if place == length:
                return node, size

    def extend(self, text: Text, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.append(text, token)

    def append(self, text: Text, token: int) -> None:
        """Let the text go on with one more token; the first one adds the text."""
        tokens, ends = text.token_ids, text.ends
        position = len(tokens)
        tokens.append(token)
        self.num_tokens += 1
        ends.append(ROOT)
        if len(ends) > self.max_depth:
            del ends[0]
        count, start, end = self.count, self.start, self.end
        for index, node in enumerate(ends):
            if count[node] == 1:  # no other suffix comes here: the label grows with the text
                if self.labels[node] is not tokens or end[node] != position:
                    start[node] = position - (end[node] - start[node])
                    self.labels[node] = tokens
                end[node] = position + 1
                continue
            children = self.children[node]
            child = children.get(token, ROOT) if children else ROOT
            if child == ROOT:
                ends[index] = self._new_leaf(node, tokens, position)
            elif node != ROOT and count[node] == count[child] + 1:  # all others go on to the child: the border moves with this one
                ends[index] = self._move_border(node, child, tokens, position)
            else:
                if end[child] - start[child] > 1:
                    child = self._split(child)
                self.labels[child], start[child], end[child] = tokens, position, position + 1
                count[child] += 1
                if node != ROOT:
                    self._promote(node, child)
                ends[index] = child

    def remove(self, text: Text) -> None:
        """Forget a text of this tree, finished or not. It costs what adding it has cost."""
        tokens = text.token_ids
        labelled: set[int] = set()  # nodes that stay and may have this text's tokens as their label
        for first in range(len(tokens)):
            node, place = ROOT, first
            last = min(len(tokens), first + self.max_depth)
            while place < last:
                children = self.children[node]
                assert children is not None
                child = children[tokens[place]]
                if self.count[child] == 1:
                    labelled.discard(child)
                    self._remove_leaf(node, child, tokens[place])
                    break
                self.count[child] -= 1
                if node != ROOT:
                    self._demote(node, child)
                labelled.add(child)
                place += self.end[child] - self.start[child]
                node = child
            if node != ROOT and (ranked := self.ranked[node]) and self.count[ranked[0]] == self.count[node]:
                labelled.discard(node)
                self._merge(node, ranked[0])
        for node in labelled:
            self._relabel(node, tokens)
        self.num_tokens -= len(tokens)
        text.token_ids, text.ends = array(TOKEN_TYPE), []

    def _new_node(self, label: array[int], start: int, end: int, parent: int, count: int) -> int:
        if self._free:
            node = self._free.pop()
            self.count[node], self.labels[node], self.start[node], self.end[node] = count, label, start, end
            self.parent[node], self.rank[node] = parent, 0
            return node
        for column, value in ((self.count, count), (self.start, start), (self.end, end), (self.parent, parent), (self.rank, 0)):
            column.append(value)
        self.labels.append(label)
        self.children.append(None)
        self.ranked.append(None)
        return len(self.count) - 1

    def _free_node(self, node: int) -> None:
        self.labels[node] = self.labels[ROOT]  # which is empty
        self.children[node] = self.ranked[node] = None
        self.count[node] = 0
        self._free.append(node)

    def _new_leaf(self, node: int, tokens: array[int], position: int) -> int:
        leaf = self._new_node(tokens, position, position + 1, node, 1)
        children = self.children[node]
        if children is None:
            self.children[node], self.ranked[node] = {tokens[position]: leaf}, [leaf]
            return leaf
        children[tokens[position]] = leaf
        if (ranked := self.ranked[node]) is not None:
            self.rank[leaf] = len(ranked)
            ranked.append(leaf)
            self._promote(node, leaf)
        return leaf

    def _split(self, child: int) -> int:
        """Make the first token of the child's label a node of its own, between it and its parent."""
        parent, label, first = self.parent[child], self.labels[child], self.start[child]
        border = self._new_node(label, first, first + 1, parent, self.count[child])
        self._put_in_place_of(child, border, label[first])
        self.start[child] = first + 1
        self.parent[child] = border
        self.rank[child] = 0
        self.children[border], self.ranked[border] = {label[first + 1]: child}, [child]
        return border

    def _move_border(self, node: int, child: int, tokens: array[int], position: int) -> int:
        """Give the first token of an only child's label to the node. Returns what is left of both: the child if that was its all."""
        size = self.end[node] - self.start[node] + 1
        kept = node
        if self.end[child] - self.start[child] == 1:
            kept = child
            self.count[child] += 1
            self.parent[child] = self.parent[node]
            self._put_in_place_of(node, child, tokens[position + 1 - size])
            self._free_node(node)
        else:
            self.start[child] += 1
            self.children[node] = {self.labels[child][self.start[child]]: child}
        self.labels[kept], self.start[kept], self.end[kept] = tokens, position + 1 - size, position + 1
        return kept

    def _put_in_place_of(self, old: int, new: int, first_token: int) -> None:
        """Among the children of old's parent, which has it under this token. Both have one count."""
        parent, rank = self.parent[old], self.rank[old]
        children, ranked = self.children[parent], self.ranked[parent]
        assert children is not None
        children[first_token] = new
        self.rank[new] = rank
        if ranked is not None:
            ranked[rank] = new

    def _promote(self, node: int, child: int) -> None:
        """The child's count has grown by one: move it before all that have no more."""
        ranked, count, rank = self.ranked[node], self.count, self.rank[child]
        assert ranked is not None
        now = count[child]
        if rank == 0 or count[ranked[rank - 1]] > now:
            return
        for most in (now - 1, now):  # two exchanges, so that the order of the others stays one of descending counts
            place = bisect_left(ranked, -most, 0, rank, key=lambda other: -count[other])
            self._exchange(ranked, rank, place)
            rank = place

    def _demote(self, node: int, child: int) -> None:
        """The child's count has shrunk by one: move it behind all that have more."""
        ranked, count, rank = self.ranked[node], self.count, self.rank[child]
        assert ranked is not None
        if rank + 1 < len(ranked) and count[ranked[rank + 1]] > count[child]:
            place = bisect_right(ranked, -count[child] - 1, rank + 1, key=lambda other: -count[other]) - 1
            self._exchange(ranked, rank, place)

    def _exchange(self, ranked: list[int], one: int, other: int) -> None:
        ranked[one], ranked[other] = ranked[other], ranked[one]
        self.rank[ranked[one]], self.rank[ranked[other]] = one, other

    def _remove_leaf(self, node: int, leaf: int, first_token: int) -> None:
        children, ranked = self.children[node], self.ranked[node]
        assert children is not None and self.children[leaf] is None
        del children[first_token]
        if ranked is not None:
            self._exchange(ranked, self.rank[leaf], len(ranked) - 1)  # the last one is counted once too
            ranked.pop()
            if not ranked:
                self.children[node] = self.ranked[node] = None
        self._free_node(leaf)

    def _merge(self, node: int, child: int) -> None:
        """No suffix ends at the node any more and all go on to the child: the child takes the node's tokens and place."""
        size = self.end[node] - self.start[node]
        first_token = self.labels[node][self.start[node]]
        if self.start[child] >= size:
            self.start[child] -= size
        else:
            own = self.labels[node][self.start[node] : self.end[node]] + self.labels[child][self.start[child] : self.end[child]]
            self.labels[child], self.start[child], self.end[child] = own, 0, len(own)
        self.parent[child] = self.parent[node]
        self._put_in_place_of(node, child, first_token)
        self._free_node(node)

    def _relabel(self, node: int, gone: array[int]) -> None:
        """Take the label from a text that stays: what stands before a child's label, else a copy."""
        if self.labels[node] is not gone:
            return
        start, size = self.start[node], self.end[node] - self.start[node]
        if ranked := self.ranked[node]:
            child = ranked[0]
            self._relabel(child, gone)
            if self.start[child] >= size:
                self.labels[node], self.end[node] = self.labels[child], self.start[child]
                self.start[node] = self.end[node] - size
                return
        self.labels[node], self.start[node], self.end[node] = gone[start : start + size], 0, size

    def check(self, texts: Sequence[Text]) -> None:
        """Raise AssertionError unless the tree is exactly that of these texts. Costs a walk over everything."""
        passed: dict[int, int] = {}
        for text in texts:
            tokens = text.token_ids
            for first in range(len(tokens)):
                node, place, last = ROOT, first, min(len(tokens), first + self.max_depth)
                while place < last:
                    node = (self.children[node] or {}).get(tokens[place], ROOT)
                    assert node != ROOT, "a suffix of a text is not in the tree"
                    size = self.end[node] - self.start[node]
                    assert self.labels[node][self.start[node] : self.end[node]] == tokens[place : place + size], "a label is wrong"
                    passed[node] = passed.get(node, 0) + 1
                    place += size
                assert place == last, "a suffix ends inside a label"
                if first >= len(tokens) - len(text.ends):
                    assert text.ends[first - len(tokens)] == node, "a text does not know where its suffix ends"
        assert len(passed) == self.num_nodes, "nodes that no text passes"
        assert self.num_tokens == sum(len(text.token_ids) for text in texts), "tokens are miscounted"
        for node, times in passed.items():
            assert self.count[node] == times, "a count is wrong"
            ranked = self.ranked[node] or []
            assert sorted(ranked) == sorted((self.children[node] or {}).values()), "ranked are not the children"
            assert all(self.parent[child] == node and self.rank[child] == rank for rank, child in enumerate(ranked)), "a child is misplaced"
            counts = [self.count[child] for child in ranked]
            assert counts == sorted(counts, reverse=True) and all(c < times for c in counts), "counts of children are out of order"
