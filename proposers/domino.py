"""Domino's correction: a recurrent network that reads the guesses so far (Domino, SpecForge 2026).

Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from .block_heads import Block
from .block_parts import HeadParts
from .config_entry import SpeculativeConfigError

_READ, _KEPT = "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"
_MIXED, _SCORES = "embed_proj.0.weight", "embed_proj.2.weight"


@dataclass(frozen=True)
class Domino:
    """Adds W2 silu(W1 [h; s]) to the scores of guess number `first` (from 0 on) and those behind it.

    h is the state behind the last norm. s is that of a GRU without biases that starts at 0 and has read the embeddings of the last
    known token and of all guesses so far: the same wherever a block has its first guess.
    """

    read: Callable[[Tensor], Tensor]  # tokens [n] -> [n, 3 g], what their embeddings say to the reset gate, the update gate, the candidate
    kept: Callable[[Tensor], Tensor]  # [n, g] -> [n, 3 g], what s says to them
    of_hidden: Tensor  # W1's columns for h [e, H]
    of_state: Tensor  # and for s [e, g]
    bias: Callable[[Tensor], Tensor]  # W2: [n, e] -> [n, columns of the scores]
    first: int
    reads_context: ClassVar[bool] = False

    def on(self, device: torch.device) -> Domino:
        if self.of_hidden.device == device:
            return self
        return replace(self, of_hidden=self.of_hidden.to(device), of_state=self.of_state.to(device))

    def describe(self) -> str:
        return f"recurrent correction from guess {self.first + 1} on: a state of {self.of_state.shape[1]}"

    def begin(self, block: Block) -> _DominoWalk:
        return _DominoWalk(self, block)

    def step(self, previous: Tensor, state: Tensor) -> Tensor:
        """The GRU's next state [n, g] behind tokens `previous` [n]; state [n, g]."""
        reset, update, candidate = self.read(previous).chunk(3, -1)
        kept_reset, kept_update, kept = self.kept(state).chunk(3, -1)
        update = (update + kept_update).sigmoid()
        return (1 - update) * (candidate + (reset + kept_reset).sigmoid() * kept).tanh() + update * state


class _DominoWalk:
    def __init__(self, domino: Domino, block: Block) -> None:
        self._domino, self._logits = domino, block.logits
        self._states = torch.zeros(block.num_rows, domino.of_state.shape[1], dtype=torch.float32, device=block.logits.device)
        self._mixed = block.hidden @ domino.of_hidden.T

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        domino, scores = self._domino, self._logits[at].float()
        state = domino.step(previous, self._states[rows])  # even where nothing is added yet: a later one has read everything
        self._states[rows] = state
        return scores if step < domino.first else scores + domino.bias(silu(self._mixed[at] + state @ domino.of_state.T))


def read_domino(parts: HeadParts) -> Domino:
    """Raises SpeculativeConfigError."""
    draft, tensors = parts.draft, parts.tensors
    width = int(draft.hf_config.hidden_size)
    known = {name.rpartition(".")[2] for name in (_READ, _KEPT)}
    more = sorted(name for name in tensors.checkpoint.names if "prefix_gru." in name and name.rpartition(".")[2] not in known)
    if more:
        raise SpeculativeConfigError(
            f"{draft.settings.folder} has {more[0]}, but a Domino's recurrent network has one layer without biases here: take one that has"
        )
    size = tensors.take(_KEPT, -1, -1).shape[1]
    tensors.take(_KEPT, 3 * size, size)
    tensors.take(_READ, 3 * size, width)
    mixed = tensors.take(_MIXED, -1, width + size).float()
    tensors.take(_SCORES, draft.head.rows, len(mixed))
    return Domino(
        parts.embedded_product(_READ, 3 * size),
        parts.product(_KEPT, 3 * size, size),
        mixed[:, :width].contiguous(),
        mixed[:, width:].contiguous(),
        parts.product(_SCORES, draft.head.rows, len(mixed)),
        _first(parts),
    )


def _first(parts: HeadParts) -> int:
    """The first guess that is corrected. What `speculators` leaves out is 1, elsewhere it is 0."""
    settings = parts.draft.settings
    first = settings.find("pure_draft_prefix_len")
    if first is None:
        return int(settings.layout == "speculators")
    if type(first) is not int or not 0 <= first < parts.draft.max_tokens:
        raise SpeculativeConfigError(
            f"{settings.folder}/config.json: 'pure_draft_prefix_len' must be an integer from 0 to {parts.draft.max_tokens - 1}, below "
            f"the guesses of a block, not {first!r}"
        )
    return first
