"""What the correction behind a block is made from: a checkpoint's tensors, and networks for its large products."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.batch_lists import KEPT_SHAPES, BatchMemory
from ..kernels.layout import FINAL, Executor, RaggedBatch
from ..kernels.program import Program
from ..kernels.started import StartingExecutor
from ..kernels.torch_executor import on_device
from .block_checkpoint import BlockDraft
from .block_program import embedding_program, product_program, table_program
from .draft_tensors import DraftTensors
from .guessing import single_tokens
from .last_state import RowNetwork
from .loading import TargetView


@dataclass(frozen=True)
class HeadParts:
    draft: BlockDraft
    tensors: DraftTensors
    target: TargetView
    bind: Callable[[Program], Executor]

    def product(self, weight: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """[n, columns] -> [n, rows] float32 by the weight [rows, columns] as a network of its own, where it computes."""
        network = RowNetwork(self.bind(product_program(weight, rows, columns)))
        return lambda x: network.final(x).float()

    def embedding(self) -> Callable[[Tensor], Tensor]:
        """Token ids [n] int64 -> [n, H] float32, rows of the target's own table as they are, whatever it multiplies them by, where the
        ids lie."""
        target = self.target
        return _OfTokens(self.bind(table_program(target.embedding, target.vocab_size, target.hidden_size)))

    def embedded_product(self, weight: str, rows: int) -> Callable[[Tensor], Tensor]:
        """token ids [n] -> [n, rows] float32: their embeddings, as the block has them, by the weight [rows, H], where they lie.

        An embedding that is not the target's is held a second time for this.
        """
        return _OfTokens(self.bind(embedding_program(self.draft, weight, rows)))

    def rows_of_tokens(self) -> Tensor | None:
        """[target's vocabulary] int64: the row of each token in tables over the drafter's own vocabulary; None where that is the target's.

        Tokens that it lacks have the row of the next lower one, as `speculators` trains it.
        """
        if self.draft.token_ids is None:
            return None
        known, rows = self.draft.token_ids.sort()
        lower = torch.searchsorted(known, torch.arange(self.target.vocab_size), right=True) - 1
        return rows[lower.clamp_min(0)]


class _OfTokens:
    """A network from token ids to states. Ids that lie on a device stay there."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kv = executor.allocate(1, 16)  # it has no layers that would write there
        self._memory = BatchMemory()
        self._there: dict[int, RaggedBatch] = {}  # by their number: but for the ids all of them are alike

    def __call__(self, tokens: Tensor) -> Tensor:
        executor, batch = self._executor, self._batch(tokens)
        if isinstance(executor, StartingExecutor):
            return executor.start(batch, self._kv, (FINAL,)).hidden[FINAL].float()
        return executor.run(batch, self._kv, (FINAL,)).hidden[FINAL].float()

    def _batch(self, tokens: Tensor) -> RaggedBatch:
        if tokens.is_cpu:
            return self._memory.batch(single_tokens(tokens.tolist(), has_logits=False))
        count = len(tokens)
        if count not in self._there:
            if len(self._there) == KEPT_SHAPES:
                self._there.clear()
            self._there[count] = on_device(single_tokens([0] * count, has_logits=False).batch(), tokens.device)
        return replace(self._there[count], token_ids=tokens)
