"""What the correction behind a block is made from: a checkpoint's tensors, and networks for its large products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.layout import FINAL, Executor
from ..kernels.program import Program
from .block_checkpoint import BlockDraft
from .block_program import product_program, table_program
from .draft_tensors import DraftTensors
from .guessing import single_tokens
from .last_state import Network
from .loading import TargetView


@dataclass(frozen=True)
class HeadParts:
    draft: BlockDraft
    tensors: DraftTensors
    target: TargetView
    bind: Callable[[Program], Executor]

    def product(self, weight: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """[n, columns] -> [n, rows] float32 by the weight [rows, columns] as a network of its own, where it computes."""
        network = Network(self.bind(product_program(weight, rows, columns)))
        return lambda x: network.final(x).float()

    def embedding(self) -> Callable[[Tensor], Tensor]:
        """Token ids [n] int64 -> [n, H] float32, rows of the target's own table as they are, whatever it multiplies them by."""
        target = self.target
        executor = self.bind(table_program(target.embedding, target.vocab_size, target.hidden_size))
        kv = executor.allocate(1, 16)  # it has no layers that would write there

        def embed(token_ids: Tensor) -> Tensor:
            # A batch is made on the host: on a device this waits for the ids, once a block.
            batch = single_tokens(token_ids.tolist(), has_logits=False).batch()
            return executor.run(batch, kv, (FINAL,)).hidden[FINAL].float()

        return embed

    def rows_of_tokens(self) -> Tensor | None:
        """[target's vocabulary] int64: the row of each token in tables over the drafter's own vocabulary; None where that is the target's.

        Tokens that it lacks have the row of the next lower one, as `speculators` trains it.
        """
        if self.draft.token_ids is None:
            return None
        known, rows = self.draft.token_ids.sort()
        lower = torch.searchsorted(known, torch.arange(self.target.vocab_size), right=True) - 1
        return rows[lower.clamp_min(0)]
