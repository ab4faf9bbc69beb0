"""The `foretoken` command. Owns the commands' names; imports each command's module when it is called."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from .. import __version__
from .exit_status import CONFIG, INTERRUPTED, SOFTWARE, UNAVAILABLE, USAGE, failed
from .help_format import unknown

HELP = """\
usage: foretoken COMMAND ...

An OpenAI-compatible inference server built around exact speculative decoding.

use a model:
  serve [MODEL] [flags]            serve it, or the small embedded model
  chat [flags]                     talk to a running server in the terminal
  generate PROMPT [MODEL] [flags]  answer one prompt without a server
  run-batch [MODEL] [flags]        answer a file of requests without a server

measure and choose:
  tune [MODEL] [flags]    the fastest speculation for your own prompts
  bench speculation       every method and draft length against no speculation
  bench workloads         is speculation ever slower? by work and batch size
  bench serve             load any OpenAI-compatible server: latency, throughput
  bench compare           the same requests to several servers, or transformers
  bench overhead          what the engine adds to the model's own time
  bench kernels           the machine's limits, and how near we come to them
  bench training          how fast a target learns, beside plain transformers
  bench quality           what number formats cost in perplexity and acceptance

train:
  train target            a tokenizer and a model from scratch
  train draft             a draft model for a model of yours
  train head              a drafting head for it: EAGLE-3, Medusa, MTP, ...
  train ngram-cache       what follows which tokens, counted in its answers
  train family            the embedded model and all of its drafters
  train evaluate          what that family answers, and how much is accepted
  train fetch-data        where its training text comes from

  completion SHELL        completion for bash, zsh or fish
  version                 print the version

`foretoken COMMAND --help` shows the flags and examples of a command.

examples:
  foretoken serve
  foretoken serve ./my-model --speculative-model ./my-draft
  foretoken chat --url http://127.0.0.1:8000
  foretoken generate "How do I list the files of a folder?" --show-steps
  foretoken run-batch --input questions.jsonl --output answers.jsonl ./my-model
  foretoken tune ./my-model --dataset my-prompts.jsonl --out server.yaml
"""
BENCH_HELP = """\
usage: foretoken bench speculation [MODEL] [flags]
       foretoken bench workloads [MODEL] [flags]
       foretoken bench overhead [flags]
       foretoken bench kernels [flags]
       foretoken bench training [flags]
       foretoken bench quality [flags]
       foretoken bench serve --base-url URL [flags]
       foretoken bench compare --base-url URL --base-url URL [flags]

examples:
  foretoken bench speculation
  foretoken bench speculation ./my-model --speculative-config '{"method": "draft_model", "model": "./my-draft"}' --k 1,3,5,7
  foretoken bench workloads --batch 1,8 --pairs 10 --plot workloads.png
  foretoken bench overhead --help
  foretoken bench kernels --quick --models demo
  foretoken bench quality --formats bfloat16,int8,int4
  foretoken bench serve --base-url http://127.0.0.1:8000 --dataset chat --concurrency 1,8,32 --plot result.png
  foretoken bench compare --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:8080 --stream
"""
COMMANDS = ("serve", "chat", "generate", "run-batch", "bench", "tune", "train", "completion", "version", "help")
BENCHES = ("speculation", "workloads", "overhead", "kernels", "training", "quality", "serve", "compare")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its status."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us (`>&-`); in this order each gets its own number again
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what a model says may be more than a terminal's encoding has
    try:
        status = run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def run(words: list[str]) -> int:
    """One command. Returns its exit status; what it does not catch is the caller's."""
    match words:
        case ["serve", *flags]:
            return serve(flags)
        case ["chat", *flags]:
            from .terminal.chat import chat

            return chat(flags)
        case ["generate", *flags]:
            from .generate_command import generate

            return _reported(lambda: generate(flags))
        case ["run-batch", *flags]:
            from .run_batch import run_batch

            return _reported(lambda: run_batch(flags))
        case ["bench", name, *flags] if name in BENCHES:
            return import_module(f".bench.{name}", __package__).main(flags)
        case ["bench", name, *_] if not name.startswith("-"):
            return failed(unknown("benchmark", name, BENCHES, "foretoken bench --help"), USAGE)
        case ["bench", *rest]:
            asked = rest in (["-h"], ["--help"])
            print(BENCH_HELP, end="", file=sys.stdout if asked else sys.stderr)
            return 0 if asked else USAGE
        case ["tune", *flags]:
            from .bench.tune import main as tune

            return tune(flags)
        case ["train", *flags]:
            from .train.command import main as train

            return train(flags)
        case ["completion", *flags]:
            from .completion import main as completion

            return completion(flags)
        case ["version" | "--version" | "-V", *_]:
            print(f"foretoken {__version__}")
            return 0
        case ["help", command, *rest]:
            return run([command, *rest, "--help"])
        case [] | ["help" | "-h" | "--help", *_]:
            print(HELP, end="")
            return 0
        case _:
            return failed(unknown("command", words[0], COMMANDS, "foretoken --help"), USAGE)


def serve(flags: Sequence[str]) -> int:
    """`foretoken serve`: read the settings, take the port, and only then load what is slow."""
    from ..engine.errors import ForetokenError
    from .config import ServerConfig
    from .listener import ListenError, listen, listen_at

    log_level = "info"
    try:
        config = ServerConfig.from_cli(flags)
        log_level = config.log_level
        with listen_at(config.uds) if config.uds else listen(config.host, config.port) as listener:
            from .launch import serve as run

            return run(config, listener)
    except ListenError as error:
        return failed(error, UNAVAILABLE)
    except ForetokenError as error:
        return failed(error, CONFIG)
    except Exception as error:
        if log_level == "debug":
            raise
        return failed(f"{type(error).__name__}: {error} (--log-level debug shows where)", SOFTWARE)


def _reported(command: Callable[[], int]) -> int:
    """The status of a command that loads a model; what it raises is one line."""
    from ..engine.errors import ForetokenError

    try:
        return command()
    except ForetokenError as error:
        return failed(error, CONFIG)
