"""Train the demonstration target and its draft together, on a CPU, in about two hours.

    python -m foretoken.proposers.training.demo_family --data CORPORA --work WORK --out engine/demo_model

Every batch trains both models, so whenever training stops the draft fits the target. A run can be killed and started
again with the same arguments: it goes on from the last checkpoint. `echo 500000 > WORK/finish` makes it cool down over
the next 500,000 tokens, export and end.
"""

from __future__ import annotations

import argparse
import csv
import logging
import signal
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from . import checkpoint
from .export import export
from .mixture import COOLDOWN, STABLE, prepare
from .model_card import TrainingFacts
from .schedule import Schedule
from .trainer import Recipe, Trainer

log = logging.getLogger("demo_family")

EXPORT_S = 300.0                     # kept free before the deadline for evaluation and export


class Clock:
    """Tokens per second of late, and what a deadline allows."""

    def __init__(self, deadline: datetime | None):
        self.deadline = deadline
        self.rate = 0.0              # tokens per second, smoothed over about two minutes
        self._last = time.monotonic()

    def lap(self, tokens: int) -> float:
        """Note that `tokens` were trained since the last lap; returns its seconds."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        rate = tokens / seconds
        weight = min(1.0, seconds / 120)
        self.rate = rate if not self.rate else (1 - weight) * self.rate + weight * rate
        return seconds

    def restart(self) -> None:
        """Leave out the time since the last lap: it was not spent training."""
        self._last = time.monotonic()

    def tokens_left(self) -> int | None:
        """Tokens until training must end for the export to be done by the deadline; None without one."""
        if self.deadline is None:
            return None
        left_s = (self.deadline - datetime.now(self.deadline.tzinfo)).total_seconds() - EXPORT_S
        return max(0, int(left_s * self.rate))


@dataclass(frozen=True)
class Run:
    """Where a run keeps its files and when it does what."""

    work: Path
    out: Path
    deadline: datetime | None = None
    checkpoint_s: float = 180.0
    log_s: float = 10.0
    export_at_s: tuple[float, ...] = (600.0, 3000.0)     # seconds of training after which to export early


def train(trainer: Trainer, run: Run) -> None:
    """Train to the end of the schedule, with checkpoints, log and early exports. SIGTERM saves and stops."""
    saved, finish = run.work / "checkpoint.safetensors", run.work / "finish"
    if saved.exists():
        trainer.load(checkpoint.load(saved))
        log.info("resumed at %s tokens", f"{trainer.progress.seen:,}")
    stopped: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    clock, progress = Clock(run.deadline), trainer.progress
    pending = [seconds for seconds in run.export_at_s if seconds > progress.seconds]
    saved_at, losses, lap_tokens = progress.seconds, [], 0
    lap_start = time.monotonic()

    while progress.seen < trainer.schedule.total and not stopped:
        losses.append(trainer.step())
        lap_tokens += trainer.recipe.batch_tokens
        if time.monotonic() - lap_start < run.log_s:
            continue
        # Between laps: report, look for reasons to end sooner, save, export.
        lap_start = time.monotonic()
        progress.seconds += clock.lap(lap_tokens)
        report(trainer, clock, losses, run.work / "log.csv")
        losses, lap_tokens = [], 0
        replan(trainer, clock, finish)
        if progress.seconds - saved_at >= run.checkpoint_s:
            checkpoint.save(saved, trainer.state())
            saved_at = progress.seconds
        if pending and progress.seconds >= pending[0]:
            pending.pop(0)
            checkpoint.save(saved, trainer.state())
            export(trainer.models, trainer.data, facts(trainer, run.work, final=False), run.work, run.out)
            clock.restart()

    signal.signal(signal.SIGTERM, before)
    checkpoint.save(saved, trainer.state())
    if not stopped:
        export(trainer.models, trainer.data, facts(trainer, run.work, final=True), run.work, run.out)
        log.info("finished: %s tokens, exported to %s", f"{progress.seen:,}", run.out)


def replan(trainer: Trainer, clock: Clock, finish: Path) -> None:
    """Move the end of training to where a finish file or the deadline wants it."""
    seen, schedule = trainer.progress.seen, trainer.schedule
    if finish.exists():
        tokens = int(finish.read_text().strip() or 1_000_000)
        finish.unlink()
        log.info("finish: cooling down over %s tokens", f"{tokens:,}")
        trainer.schedule, trainer.finishing = schedule.ending_after(tokens, seen), True
        return
    left = clock.tokens_left()
    if left is None:
        return
    if trainer.finishing:
        trainer.schedule = replace(schedule, total=min(schedule.total, seen + left))
    else:
        trainer.schedule = Schedule.over(min(trainer.recipe.tokens, seen + left), schedule.warmup)


def report(trainer: Trainer, clock: Clock, losses: list[tuple[float, float]], table: Path) -> None:
    """One line to the log, one row to the table."""
    seen, schedule = trainer.progress.seen, trainer.schedule
    target, draft = (sum(values) / len(values) for values in zip(*losses, strict=True))
    factor = schedule.factor(seen)
    log.info(
        "%s / %s tokens  %.0f tokens/s  target %.3f  draft %.3f  lr %.0f %%%s  ETA %.0f min",
        f"{seen:,}", f"{schedule.total:,}", clock.rate, target, draft, 100 * factor,
        "  cooling" if trainer.cooling else "", (schedule.total - seen) / clock.rate / 60,
    )
    seconds = f"{trainer.progress.seconds:.0f}"
    row = [seen, seconds, f"{clock.rate:.0f}", f"{target:.4f}", f"{draft:.4f}", f"{factor:.4f}"]
    new = not table.exists()
    with table.open("a", newline="") as lines:
        writer = csv.writer(lines)
        if new:
            writer.writerow(["tokens", "seconds", "tokens_per_s", "target_loss", "draft_loss", "lr_factor"])
        writer.writerow(row)


def facts(trainer: Trainer, work: Path, final: bool) -> TrainingFacts:
    """What the model card says about this run so far; WORK/notes.md adds what only a person knows."""
    notes = work / "notes.md"
    progress, recipe = trainer.progress, trainer.recipe
    cooled = progress.cooldown_seen / max(1, progress.seen)
    return TrainingFacts(
        tokens=progress.seen,
        hours=progress.seconds / 3600,
        machine=f"{recipe.workers} cores, CPU",
        final=final,
        parameters=(trainer.target.num_parameters(), trainer.draft.num_parameters()),
        group_shares={group: (1 - cooled) * share + cooled * COOLDOWN[group] for group, share in STABLE.items()},
        peak_lr=(recipe.target_lr, recipe.draft_lr),
        distillation=recipe.distillation,
        notes=notes.read_text(encoding="utf-8") if notes.exists() else "",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with chat/, code/, ... of *.jsonl(.xz)")
    parser.add_argument("--work", type=Path, required=True, help="folder for packed data, checkpoint and log")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and README.md")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens)
    parser.add_argument("--deadline", type=datetime.fromisoformat, help="when the export should be done, ISO 8601")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=Recipe.workers, help="threads, each with a part of the batch")
    parser.add_argument("--export-only", action="store_true", help="export the last checkpoint and end")
    args = parser.parse_args(argv)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    disable_progress_bar()           # of saving and loading weights, which would break up the log
    torch.set_num_threads(1)         # see Trainer.pool
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(tokens=args.tokens, seed=args.seed, workers=args.workers)
    data = prepare(args.data, args.work, args.tokens, recipe.vocab_size, args.seed)
    trainer = Trainer(recipe, data)
    if args.export_only:
        trainer.load(checkpoint.load(args.work / "checkpoint.safetensors"))
        export(trainer.models, data, facts(trainer, args.work, final=False), args.work, args.out)
    else:
        train(trainer, Run(args.work, args.out, args.deadline))


if __name__ == "__main__":
    main()
