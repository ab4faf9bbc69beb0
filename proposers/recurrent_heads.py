"""Heads that guess token by token: each guess is read from a state made of the one before and the token that was guessed last.

Owns the walk, along chains or down a tree, in which all rows take a step together. How a state goes on is a recurrence's own business.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.started import to_lists
from ..kernels.upload import upload
from .config import StaticTree
from .drafting import Feed
from .guessing import Drawing, Guesses, share_of
from .last_state import RowNetwork

Carried = tuple[Tensor, ...]
"""What a step hands on to the next one: tensors with a row for each of the R rows."""


class Recurrence(Protocol):
    """From the target's state to one token after the other: rows know nothing of each other."""

    def begin(self, states: Tensor) -> Carried:
        """states [R, H]: of the target, after its final norm -> what step 0 reads."""
        ...

    def step(self, step: int, carried: Carried, token_ids: Sequence[int]) -> tuple[Tensor, Carried]:
        """token_ids [R]: the last known tokens, or those guessed last -> (scores [R, V], what the next step reads), where it computes."""
        ...


class NetworkPerStep:
    """Implements `Recurrence`: each step has a network, whose boundary 0 the next one reads."""

    def __init__(self, networks: Sequence[RowNetwork]) -> None:
        self._networks = networks

    def begin(self, states: Tensor) -> Carried:
        return (states,)

    def step(self, step: int, carried: Carried, token_ids: Sequence[int]) -> tuple[Tensor, Carried]:
        output = self._networks[step].run(carried[0], token_ids, (0,))
        assert output.logits is not None
        return output.logits, (output.hidden[0],)


class RecurrentHeads:
    """Implements `Heads`. A row that has its tokens drops out: at once if it wants none."""

    def __init__(self, recurrence: Recurrence, drawing: Drawing) -> None:
        self._recurrence, self._drawing = recurrence, drawing

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        guesses = Guesses.none(len(feeds))
        drawn_from: list[list[Tensor]] = [[] for _ in feeds]
        tokens = [feed.row.token_ids[-1] for feed in feeds]
        alive = list(range(len(feeds)))
        likely: list[Tensor] = []  # by step, of the rows that were alive
        whose: list[list[int]] = []
        carried = self._recurrence.begin(states)
        for step in range(max(feed.count for feed in feeds)):
            going_on = [place for place, i in enumerate(alive) if feeds[i].count > step]
            if len(going_on) < len(alive):
                there = upload(torch.tensor(going_on), carried[0].device)
                carried = tuple(x[there] for x in carried)
                tokens, alive = [tokens[place] for place in going_on], [alive[place] for place in going_on]
            scores, carried = self._recurrence.step(step, carried, tokens)
            rows = [feeds[i].row for i in alive]
            chosen = self._drawing.choose(scores, rows, [len(row.token_ids) + step for row in rows])
            likely.append(share_of(scores, chosen))
            whose.append(alive)
            tokens: list[int] = chosen.tolist()
            for place, (i, token) in enumerate(zip(alive, tokens, strict=True)):
                guesses.token_ids[i].append(token)
                if self._drawing.return_probs:
                    drawn_from[i].append(self._drawing.probs(feeds[i].row, chosen[place, None], scores[place, None], None))
        assert guesses.confidence is not None
        for rows_alive, probabilities in zip(whose, to_lists(*likely), strict=True):
            for i, probability in zip(rows_alive, probabilities, strict=True):
                guesses.confidence[i].append(probability)
        probs = [row for rows in drawn_from for row in rows]
        return replace(guesses, probs=torch.cat(probs).cpu() if probs else None)


class RecurrentTree:
    """Implements `Heads`. Entry d of a node's path is a rank among what may follow the d nodes before it; nodes are never drawn."""

    def __init__(self, recurrence: Recurrence, vocab_size: int, tree: StaticTree) -> None:
        self._recurrence, self._vocab_size, self._paths = recurrence, vocab_size, tree.paths

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        paths, num_rows = self._paths[: max(feed.count for feed in feeds)], len(feeds)
        tokens: dict[tuple[int, ...], list[int]] = {(): [feed.row.token_ids[-1] for feed in feeds]}
        chances: dict[tuple[int, ...], list[float]] = {}
        carried: dict[tuple[int, ...], Carried] = {(): self._recurrence.begin(states)}
        for depth in range(len(paths[-1])):  # all nodes of a level that have children take a step together
            nodes = [*dict.fromkeys(path[:-1] for path in paths if len(path) == depth + 1)]
            read = tuple(torch.cat(parts) for parts in zip(*(carried[node[:-1]] for node in nodes), strict=True))
            scores, handed_on = self._recurrence.step(depth, read, [token for node in nodes for token in tokens[node]])
            likeliest, ids = torch.softmax(scores[:, : self._vocab_size], -1).topk(1 + max(path[-1] for path in paths), -1)
            ranked, likely = to_lists(ids, likeliest.clamp(max=1.0))
            for n, node in enumerate(nodes):
                rows = slice(n * num_rows, (n + 1) * num_rows)
                carried[node] = tuple(x[rows] for x in handed_on)
                for path in paths:
                    if path[:-1] == node:
                        tokens[path], chances[path] = ([row[path[-1]] for row in lists[rows]] for lists in (ranked, likely))
        parents = [paths.index(path[:-1]) if path[1:] else -1 for path in paths]
        each = [(i, paths[: feed.count]) for i, feed in enumerate(feeds)]
        return Guesses(
            [[tokens[path][i] for path in own] for i, own in each],
            [parents[: feed.count] for feed in feeds],
            [[chances[path][i] for path in own] for i, own in each],
        )
