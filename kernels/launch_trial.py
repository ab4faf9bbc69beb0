"""Whether kernels that come early (triton/early_launch.py) make a pass faster on this GPU: it is tried when the target is made ready.

Nobody is served sooner by a mistake, so early ones have to give the same bits as well, in every one of many passes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch_lists import BatchLists
from .layout import KVTensors, RaggedBatch
from .static_batch import BlockTables, Rung, StaticBatch
from .torch_executor import TorchExecutor
from .torch_kv import TorchKV

CONTEXT = 1024
"""Places that the token of a trial sees, in blocks of BLOCK of a cache of its own."""

BLOCK = 16
TURNS = 5
PASSES = 20
"""In a turn, of each kind."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""As `Recorder.record`."""


@dataclass(frozen=True)
class Trial:
    """One pass launched in both ways."""

    usual_ms: float
    early_ms: float = float("inf")
    problem: str = ""  # with early kernels

    @property
    def is_won(self) -> bool:
        return not self.problem and self.early_ms < self.usual_ms

    def describe(self) -> str:
        """`early: a pass takes 3.95 instead of 4.41 ms`."""
        if self.is_won:
            return f"early: a pass takes {self.early_ms:.2f} instead of {self.usual_ms:.2f} ms"
        return f"one by one: {self.problem or f'a pass takes {self.usual_ms:.2f} ms, with early ones {self.early_ms:.2f}'}"


def try_early_launches(
    network: TorchExecutor, record: Record, milliseconds: Callable[[Callable[[], object]], float] | None = None
) -> Trial | None:
    """Launch kernels on the network's device from now on as was faster, and as usual if results are not the same.

    record: what makes graphs. milliseconds: how long some work takes; None = by the GPU's own clock. Returns None where kernels
    cannot come early, or the network has no scores to compare. What was recorded before stays as it is.
    """
    if not network.program.logits or not _can_launch_early(network.device):
        return None
    from .triton.early_launch import launching_early

    timed = milliseconds or _milliseconds
    with torch.inference_mode():
        work = _pass_of_one_token(network)
        launching_early.discard(network.device)
        usual, result = record(work)
        usual()
        expected = result.clone()
        launching_early.add(network.device)
        try:
            trial = _tried(usual, *record(work), expected, timed)
        except Exception as error:  # whatever a driver or compiler has against it, there is another way
            trial = Trial(timed(usual), problem=f"{type(error).__name__}: {error}")
    if not trial.is_won:
        launching_early.discard(network.device)
    return trial


def _tried(
    usual: Callable[[], object],
    early: Callable[[], object],
    result: Tensor,
    expected: Tensor,
    milliseconds: Callable[[Callable[[], object]], float],
) -> Trial:
    usual_ms = early_ms = float("inf")
    for _ in range(TURNS):
        usual_ms, early_ms = min(usual_ms, milliseconds(usual)), min(early_ms, milliseconds(early))
        for _ in range(PASSES):
            result.zero_()
            early()
            if not torch.equal(result.view(torch.uint8), expected.view(torch.uint8)):
                return Trial(usual_ms, early_ms, "early ones gave another result")
    return Trial(usual_ms, early_ms)


def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _pass_of_one_token(network: TorchExecutor) -> Callable[[], Tensor]:
    """What gives its scores, [1, V]."""
    kv: KVTensors = network.allocate(CONTEXT // BLOCK, BLOCK)
    assert isinstance(kv, TorchKV)
    for cache in (*kv.k, *kv.v):
        cache.zero_()
    device, rung = network.device, Rung(1, 1, 1)
    static = StaticBatch(rung, BlockTables(1, CONTEXT // BLOCK, device), BLOCK)
    static.fill(_last_of(min(CONTEXT, network.max_model_len)))
    widths = network.program.inputs.items()
    inputs = {name: torch.zeros(1, width, dtype=network.dtype, device=device) for name, width in widths}

    def work() -> Tensor:
        logits = network.compute(static.batch, kv, (), inputs).logits
        assert logits is not None
        return logits

    return work


def _last_of(context: int) -> RaggedBatch:
    """One token, the last of so many, in blocks from the first on."""
    lists = BatchLists(BLOCK, [0], [context - 1], tree_mask=[0], logits_indices=[0], query_start_loc=[0, 1], seq_lens=[context])
    lists.num_causal.append(1)
    lists.tables.append(range(CONTEXT // BLOCK))
    lists.add_slots(lists.tables[0], context - 1, context)
    return lists.batch()


def _milliseconds(work: Callable[[], object]) -> float:
    """Of one of PASSES, on average of both ways in which steps come: one behind the other, and each waited for by the host."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    first.record()
    for _ in range(PASSES):
        work()
    last.record()
    last.synchronize()
    started = time.perf_counter()
    for _ in range(PASSES):
        work()
        torch.cuda.synchronize()
    waited_for = (time.perf_counter() - started) * 1e3
    return (first.elapsed_time(last) + waited_for) / (2 * PASSES)
