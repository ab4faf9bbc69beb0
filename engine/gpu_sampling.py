"""The sampler's choice on a GPU: places of requests that leave the logits as they are, described by tensors, in two launches.

Follows sampler.py with the same tokens up to rounding; one copy there and one back. Knows no edits of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.noise import keys
from ..kernels.triton.sampling import Places, choose
from .logit_filters import Filters


def choose_tokens(
    logits: Tensor,
    logits_rows: Sequence[int],
    streams: Sequence[int],
    positions: Sequence[int],
    filters: Sequence[Filters | None],
    row_starts: Sequence[int],
) -> list[int]:
    """One token for each of N places of logits [M, V]; -1 = NaN or no finite best. filters None = greedy.

    row_starts [R + 1]: the first place of each request. What drafts hold is not looked at: every place gets its token.
    """
    floats = torch.tensor(
        [
            [0.0 if f is None else f.temperature for f in filters],
            [1.0 if f is None else f.top_p for f in filters],
            [-torch.inf if f is None else f.log_min_p for f in filters],
        ],
        dtype=torch.float64,
    )
    integers = torch.stack(
        [
            torch.tensor(logits_rows, dtype=torch.int64),
            keys(streams, positions),
            torch.tensor([logits.shape[1] if f is None else f.top_k for f in filters], dtype=torch.int64),
        ]
    )
    integers, floats = _moved(integers, logits), _moved(floats, logits)
    nobody = integers.new_full((len(logits_rows),), -1, dtype=torch.int32)
    places = Places(
        logits_rows=integers[0],
        keys=integers[1],
        temperature=floats[0].float(),
        top_k=integers[2].int(),
        top_p=floats[1].contiguous(),
        log_min_p=floats[2].float(),
        parents=nobody,
        guesses=nobody,
        row_starts=_moved(torch.tensor(row_starts, dtype=torch.int32), logits),
    )
    return choose(logits, places).tolist()


def _moved(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
