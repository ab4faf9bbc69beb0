"""An engine of the simulation whose steps overlap, around a device that has done its work as soon as it is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import simulation
import torch
from hash_model import HashModel
from torch import Tensor

from foretoken.engine.core import EngineCore
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.kernels.layout import KVTensors, RaggedBatch
from foretoken.kernels.started import Fetched, Started
from foretoken.kernels.torch_executor import Computed

plain_core: Callable[..., EngineCore] = simulation.build_core


class StartingHashModel(HashModel):
    """What was begun first is written first, and what a pass says of its nodes is gone with the next one."""

    started_class = Started
    last: Started | None = None

    def start(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
        tokens: Tensor | None = None,
    ) -> Started:
        found = self.run(batch if tokens is None else replace(batch, token_ids=tokens.clone()), kv, hidden, inputs)
        if self.last is not None:
            for part in (self.last.argmax, self.last.top, self.last.scores):
                assert part is not None
                part.fill_(-7)
        argmax, top = (torch.cat([part, torch.zeros(2).to(part)]) for part in (found.argmax, found.top))  # padding may stand behind
        scores = torch.full((len(argmax), self.vocab_size), math.nan)
        if found.logits is not None:
            scores[batch.full_logits] = found.logits
        self.last = self.started_class(Computed(argmax, top, scores, found.hidden), len(found.argmax), batch.full_logits)
        return self.last

    def fetch(self, tensor: Tensor) -> Fetched:
        return Fetched.of(tensor)[0]


def overlapped_core(*args: Any, model: StartingHashModel | None = None, **settings: Any) -> EngineCore:
    """`simulation.build_core` with a runner that begins steps before they are planned."""
    core = plain_core(*args, **settings)
    model = model or StartingHashModel(simulation.VOCAB)
    core.runner = OverlappedRunner(model, core.runner.kv, core.proposers.needs.hidden, full_logits_wanted, model.max_model_len)
    core.runner.use_verifier(core.verifier)
    core.scheduler.lookahead = core.runner.lookahead
    return core
