"""DFlash 2's candidate selector: of each place's best guesses, the ones that go together (Inco AI and z-lab, August 2026).

The convolutions around its layers are ops of its program. Knows no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .block_heads import Block
from .block_parts import HeadParts

_MODULE = "candidate_selector"
_MOST = 1024  # candidates of a place: their rows are gathered in every step


@dataclass(frozen=True)
class Selector:
    """Candidates are the `top` best of a place; candidate c behind the guess p gets its score + <A[p] * (P h), B[c]>.

    h is the state behind the last norm. Nothing else can be guessed.
    """

    predecessors: Tensor  # A [rows, r]
    successors: Tensor  # B [rows, r]; rows are columns of the scores
    projection: Tensor  # P [r, H]
    top: int
    places: Tensor | None = None  # [target's vocabulary] int64, the row of A of each token; None = the token's own
    reads_context: ClassVar[bool] = False

    def on(self, device: torch.device) -> Selector:
        if self.projection.device == device:
            return self
        places = None if self.places is None else self.places.to(device)
        return replace(
            self,
            predecessors=self.predecessors.to(device),
            successors=self.successors.to(device),
            projection=self.projection.to(device),
            places=places,
        )

    def describe(self) -> str:
        return f"candidate selector: of each place's best {self.top}, rank {len(self.projection)}"

    def begin(self, block: Block) -> _Path:
        return _Path(self, block)


class _Path:
    def __init__(self, selector: Selector, block: Block) -> None:
        self._selector = selector
        self._columns = block.logits.shape[1]
        self._own, self._candidates = block.logits.float().topk(min(selector.top, self._columns), -1)
        self._projected = block.hidden @ selector.projection.T

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        selector, candidates = self._selector, self._candidates[at]
        before = previous if selector.places is None else selector.places[previous]
        context = selector.predecessors[before].float() * self._projected[at]
        edges = torch.einsum("nr,ncr->nc", context, selector.successors[candidates].float())
        scores = torch.full((len(at), self._columns), -torch.inf, dtype=torch.float32, device=at.device)
        return scores.scatter_(1, candidates, self._own[at] + edges)


def read_selector(parts: HeadParts) -> Selector:
    """Raises SpeculativeConfigError."""
    draft, tensors = parts.draft, parts.tensors
    width, columns = int(draft.hf_config.hidden_size), draft.head.rows
    projection = tensors.take(f"{_MODULE}.hidden_projection.weight", -1, width)
    successors = tensors.take(f"{_MODULE}.successor_codebook", columns, len(projection))
    predecessors = tensors.take(f"{_MODULE}.predecessor_codebook", columns, len(projection))
    top = draft.settings.count("selector_top_k", _MOST)
    # copies: a view of a file might change
    return Selector(predecessors.clone(), successors.clone(), projection.to(torch.float32, copy=True), top, parts.rows_of_tokens())
