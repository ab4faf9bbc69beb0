"""Log probabilities of a prompt's own tokens: the scores of a pass, and those of a request as they gather.

Of each place the asked number of best tokens is kept, in arrays; whole logits live for one pass only. Knows no queue and no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .logit_filters import best

MAX_LOGITS_BYTES = 64 * 2**20
"""Of whole logits that the prompts of one step may take together: a long chunk of a large vocabulary would take gigabytes."""

ROWS = 128
"""Scored at a time, for the same reason: on the way there are twice as many numbers as logits."""


@dataclass(frozen=True)
class Scores:
    """Log probabilities of n tokens, each among the whole vocabulary, from raw logits."""

    chosen: NDArray[np.float32]  # [n]
    ranks: NDArray[np.int32]  # [n], 1 = the best
    top_ids: NDArray[np.int32]  # [n, k], best first
    top: NDArray[np.float32]  # [n, k]

    @classmethod
    def of(cls, logits: Tensor, token_ids: Sequence[int], num_best: int) -> Scores:
        """Of token_ids [n] by logits [n, V], with the num_best best beside them. NaN in a row makes its scores NaN."""
        if len(logits) > ROWS:
            starts = range(0, len(logits), ROWS)
            parts = [cls.of(logits[start : start + ROWS], token_ids[start : start + ROWS], num_best) for start in starts]
            return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))
        scores = torch.log_softmax(logits, -1)
        chosen = scores.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
        ranks = (scores > chosen).sum(-1) + 1
        top, ids = best(scores, num_best)
        return cls(chosen[:, 0].cpu().numpy(), ranks.int().cpu().numpy(), ids.int().cpu().numpy(), top.cpu().numpy())

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.chosen).all())


class PromptLogprobs:
    """Those of one request, which grow as its prompt is computed. The first token has none: nothing comes before it."""

    def __init__(self, prompt_token_ids: Sequence[int], num_best: int) -> None:
        self.num_best = num_best
        self.token_ids = prompt_token_ids[1:]
        self.num_scored = 0
        self._parts: list[Scores] = []

    @property
    def complete(self) -> bool:
        return self.num_scored == len(self.token_ids)

    def extend(self, scores: Scores) -> None:
        self._parts.append(scores)
        self.num_scored += len(scores.chosen)
        assert self.num_scored <= len(self.token_ids), "a token of the prompt was scored twice"

    def __len__(self) -> int:
        return self.num_scored

    def __iter__(self) -> Iterator[tuple[int, float, int, list[tuple[int, float]]]]:
        """(token id, its logprob, its rank, the best tokens with theirs) of the prompt's second token, third, ..."""
        token_ids = iter(self.token_ids)
        for part in self._parts:
            best = (list(zip(*row, strict=True)) for row in zip(part.top_ids.tolist(), part.top.tolist(), strict=True))
            # The tokens last: a zip takes one more of those before the list that ends it.
            for logprob, rank, top, token in zip(part.chosen.tolist(), part.ranks.tolist(), best, token_ids, strict=False):
                yield token, logprob, rank, top
