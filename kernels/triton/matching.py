"""The walk of kernels/matching.py on a GPU, behind the pass and the choices that it reads: one launch, and no wait.

A row's draft lies in the registers of one warp, so that a step of the walk is a search there and no way to memory.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import MAX_TREE_TOKENS
from ..matching import Guesses
from ..sampling import neutral
from ..upload import upload_packed
from .edits import PATH_LENGTHS
from .launch import power_of_two
from .sample_rows import sample

_NODES = power_of_two(1 + MAX_TREE_TOKENS)


def match(argmax: Tensor, top: Tensor, chosen: Tensor | None, guesses: Guesses) -> Tensor:
    """As the reference, on the device of argmax. chosen None: no row has choices."""
    arrays = [guesses.parents, guesses.token_ids, guesses.choices, guesses.row_starts]
    if guesses.decreed is not None:
        arrays.append(guesses.decreed)
    parents, token_ids, choices, starts, *decreed = upload_packed(arrays, argmax.device)
    rows = len(guesses.row_starts) - 1
    found = torch.empty(rows, 1 + 2 * guesses.depth, dtype=torch.int32, device=argmax.device)
    if rows:
        by_decree = decreed[0] if decreed else None
        _match[(rows,)](
            argmax, top, chosen, by_decree, parents, token_ids, choices, starts, found, guesses.depth, NODES=_NODES, num_warps=1
        )
    return found


def warm_up(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have what comes behind a pass with such scores compiled now, so that no request waits for it.

    Steps that are waited for choose from float32 copies of the scores.
    """
    for kind in {dtype, torch.float32}:
        scores = torch.zeros(2, vocab_size, dtype=kind, device=device)
        sample(scores, np.arange(2), neutral(2))
        for length in PATH_LENGTHS:
            path, edited = np.zeros(length, np.int32), neutral(2)
            edited["banned"], edited["num_banned"] = path.ctypes.data, 1
            edited["path"], edited["path_length"] = path.ctypes.data, length
            sample(scores, np.arange(2), edited)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    for choices in (tokens, None):
        match(tokens, torch.zeros(2, dtype=torch.float32, device=device), choices, Guesses.of([([0], [-1], True)]))


@triton.jit(do_not_specialize=["depth"])
def _match(
    argmax_ptr, top_ptr, chosen_ptr, decreed_ptr, parents_ptr, guesses_ptr, choices_ptr, starts_ptr, found_ptr, depth, NODES: tl.constexpr
):
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    node = tl.arange(0, NODES)
    inside = node < tl.load(starts_ptr + row + 1) - start
    parent = tl.load(parents_ptr + start + node, mask=inside, other=-1)
    guess = tl.load(guesses_ptr + start + node, mask=inside, other=-1)
    token = tl.load(argmax_ptr + start + node, mask=inside, other=-1).to(tl.int32)
    if chosen_ptr is not None:
        choice = tl.load(choices_ptr + start + node, mask=inside, other=-1)
        own = tl.load(chosen_ptr + choice, mask=choice >= 0, other=-1).to(tl.int32)
        token = tl.where(choice >= 0, own, token)
    if decreed_ptr is not None:
        by_decree = tl.load(decreed_ptr + start + node, mask=inside, other=-1)
        token = tl.where(by_decree >= 0, by_decree, token)
    top = tl.load(top_ptr + start + node, mask=inside, other=0.0).to(tl.float32)
    token = tl.where(tl.abs(top) < float("inf"), token, -1)  # not so for NaN either

    tokens_ptr = found_ptr + row * (1 + 2 * depth) + 1
    nodes_ptr = tokens_ptr + depth
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    said = tl.sum(tl.where(node == 0, token, 0), 0)
    lowest = said
    tl.store(tokens_ptr, said)
    tl.store(nodes_ptr, at)
    for _ in range(1, depth):
        child = tl.min(tl.where((parent == at) & (guess == said), node, NODES), 0)
        follows = child < NODES  # once it does not, it never will
        at = tl.where(follows, child, at)
        said = tl.where(follows, tl.sum(tl.where(node == child, token, 0), 0), said)
        tl.store(tokens_ptr + count, said, mask=follows)
        tl.store(nodes_ptr + count, at, mask=follows)
        count += follows.to(tl.int32)
        lowest = tl.minimum(lowest, said)
    tl.store(found_ptr + row * (1 + 2 * depth), tl.where(lowest < 0, 0, count))
