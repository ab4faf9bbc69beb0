"""The walk of kernels/matching.py on a GPU, behind the pass and the choices that it reads: one launch, and no wait.

A row's draft lies in the registers of one warp, so that a step of the walk is a search there and no way to memory.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host_memory import host_memory
from ..layout import MAX_TREE_TOKENS
from ..matching import Guesses
from ..sampling import neutral
from .edits import PATH_LENGTHS
from .launch import power_of_two
from .launcher import Launcher
from .sample_rows import sample

_NODES = power_of_two(1 + MAX_TREE_TOKENS)


def match(argmax: Tensor, top: Tensor, chosen: Tensor | None, guesses: Guesses, heard: Tensor | None = None) -> Tensor:
    """As the reference, on the device of argmax. chosen None: no row has choices. heard: where the answer is written, too, flat int32."""
    arrays = [guesses.parents, guesses.token_ids, guesses.choices, guesses.row_starts]
    if guesses.decreed is not None:
        arrays.append(guesses.decreed)
    rows = len(guesses.row_starts) - 1
    found = torch.empty(rows, 1 + 2 * guesses.depth, dtype=torch.int32, device=argmax.device)
    if rows:
        with host_memory(argmax.device).lent(*arrays) as (numbers, starts):
            decreed = starts[4] if guesses.decreed is not None else -1
            _walk(argmax.device, (rows,), argmax, top, chosen, numbers, *starts[:4], decreed, found, heard, guesses.depth)
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
    heard = host_memory(device).slot(5)
    for choices in (tokens, None):
        match(tokens, torch.zeros(2, dtype=torch.float32, device=device), choices, Guesses.of([([0], [-1], True)]), heard.numbers)
    heard.sent()


@triton.jit(do_not_specialize=["parents", "guesses", "choices", "starts", "decreed", "depth"])
def _match(
    argmax_ptr, top_ptr, chosen_ptr, numbers_ptr, parents, guesses, choices, starts, decreed, found_ptr, heard_ptr, depth,
    NODES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(numbers_ptr + starts + row)
    node = tl.arange(0, NODES)
    inside = node < tl.load(numbers_ptr + starts + row + 1) - start
    own = numbers_ptr + start + node
    parent = tl.load(own + parents, mask=inside, other=-1)
    guess = tl.load(own + guesses, mask=inside, other=-1)
    by_decree = tl.load(own + decreed, mask=inside & (decreed >= 0), other=-1)
    token = tl.load(argmax_ptr + start + node, mask=inside, other=-1).to(tl.int32)
    if chosen_ptr is not None:
        choice = tl.load(own + choices, mask=inside, other=-1)
        chosen = tl.load(chosen_ptr + choice, mask=choice >= 0, other=-1).to(tl.int32)
        token = tl.where(choice >= 0, chosen, token)
    token = tl.where(by_decree >= 0, by_decree, token)
    top = tl.load(top_ptr + start + node, mask=inside, other=0.0).to(tl.float32)
    token = tl.where(tl.abs(top) < float("inf"), token, -1)  # not so for NaN either

    width = 1 + 2 * depth
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    said = tl.sum(tl.where(node == 0, token, 0), 0)
    lowest = said
    _say(found_ptr, heard_ptr, row * width + 1, said, True)
    _say(found_ptr, heard_ptr, row * width + 1 + depth, at, True)
    for _ in range(1, depth):
        child = tl.min(tl.where((parent == at) & (guess == said), node, NODES), 0)
        follows = child < NODES  # once it does not, it never will
        at = tl.where(follows, child, at)
        said = tl.where(follows, tl.sum(tl.where(node == child, token, 0), 0), said)
        _say(found_ptr, heard_ptr, row * width + 1 + count, said, follows)
        _say(found_ptr, heard_ptr, row * width + 1 + depth + count, at, follows)
        count += follows.to(tl.int32)
        lowest = tl.minimum(lowest, said)
    _say(found_ptr, heard_ptr, row * width, tl.where(lowest < 0, 0, count), True)


_walk = Launcher(_match, num_warps=1, NODES=_NODES)


@triton.jit
def _say(found_ptr, heard_ptr, place, value, mask):
    """On the device, and where the host hears of it."""
    tl.store(found_ptr + place, value, mask=mask)
    if heard_ptr is not None:
        tl.store(heard_ptr + place, value, mask=mask)
