"""One part of a family: where it lies, its run in the work folder, and what it leaves beside its weights. Knows no recipe's order."""

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...proposers.training.family import Training
from ...proposers.training.loop import Run, Trainee
from ...proposers.training.packing import Packed, PackedStream, mean_tokens
from .run import Machine, say


@dataclass(frozen=True)
class Paths:
    """Where a family is made. `family` is what is published to `out`."""

    data: Path
    work: Path
    out: Path

    @property
    def family(self) -> Path:
        return self.work / "family"

    @property
    def target(self) -> Path:
        """The finished one, which drafters are made for."""
        return self.family / "target"

    @property
    def unrefined(self) -> Path:
        """The target before its refinement, if the recipe has one."""
        return self.work / "unrefined"

    @property
    def evaluation(self) -> Path:
        """Left by `foretoken train evaluate`."""
        return self.work / "evaluation" / "evaluation.json"

    def run(self, name: str) -> Path:
        return self.work / "runs" / name

    def answers(self, held_out: bool) -> Path:
        return self.work / ("answers_held_out" if held_out else "answers")


def run_of(trainee: Trainee, stream: PackedStream, training: Training, work: Path, machine: Machine, held_out: Sequence[Packed]) -> Run:
    """Train to the end. Raises KeyboardInterrupt, with everything saved, when asked to stop."""
    workers = machine.workers(training.accumulate)
    torch.set_num_threads(max(1, machine.cores // workers))
    plan = training.plan(mean_tokens(stream), half=machine.half, device=machine.device, workers=workers)
    run = Run(trainee, stream, plan, work, held_out)
    say(f"{work.name}: {sum(p.numel() for p in trainee.parameters()):,} parameters, {training.tokens:,} tokens, on {machine.device}")
    if not run.train(say):
        raise KeyboardInterrupt
    return run


def leave_facts(run: Run, folder: Path, prefix: str = "") -> None:
    """facts.json for the card, and the curves, under names that begin with `prefix`."""
    progress = run.progress
    machine = f"{run.plan.device.type}, {processor()}, {run.plan.workers} threads"
    if run.plan.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.plan.device)
    facts = {"tokens": progress.tokens, "seconds": round(progress.seconds), "machine": machine}
    (folder / f"{prefix}facts.json").write_text(json.dumps(facts) + "\n")
    shutil.copyfile(run.work / "curves.png", folder / f"{prefix}curves.png")


def processor() -> str:
    return platform.processor() or platform.machine()
