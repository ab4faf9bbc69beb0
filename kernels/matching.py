"""How far the target follows what was guessed: drafts walked as long as its own tokens are the same, in one packed answer.

Owns the form of question and answer. The walk here is the reference of triton/matching.py, which makes it behind a pass that
nobody has waited for. Knows no requests, and not how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Guesses:
    """Of R rows that want tokens, on the host. A row is node 0 (behind the known tokens), then the nodes of its draft, parents
    before children; rows stand one behind the other. N nodes in all."""

    parents: NDArray[np.int32]  # [N] the row's node before it, -1 for node 0
    token_ids: NDArray[np.int32]  # [N] the guess that leads to it, -1 for node 0
    choices: NDArray[np.int32]  # [N] which choice made from whole logits is the target's token there; -1 = its best token is
    row_starts: NDArray[np.int32]  # [R + 1] first node of each row
    depth: int  # most tokens that a row can emit
    decreed: NDArray[np.int32] | None = None  # [N] the token that counts as the target's there, -1 = its own does; None = all its own

    @classmethod
    def of(
        cls, drafts: Sequence[tuple[Sequence[int], Sequence[int], bool]], paths: Sequence[Sequence[int] | None] | None = None
    ) -> Guesses:
        """Of each row: its draft, its parents (-1 = the known tokens) and whether its tokens are choices from whole logits.

        paths: the nodes of each draft that are accepted whatever the target says, and no others are; None = as it says.
        """
        parents: list[int] = []
        token_ids: list[int] = []
        choices: list[int] = []
        starts, num_chosen, deepest = [0], 0, 0
        for draft, its_parents, chooses in drafts:
            parents.append(-1)
            token_ids.append(-1)
            token_ids += draft
            depths = [0]
            for parent in its_parents:
                parents.append(parent + 1)
                depths.append(depths[parent + 1] + 1)
            deepest = max(deepest, max(depths))
            if chooses:
                choices += range(num_chosen, num_chosen + len(depths))
                num_chosen += len(depths)
            else:
                choices += [-1] * len(depths)
            starts.append(len(parents))
        decreed = None if paths is None else _decreed(token_ids, starts, paths)
        arrays = (np.array(values, np.int32) for values in (parents, token_ids, choices, starts))
        return cls(*arrays, depth=1 + deepest, decreed=decreed)


def _decreed(token_ids: list[int], starts: list[int], paths: Sequence[Sequence[int] | None]) -> NDArray[np.int32]:
    """What is to count as the target's tokens; guesses off a row's path become what nobody says."""
    decreed = np.full(len(token_ids), -1, np.int32)
    for start, end, path in zip(starts, starts[1:], paths, strict=False):
        if path is None:
            continue
        nodes = [start, *(start + 1 + place for place in path)]
        for node, child in zip(nodes, nodes[1:], strict=False):
            decreed[node] = token_ids[child]
        for node in {*range(start + 1, end)}.difference(nodes):
            token_ids[node] = -1
    return decreed


def match(argmax: Tensor, top: Tensor, chosen: Tensor | None, guesses: Guesses) -> Tensor:
    """[R, 1 + 2 * depth] int32 on the CPU, which `emitted` reads: what each row emits.

    argmax, top [N, maybe padded]: the best token of each node and its logit; chosen [C]: choices made instead, -1 where scores
    were not finite. A row says nothing if a score on its way is not.
    """
    tokens = argmax[: len(guesses.parents)].clone()
    if chosen is not None:
        choices = torch.from_numpy(guesses.choices).long()
        tokens = torch.where(choices >= 0, chosen[choices.clamp(min=0)], tokens)
    if guesses.decreed is not None:
        decreed = torch.from_numpy(guesses.decreed)
        tokens = torch.where(decreed >= 0, decreed, tokens)
    said: list[int] = torch.where(top[: len(tokens)].isfinite(), tokens, -1).tolist()
    parents, wanted, starts = guesses.parents.tolist(), guesses.token_ids.tolist(), guesses.row_starts.tolist()
    answers: list[list[int]] = []
    for start, end in zip(starts, starts[1:], strict=False):
        path = [0]
        for node in range(1, end - start):
            if parents[start + node] == path[-1] and wanted[start + node] == said[start + path[-1]]:
                path.append(node)
        row_tokens = [said[start + node] for node in path]
        padding = [0] * (guesses.depth - len(path))
        answers.append([0 if min(row_tokens) < 0 else len(path), *row_tokens, *padding, *path, *padding])
    return torch.tensor(answers, dtype=torch.int32).view(-1, 1 + 2 * guesses.depth)


def emitted(answer: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Of each row of `match`'s answer: the tokens it emits, and the nodes behind which they were chosen. None if scores were not finite."""
    depth = answer.shape[1] // 2
    for count, *rest in answer.tolist():
        yield rest[:count], rest[depth : depth + count]
