"""Embedding and head of a drafter: its own, or the target's where it has none or the very same numbers.

Owns the choice between the two. Knows no layers.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.stored_tensors import read_tensors, text_tensors
from .checkpoint import check_token_map
from .config_entry import SpeculativeConfigError
from .draft_tensors import DraftTensors
from .loading import TargetView


@dataclass(frozen=True)
class Table:
    """The embedding or the head of a drafter."""

    weight: str
    rows: int
    is_shared: bool  # the target's own
    scale: float = 1.0  # of the embeddings, or of the logits
    softcap: float | None = None


def embedding_of(tensors: DraftTensors, width: int, target: TargetView, keep_own: bool) -> Table:
    """For a drafter of this width. What the file lacks is scaled as the target scales it; what it has is meant as it is.

    keep_own: even if the target has the same numbers, because it may hold them in a narrower format.
    """
    name = "embed_tokens.weight"
    if not tensors.has(name):
        _require_width_of_target(name, width, tensors.checkpoint.folder, target)
        return Table(target.embedding, target.vocab_size, True, target.embed_scale)
    own = tensors.take(name, -1, width)
    if not keep_own and _is_in_target(own, target.embedding, target):
        return Table(target.embedding, target.vocab_size, True)
    return Table(name, len(own), False)


def head_of(
    tensors: DraftTensors, width: int, target: TargetView, embedding: Table, draft_vocab_size: int | None, is_tied: bool
) -> tuple[Table, Tensor | None]:
    """The head, and [rows] int64 the token ids of its rows where they are a vocabulary of the drafter's own."""
    name, folder = "lm_head.weight", tensors.checkpoint.folder
    if not tensors.has("d2t"):
        if draft_vocab_size not in (None, target.vocab_size):
            raise SpeculativeConfigError(f"{folder} has {draft_vocab_size} tokens of its own, but no d2t that says which they are")
        if tensors.has(name):
            same = _is_in_target(tensors.take(name, target.vocab_size, width), target.head, target)
            return Table(target.head if same else name, target.vocab_size, same), None
        if is_tied and tensors.has("embed_tokens.weight"):
            return Table(embedding.weight, embedding.rows, embedding.is_shared), None
        _require_width_of_target(name, width, tensors.checkpoint.folder, target)
        return Table(target.head, target.vocab_size, True, target.logits_scale, target.logits_softcap), None
    rows = len(tensors.take(name, -1, width))
    return Table(name, rows, False), check_token_map("d2t", tensors.take("d2t", rows), target.vocab_size)


def _require_width_of_target(name: str, width: int, folder: Path, target: TargetView) -> None:
    """The folder has no such tensor. Raises SpeculativeConfigError unless the target's can stand in for it."""
    if width != target.hidden_size:
        raise SpeculativeConfigError(
            f"{folder} has no {name}, and the target's cannot be used: it is {target.hidden_size} wide, not {width}"
        )


def _is_in_target(own: Tensor, name: str, target: TargetView) -> bool:
    """Whether the target's file holds the same numbers: published drafters often bring a copy, which need not be kept twice."""
    tensors = text_tensors(read_tensors(sorted(target.folder.glob("*.safetensors"))))
    if name not in tensors:
        return False
    theirs = tensors[name]
    return theirs.shape == own.shape and theirs.dtype == own.dtype and torch.equal(theirs, own)
