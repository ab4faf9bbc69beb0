"""`foretoken train ngram-cache`: what follows short runs of tokens in a target's answers, from text to a folder that serves beside it."""

import json
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ...proposers.checkpoint import Checkpoint
from ...proposers.ngram_cache_checkpoint import read_table, write_table
from ...proposers.training.ngram_check import Check, check
from ...proposers.training.ngram_counts import CountLimits, count_runs
from ...proposers.training.packing import LEARN, PackedFile
from ...proposers.training.reading import DataError
from .drafter_data import ANSWERS, prepare
from .options import NgramCacheOptions
from .run import WorkFolder, log, open_to_readers


@dataclass(frozen=True)
class Made:
    """An n-gram cache in its folder, and what came out."""

    runs: int
    tokens: int                      # of answers, that were counted
    seconds: float
    check: Check | None              # None: nothing was held out


def train_ngram_cache(options: NgramCacheOptions) -> None:
    """Generate, count, write, check. Raises DataError, what `generate` raises, and KeyboardInterrupt when asked to stop."""
    sources = options.sources
    # How it is counted is no part of the record: that takes seconds, and answers serve every count.
    folder = WorkFolder.claim(sources, {"model": options.model, **asdict(options.prompting)})
    data = prepare(sources, options.model, options.prompting, folder, ground_truth=False)
    limits = CountLimits(options.max_n, options.min_count, options.max_runs)
    made = make_ngram_cache(folder.packed(ANSWERS), limits, len(data.tokenizer), sources.out)
    open_to_readers(sources.out)
    config = json.dumps({"method": "ngram_cache", "model": str(sources.out)})
    print(f"counted {sources.out}: {made.runs:,} runs of up to {options.max_n} tokens, from {made.tokens:,} tokens of answers")
    for line in made.check.lines() if made.check else ("nothing is held out of so little data: how often it is right is not known",):
        print(line)
    print(f"serve it with\n  foretoken serve {shlex.quote(options.model)} --speculative-config {shlex.quote(config)}")


def make_ngram_cache(answers: Path, limits: CountLimits, vocab_size: int, folder: Path) -> Made:
    """Write the folder, and check it. answers: a packed file; NAME_held_out beside it is not counted but checked with.

    Raises DataError if no run comes often enough.
    """
    counted = PackedFile(answers)
    tokens = int(np.count_nonzero(counted.learn == LEARN))
    log.info("counting what follows runs of up to %d tokens, in %s tokens of answers", limits.max_n, f"{tokens:,}")
    began = time.monotonic()
    with tqdm(desc="counting", total=limits.max_n, unit=" lengths", leave=False, disable=None) as bar:
        followed = count_runs(counted, limits, bar.update)
    runs = sum(len(one.next) for one in followed)
    if not runs:
        raise DataError(f"no run of tokens comes {limits.min_count:,} times in {tokens:,} tokens of answers: give more data")
    write_table(folder, followed, vocab_size)
    table = read_table(Checkpoint(folder), vocab_size)       # what is checked is what will be served
    held_out = answers.with_name(f"{answers.name}_held_out")
    found = check(table, PackedFile(held_out)) if held_out.with_suffix(".learn").stat().st_size else None
    return Made(runs, tokens, time.monotonic() - began, found)
