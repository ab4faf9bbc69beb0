"""An engine of the simulation whose steps overlap, around a device that has done its work as soon as it is told."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import simulation
import torch
from hash_model import HashModel
from torch import Tensor

from foretoken.engine.core import EngineCore
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.kernels.device_chain import ChainDraws, ChainTensors
from foretoken.kernels.layout import KVTensors, RaggedBatch
from foretoken.kernels.started import Started
from foretoken.kernels.torch_executor import Computed
from foretoken.proposers.config import SpeculativeConfig

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
    ) -> Started:
        found = self.run(batch, kv, hidden, inputs)
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


class ChainHashModel(HashModel):
    """A drafter's network whose chains need not be waited for. Implements `ChainStarter`."""

    def takes_chains(self, num_tokens: int, num_rows: int) -> bool:
        return True

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
        assert draws is None and vocab_size is None
        found = self.run_chain(batch, kv, counts, inputs=inputs)
        missing = steps - found.token_ids.shape[1]  # what no row has room for
        return ChainTensors(torch.nn.functional.pad(found.token_ids, (0, missing), value=-5), found.confidence, [])


def overlapped_core(world: simulation.World, *args: Any, model: StartingHashModel | None = None, **settings: Any) -> EngineCore:
    """`simulation.build_core` with a runner that begins steps before they are planned, as those of recurrent targets never are."""
    world.states = None
    core = plain_core(world, *args, **settings)
    model = model or StartingHashModel(simulation.VOCAB)
    core.runner = OverlappedRunner(model, core.runner.kv, core.proposers.needs.hidden, full_logits_wanted, model.max_model_len)
    core.runner.use_verifier(core.verifier)
    ahead = {"lookahead": core.runner.lookahead, "guessing_lookahead": core.proposers.num_places_ahead}
    core.scheduler.needs = replace(core.scheduler.needs, **ahead)
    return core


def simulate_overlapped(seeds: range, overlapped: Callable[..., EngineCore] = overlapped_core) -> list[OverlappedRunner]:
    """Runners of these worlds: arrivals, ends, cancels and preemption; each output must equal the request run alone and plainly."""
    runners: list[OverlappedRunner] = []

    def build(world: simulation.World, proposers: Any, speculative: SpeculativeConfig, num_blocks: int, *rest: Any) -> EngineCore:
        if speculative.off:
            return plain_core(world, proposers, speculative, num_blocks, *rest)
        core = overlapped(world, proposers, speculative, num_blocks, *rest)
        runners.append(runner_of(core))
        return core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "build_core", build)
        for seed in seeds:
            simulation.simulate(seed)
    return runners


def runner_of(core: EngineCore) -> OverlappedRunner:
    assert isinstance(core.runner, OverlappedRunner)
    return core.runner
