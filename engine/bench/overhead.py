"""What a step of the engine costs besides the forward pass, measured with a network that answers at once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.chain import run_chain_by_steps
from ...kernels.layout import (
    ChainOutput,
    Draws,
    ForwardOutput,
    HasNoStates,
    KVLayerSpec,
    KVTensors,
    RaggedBatch,
    StateRoom,
    kv_bytes_per_block,
)
from ...kernels.torch_kv import TorchKV
from ...kernels.weight_bank import WeightBank
from ...proposers.config import NgramConfig, SpeculativeConfig
from ...proposers.ngram import NgramProposer
from ...proposers.proposer_set import ProposerSet
from ..committer import Committer
from ..config import SchedulerConfig
from ..controller import Controller
from ..core import EngineCore
from ..kv_cache import KVCache
from ..policy.base import ProposerInfo
from ..policy.costs import CostFigures, CostTable
from ..request import Request, SamplingParams
from ..runner import Runner
from ..sampler import full_logits_wanted
from ..scheduler import NetworkNeeds, Scheduler
from ..verifier import Verifier

PERIOD = 7  # the network counts 0 .. 6 for ever, so that prompt lookup is always right


class InstantModel(HasNoStates):
    """An executor that computes nothing: the next token follows from the position. Its own time is not counted."""

    kv_layers = (KVLayerSpec(1, 1, 1),)
    max_model_len = 1 << 20
    is_batch_invariant = True
    weight_bytes = 0
    token_ids: Tensor | None = None
    recurrent: tuple[str, int] | None = None

    def __init__(self, vocab_size: int) -> None:
        self.bank = WeightBank()
        self.vocab_size = vocab_size
        self.seconds = 0.0
        self._logits = torch.randn(1024, vocab_size)

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> TorchKV:
        return TorchKV(self.kv_layers, num_blocks, block_size, torch.float32)

    def kv_block_bytes(self, block_size: int) -> int:
        return kv_bytes_per_block(self.kv_layers, block_size, torch.float32)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        started = time.perf_counter()
        argmax = (batch.positions[batch.logits_indices] + 1) % PERIOD
        logits = None
        if len(batch.full_logits):
            logits = self._logits[: len(batch.full_logits)].clone()
            logits[torch.arange(len(logits)), argmax[batch.full_logits]] = 30.0
        output = ForwardOutput(argmax, torch.ones(len(argmax)), logits)
        self.seconds += time.perf_counter() - started
        return output

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        return run_chain_by_steps(self, batch, kv, counts, draws, inputs)


@dataclass(frozen=True)
class Overhead:
    """Milliseconds a step around the forward pass."""

    case: str
    rows: int
    tokens_per_step: float  # committed, a row
    median_ms: float
    p95_ms: float
    controller_ms: float  # of the median, in deciding how much to guess and in learning from what came of it


class Timed:
    """A function whose seconds are added up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        answer = self._function(*args)
        self.seconds += time.perf_counter() - started
        return answer


def measure(
    case: str,
    num_rows: int,
    num_draft_tokens: int,
    params: SamplingParams,
    steps: int = 300,
    vocab_size: int = 8192,
    *,
    costs: CostFigures | None = None,
) -> Overhead:
    """Run num_rows endless requests and time the steps after the prompts. costs: what adaptive speculation weighs; None = fixed k."""
    model = InstantModel(vocab_size)
    proposers = [NgramProposer(NgramConfig(num_draft_tokens, 4, 2))] if num_draft_tokens else []
    block_size = 16
    length = 64 + (num_draft_tokens + 1) * (steps + 20)
    kv = KVCache(num_rows * (length // block_size + 2), block_size)
    proposer_set = ProposerSet(list(proposers))
    config = SpeculativeConfig(adaptive=costs is not None, disable_by_batch_size=num_rows, off=not proposers)
    names = [p.name for p in proposers]
    table = None if costs is None else CostTable(costs, names, num_rows * (num_draft_tokens + 1))
    infos = [ProposerInfo(p.name, p.max_tokens, scout) for p, scout in zip(proposers, proposer_set.scouts, strict=True)]
    controller = Controller(config, tuple(infos), table)
    looked, shared, observed = Timed(controller.look), Timed(controller.share), Timed(controller.observe)
    setattr(controller, "look", looked)  # noqa: B010 - as below
    setattr(controller, "share", shared)  # noqa: B010 - a type checker would want their signatures
    setattr(controller, "observe", observed)  # noqa: B010
    runner = Runner(model, model.allocate(kv.pool.num_blocks, block_size), (), full_logits_wanted)
    scheduler = Scheduler(SchedulerConfig(8192, max(128, num_rows), 4096), kv, controller, NetworkNeeds(vocab_size, model.max_model_len))
    committer = Committer(kv, scheduler, runner.move_slots, lambda request: None)
    # Where costs are given they stay as they are: the network's own would teach that nothing pays.
    stopwatch = time.perf_counter if costs is None else lambda: 0.0
    core = EngineCore(scheduler, proposer_set, runner, Verifier("match"), committer, controller, stopwatch)
    for i in range(num_rows):
        core.add_request(Request(f"r{i}", [p % PERIOD for p in range(48)], params, 0.0, max_tokens=length, seed=i))
    for _ in range(15):
        core.step(0.0)
    times: list[float] = []
    controlling: list[float] = []
    tokens = core.committer.generation_tokens
    for _ in range(steps):
        model.seconds = looked.seconds = shared.seconds = observed.seconds = 0.0
        started = time.perf_counter()
        core.step(0.0)
        times.append(time.perf_counter() - started - model.seconds)
        controlling.append(looked.seconds + shared.seconds + observed.seconds)
    tokens = core.committer.generation_tokens - tokens
    times.sort()
    controlling.sort()
    figures = (times[steps // 2], times[int(steps * 0.95)], controlling[steps // 2])
    return Overhead(case, num_rows, round(tokens / steps / num_rows, 2), *(round(seconds * 1e3, 3) for seconds in figures))


def weighed(num_rows: int) -> CostFigures:
    """Costs under which every guess pays a little, so that all of them are weighed in every step."""
    tokens = (1, num_rows, 6 * num_rows)
    return CostFigures({t: 0.02 + 1e-5 * t for t in tokens}, 0.0, {"ngram": {(k, 1): 1e-5 for k in (1, 5)}})


CASES: tuple[tuple[str, int, int, SamplingParams], ...] = (
    ("greedy, no draft", 1, 0, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
    ("greedy, n-gram k=5", 1, 5, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
    ("sampled, n-gram k=5", 1, 5, SamplingParams(temperature=1, max_tokens=None, ignore_eos=True)),
    ("sampled with penalties, n-gram k=5", 1, 5, SamplingParams(presence_penalty=0.5, max_tokens=None, ignore_eos=True)),
    ("greedy, no draft", 128, 0, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
    ("greedy, n-gram k=5", 128, 5, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
    ("sampled, no draft", 128, 0, SamplingParams(temperature=1, max_tokens=None, ignore_eos=True)),
)
ADAPTIVE_ROWS = (1, 32, 128)
