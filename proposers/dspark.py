"""DSpark's two small heads behind a block (DeepSeek 2026): a Markov head lets a guess know the one before it, a confidence head
says how likely it will be accepted.

Scores of the whole block are there already; guesses are drawn from them one after the other. Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels.noise import keys, sample
from .drafting import Feed
from .guessing import Drawing, Guesses


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


def draw(
    feeds: Sequence[Feed], logits: Tensor, hidden: Tensor, drawing: Drawing, columns: Tensor | None, heads: Heads
) -> Guesses:
    """Guesses of all feeds, left to right. logits [sum of counts, V], hidden [sum of counts, H]; columns: `Executor.token_ids`."""
    rows = [_Row(i, feed) for i, feed in enumerate(feeds) if feed.count]
    start = 0
    for row in rows:
        row.start, start = start, start + row.feed.count
    markov, confidence = heads.markov, heads.confidence
    states = torch.zeros(len(rows), 0 if markov is None else markov.embedding.shape[1])
    going = list(range(len(rows)))
    for j in range(max((row.feed.count for row in rows), default=0)):
        going = [n for n in going if rows[n].feed.count > j]
        at = torch.tensor([rows[n].start + j for n in going], dtype=torch.int64)
        previous = torch.tensor([rows[n].tokens[-1] if j else rows[n].feed.row.token_ids[-1] for n in going], dtype=torch.int64)
        if confidence is not None and going:
            trusted = confidence.of(previous, hidden[at])
            for n, chance in zip(going, trusted.tolist(), strict=True):
                rows[n].trusted.append(chance)
            kept = [k for k, chance in enumerate(trusted.tolist()) if chance >= heads.threshold]
            going, at, previous = [going[k] for k in kept], at[kept], previous[kept]
        if not going:
            break
        scores = logits[at].float()
        if markov is not None:
            added, states[going] = markov.step(previous, hidden[at], states[going])
            scores = scores + added
        by_token = drawing.by_token(scores, columns)
        tokens = _choose(by_token, [rows[n].feed for n in going], j, drawing)
        likely = torch.softmax(by_token, -1).gather(1, tokens[:, None])[:, 0].clamp(max=1.0)
        for k, n in enumerate(going):
            rows[n].tokens.append(int(tokens[k]))
            rows[n].likely.append(float(likely[k]))
            if drawing.return_probs:
                rows[n].scores.append(by_token[k])
    return _guesses(feeds, rows, drawing, confidence is not None)


class _Row:
    """One feed's guesses so far."""

    def __init__(self, index: int, feed: Feed) -> None:
        self.index, self.feed, self.start = index, feed, 0
        self.tokens: list[int] = []
        self.likely: list[float] = []  # each token's own probability
        self.trusted: list[float] = []  # by the confidence head
        self.scores: list[Tensor] = []


def _choose(scores: Tensor, feeds: Sequence[Feed], j: int, drawing: Drawing) -> Tensor:
    """Guess j of each feed from scores [n, vocab_size]: the best, or drawn at the row's temperature."""
    tokens = scores.argmax(-1)
    hot = [k for k, feed in enumerate(feeds) if drawing.samples and feed.row.draw.temperature]
    if hot:
        rows = [feeds[k].row for k in hot]
        under = keys([drawing.stream(row) for row in rows], [len(row.token_ids) + j for row in rows])
        temperatures = torch.tensor([row.draw.temperature for row in rows])[:, None]
        tokens[hot] = sample(scores[hot] / temperatures, under)
    return tokens


def _guesses(feeds: Sequence[Feed], rows: Sequence[_Row], drawing: Drawing, is_trusted: bool) -> Guesses:
    token_ids: list[list[int]] = [[] for _ in feeds]
    confidence: list[list[float]] = [[] for _ in feeds]
    probs: list[Tensor] = []
    for row in rows:
        token_ids[row.index] = row.tokens
        confidence[row.index] = row.trusted[: len(row.tokens)] if is_trusted else row.likely
        if row.scores:
            temperature = row.feed.row.draw.temperature if drawing.samples else 0.0
            probs.append(drawing.probs(temperature, torch.tensor(row.tokens), torch.stack(row.scores), None))
    return Guesses(token_ids, confidence=confidence, probs=torch.cat(probs) if probs else None)
