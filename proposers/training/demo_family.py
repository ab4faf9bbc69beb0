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
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from .export import export
from .joint_loss import joint_loss
from .mixture import COOLDOWN, STABLE, PackedData, TokenIds, prepare
from .model_card import TrainingFacts
from .schedule import Schedule

log = logging.getLogger("demo_family")

EXPORT_S = 300.0                     # kept free before the deadline for evaluation and export


@dataclass(frozen=True)
class Shape:
    """Size of one Llama model; the head has the embedding's weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    def build(self, vocab_size: int) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,          # <|im_end|>, see tokenizer.SPECIAL_TOKENS
            pad_token_id=3,
        ))


TARGET = Shape(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=688)      # 7.9M parameters
DRAFT = Shape(hidden=96, layers=2, heads=3, kv_heads=3, intermediate=256)        # 1.0M parameters


@dataclass(frozen=True)
class Recipe:
    """What decides the weights that come out. Change it and an old checkpoint no longer fits."""

    target: Shape = TARGET
    draft: Shape = DRAFT
    vocab_size: int = 8192
    tokens: int = 20_000_000
    batch_tokens: int = 2048
    sequence: int = 512
    long_sequences: tuple[int, ...] = (1024, 1024, 1024, 2048)   # in turn in the cool-down: all positions are seen
    target_lr: float = 1.5e-3
    draft_lr: float = 2.5e-3
    warmup_tokens: int = 400_000
    weight_decay: float = 0.05
    distillation: float = 0.7
    workers: int = 2                 # parts of a batch, computed side by side
    seed: int = 0
    half: bool = True                # bfloat16 autocast; weights and optimizer stay float32


@dataclass
class Progress:
    """How far a run is, as stored in its checkpoints."""

    seen: int = 0                    # tokens trained on
    stable_seen: int = 0             # of these, before the cool-down: position in the stable stream
    seconds: float = 0.0             # spent training, over all restarts

    @property
    def cooldown_seen(self) -> int:
        return self.seen - self.stable_seen


class Trainer:
    """Owns both models, the optimizer and the position in the data. Only `step` changes weights, by one batch."""

    def __init__(self, recipe: Recipe, data: PackedData):
        torch.manual_seed(recipe.seed)
        self.recipe, self.data = recipe, data
        self.target = recipe.target.build(len(data.tokenizer))
        self.draft = recipe.draft.build(len(data.tokenizer))
        self.parameters = [*self.target.parameters(), *self.draft.parameters()]
        # Parts of a batch side by side, one thread each, meet once a step. Splitting every operation over the threads
        # instead waits at each of them, which on a machine with other work is most of the time.
        self.pool = ThreadPoolExecutor(recipe.workers)
        self.optimizer = torch.optim.AdamW(
            [*_groups(self.target, recipe.target_lr, recipe), *_groups(self.draft, recipe.draft_lr, recipe)],
            betas=(0.9, 0.97), fused=True,
        )
        self.schedule = Schedule.over(recipe.tokens, recipe.warmup_tokens)
        self.progress = Progress()
        self.cooling = False         # once begun, the cool-down's data stay, even if the end moves away again
        self.finishing = False       # the end was asked for by a finish file; a deadline only brings it nearer

    def step(self) -> tuple[float, float]:
        """Train on one batch; returns the losses of target and draft. Raises if one is not finite."""
        inputs, labels = self.next_batch()
        parts = inputs.chunk(self.recipe.workers), labels.view_as(inputs).chunk(self.recipe.workers)
        results = list(self.pool.map(self.gradients, *parts, [labels.numel()] * len(parts[0])))
        target_loss, draft_loss = (sum(losses) for losses in zip(*(result[0] for result in results), strict=True))
        if not target_loss + draft_loss < float("inf"):
            raise FloatingPointError(f"loss is {target_loss}, {draft_loss} after {self.progress.seen} tokens")

        for parameter, *grads in zip(self.parameters, *(result[1] for result in results), strict=True):
            parameter.grad = torch.stack(grads).sum(0)
        for model in self.models:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self.schedule.factor(self.progress.seen)
        self.optimizer.step()
        self.progress.seen += labels.numel()
        if not self.cooling:
            self.progress.stable_seen = self.progress.seen
        return target_loss, draft_loss

    def gradients(self, inputs: Tensor, labels: Tensor, count: int) -> tuple[tuple[float, float], list[Tensor]]:
        """Losses, and gradients in the order of `self.parameters`, of one part [b, S] of a batch of `count` tokens."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.half):
            hidden = [
                model.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1) for model in self.models
            ]
        dtype = torch.bfloat16 if self.recipe.half else torch.float32
        heads = [model.lm_head.weight for model in self.models]
        target_hidden, draft_hidden, target_head, draft_head = (x.detach().to(dtype) for x in (*hidden, *heads))
        loss = joint_loss(
            target_hidden, draft_hidden, target_head, draft_head, labels.flatten(), self.recipe.distillation, count)
        hidden_grads = loss.target_hidden_grad.to(hidden[0].dtype), loss.draft_hidden_grad.to(hidden[1].dtype)
        grads = list(torch.autograd.grad(hidden, self.parameters, hidden_grads))
        for head, grad in zip(heads, (loss.target_head_grad, loss.draft_head_grad), strict=True):
            index = next(i for i, parameter in enumerate(self.parameters) if parameter is head)
            grads[index] = grads[index] + grad       # tied: the head is the embedding
        return (loss.target, loss.draft), grads

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs [B, S] and labels [B * S] at the present position; long sequences once the cool-down has begun."""
        self.cooling = self.cooling or self.schedule.cooling(self.progress.seen)
        stream, position, sequence = self.data.stable, self.progress.stable_seen, self.recipe.sequence
        if self.cooling:
            stream, position = self.data.cooldown, self.progress.cooldown_seen
            lengths = self.recipe.long_sequences
            sequence = lengths[position // self.recipe.batch_tokens % len(lengths)]
        window = _window(stream, position, self.recipe.batch_tokens + 1)
        return window[:-1].view(-1, sequence), window[1:]

    @property
    def models(self) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
        return self.target, self.draft

    def state(self) -> dict[str, Any]:
        return {
            "target": self.target.state_dict(),
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "tokens": self.recipe.tokens,
            "schedule": vars(self.schedule),
            "cooling": self.cooling,
            "finishing": self.finishing,
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, with this recipe's peak learning rates.

        If the recipe's number of tokens has changed since, it decides anew when training ends.
        """
        self.target.load_state_dict(state["target"])
        self.draft.load_state_dict(state["draft"])
        peaks = [group["peak_lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
            group["peak_lr"] = peak
        self.progress = Progress(**state["progress"])
        self.cooling = state["cooling"]
        if state["tokens"] == self.recipe.tokens:
            self.schedule, self.finishing = Schedule(**state["schedule"]), state["finishing"]
        torch.set_rng_state(state["rng"])


def _groups(model: LlamaForCausalLM, lr: float, recipe: Recipe) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    parameters = [*model.parameters()]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "peak_lr": lr, "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "peak_lr": lr, "weight_decay": 0.0},
    ]


def _window(stream: TokenIds, position: int, length: int) -> Tensor:
    """`length` tokens from `position` on; the stream begins again at its end."""
    start = position % (len(stream) - length)
    return torch.from_numpy(stream[start:start + length].astype("int64"))


def save_checkpoint(path: Path, trainer: Trainer) -> None:
    """Write beside, then rename: a kill at any moment leaves a whole checkpoint."""
    partial = path.with_suffix(".partial")
    torch.save(trainer.state(), partial)
    os.replace(partial, path)


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
    checkpoint, finish = run.work / "checkpoint.pt", run.work / "finish"
    if checkpoint.exists():
        trainer.load(torch.load(checkpoint, weights_only=True))
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
            save_checkpoint(checkpoint, trainer)
            saved_at = progress.seconds
        if pending and progress.seconds >= pending[0]:
            pending.pop(0)
            save_checkpoint(checkpoint, trainer)
            export(trainer.models, trainer.data, facts(trainer, final=False), run.work, run.out)
            clock.restart()

    signal.signal(signal.SIGTERM, before)
    save_checkpoint(checkpoint, trainer)
    if not stopped:
        export(trainer.models, trainer.data, facts(trainer, final=True), run.work, run.out)
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


def facts(trainer: Trainer, final: bool) -> TrainingFacts:
    """What the model card says about this run so far."""
    progress, recipe = trainer.progress, trainer.recipe
    cooled = progress.cooldown_seen / max(1, progress.seen)
    return TrainingFacts(
        tokens=progress.seen,
        hours=progress.seconds / 3600,
        machine=f"{recipe.workers} cores, CPU, shared with other work",
        final=final,
        parameters=(trainer.target.num_parameters(), trainer.draft.num_parameters()),
        group_shares={group: (1 - cooled) * share + cooled * COOLDOWN[group] for group, share in STABLE.items()},
        peak_lr=(recipe.target_lr, recipe.draft_lr),
        distillation=recipe.distillation,
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
        trainer.load(torch.load(args.work / "checkpoint.pt", weights_only=True))
        export(trainer.models, data, facts(trainer, final=False), args.work, args.out)
    else:
        train(trainer, Run(args.work, args.out, args.deadline))


if __name__ == "__main__":
    main()
