"""DSpark's two small heads behind a block (DeepSeek 2026): a Markov head lets a guess know the one before it, a confidence head
says how likely it will be accepted.

Scores of the whole block are there already; guesses are drawn from them one after the other. Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..kernels.started import to_lists
from ..kernels.upload import upload
from .drafting import Feed
from .guessing import Drawing, Guesses, share_of


@dataclass(frozen=True)
class Markov:
    """Adds W2 e to the scores, where e is made of the embedding W1[p] of the token p before, in one of three ways.

    h is the state behind the last norm, s a state that starts at 0:
    vanilla: e = W1[p]; gated: e = sigmoid(G [h; W1[p]]) * W1[p];
    rnn: (g, c, o) = J [s; W1[p]; h], s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), e = tanh(o).
    """

    kind: Literal["vanilla", "gated", "rnn"]
    embedding: Tensor  # W1 [V, r]
    bias: Callable[[Tensor], Tensor]  # W2: [n, r] -> [n, columns of the scores]
    projection: Tensor | None = None  # G [r, H + r] or J [3 r, 2 r + H]
    projection_bias: Tensor | None = None

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(what is added to the scores [n, columns], the next state [n, r]) behind tokens `previous` [n]; hidden [n, H]."""
        embedded = self.embedding[previous].float()
        if self.kind == "vanilla":
            return self.bias(embedded), state
        assert self.projection is not None
        if self.kind == "gated":
            gate = torch.nn.functional.linear(torch.cat([hidden, embedded], -1), self.projection, self.projection_bias)
            return self.bias(gate.sigmoid() * embedded), state
        joint = torch.nn.functional.linear(torch.cat([state, embedded, hidden], -1), self.projection, self.projection_bias)
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return self.bias(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


@dataclass(frozen=True)
class Confidence:
    """sigmoid(proj [h; W1[p]]), or of h alone: the chance that a guess is accepted, said before it is drawn."""

    weight: Tensor  # [H] or [H + r]
    bias: float
    embedding: Tensor | None  # W1, if it is read

    def of(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """[n] in [0, 1]."""
        read = hidden if self.embedding is None else torch.cat([hidden, self.embedding[previous].float()], -1)
        return (read @ self.weight + self.bias).sigmoid()


@dataclass(frozen=True)
class Heads:
    """What a DSpark checkpoint has of them.

    threshold: a block ends before the first guess that the confidence head trusts less. The guess itself is not drawn by then, so
    that it is left out says nothing about its value, and the p/q rules stay exact.
    """

    markov: Markov | None
    confidence: Confidence | None
    threshold: float = 0.0

    def on(self, device: torch.device) -> Heads:
        """These, with their weights on a device."""
        markov, confidence = self.markov, self.confidence
        if markov is not None and markov.embedding.device != device:
            projection, bias = (None if x is None else x.to(device) for x in (markov.projection, markov.projection_bias))
            markov = replace(markov, embedding=markov.embedding.to(device), projection=projection, projection_bias=bias)
        if confidence is not None and confidence.weight.device != device:
            embedding = None if confidence.embedding is None or markov is None else markov.embedding  # the same table
            confidence = replace(confidence, weight=confidence.weight.to(device), embedding=embedding)
        is_there = markov is self.markov and confidence is self.confidence
        return self if is_there else replace(self, markov=markov, confidence=confidence)


def draw(
    feeds: Sequence[Feed],
    logits: Tensor,
    hidden: Tensor,
    drawing: Drawing,
    columns: Tensor | None,
    heads: Heads,
    waits: bool,
) -> Guesses:
    """Guesses of all feeds, left to right. logits [sum of counts, V], hidden [sum of counts, H]; columns: `Executor.token_ids`.

    waits: for each guess's trust, so that those behind one that is not trusted are not even drawn. Else all are, and left out in the
    end: on a device, where to wait takes longer than to draw.
    """
    rows = [_Row(i, feed) for i, feed in enumerate(feeds) if feed.count]
    start = 0
    for row in rows:
        row.start, start = start, start + row.feed.count
    markov, confidence, device = heads.markov, heads.confidence, logits.device
    states = torch.zeros(len(rows), 0 if markov is None else markov.embedding.shape[1], device=device, dtype=torch.float32)
    previous = upload(torch.tensor([row.feed.row.token_ids[-1] for row in rows], dtype=torch.int64), device)
    going = rows
    drawn: list[_Drawn] = []
    for j in range(max((row.feed.count for row in rows), default=0)):
        kept = [k for k, row in enumerate(going) if row.feed.count > j]
        at = torch.tensor([going[k].start + j for k in kept], dtype=torch.int64)
        going, previous, states = _only(kept, going, previous, states)
        state = hidden[upload(at, device)]
        trusted = None if confidence is None else confidence.of(previous, state)
        if trusted is not None and waits:
            kept = (trusted >= heads.threshold).nonzero()[:, 0].tolist()
            going, previous, states = _only(kept, going, previous, states)
            at, state, trusted = at[kept], state[kept], trusted[kept]
        if not going:
            break
        scores = logits[upload(at, device)].float()
        if markov is not None:
            added, states = markov.step(previous, state, states)
            scores = scores + added
        by_token = drawing.by_token(scores, columns)
        given = [row.feed.row for row in going]
        previous = drawing.choose(by_token, given, [len(row.token_ids) + j for row in given])
        sure = share_of(by_token, previous) if trusted is None else trusted
        drawn.append(_Drawn(going, previous, sure, by_token if drawing.return_probs else None))
    return _guesses(feeds, drawn, drawing, None if confidence is None else heads.threshold)


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


def _only(kept: Sequence[int], rows: Sequence[_Row], previous: Tensor, states: Tensor) -> tuple[Sequence[_Row], Tensor, Tensor]:
    if len(kept) == len(rows):
        return rows, previous, states
    places = upload(torch.tensor(kept, dtype=torch.int64), previous.device)
    return [rows[k] for k in kept], previous[places], states[places]


def _guesses(feeds: Sequence[Feed], drawn: Sequence[_Drawn], drawing: Drawing, threshold: float | None) -> Guesses:
    """threshold: of what is trusted; None = whatever was drawn is."""
    token_ids: list[list[int]] = [[] for _ in feeds]
    confidence: list[list[float]] = [[] for _ in feeds]
    probs: list[Tensor] = []
    if not drawn:
        return Guesses(token_ids, confidence=confidence)
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
            temperature = row.feed.row.draw.temperature if drawing.samples else 0.0
            probs.append(drawing.probs(temperature, torch.tensor(row.tokens, device=row.scores[0].device), torch.stack(row.scores), None))
    return Guesses(token_ids, confidence=confidence, probs=torch.cat(probs).cpu() if probs else None)
