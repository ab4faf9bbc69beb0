"""`foretoken train`: which training a command line means, and how its errors end. Trains nothing."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ..exit_status import CONFIG, DATA, INTERRUPTED, SOFTWARE, USAGE, failed
from ..help_format import unknown
from .options import Parser, draft_options, head_options, ngram_cache_options, target_options

HELP = """\
usage: foretoken train target --data PATH ... --out DIR [flags]
       foretoken train draft --model TARGET --data PATH ... --out DIR [flags]
       foretoken train head --method METHOD --model TARGET --data PATH ... --out DIR [flags]
       foretoken train ngram-cache --model TARGET --data PATH ... --out DIR [flags]
       foretoken train family [flags]
       foretoken train evaluate [flags]
       foretoken train fetch-data [--data DIR]

  target      a tokenizer and a Llama-shaped model, from scratch
  draft       a small draft model for a target: it learns from what the target writes, and from its logits
  head        a drafting head for a target: eagle3, eagle, medusa, mlp_speculator, mtp, pard, dflash, dflash2 or uno
  ngram-cache what follows short runs of tokens in what the target writes: counted in seconds, guesses in microseconds
  family      the embedded model and all of its drafters, by the recipe in this package
  evaluate    what the embedded family answers, and how many drafted tokens are accepted
  fetch-data  where the embedded family's training text comes from, and whether it is here

A training that was stopped, by Ctrl-C, by SIGTERM or by accident, goes on when the same command is given again.

examples:
  foretoken train target --data my-text/ --out my-model --minutes 30
  foretoken train head --method eagle3 --model my-model --data chats.jsonl --out my-eagle3 --minutes 10
  foretoken train ngram-cache --model my-model --data chats.jsonl --out my-ngram-cache
  foretoken train fetch-data --data corpora
"""
FETCH_EXAMPLES = """\
examples:
  foretoken train fetch-data
  foretoken train fetch-data --data ~/corpora

The exit status is 0 if every corpus is there as the recipe read it.
"""
COMMANDS = ("target", "draft", "head", "ngram-cache", "family", "evaluate", "fetch-data")


def main(argv: Sequence[str]) -> int:
    """Run one training; returns the exit status."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("foretoken.train").setLevel(logging.INFO)
    match list(argv):
        case ["-h" | "--help"]:
            print(HELP, end="")
            return 0
        case [command, *flags] if command in COMMANDS:
            return _guarded(command, flags)
        case [command, *_] if not command.startswith("-"):
            return failed(unknown("training", command, COMMANDS, "foretoken train --help"), USAGE)
        case _:
            print(HELP, end="", file=sys.stderr)
            return USAGE


def _guarded(command: str, flags: Sequence[str]) -> int:
    from safetensors import SafetensorError

    from ...engine.errors import ForetokenError
    from ...proposers.training.reading import DataError

    try:
        return _run(command, flags)
    except KeyboardInterrupt:
        print("foretoken: stopped; what is done is kept, and the same command goes on with it", file=sys.stderr)
        return INTERRUPTED
    except (DataError, OSError, SafetensorError) as error:  # the last of a disk that is full, too
        return failed(error, DATA)
    except ForetokenError as error:
        return failed(error, CONFIG)
    except FloatingPointError as error:
        return failed(error, SOFTWARE)


def _run(command: str, flags: Sequence[str]) -> int:
    """Options are read before anything heavy is imported."""
    match command:
        case "target":
            options = target_options(flags)
            _quiet()
            from .target import train_target

            train_target(options)
        case "draft":
            options = draft_options(flags)
            _quiet()
            from .head import train_draft

            train_draft(options)
        case "head":
            options = head_options(flags)
            _quiet()
            from .head import train_head

            train_head(options)
        case "ngram-cache":
            options = ngram_cache_options(flags)
            _quiet()
            from .ngram_cache import train_ngram_cache

            train_ngram_cache(options)
        case "family":
            from .family import main as family

            return family(flags)
        case "evaluate":
            from .evaluate import main as evaluate

            return evaluate(flags)
        case _:
            return fetch_data(flags)
    return 0


def fetch_data(argv: Sequence[str]) -> int:
    """Name every corpus with source and licence, and check what is in the data folder. 0 if all of it is there."""
    parser = Parser("fetch-data", "Where the embedded family's training text comes from, and what of it is here.", FETCH_EXAMPLES)
    parser.add_argument("--data", type=Path, default=Path("corpora"), metavar="DIR", help="folder with the corpora (default ./corpora)")
    data: Path = parser.parse_args(argv).data
    from ...proposers.training.fetch_data import CORPORA, State, check

    counts = dict.fromkeys(State, 0)
    for finding in tqdm(check(data), total=len(CORPORA), desc="checking", unit="file", leave=False, disable=None):
        corpus = finding.corpus
        counts[finding.state] += 1
        tqdm.write(f"{finding.state:8} {corpus.name:26} {corpus.licence:36} {corpus.url}")
        if finding.state is State.CHANGED:
            tqdm.write(f"{'':8} {finding.path} has {finding.records:,} records and another sum than the recipe's {corpus.records:,}")
        if finding.state is State.MISSING:
            tqdm.write(f"{'':8} make {data / corpus.name}.jsonl, {corpus.records:,} lines: {corpus.files}")
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if counts[State.MISSING]:
        print(f"To get a missing one, clone its repository at that commit and write the file named above, in {data}; .jsonl.xz will do.")
    return 0 if counts[State.OK] == len(CORPORA) else 1


def _quiet() -> None:
    """What transformers says while loading and saving is not news here."""
    from transformers.utils import logging as said

    said.set_verbosity_error()
    said.disable_progress_bar()
