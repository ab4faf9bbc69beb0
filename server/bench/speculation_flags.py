"""The flags that `bench speculation` and `tune` share: what is measured, on which prompts, with which engine."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...engine.bench.speculation import Conversation, Method
from ...engine.config import DEMO_MODEL
from ...engine.errors import ConfigError
from ..option_forms import count, positive, temperature
from .prompt_sets import ALL, OWN, PUBLISHED, RANDOM, Prompt, PromptSetError, load, random_words

T = TypeVar("T")

RANDOM_WORDS = 64  # of a prompt in which nothing can be guessed
ENGINE_OPTIONS = ("dtype", "quantization", "threads", "max_model_len", "kv_cache_gb")


def add_flags(parser: argparse.ArgumentParser, concurrency: tuple[int, ...], max_tokens: int, num_prompts: int, rounds: int) -> None:
    """The numbers are defaults."""
    add = parser.add_argument
    add("model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help="folder or hub id of the target (default: the embedded model)")
    add(
        "--dataset", default=ALL, metavar="NAME|FILE",
        help=f"prompts: {', '.join((*OWN, ALL, RANDOM))}, or a file: JSON lines with messages, prompt or turns, or .txt (default all)",
    )
    add("--dataset-path", type=Path, metavar="FILE", help=f"the file of a published set: {', '.join(PUBLISHED)}")
    add(
        "--speculative-config", "-sc", metavar="CONFIG",
        help="what to try, as for serve: an object or a list of them, JSON, YAML or @FILE (default: all that the model has)",
    )
    add("--methods", type=_names, default=(), metavar="A,B", help="only these of them, by name: ngram,draft_model")
    add("--k", type=numbers, default=(1, 3, 5, 7), metavar="K,K", help="draft lengths (default 1,3,5,7)")
    add(
        "--concurrency", "--batch", type=numbers, default=concurrency, metavar="N,N",
        help=f"requests at a time (default {','.join(map(str, concurrency))})",
    )
    add("--max-tokens", type=count, default=max_tokens, metavar="N", help="of an answer (default %(default)s)")
    add("--num-prompts", type=count, default=num_prompts, metavar="N", help="taken from the data set, evenly (default %(default)s)")
    add("--rounds", type=count, default=rounds, metavar="N", help="times that everybody has a turn, for figures (default %(default)s)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default %(default)s)")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens in any case")
    engine = parser.add_argument_group("engine").add_argument
    engine("--dtype", choices=["auto", "float32", "bfloat16"], help="as for serve")
    engine("--quantization", choices=["none", "int8", "int4", "fp8"], help="as for serve")
    engine("--threads", type=count, metavar="N", help="cores to compute with (default: all)")
    engine("--max-model-len", type=count, metavar="N", help="as for serve")
    engine("--kv-cache-gb", type=positive, metavar="GB", help="as for serve")


def methods_of(args: argparse.Namespace) -> tuple[Method, ...]:
    """Raises ConfigError."""
    from .speculation_methods import find_methods  # imports torch

    return find_methods(args.model, args.speculative_config, args.methods)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """As `LLM` takes them; what nobody gave is absent."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}


def conversations_of(args: argparse.Namespace) -> list[Conversation]:
    """At most --num-prompts, spread over the whole set: what is said up to the first answer. Raises ConfigError."""
    try:
        if args.dataset == RANDOM and args.dataset_path is None:
            return [conversation(prompt) for prompt in random_words(args.num_prompts, RANDOM_WORDS, 0)]
        found = load(args.dataset, args.dataset_path)
    except PromptSetError as error:
        raise ConfigError(str(error)) from None
    return [conversation(prompt) for prompt in evenly(found, args.num_prompts)]


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most so many, from all parts: of 0 .. 9 four are 0, 2, 5, 7."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def conversation(prompt: Prompt) -> Conversation:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def numbers(text: str) -> tuple[int, ...]:
    """ "8,1,1" -> (1, 8)."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def _names(text: str) -> Sequence[str]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))
