"""The flags of `foretoken train target | draft | head | ngram-cache`, as typed options.

Imports nothing heavy: a mistake is known at once.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..help_format import CommandParser

METHODS = ("eagle3", "eagle", "medusa", "mlp_speculator", "mtp", "pard", "dflash", "dflash2", "uno")
MOST_N = 8                           # of kernels/ngram_table.py, which imports heavy things

TARGET_EXAMPLES = """\
examples:
  foretoken train target --data my-text/ --out my-model
  foretoken train target --data chats.jsonl notes.md --out my-model --hidden 384 --layers 12 --minutes 120
"""
DRAFT_EXAMPLES = """\
examples:
  foretoken train draft --model my-model --data chats.jsonl --out my-draft
  foretoken train draft --model Qwen/Qwen3-0.6B --data chats.jsonl --out my-draft --layers 2 --hidden 256 --minutes 60
"""
HEAD_EXAMPLES = """\
examples:
  foretoken train head --method eagle3 --model my-model --data chats.jsonl --out my-eagle3
  foretoken train head --method medusa --model my-model --data chats.jsonl --out my-medusa --num-speculative-tokens 4
  foretoken train head --method mlp_speculator --model my-model --data my-text/ --out my-mlp --set inner_dim=256
"""
NGRAM_CACHE_EXAMPLES = """\
examples:
  foretoken train ngram-cache --model my-model --data chats.jsonl --out my-ngram-cache
  foretoken train ngram-cache --model Qwen/Qwen3-0.6B --data chats.jsonl --out my-ngram-cache --prompts 50k --max-runs 1M
  foretoken train ngram-cache --model my-model --data chats.jsonl --out my-ngram-cache --max-n 3 --max-runs 20k

Given again with another --max-n, --min-count or --max-runs, it counts the same answers anew.
"""
DATA = "jsonl with `text` or `messages` (and `tools`), text files, .xz of either, or folders of them"


@dataclass(frozen=True)
class Sources:
    """What it is made from, and where."""

    data: tuple[Path, ...]
    out: Path
    work: Path
    seed: int


@dataclass(frozen=True)
class Training:
    """What every training takes."""

    sources: Sources
    tokens: int | None               # read in all; None: `epochs` of the data, or as many as `minutes` allow
    epochs: float | None
    minutes: float | None
    batch_tokens: int
    accumulate: int
    lr: float | None                 # None: the optimizer's own
    device: str
    precision: str


@dataclass(frozen=True)
class Sizes:
    """Of a Llama-shaped model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


@dataclass(frozen=True)
class Prompting:
    """What the target is asked, to have it write what drafters learn from."""

    prompts: int                     # at most so many
    prompt_tokens: int               # of plain text, which the target continues; chats are answered turn by turn
    answer_tokens: int
    batch: int                       # answered together


@dataclass(frozen=True)
class TargetOptions:
    training: Training
    sizes: Sizes
    vocab_size: int
    context: int


@dataclass(frozen=True)
class DraftOptions:
    training: Training
    model: str
    prompting: Prompting
    sizes: Sizes


@dataclass(frozen=True)
class HeadOptions:
    training: Training
    model: str
    prompting: Prompting
    method: str
    num_speculative_tokens: int | None
    settings: dict[str, Any]         # of the method's own settings, by field name


@dataclass(frozen=True)
class NgramCacheOptions:
    sources: Sources
    model: str
    prompting: Prompting
    max_n: int                       # of CountLimits of proposers/training/ngram_counts.py, as are the next two
    min_count: int
    max_runs: int


def target_options(argv: Sequence[str]) -> TargetOptions:
    parser = Parser("target", "Train a tokenizer and a Llama-shaped model from scratch.", TARGET_EXAMPLES)
    parser.add_training(accumulate=2)
    parser.add_sizes(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=688)
    parser.add_argument("--vocab-size", type=count, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--context", type=count, default=2048, metavar="N", help="longest sequence in tokens (default 2048)")
    args = parser.parse_args(argv)
    if args.vocab_size < 512:
        parser.error("--vocab-size must be at least 512: 256 bytes, the markers and some merges")
    return TargetOptions(parser.training(args), parser.sizes(args), args.vocab_size, args.context)


def draft_options(argv: Sequence[str]) -> DraftOptions:
    parser = Parser("draft", "Train a small draft model on what the target writes, and on its logits.", DRAFT_EXAMPLES)
    parser.add_model()
    parser.add_training(accumulate=2)
    parser.add_sizes(hidden=96, layers=2, heads=4, kv_heads=2, intermediate=256)
    args = parser.parse_args(argv)
    return DraftOptions(parser.training(args), args.model, prompting(args), parser.sizes(args))


def head_options(argv: Sequence[str]) -> HeadOptions:
    parser = Parser("head", "Train a drafting head on what the target writes.", HEAD_EXAMPLES)
    parser.add_argument("--method", required=True, choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_model()
    parser.add_training(accumulate=2)
    parser.add_argument("--num-speculative-tokens", type=count, metavar="K", help="tokens guessed at a time (default: the method's own)")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
                        help="one of the method's own settings, such as inner_dim=256; a wrong name lists them all")
    args = parser.parse_args(argv)
    return HeadOptions(parser.training(args), args.model, prompting(args), args.method, args.num_speculative_tokens, dict(args.set))


def ngram_cache_options(argv: Sequence[str]) -> NgramCacheOptions:
    parser = Parser("ngram-cache", "Count what follows short runs of tokens in what the target writes.", NGRAM_CACHE_EXAMPLES)
    parser.add_model()
    parser.add_sources()
    add = parser.add_argument_group("counting").add_argument
    add("--max-n", type=count, default=4, metavar="N", help="tokens of the longest runs (default 4)")
    add("--min-count", type=count, default=3, metavar="N", help="leave out runs that came less often (default 3)")
    add("--max-runs", type=count, default=100_000, metavar="N", help="at most so many, those that help most (default 100,000)")
    args = parser.parse_args(argv)
    if args.max_n > MOST_N:
        parser.error(f"--max-n {args.max_n} is above {MOST_N}")
    return NgramCacheOptions(parser.sources(args), args.model, prompting(args), args.max_n, args.min_count, args.max_runs)


class Parser(CommandParser):
    """Flags that several of the commands share."""

    def __init__(self, command: str, description: str, examples: str) -> None:
        super().__init__(prog=f"foretoken train {command}", description=description, epilog=examples)

    def add_model(self) -> None:
        self.add_argument("--model", required=True, metavar="TARGET", help="folder or hub id of the target")
        group = self.add_argument_group("text written by the target")
        add = group.add_argument
        add("--prompts", type=count, default=20_000, metavar="N", help="at most so many, taken at random (default 20,000)")
        add("--prompt-tokens", type=count, default=48, metavar="N", help="of plain text, for the target to go on from (default 48)")
        add("--answer-tokens", type=count, default=256, metavar="N", help="most tokens of an answer (default 256)")
        add("--generate-batch", type=count, default=64, metavar="N", help="prompts answered together (default 64)")

    def add_sources(self) -> None:
        self.add_argument("--data", required=True, nargs="+", type=Path, metavar="PATH", help=DATA)
        self.add_argument("--out", required=True, type=Path, metavar="DIR", help="the finished folder; need not exist")
        self.add_argument("--work", type=Path, metavar="DIR", help="checkpoints, curves and generated text (default: OUT.work)")
        self.add_argument("--seed", type=int, default=0, metavar="N", help="(default 0)")

    def add_training(self, accumulate: int) -> None:
        self.add_sources()
        group = self.add_argument_group("training; the same command again goes on where it stopped")
        add = group.add_argument
        add("--tokens", type=count, metavar="N", help="tokens to read in all, such as 20M")
        add("--epochs", type=positive, metavar="N", help="times to read the data (default 1 if --tokens and --minutes are not given)")
        add("--minutes", type=positive, metavar="M", help="end after so much training, if that comes first")
        add("--batch-tokens", type=count, default=4096, metavar="N", help="tokens of a batch (default 4096)")
        add("--accumulate", type=count, default=accumulate, metavar="N", help=f"batches to a step (default {accumulate})")
        add("--lr", type=positive, metavar="RATE", help="peak learning rate of the matrices; tables get half as much again")
        add("--device", default="auto", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
        add("--precision", default="auto", choices=("auto", "bfloat16", "float32"),
            help="of matrix products; weights stay float32 in training (default: bfloat16 where the machine has it)")

    def add_sizes(self, **defaults: int) -> None:
        group = self.add_argument_group("sizes of the model")
        for name, default in defaults.items():
            group.add_argument(f"--{name.replace('_', '-')}", type=count, default=default, metavar="N", help=f"(default {default})")

    def sizes(self, args: argparse.Namespace) -> Sizes:
        sizes = Sizes(args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate)
        if sizes.hidden % (2 * sizes.heads):
            self.error(f"--hidden {sizes.hidden} must be a multiple of twice --heads {sizes.heads}")
        if sizes.heads % sizes.kv_heads:
            self.error(f"--heads {sizes.heads} must be a multiple of --kv-heads {sizes.kv_heads}")
        return sizes

    def sources(self, args: argparse.Namespace) -> Sources:
        work = args.work or args.out.with_name(args.out.name + ".work")
        return Sources(tuple(args.data), args.out, work, args.seed)

    def training(self, args: argparse.Namespace) -> Training:
        if args.batch_tokens < 2:
            self.error("--batch-tokens must be at least 2: a token is learned from the one before it")
        return Training(
            self.sources(args), args.tokens, args.epochs, args.minutes, args.batch_tokens, args.accumulate, args.lr,
            args.device, args.precision,
        )


def prompting(args: argparse.Namespace) -> Prompting:
    return Prompting(args.prompts, args.prompt_tokens, args.answer_tokens, args.generate_batch)


def count(text: str) -> int:
    """20M -> 20000000. Raises for anything but a whole number above 0."""
    digits, factor = (text[:-1], {"k": 10**3, "M": 10**6, "G": 10**9}[text[-1]]) if text[-1:] in ("k", "M", "G") else (text, 1)
    try:
        number = float(digits.replace(",", "").replace("_", "")) * factor
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0, such as 500, 4k or 20M")
    return int(number)


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def setting(text: str) -> tuple[str, Any]:
    """inner_dim=256 -> ("inner_dim", 256): numbers, true, false and lists as in JSON, anything else is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        parsed: Any = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed
