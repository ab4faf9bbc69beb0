"""How much of a GPU's memory the KV caches get: what is left of its share after weights, a profiled step and graphs.

Owns the sum and the refusal when it does not come out. Knows no cache layout and no block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels.graphs import GraphExecutor
from ..kernels.layout import RaggedBatch, StateRoom
from .config import SchedulerConfig
from .errors import ConfigError

GRAPH_BYTES = 256 * 2**20
"""Set aside for captured graphs beside their scores: their other buffers and what the driver keeps for each."""

PROFILED_BLOCKS = 8
"""Blocks of the small cache that the profiled step runs over, which has few states too. Its tokens are padding: they write and read
none."""


CONTEXT_BYTES = 512 * 2**20
"""What a process's context takes, its kernels too. It cannot be told from what other processes have."""


RESERVE_BYTES = 2**30
"""Left free where other processes, not the share, say where memory ends."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    device: str  # its name
    total: int
    utilization: float  # the share of the total that this process may use
    free: int  # nobody's, with the weights in place
    weights: int  # of the target and its drafters, and whatever else stands already
    step: int  # that the largest step needs beyond them
    graphs: int

    @property
    def for_cache(self) -> int:
        """The rest of the share; less where other processes have that already."""
        return min(self._left_of_share, self._left_by_others) - self.step - self.graphs

    @property
    def _left_of_share(self) -> int:
        return int(self.total * self.utilization) - CONTEXT_BYTES - self.weights

    @property
    def _left_by_others(self) -> int:
        return self.free - RESERVE_BYTES

    def require(self, sequence_bytes: int, tokens: int) -> int:
        """Bytes for the caches. Raises ConfigError if not even one sequence of so many tokens fits."""
        if self.for_cache < sequence_bytes:
            raise ConfigError(
                f"{self.device}: {_gb(max(self.for_cache, 0))} are left for the KV cache, but one sequence of {tokens:,} tokens needs "
                f"{_gb(sequence_bytes)}: {self.describe()}; raise gpu_memory_utilization, lower max_model_len or "
                "max_num_batched_tokens, or use kv_cache_dtype fp8, or quantization fp8 or int4"
            )
        return self.for_cache

    def describe(self) -> str:
        """`126.9 GB (0.90 of 141.0 GB) less 0.5 GB context, 16.1 GB weights, 1.2 GB for a step, 0.3 GB for graphs`."""
        others = f"; other processes leave {_gb(self.free)} of it" if self._left_by_others < self._left_of_share else ""
        return (
            f"{_gb(int(self.total * self.utilization))} ({self.utilization:.2f} of {_gb(self.total)}) less {_gb(CONTEXT_BYTES)} context, "
            f"{_gb(self.weights)} weights, {_gb(self.step)} for a step, {_gb(self.graphs)} for graphs{others}"
        )


def measure(device: torch.device, utilization: float, run_largest_step: Callable[[], None], graphs: int) -> GpuMemory:
    """What stands on the device now, and what a step takes on top. The networks must be loaded, caches not yet allocated.

    graphs: as of graph_bytes.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    from ..kernels.triton.attention import SCRATCH_BYTES  # Triton is there only where torch is built for GPUs

    # Its one row has no context, so that attention had nothing to share out.
    step = torch.cuda.max_memory_allocated(device) - before + SCRATCH_BYTES
    torch.cuda.empty_cache()
    return GpuMemory(torch.cuda.get_device_name(device), total, utilization, free, before, step, graphs)


def graph_bytes(executors: Sequence[GraphExecutor], scheduler: SchedulerConfig) -> int:
    """What these networks' graphs will keep: mostly the scores of the largest pass, once for the graphs and once for who reads them."""
    most = scheduler.max_num_seqs + scheduler.max_draft_tokens_per_step
    scoring = [executor for executor in executors if executor.program.logits]
    return GRAPH_BYTES + sum(2 * max(e.ladder.below(most)) * e.vocab_size * e.network.dtype.itemsize for e in scoring)


def run_largest_step(executors: Sequence[GraphExecutor], scheduler: SchedulerConfig, block_size: int) -> None:
    """One pass of each network over as many tokens as a step may have, with whole scores for as many as may want them."""
    for executor in executors:
        program = executor.program
        tokens = min(scheduler.max_num_batched_tokens, executor.max_model_len)
        wanted = min(tokens, scheduler.max_num_seqs + scheduler.max_draft_tokens_per_step) if program.logits else 0
        kv = executor.allocate(PROFILED_BLOCKS, block_size, StateRoom(2, 1) if executor.state_layers else None)
        inputs = {name: torch.zeros(tokens, width, dtype=torch.float32) for name, width in program.inputs.items()}
        hidden = tuple(range(min(3, len(program.boundaries))))
        executor.network.run(padding(tokens, wanted, block_size), kv, hidden, inputs)  # no graph: it would keep the cache for ever


def padding(tokens: int, wanted: int, block_size: int) -> RaggedBatch:
    """Tokens that are computed and written nowhere, in one empty row; whole scores of the first `wanted`."""
    zeros, nobody = torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    scores = torch.arange(wanted)
    return RaggedBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros - 1,
        query_start_loc=torch.zeros(2, dtype=torch.int32),
        seq_lens=nobody,
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        num_causal=nobody,
        tree_mask=zeros,
        logits_indices=scores,
        full_logits=scores,
        block_size=block_size,
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
