"""What executors in plain Python have in common: all but the rule by which their networks say something."""

from typing import Generic, TypeVar

from torch import Tensor

from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.layout import HasNoStates, KVLayerSpec
from foretoken.kernels.weight_bank import WeightBank

Entry = TypeVar("Entry")


class PlainKV(Generic[Entry]):
    """An entry in each slot, which the network itself writes and reads."""

    def __init__(self, num_blocks: int, block_size: int, empty: Entry) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots: list[Entry] = [empty] * (num_blocks * block_size)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def move(self, src: Tensor, dst: Tensor) -> None:
        for slot, content in zip(dst.tolist(), [self.slots[s] for s in src.tolist()], strict=True):
            self.slots[slot] = content


class PlainExecutor(HasNoStates):
    """An `Executor` but for `vocab_size`, `allocate`, `kv_block_bytes` and `run`."""

    kv_layers = (KVLayerSpec(1, 1, 1),)
    max_model_len = 4096
    is_batch_invariant = True
    weight_bytes = 0
    token_ids: Tensor | None = None
    recurrent: tuple[str, int] | None = None
    bank = WeightBank()
    run_chain = run_chain_by_steps
