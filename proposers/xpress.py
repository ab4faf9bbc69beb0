"""XPress's refiner: scores a whole block again in a few passes, each from the tokens that the one before chose (UIUC SSAIL 2026).

These are Jacobi's passes to what would be said one after the other. Knows no checkpoint and no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..kernels.upload import upload
from .block_heads import Block
from .block_parts import HeadParts
from .config_entry import SpeculativeConfigError
from .dflash2 import Selector, read_selector

_PASSES = 6  # where a config says nothing

# As UIUC publishes it, and as `speculators` does.
_NAMES = {
    "w1": ("xpress_head.w1.weight", "refiner_head.token_embed.weight"),
    "down_h": ("xpress_head.down_h.weight", "refiner_head.down_h.weight"),
    "down_g": ("xpress_head.down_g.weight", "refiner_head.down_g.weight"),
    "in": ("xpress_head.in_proj.weight", "refiner_head.in_proj.weight"),
    "mix": ("xpress_head.mix.L", "refiner_head.mix_l"),
    "gate": ("xpress_head.mlp.gate_proj.weight", "refiner_head.mlp_gate.weight"),
    "up": ("xpress_head.mlp.up_proj.weight", "refiner_head.mlp_up.weight"),
    "down": ("xpress_head.mlp.down_proj.weight", "refiner_head.mlp_down.weight"),
    "w2": ("xpress_head.w2.weight", "refiner_head.readout.weight"),
}


@dataclass(frozen=True)
class XPress:
    """Adds W2 y to the scores of each place k of a block, where

    x_k = local h_k + whole mean(h) + enter W1[p_k],  m_k = sum over j <= k of mix[:, k, j] * x_j,
    y_k = m_k + down (silu(gate m_k) * up m_k).

    h is the state behind the last norm, p_k the token before the one that place k is for. The last known token's own place belongs to
    the block whether it has a guess or not. The first pass has the best guess of each place (or those of `start`) before the others,
    each later one the best by the pass before. So all final scores are there before anything is drawn: what is drawn from them is
    drawn for each place by itself.
    """

    embedding: Tensor  # W1 [target's vocabulary, r]
    enter: Tensor  # [r, r]
    local: Tensor  # [r, H]
    whole: Tensor  # [r, H]
    mix: Tensor  # [r, places, places], nothing above the diagonal
    gate: Tensor  # [m, r]
    up: Tensor  # [m, r]
    down: Tensor  # [r, m]
    bias: Callable[[Tensor], Tensor]  # W2: [n, r] -> [n, columns of the scores]
    passes: int
    start: Selector | None = None
    token_ids: Tensor | None = None  # [columns of the scores] int64; None = the columns themselves
    reads_context: ClassVar[bool] = False

    def on(self, device: torch.device) -> XPress:
        if self.embedding.device == device:
            return self
        tensors = {field.name: value.to(device) for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}
        return replace(self, **tensors, start=None if self.start is None else self.start.on(device))

    def describe(self) -> str:
        begins = "" if self.start is None else f", begins with a {self.start.describe()}"
        return f"refiner: {self.passes} passes over a block, rank {len(self.enter)}{begins}"

    def begin(self, block: Block) -> _Refined:
        return _Refined(self._refined(block))

    def _refined(self, block: Block) -> Tensor:
        """[entries, columns] float32."""
        own = block.logits.float()
        layout = _Layout.of(block)
        known = block.tokens[:, None]
        if block.anchors is not None:
            assert block.before is not None
            known = torch.stack([block.before, block.tokens], 1)
        fixed = self._of_states(block, layout)
        chosen = self._best(own) if self.start is None else self._walked(self.start, block)
        scores = own
        for _ in range(min(self.passes, max(block.counts))):  # each pass is the last for one place more
            previous = torch.cat([known, chosen[layout.guesses][:, :-1]], 1)
            refined = self._mixed(fixed + self.embedding[previous].float() @ self.enter.T)
            scores = own + self.bias(refined.flatten(0, 1)[layout.entries])
            before, chosen = chosen, self._best(scores)
            if chosen.is_cpu and torch.equal(before, chosen):  # elsewhere to wait for this takes longer than the passes
                break
        return scores

    def _of_states(self, block: Block, layout: _Layout) -> Tensor:
        """[rows, places, r] what the states say to each place, which no pass changes."""
        states = block.hidden if block.anchors is None else torch.cat([block.hidden, block.anchors])
        whole = (states @ self.whole.T)[layout.places] * layout.is_there
        return (states @ self.local.T)[layout.places] + whole.sum(1, keepdim=True) / layout.is_there.sum(1, keepdim=True)

    def _mixed(self, x: Tensor) -> Tensor:
        """[rows, places, r] -> [rows, places, r]."""
        places = x.shape[1]
        m = torch.einsum("ckj,njc->nkc", self.mix[:, :places, :places], x)
        return m + (silu(m @ self.gate.T) * (m @ self.up.T)) @ self.down.T

    def _best(self, scores: Tensor) -> Tensor:
        columns = scores.argmax(-1)
        return columns if self.token_ids is None else self.token_ids[columns]

    def _walked(self, start: Selector, block: Block) -> Tensor:
        """[entries] tokens that a selector goes over, the best behind the best."""
        walk, previous = start.begin(block), block.tokens
        chosen = torch.zeros(len(block.hidden), dtype=torch.int64, device=block.hidden.device)
        for step in range(max(block.counts)):
            rows = [i for i, count in enumerate(block.counts) if count > step]
            going = upload(torch.tensor([rows, [block.starts[i] + step for i in rows]]), chosen.device)
            chosen[going[1]] = self._best(walk.scores(going[0], going[1], step, previous[going[0]]))
            previous = previous.index_copy(0, going[0], chosen[going[1]])
        return chosen


@dataclass(frozen=True)
class _Layout:
    """Blocks of different lengths as one array of rows; what stands behind a row's end is never asked for.

    Counts 2 and 3 without anchors -> places [[0, 1, 1], [2, 3, 4]], entries [0, 1, 3, 4, 5].
    """

    places: Tensor  # [rows, places] rows of [states of entries; states of anchors]
    guesses: Tensor  # [rows, most guesses] entries
    entries: Tensor  # [entries] places of [rows, places], flat
    is_there: Tensor  # [rows, places, 1] float32, 0 behind a row's end

    @classmethod
    def of(cls, block: Block) -> _Layout:
        lead, most, total = int(block.anchors is not None), max(block.counts), len(block.hidden)
        width = lead + most
        guesses = [[start + min(j, count - 1) for j in range(most)] for start, count in zip(block.starts, block.counts, strict=True)]
        places = [[total + i] * lead + row for i, row in enumerate(guesses)]
        # A row's entries follow one another, and rows follow one another.
        entries = [i * width + lead + j for i, count in enumerate(block.counts) for j in range(count)]
        there = [[1] * (lead + count) + [0] * (most - count) for count in block.counts]
        flat = [number for rows in (places, there) for row in rows for number in row] + entries
        numbers = upload(torch.tensor(flat, dtype=torch.int64), block.hidden.device)  # one copy for all
        size = block.num_rows * width
        moved = numbers[:size].view(-1, width)
        return cls(moved, moved[:, lead:], numbers[2 * size :], numbers[size : 2 * size].view(-1, width, 1).float())


@dataclass(frozen=True)
class _Refined:
    """Implements `Walk`."""

    logits: Tensor

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        return self.logits[at]


def read_xpress(parts: HeadParts) -> XPress:
    """Raises SpeculativeConfigError."""
    draft, tensors = parts.draft, parts.tensors
    settings, width, places = draft.settings, int(draft.hf_config.hidden_size), draft.block_size
    names = {part: both[any("refiner_head." in name for name in tensors.checkpoint.names)] for part, both in _NAMES.items()}
    embedding = tensors.take(names["w1"], -1, -1)
    rank = embedding.shape[1]
    if len(embedding) < parts.target.vocab_size:
        raise SpeculativeConfigError(
            f"the refiner in {settings.folder} knows {len(embedding)} tokens, the target has {parts.target.vocab_size}: take the drafter "
            "that was trained for this target"
        )
    if settings.find("xpress_mixer_format") not in (None, "raw"):
        raise SpeculativeConfigError(
            f"{settings.folder}/config.json: 'xpress_mixer_format' is {settings.find('xpress_mixer_format')!r}, but mixers are read as "
            "they were trained: take the checkpoint that says 'raw' or nothing"
        )
    enters = tensors.take(names["in"], rank, 3 * rank).float()
    local, whole = (tensors.take(names[part], rank, width).float() for part in ("down_h", "down_g"))
    gate = tensors.take(names["gate"], -1, rank).to(torch.float32, copy=True)
    has_selector = any("candidate_selector." in name for name in tensors.checkpoint.names)
    return XPress(
        embedding.clone(),  # a view of a file might change
        enters[:, 2 * rank :].contiguous(),
        enters[:, :rank] @ local,
        enters[:, rank : 2 * rank] @ whole,
        # files have it without what a place keeps of itself, and with numbers above the diagonal that mean nothing
        tensors.take(names["mix"], rank, places, places).float().tril() + torch.eye(places, dtype=torch.float32),
        gate,
        tensors.take(names["up"], len(gate), rank).to(torch.float32, copy=True),
        tensors.take(names["down"], rank, len(gate)).to(torch.float32, copy=True),
        parts.product(names["w2"], draft.head.rows, rank),
        _passes(parts),
        read_selector(parts) if has_selector and settings.flag("xpress_selector", True) else None,
        draft.token_ids,
    )


def _passes(parts: HeadParts) -> int:
    settings = parts.draft.settings
    for key in ("xpress_num_passes", "num_jacobi_passes"):
        passes = settings.find(key)
        if passes is not None and (type(passes) is not int or passes < 1):
            raise SpeculativeConfigError(f"{settings.folder}/config.json: {key!r} must be a positive integer, not {passes!r}")
        if passes is not None:
            return passes
    return _PASSES
