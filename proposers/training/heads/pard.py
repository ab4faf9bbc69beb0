"""PARD in training: a draft model learns to guess several tokens in one pass, a mask token standing for each it does not know yet.

Behind a token stand up to K - 1 masks; mask d sees the text up to that token and the masks before it, and guesses the token d + 1
places on (https://arxiv.org/abs/2504.18583). Far guesses are learned behind fewer tokens (conditional drop, section 3.3): a mask is only
kept where all masks before it are.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..block_attention import TEXT_AND_BLOCKS, Blocks
from ..cross_entropy import linear_cross_entropy
from ..frozen import FrozenTarget, attends_to_all, product_type
from ..loop import Losses
from ..packing import Packed
from .base import Head


@dataclass(frozen=True)
class PardSettings:
    """The published numbers; `draft` is a folder of a trained draft model with the target's vocabulary."""

    draft: str | Path
    num_tokens: int = 8              # K: guesses of one pass, the ordinary next token among them
    retention: float = 0.7           # guess d is learned behind a share retention ** (d - 1) of the tokens,
    min_retention: float = 0.2       # but no smaller one than this


class Pard(Head):
    """The whole draft model, its embedding one row longer: the mask's, which begins as the mean of all."""

    def __init__(self, target: FrozenTarget, settings: PardSettings):
        """Raises ValueError if the draft has fewer tokens than the target, or attention of another kind."""
        super().__init__(target)
        self.settings = settings
        model: Any = AutoModelForCausalLM.from_pretrained(settings.draft, dtype=torch.float32, attn_implementation=TEXT_AND_BLOCKS)
        if not attends_to_all(model):
            raise ValueError(f"pard needs a draft whose layers all attend to the whole text: those of {settings.draft} do not")
        self.mask_token: int = model.config.vocab_size
        if self.mask_token < target.config.vocab_size:
            raise ValueError(f"{settings.draft} has {self.mask_token} tokens, the target has {target.config.vocab_size}")
        model.resize_token_embeddings(self.mask_token + 1, mean_resizing=False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.data[self.mask_token] = table.weight.data[: self.mask_token].mean(0)
        model.config.pard_token = self.mask_token
        self.model: Any = model

    def forward(self, batch: Packed, blocks: Blocks) -> Tensor:
        """States behind the final norm, [N + R, hidden], of the text's tokens and of all masks."""
        masks = torch.full_like(blocks.numbers, self.mask_token)
        token_ids, positions = torch.cat([batch.token_ids, masks]), torch.cat([batch.positions, blocks.positions])
        output = self.model.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, blocks=blocks)
        return output.last_hidden_state[0]

    def masks(self, batch: Packed) -> Blocks:
        return slots_behind(batch, self.settings.num_tokens, self.settings.retention, self.settings.min_retention)

    def loss(self, batch: Packed) -> Losses:
        blocks = self.masks(batch)
        hidden = self(batch, blocks)
        of_text, of_masks = batch.ahead(1), blocks.ahead(1)
        labels, weights = (torch.cat(pair) for pair in zip(of_text, of_masks, strict=True))
        depths = torch.cat([torch.zeros_like(batch.token_ids), 1 + blocks.offsets])
        rows = weights.nonzero()[:, 0]
        head = self.model.get_output_embeddings().weight
        total, right = linear_cross_entropy(hidden[rows].to(product_type(hidden)), head, labels[rows], weights[rows])
        found, tried = (
            torch.zeros(self.settings.num_tokens).index_add_(0, depths[rows].cpu(), x.cpu()).tolist() for x in (right, weights[rows]))
        metrics = {f"accuracy_{depth}": pair for depth, pair in enumerate(zip(found, tried, strict=True), 1)}
        return Losses(total, float(len(rows)), {"loss": (float(total.detach()), float(len(rows))), **metrics})

    def export(self, folder: Path) -> None:
        """A transformers model with `pard_token` in its config. The tokenizer is the draft's, unchanged: the caller saves it here."""
        copy.deepcopy(self.model).bfloat16().save_pretrained(folder)


def slots_behind(batch: Packed, num_tokens: int, retention: float, min_retention: float) -> Blocks:
    """Up to num_tokens - 1 slots behind every token whose next but one is learned, as many as chance leaves it and the document has
    tokens for. Slot d is kept behind a share retention ** d of the tokens, or min_retention."""
    kept = (retention ** torch.arange(1, num_tokens)).clamp_min(min_retention)
    chance = torch.rand(len(batch.token_ids), generator=torch.Generator().manual_seed(batch.number))
    lengths = (chance[:, None] < kept).sum(1).to(batch.token_ids.device)
    starts = (batch.ahead(2)[1] * lengths).nonzero()[:, 0]
    ends = torch.tensor(batch.bounds, device=starts.device)
    room = ends[torch.searchsorted(ends, starts, right=True)] - 2 - starts
    return Blocks(batch, starts + 1, lengths[starts].minimum(room), causal=True)
