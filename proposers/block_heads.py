"""What stands behind a block: a correction of its scores that knows the guess before each, and trust in a guess.

All scores of a block are there already; guesses are drawn from them one after the other, left to right. Each kind of drafter has a
file of its own for its correction. Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..kernels.started import to_lists
from ..kernels.upload import upload
from .drafting import Feed
from .guessing import Drawing, Guesses, share_of


@dataclass(frozen=True)
class Block:
    """Blocks of some rows, as one pass has left them: row i owns entries starts[i]:starts[i] + counts[i].

    Columns of the scores are `Executor.token_ids` of the drafter.
    """

    logits: Tensor  # [sum of counts, columns]
    hidden: Tensor  # [sum of counts, H] behind the last norm
    starts: Sequence[int]
    counts: Sequence[int]
    tokens: Tensor  # [rows] int64, the last known token of each
    context: Tensor | None = None  # [rows, H] what the drafter made of the target's states just before it; a row that read none has zeros
    anchors: Tensor | None = None  # [rows, H] as hidden, in its own place; None where that has the first guess
    before: Tensor | None = None  # [rows] int64, the token before it, or itself if it is the first

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class Walk(Protocol):
    """A correction on its way through blocks, from the first guess of each row to the last."""

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        """[n, columns] float32 that guess number `step` of rows [n] is drawn from; at [n]: their entries; previous [n]: the tokens before.

        Asked once for each step and row, in order; a row that has ended is not asked again. -inf: never guessed.
        """
        ...


class Correction(Protocol):
    """Makes scores better by what is guessed before them."""

    reads_context: ClassVar[bool]  # whether `Block.context` is wanted

    def on(self, device: torch.device) -> Correction:
        """This, with its weights on a device; itself if they are there."""
        ...

    def begin(self, block: Block) -> Walk: ...

    def describe(self) -> str:
        """For people."""
        ...


class Trust(Protocol):
    """Says how likely a guess will be accepted, before it is drawn."""

    def on(self, device: torch.device, correction: Correction | None) -> Trust:
        """Likewise; correction: what is there already, of which it may read the tables."""
        ...

    def of(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """[n] in [0, 1] behind tokens `previous` [n]; hidden [n, H]."""
        ...


@dataclass(frozen=True)
class Heads:
    """What a checkpoint has of them.

    threshold: a block ends before the first guess that is trusted less. The guess itself is not drawn by then, so that it is left out
    says nothing about its value, and the p/q rules stay exact.
    """

    correction: Correction | None
    confidence: Trust | None = None
    threshold: float = 0.0

    def on(self, device: torch.device) -> Heads:
        """These, with their weights on a device."""
        correction = None if self.correction is None else self.correction.on(device)
        confidence = None if self.confidence is None else self.confidence.on(device, correction)
        is_there = correction is self.correction and confidence is self.confidence
        return self if is_there else replace(self, correction=correction, confidence=confidence)


def draw(
    feeds: Sequence[Feed],
    logits: Tensor,
    hidden: Tensor,
    context: Tensor | None,
    anchors: Tensor | None,
    drawing: Drawing,
    columns: Tensor | None,
    heads: Heads,
    waits: bool,
) -> Guesses:
    """Guesses of all feeds, left to right. logits [sum of counts, V], hidden [sum of counts, H]; columns: `Executor.token_ids`.

    context, anchors [feeds that want guesses, H]: see `Block`. waits: for each guess's trust, so that those behind one that is not
    trusted are not even drawn. Else all are, and left out in the end: on a device, where to wait takes longer than to draw.
    """
    rows = [_Row(i, feed) for i, feed in enumerate(feeds) if feed.count]
    start = 0
    for row in rows:
        row.start, start = start, start + row.feed.count
    confidence, device = heads.confidence, logits.device
    before, previous = upload(torch.tensor([_last_two(row.feed.row.token_ids) for row in rows], dtype=torch.int64).view(-1, 2), device).T
    numbers = torch.arange(len(rows), device=device)
    block = Block(logits, hidden, [row.start for row in rows], [row.feed.count for row in rows], previous, context, anchors, before)
    walk = _Plain(logits) if heads.correction is None or not rows else heads.correction.begin(block)
    going = rows
    drawn: list[_Drawn] = []
    for j in range(max((row.feed.count for row in rows), default=0)):
        kept = [k for k, row in enumerate(going) if row.feed.count > j]
        going, previous, numbers = _only(kept, going, previous, numbers)
        at = upload(torch.tensor([row.start + j for row in going], dtype=torch.int64), device)
        trusted = None if confidence is None else confidence.of(previous, hidden[at])
        if trusted is not None and waits:
            kept = (trusted >= heads.threshold).nonzero()[:, 0].tolist()
            going, previous, numbers = _only(kept, going, previous, numbers)
            at, trusted = at[kept], trusted[kept]
        if not going:
            break
        by_token = drawing.by_token(walk.scores(numbers, at, j, previous), columns)
        given = [row.feed.row for row in going]
        previous = drawing.choose(by_token, given, [len(row.token_ids) + j for row in given])
        sure = share_of(by_token, previous) if trusted is None else trusted
        drawn.append(_Drawn(going, previous, sure, by_token if drawing.return_probs else None))
    return _guesses(feeds, drawn, drawing, None if confidence is None else heads.threshold)


def _last_two(token_ids: Sequence[int]) -> tuple[int, int]:
    return token_ids[-2] if len(token_ids) > 1 else token_ids[-1], token_ids[-1]


@dataclass(frozen=True)
class _Plain:
    """No correction."""

    logits: Tensor

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        return self.logits[at].float()


@dataclass(eq=False, slots=True)
class _Row:
    """One feed's guesses so far."""

    index: int
    feed: Feed
    start: int = 0  # of its scores
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A guess of each of some rows."""

    rows: Sequence[_Row]
    tokens: Tensor
    sure: Tensor  # by the confidence head, else by its own probability
    scores: Tensor | None  # [n, vocab_size] that it was drawn from, if they are wanted


def _only(kept: Sequence[int], rows: Sequence[_Row], previous: Tensor, numbers: Tensor) -> tuple[Sequence[_Row], Tensor, Tensor]:
    if len(kept) == len(rows):
        return rows, previous, numbers
    places = upload(torch.tensor(kept, dtype=torch.int64), previous.device)
    return [rows[k] for k in kept], previous[places], numbers[places]


def _guesses(feeds: Sequence[Feed], drawn: Sequence[_Drawn], drawing: Drawing, threshold: float | None) -> Guesses:
    """threshold: of what is trusted; None = whatever was drawn is."""
    if not drawn:
        return Guesses.none(len(feeds))
    token_ids: list[list[int]] = [[] for _ in feeds]
    confidence: list[list[float]] = [[] for _ in feeds]
    probs: list[Tensor] = []
    tokens, sure = to_lists(torch.cat([one.tokens for one in drawn]), torch.cat([one.sure for one in drawn]))
    said = zip(tokens, sure, strict=True)
    ended: set[int] = set()
    for one in drawn:
        for k, row in enumerate(one.rows):
            token, trusted = next(said)
            if threshold is not None and not trusted >= threshold:  # nor is NaN
                ended.add(row.index)
            if row.index in ended:
                continue
            row.tokens.append(token)
            row.sure.append(trusted)
            if one.scores is not None:
                row.scores.append(one.scores[k])
    for row in drawn[0].rows:
        token_ids[row.index], confidence[row.index] = row.tokens, row.sure
        if row.scores:
            chosen = torch.tensor(row.tokens, device=row.scores[0].device)
            probs.append(drawing.probs(row.feed.row, chosen, torch.stack(row.scores), None))
    return Guesses(token_ids, confidence=confidence, probs=torch.cat(probs).cpu() if probs else None)
