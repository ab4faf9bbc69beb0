"""DSpark's two small heads behind a block (DeepSeek 2026): a Markov head lets a guess know the one before it, a confidence head
says how likely it will be accepted.

Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .block_heads import Block, Correction
from .block_parts import HeadParts


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
    reads_context: ClassVar[bool] = False

    def on(self, device: torch.device) -> Markov:
        if self.embedding.device == device:
            return self
        projection, bias = (None if x is None else x.to(device) for x in (self.projection, self.projection_bias))
        return replace(self, embedding=self.embedding.to(device), projection=projection, projection_bias=bias)

    def describe(self) -> str:
        return f"Markov head: {self.kind}"

    def begin(self, block: Block) -> _MarkovWalk:
        return _MarkovWalk(self, block)

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


class _MarkovWalk:
    def __init__(self, markov: Markov, block: Block) -> None:
        self._markov, self._block = markov, block
        self._states = torch.zeros(block.num_rows, markov.embedding.shape[1], dtype=torch.float32, device=block.logits.device)

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        added, self._states[rows] = self._markov.step(previous, self._block.hidden[at], self._states[rows])
        return self._block.logits[at].float() + added


@dataclass(frozen=True)
class Confidence:
    """sigmoid(proj [h; W1[p]]), or of h alone: the chance that a guess is accepted, said before it is drawn."""

    weight: Tensor  # [H] or [H + r]
    bias: float
    embedding: Tensor | None  # W1, if it is read

    def on(self, device: torch.device, correction: Correction | None) -> Confidence:
        """correction: the Markov head, whose embedding this one reads, too."""
        if self.weight.device == device:
            return self
        embedding = correction.embedding if self.embedding is not None and isinstance(correction, Markov) else None
        return replace(self, weight=self.weight.to(device), embedding=embedding)

    def of(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """[n] in [0, 1]."""
        read = hidden if self.embedding is None else torch.cat([hidden, self.embedding[previous].float()], -1)
        return (read @ self.weight + self.bias).sigmoid()


def read_markov(parts: HeadParts) -> Markov | None:
    """Its tensors were checked with the checkpoint."""
    draft, tensors = parts.draft, parts.tensors
    if draft.markov is None:
        return None
    embedding = tensors.take("markov_head.markov_w1.weight")
    name = {"vanilla": "", "gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}[draft.markov]
    return Markov(
        draft.markov,
        embedding.clone(),  # not a view of a file that might change
        parts.product("markov_head.markov_w2.weight", draft.head.rows, embedding.shape[1]),
        tensors.take(f"{name}.weight").to(torch.float32, copy=True) if name else None,
        tensors.take(f"{name}.bias").to(torch.float32, copy=True) if name and tensors.has(f"{name}.bias") else None,
    )


def read_confidence(parts: HeadParts, correction: Correction | None) -> Confidence:
    """Raises SpeculativeConfigError."""
    tensors, width = parts.tensors, int(parts.draft.hf_config.hidden_size)
    embedding = correction.embedding if isinstance(correction, Markov) else None
    weight = tensors.take("confidence_head.proj.weight", 1, -1)[0].to(torch.float32, copy=True)
    rank = 0 if embedding is None else embedding.shape[1]
    if len(weight) not in (width, width + rank):
        tensors.take("confidence_head.proj.weight", 1, width + rank)  # says what is wrong
    bias = float(tensors.take("confidence_head.proj.bias", 1)) if tensors.has("confidence_head.proj.bias") else 0.0
    return Confidence(weight, bias, None if len(weight) == width else embedding)
