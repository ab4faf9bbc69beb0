"""The training loop of every model here: accumulate, step, log, measure, save, resume. Knows neither models nor texts.

Whatever is trained is a Trainee: a module that turns a batch of packed documents into a loss. On a CPU the batches of one step are
computed side by side, one thread each, and meet once a step: splitting every operation over the threads instead waits at
each of them.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint
from .curves import append_row, plot
from .optimizer import Optimizer, OptimizerSettings
from .packing import Packed, PackedStream
from .schedule import Schedule

log = logging.getLogger("foretoken.train")


@dataclass(frozen=True)
class Losses:
    """What one batch says. Sums, so that batches of different sizes add up."""

    total: Tensor                    # scalar with a graph: sum of the tokens' losses
    weight: float                    # what `total` is divided by, over a whole step
    metrics: dict[str, tuple[float, float]]    # name -> (sum, weight); shown and plotted as sum / weight


class Trainee(nn.Module):
    """A model in training; its parameters are what is trained, a frozen target is kept out of them."""

    def loss(self, batch: Packed) -> Losses:
        """Loss of one batch. Called by several threads at once; chance comes from `batch.number` alone."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """What decides the weights that come out, given trainee and data; then how the run is looked after."""

    steps: int
    accumulate: int = 2              # batches per step
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    half: bool = True                # bfloat16 autocast; weights and optimizer stay float32
    minutes: float | None = None     # end after so much training, if that comes before `steps`
    workers: int = 2                 # threads, each with batches of its own (1 on a GPU)
    device: torch.device = torch.device("cpu")
    checkpoint_s: float = 180.0
    log_s: float = 10.0
    evaluate_s: float = 120.0


@dataclass
class Progress:
    """How far a run is, as stored in its checkpoints."""

    step: int = 0
    tokens: int = 0                  # read
    seconds: float = 0.0             # spent training, over all restarts


class Run:
    """One training in a work folder: owns optimizer, progress, checkpoint.safetensors, log.csv and curves.png."""

    def __init__(self, trainee: Trainee, stream: PackedStream, plan: Plan, work: Path, held_out: Sequence[Packed] = ()):
        self.trainee, self.stream, self.plan, self.work, self.held_out = trainee.to(plan.device), stream, plan, work, held_out
        self.optimizer = Optimizer(trainee.named_parameters(), plan.optimizer, plan.workers)
        self.progress = Progress()
        self.pool = ThreadPoolExecutor(plan.workers)
        self.saved = work / "checkpoint.safetensors"
        work.mkdir(parents=True, exist_ok=True)
        if self.saved.exists():
            self.load(checkpoint.load(self.saved))
            log.info("resumed at step %s, %.0f%% done", f"{self.progress.step:,}", 100 * self.done)

    @property
    def done(self) -> float:
        """Share of the training behind us, in [0, 1]."""
        limit = self.progress.seconds / 60 / self.plan.minutes if self.plan.minutes else 0.0
        return min(1.0, max(self.progress.step / self.plan.steps, limit))

    def train(self, show: Callable[[str], None] = log.info) -> bool:
        """Train to the end; False if SIGTERM or SIGINT asked to stop before, with everything saved to go on from."""
        stopped: list[int] = []
        before = {number: signal.signal(number, lambda n, _: stopped.append(n)) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._train(show, stopped)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.save()
        plot(self.work / "log.csv", self.work / "curves.png")
        return self.done >= 1.0

    def _train(self, show: Callable[[str], None], stopped: list[int]) -> None:
        saved_at = evaluated_at = self.progress.seconds
        sums: dict[str, tuple[float, float]] = {}
        lap = Lap(self.progress)
        while self.done < 1.0 and not stopped:
            started = time.monotonic()
            metrics, norm = self.step()
            self.progress.seconds += time.monotonic() - started
            sums = add(sums, metrics)
            seconds = self.progress.seconds
            if seconds - lap.seconds < self.plan.log_s and self.done < 1.0:
                continue
            row = lap.row(self.progress, self.plan.schedule.factor(self.done), norm) | means(sums)
            if seconds - evaluated_at >= self.plan.evaluate_s or self.done >= 1.0:
                row |= self.evaluate()
                evaluated_at = seconds
            append_row(self.work / "log.csv", row)
            show(self.line(row))
            lap, sums = Lap(self.progress), {}
            if seconds - saved_at >= self.plan.checkpoint_s:
                self.save()
                plot(self.work / "log.csv", self.work / "curves.png")
                saved_at = seconds

    def step(self) -> tuple[dict[str, tuple[float, float]], float]:
        """One step of the optimizer; metrics as sums, and the gradients' norm. Raises FloatingPointError if that is not finite."""
        first = self.progress.step * self.plan.accumulate
        batches = [self.stream[first + i] for i in range(self.plan.accumulate)]
        results = list(self.pool.map(self.gradients, batches))
        weight = max(1e-9, sum(result[0] for result in results))         # nothing to learn in a whole step: nothing moves
        grads = [_sum([result[1][i] for result in results], weight) for i in range(len(self.optimizer.parameters))]
        norm = self.optimizer.step(grads, self.plan.schedule.factor(self.done))
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradients' norm is {norm} at step {self.progress.step}: lower the learning rate")
        self.progress.step += 1
        self.progress.tokens += sum(len(batch.token_ids) for batch in batches)
        metrics: dict[str, tuple[float, float]] = {}
        for result in results:
            metrics = add(metrics, result[2])
        return metrics, norm

    def gradients(self, batch: Packed) -> tuple[float, tuple[Tensor | None, ...], dict[str, tuple[float, float]]]:
        losses = self._losses(batch)
        grads = torch.autograd.grad(losses.total, self.optimizer.parameters, allow_unused=True)
        return losses.weight, grads, losses.metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out batches, under names that begin with held_out_."""
        sums: dict[str, tuple[float, float]] = {}
        for losses in self.pool.map(torch.no_grad()(self._losses), self.held_out):
            sums = add(sums, losses.metrics)
        return {f"held_out_{name}": value for name, value in means(sums).items()}

    def _losses(self, batch: Packed) -> Losses:
        # Its cache of narrowed weights is the whole process's and emptied by whichever thread leaves first: gradients of a weight that is
        # used twice would then be rounded differently from one run to the next.
        with torch.autocast(self.plan.device.type, torch.bfloat16, enabled=self.plan.half, cache_enabled=False):
            return self.trainee.loss(batch.to(self.plan.device))

    def line(self, row: dict[str, float]) -> str:
        """One line for a person."""
        minutes = self.progress.seconds / 60 * (1 / max(self.done, 1e-6) - 1)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if name not in Lap.COLUMNS)
        return f"{self.done:4.0%}  {self.progress.tokens:,} tokens  {row['tokens_per_s']:,.0f}/s  {shown}  {minutes:.0f} min left"

    def save(self) -> None:
        state = {
            "trainee": self.trainee.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": vars(self.progress),
        }
        checkpoint.save(self.saved, state)

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, with this plan's learning rates."""
        self.trainee.load_state_dict(state["trainee"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


class Lap:
    """The stretch between two lines of the log."""

    COLUMNS = ("step", "tokens", "seconds", "tokens_per_s", "lr_factor", "gradient_norm")

    def __init__(self, progress: Progress):
        self.tokens, self.seconds = progress.tokens, progress.seconds

    def row(self, progress: Progress, factor: float, norm: float) -> dict[str, float]:
        rate = (progress.tokens - self.tokens) / max(1e-9, progress.seconds - self.seconds)
        return dict(zip(self.COLUMNS, (progress.step, progress.tokens, progress.seconds, rate, factor, norm), strict=True))


def add(one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sums of both, by name."""
    nothing = (0.0, 0.0)
    return {
        name: (one.get(name, nothing)[0] + other.get(name, nothing)[0], one.get(name, nothing)[1] + other.get(name, nothing)[1])
        for name in one | other
    }


def means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / max(weight, 1e-9) for name, (total, weight) in sums.items()}


def _sum(grads: Sequence[Tensor | None], weight: float) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return torch.stack(present).sum(0).div_(weight) if present else None
