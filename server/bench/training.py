"""`foretoken bench training`: tokens a second that `foretoken train target` learns, beside transformers with AdamW as it comes.

Both train the same shape on the same documents, in turn; what is said in them does not matter to the speed, so they are made up.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ...engine.bench.interleaved import take_turns, timed
from ...engine.bench.machine import this_machine
from ...proposers.training.loop import Plan, Run
from ...proposers.training.packing import Document, PackedStream, write
from ...proposers.training.target import Shape, TargetTrainee
from ..help_format import CommandParser
from ..option_forms import count
from ..train.run import Machine

VOCAB_SIZE = 8192
BATCH_TOKENS, ACCUMULATE = 4096, 2   # as the embedded target was trained
STEP_TOKENS = ACCUMULATE * BATCH_TOKENS
DOCUMENT_TOKENS = 300                # on average
BLOCK = 256                          # the peer cuts its text into blocks of so many tokens

EXAMPLES = """\
examples:
  foretoken bench training
  foretoken bench training --hidden 512 --layers 12 --rounds 3

Let the machine do nothing else meanwhile.
"""


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = CommandParser(
        prog="foretoken bench training", epilog=EXAMPLES,
        description="How fast a target learns, and how fast with transformers' own model, loss and AdamW.")
    parser.add_argument("--hidden", type=count, default=320, metavar="N", help="width of the model, a multiple of 64 (default 320)")
    parser.add_argument("--layers", type=count, default=8, metavar="N", help="default 8")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="times that both have a turn (default 5)")
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps in a turn (default 3)")
    args = parser.parse_args(argv)
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: a multiple of 64 is needed, the width of a head")
    heads = args.hidden // 64
    shape = Shape(args.hidden, args.layers, heads, heads, round(args.hidden * 8 / 3 / 32) * 32)
    with tempfile.TemporaryDirectory() as folder:
        print(measure(shape, args.rounds, args.steps, Path(folder)))
    print(f"\n    {shlex.join(['foretoken', 'bench', 'training', *argv])}\n\non {this_machine().describe()}")
    return 0


def measure(shape: Shape, rounds: int, steps: int, work: Path) -> str:
    """A table: tokens a second of both, medians of their turns, and the ratio round by round."""
    documents = made_up(8 * STEP_TOKENS)
    write(work / "text", documents, VOCAB_SIZE)
    turns = {"foretoken train": ours(shape, work, steps), "transformers + AdamW": plain(shape, documents, steps)}
    with tqdm(total=len(turns) * (rounds + 1), desc="training", unit=" turns", leave=False, disable=None) as bar:
        found = take_turns(turns, rounds, bar.update)
    ratio = found["foretoken train"].over(found["transformers + AdamW"])
    size = sum(weights.numel() for weights in shape.build(VOCAB_SIZE).parameters())
    lines = [f"| {size / 1e6:.1f}M parameters, bfloat16 | tokens/s |", "|---|---|"]
    lines += [f"| {name} | {series.spread.median:,.0f} |" for name, series in found.items()]
    return "\n".join([*lines, f"| ratio (quartiles) | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"])


def made_up(tokens: int) -> list[Document]:
    """Documents of random lengths, `tokens` tokens in all and a few more."""
    chance, documents = np.random.default_rng(0), []
    while tokens > 0:
        ids = chance.integers(8, VOCAB_SIZE, int(chance.integers(DOCUMENT_TOKENS // 3, 2 * DOCUMENT_TOKENS)))
        documents.append(Document(ids.astype(np.uint16), np.ones(len(ids), np.uint8)))
        tokens -= len(ids)
    return documents


def ours(shape: Shape, work: Path, steps: int) -> Callable[[], float]:
    """A turn of `foretoken train target`: tokens a second."""
    machine, stream = Machine.choose("cpu", "auto"), PackedStream([work / "text"], BATCH_TOKENS)
    workers = machine.workers(ACCUMULATE)
    plan = Plan(sys.maxsize, accumulate=ACCUMULATE, half=machine.half, workers=workers)
    run = Run(TargetTrainee(shape.build(VOCAB_SIZE)), stream, plan, work)

    def turn() -> float:
        torch.set_num_threads(max(1, machine.cores // workers))
        before = run.progress.tokens
        seconds = timed(lambda: [run.step() for _ in range(steps)])
        return (run.progress.tokens - before) / seconds

    return turn


def plain(shape: Shape, documents: Sequence[Document], steps: int) -> Callable[[], float]:
    """A turn of what one writes without thinking of speed, on as many tokens a step: tokens a second."""
    machine, model = Machine.choose("cpu", "auto"), shape.build(VOCAB_SIZE)
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.from_numpy(np.concatenate([document.token_ids for document in documents]).astype(np.int64))
    batches = cycle(text[: len(text) // STEP_TOKENS * STEP_TOKENS].view(-1, STEP_TOKENS // BLOCK, BLOCK))

    def step() -> None:
        batch: Any = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=machine.half):
            loss: Any = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> float:
        torch.set_num_threads(machine.cores)
        return steps * STEP_TOKENS / timed(lambda: [step() for _ in range(steps)])

    return turn
