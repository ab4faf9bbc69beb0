"""What proposers answered becomes one draft: is an answer a draft at all, what of it counts for a row, all rows' in one.

Pure functions of drafts. Knows no proposer: who is asked, and what a fault costs him, is proposer_set.py's business.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.record import record
from .base import FORCED, Draft


@record
class Guess:
    """A run of one proposer's draft that was taken for a row."""

    source: int
    token_ids: Sequence[int]
    parents: Sequence[int]
    confidence: Sequence[float] | None = None
    probs: Tensor | None = None  # [len(token_ids), V]
    num_forced: int = 0  # leading tokens that no proposer guessed


def fault_of(draft: object, num_rows: int, vocab_size: int | None) -> str | None:
    """Why this is no draft of num_rows rows; None if it is one."""
    if not isinstance(draft, Draft):
        return f"{draft!r:.80} is no Draft"
    total = len(draft.token_ids)
    starts = draft.start_loc
    if len(starts) != num_rows + 1 or starts[0] != 0 or starts[-1] != total or any(a > b for a, b in zip(starts, starts[1:], strict=False)):
        return f"start_loc does not split {total} tokens into {num_rows} rows"
    if len(draft.parents) != total or len(draft.source) != total:
        return "parents or source have another length than token_ids"
    limit = math.inf if vocab_size is None else vocab_size
    ids = draft.token_ids
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= limit):
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < limit)
        return f"{wrong!r} is no token id: an int from 0 to {limit - 1}"
    if draft.parents and set(map(type, draft.parents)) != {int}:
        return "a parent is no int"
    for start, end in zip(starts, starts[1:], strict=False):
        for node, parent in enumerate(draft.parents[start:end]):
            if not -1 <= parent < node:
                return "a parent does not stand before its child"
    if draft.confidence is not None and (len(draft.confidence) != total or not all(map(math.isfinite, draft.confidence))):
        return "confidence is not one finite number a token"
    if draft.probs is not None and (fault := _fault_of_probs(draft.probs, draft.token_ids, limit)) is not None:
        return fault
    for key, num_filled in draft.filled.items():
        if type(key) is not tuple or len(key) != 2 or type(num_filled) is not int or num_filled < 0:
            return f"filled has {key!r}: {num_filled!r}, not (0, request id): number of tokens"
    return None


def _fault_of_probs(probs: object, token_ids: Sequence[int], limit: float) -> str | None:
    if not isinstance(probs, Tensor) or not probs.is_floating_point() or probs.dim() != 2 or len(probs) != len(token_ids):
        return "probs are no tensor of floats with one row a token"
    if token_ids and not max(token_ids) < probs.shape[1] <= limit:
        return f"probs have {probs.shape[1]} columns: none for a guessed token, or more than there are tokens"
    if not bool(((probs >= 0).all(1) & ((probs.sum(1) - 1).abs() < 0.01)).all()):
        return "probs are not at least 0 with a sum of 1 in each row"
    return None


def taken(draft: Draft, place: int, wanted: int, source: int) -> Guess | None:
    """The first `wanted` tokens of one row of the draft, None if it has none. Parents come first, so a cut tree is a tree."""
    start = draft.start_loc[place]
    end = min(draft.start_loc[place + 1], start + wanted)
    if start == end:
        return None
    return Guess(
        source,
        draft.token_ids[start:end],
        draft.parents[start:end],
        None if draft.confidence is None else draft.confidence[start:end],
        None if draft.probs is None else draft.probs[start:end],
    )


def behind(forced: Sequence[int], guess: Guess | None) -> Guess | None:
    """The forced tokens, and behind them what a guess has there that starts with the same ones."""
    if not forced:
        return guess
    parents = [*range(-1, len(forced) - 1)]
    end = _end_of(forced, guess) if guess is not None else None
    if guess is None or end is None:
        return Guess(FORCED, forced, parents, num_forced=len(forced))
    nodes: list[int] = []
    place = {end: len(forced) - 1}
    for node, parent in enumerate(guess.parents):
        if parent in place:
            place[node] = len(forced) + len(nodes)
            nodes.append(node)
            parents.append(place[parent])
    head = Guess(FORCED, forced, ())
    return Guess(
        guess.source,
        [*forced, *(guess.token_ids[node] for node in nodes)],
        parents,
        None if guess.confidence is None else [1.0] * len(forced) + [guess.confidence[node] for node in nodes],
        None if guess.probs is None else torch.cat([_probs(head, guess.probs.shape[1]).to(guess.probs), guess.probs[nodes]]),
        len(forced),
    )


def _end_of(path: Sequence[int], guess: Guess) -> int | None:
    """The node of a guess that a path from its root leads to; None if the guess has no such path."""
    at = -1
    for token in path:
        children = [n for n, (t, p) in enumerate(zip(guess.token_ids, guess.parents, strict=True)) if p == at and t == token]
        if not children:
            return None
        at = children[0]
    return at


def merged(guesses: Sequence[Guess | None], filled: dict[tuple[int, str], int], vocab_size: int | None) -> Draft:
    """All rows' guesses in one draft. Who gives no confidence of its own counts as certain, who gives no probs as one-hot.

    probs get vocab_size columns; None = as many as are needed.
    """
    token_ids: list[int] = []
    start_loc = [0]
    parents: list[int] = []
    source: list[int] = []
    taken = [guess for guess in guesses if guess is not None]
    for guess in guesses:
        if guess is not None:
            token_ids += guess.token_ids
            parents += guess.parents
            source += [FORCED] * guess.num_forced + [guess.source] * (len(guess.token_ids) - guess.num_forced)
        start_loc.append(len(token_ids))
    confidence: list[float] | None = None
    if any(guess.confidence is not None for guess in taken):
        confidence = []
        for guess in taken:
            confidence += [1.0] * len(guess.token_ids) if guess.confidence is None else guess.confidence
    widths = [guess.probs.shape[1] for guess in taken if guess.probs is not None]
    probs: Tensor | None = None
    if widths:
        width = vocab_size or max([*widths, *(max(guess.token_ids) + 1 for guess in taken)])
        probs = torch.cat([_probs(guess, width) for guess in taken])
    return Draft(token_ids, start_loc, parents, source, confidence, probs, filled)


def _probs(guess: Guess, vocab_size: int) -> Tensor:
    if guess.probs is not None:  # of a smaller vocabulary, it never guesses the rest
        return torch.nn.functional.pad(guess.probs.detach(), (0, vocab_size - guess.probs.shape[1]))
    return torch.nn.functional.one_hot(torch.tensor(list(guess.token_ids)), vocab_size).float()
