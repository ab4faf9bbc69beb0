"""Passes that were handed to a device and go on by themselves, and values on their way to the host from there.

Owns the waiting: one event for what is wanted, and never for what was begun later. Knows no graph and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .device_chain import ChainDraws, ChainTensors
from .layout import Executor, ForwardOutput, KVTensors, RaggedBatch
from .matching import Guesses, match
from .torch_executor import Computed, full_logits
from .upload import upload


@dataclass(frozen=True)
class Fetched:
    """Values on their way to the host."""

    _values: Tensor
    _done: torch.cuda.Event | None

    @classmethod
    def of(cls, *tensors: Tensor) -> list[Fetched]:
        """Each as the work that was begun so far leaves it. Later work need not wait for that: it must leave them as they are until
        somebody has waited, or nobody is going to."""
        there = [tensor for tensor in tensors if tensor.is_cuda and len(tensor)]
        if not there:
            return [cls(to_host(tensor), None) for tensor in tensors]
        device = there[0].device
        beside, done = _stream(device), torch.cuda.Event()
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            values = [to_host(tensor) for tensor in tensors]
            done.record()
        for tensor in there:
            tensor.record_stream(beside)
        return [cls(value, done) for value in values]

    def get(self) -> Tensor:
        """Wait for them, and for nothing that was begun later."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


class Started:
    """A pass that was handed to the device. What it says of its nodes the next pass overwrites: by then it must have been used
    there, matched, or finished."""

    def __init__(self, computed: Computed, num_scores: int, wanted: Tensor) -> None:
        """computed: behind the pass's own entries there may be padding. wanted: full_logits of the batch, on the device."""
        self.argmax, self.top, self.scores, self.hidden = computed.argmax, computed.top, computed.logits, computed.hidden
        self.num_scores, self._computed, self._wanted = num_scores, computed, wanted

    @cached_property
    def logits(self) -> Tensor | None:
        """As in ForwardOutput, on the device: copies of some of the scores."""
        return full_logits(self._computed, self._wanted)

    def match(self, guesses: Guesses, chosen: Tensor | None) -> Tensor:
        """What each row emits (matching.py), on the device. chosen: by the rows that choose from `scores`, there too."""
        if self.argmax.is_cuda:
            from .triton import matching  # Triton is there only where torch is built for GPUs

            return matching.match(self.argmax, self.top, chosen, guesses)
        return match(self.argmax, self.top, chosen, guesses)

    def at(self, nodes: list[int], wanted: list[int]) -> Started:
        """The pass as if it had had these tokens only, all of which it scored. `scores` stay as they are; wanted: of whole logits."""
        there = upload(torch.tensor(nodes, dtype=torch.int64), self.argmax.device)
        states = {boundary: state[there] for boundary, state in self.hidden.items()}
        some = replace(self._computed, argmax=self.argmax[there], top=self.top[there], hidden=states)
        return Started(some, len(nodes), upload(torch.tensor(wanted, dtype=torch.int64), there.device))

    def finish(self) -> ForwardOutput:
        """Wait for the device, before another pass is started. Logits and states stay there: mostly nobody asks for the first, and who
        wants the others goes on with them there."""
        logits = self.logits
        argmax, top = (sent.get() for sent in Fetched.of(self.argmax[: self.num_scores], self.top[: self.num_scores]))
        return ForwardOutput(argmax, top, logits, self.hidden)


@runtime_checkable
class StartingExecutor(Executor, Protocol):
    """An executor that need not be waited for."""

    def start(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Started:
        """`run` without waiting. The batch may lie on the device: the host need not know all of it."""
        ...


@runtime_checkable
class ChainStarter(Executor, Protocol):
    """An executor whose chains need neither be waited for nor known to the host where they begin."""

    def takes_chains(self, num_tokens: int, num_rows: int) -> bool:
        """Whether chains behind a batch of this size are one piece of work: to hand over many takes longer than not waiting saves."""
        ...

    def start_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        steps: int,
        draws: ChainDraws | None = None,
        vocab_size: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainTensors:
        """`run_chain` without waiting, all tensors on the device; no count is above `steps`. What it leaves the next chain overwrites:
        by then it must have been used there, or fetched and waited for. vocab_size: token ids below it may be chosen; None = all."""
        ...


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Not that of uploads: what is fetched waits for the pass that is under way, and they do not."""
    return torch.cuda.Stream(device)


def to_lists(*tensors: Tensor) -> list[list[Any]]:
    """Their numbers, waited for once."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.tolist() for tensor in tensors]
    return [fetched.get().tolist() for fetched in Fetched.of(*tensors)]


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is under way; a CPU tensor is copied at once."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
