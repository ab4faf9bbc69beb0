"""The flags of `foretoken serve`: their names, aliases and forms, and the sources they come from.

Owns reading: what the words of a command line, of a `--config` file and of the environment say, merged by precedence. Knows
no defaults (those stand in the config types) and no meaning of a value beyond its form.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .flags import UnknownFlag, separate
from .reasoning import REASONING_FORMATS
from .tools.formats import FORMATS, NO_PARSER

DESCRIPTION = """\
Serve a model behind an OpenAI-compatible API, with speculative decoding.

MODEL is a folder with safetensors weights or a Hugging Face id; without one, the small embedded model is served.
Without a drafter the server guesses by prompt lookup (n-gram, 5 tokens); the output is the same with any drafter or none.
"""
EXAMPLES = """\
examples:
  foretoken serve
  foretoken serve ./my-model --port 9000
  foretoken serve ./my-model --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
  foretoken serve ./my-model --speculative-config '{"method": "draft_model", "model": "./my-draft", "num_speculative_tokens": 3}'
  foretoken serve --model ./my-model --speculative-model '[ngram]' --num-speculative-tokens 5 --ngram-prompt-lookup-max 4
  foretoken serve --config server.yaml        (keys are the flags' names)

A setting is taken from the first of: command line, --config file, environment (FORETOKEN_PORT, FORETOKEN_API_KEY, ...), default.
vLLM's other flags are accepted with a warning that they have no effect; unknown flags are errors.
"""
SPECULATION_OPTIONS = frozenset(
    {
        "speculative_config", "spec_method", "speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_min",
        "ngram_prompt_lookup_max", "speculative_max_model_len", "speculative_disable_by_batch_size",
        "speculative_draft_tensor_parallel_size", "speculative_model_quantization",
    }
)  # fmt: skip
_REPEATED = {"--api-key"}  # a list in a file becomes one flag an item
_TAKING_VALUES = {"--served-model-name"}  # ... or one flag with several values


@dataclass
class Options:
    """What all sources say together, by the flag's name with underscores. A flag nobody gave is absent."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Parse the words after `foretoken serve`; `environment` maps flag names (without dashes) to text.

    Exits with status 2 and one line on a mistake, 0 after --help.
    """
    parser = ServeParser()
    line = _parse(parser, argv, "")
    surrounding = _parse(parser, [f"--{name}={text}" for name, text in environment.items()], "environment: ")
    sources = [line, surrounding]
    if path := line.values.get("config", surrounding.values.get("config")):
        parser.where = ""
        sources.insert(1, _parse(parser, _words_of_file(parser, Path(path)), f"{path}: "))
    merged = Options({}, [warning for source in sources for warning in source.warnings])
    for source in reversed(sources):
        if SPECULATION_OPTIONS & source.values.keys():  # a drafter is chosen as a whole, never half from here and half from there
            merged.values = {name: value for name, value in merged.values.items() if name not in SPECULATION_OPTIONS}
        merged.values.update(source.values)
    return merged


def _parse(parser: ServeParser, words: Sequence[str], where: str) -> Options:
    parser.where = where
    try:
        separated = separate(words, parser.flags)
    except UnknownFlag as error:
        parser.error(str(error))
    namespace, positional = parser.parse_known_args(separated.own)
    values = vars(namespace)
    positional = [word for word in positional if word != "--"]
    if len(positional) > 1:
        parser.error(f"one MODEL at most, not {' '.join(positional)}")
    if positional and values.setdefault("model", positional[0]) != positional[0]:
        parser.error(f"two models: {positional[0]} and --model {values['model']}; name one")
    return Options(values, [where + warning for warning in separated.warnings])


def _words_of_file(parser: ServeParser, path: Path) -> list[str]:
    """`port: 9000` -> `--port=9000`. True gives the bare flag, False its `--no-` form where there is one."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config {path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        parser.error(f"--config {path} must map the flags' names to values")
    words: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-").removeprefix("--")
        match value:
            case None:
                pass
            case True:
                words.append(flag)
            case False:
                words.extend(no for no in [flag.replace("--", "--no-", 1)] if no in parser.flags)
            case list() if flag in _REPEATED:
                words.extend(f"{flag}={item}" for item in value)
            case list() if flag in _TAKING_VALUES:
                words.extend([flag, *map(str, value)])
            case list() | dict():
                words.append(f"{flag}={json.dumps(value)}")
            case _:
                words.append(f"{flag}={value}")
    return words


class ServeParser(argparse.ArgumentParser):
    """All flags of `foretoken serve`. `flags` holds every spelling, `where` names the source being read."""

    def __init__(self) -> None:
        super().__init__(
            prog="foretoken serve",
            usage="foretoken serve [MODEL] [flags]",
            description=DESCRIPTION,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.flags = {"-h", "--help"}
        self.where = ""
        self._add_model_flags()
        self._add_speculation_flags()
        self._add_engine_flags()
        self._add_server_flags()

    def error(self, message: str) -> NoReturn:
        """One line, whatever is wrong."""
        self.exit(2, f"foretoken: error: {self.where}{message}\n")

    def _section(self, title: str) -> Section:
        return Section(self, title)

    def _add_model_flags(self) -> None:
        add = self._section("model").add
        add("--model", metavar="MODEL", help="the same as MODEL")
        add("--served-model-name", nargs="+", type=name, metavar="NAME", help="name in the API; more than one are aliases")
        add("--dtype", choices=["auto", "float32", "float", "bfloat16", "half", "float16"], help="auto, float32 or bfloat16")
        add("--max-model-len", type=count, metavar="N", help="context length; 8k and 8K are understood")
        add("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face id")
        add("--executor", metavar="NAME", help="auto (the first that can), native, torch or transformers")
        add("--quantization", "-q", type=str.lower, metavar="NAME", help="int8 or int4, made at loading (native executor)")
        add("--kv-cache-dtype", type=str.lower, metavar="NAME", help="auto (as --dtype) or int8 (native executor)")
        add("--threads", type=count, metavar="N", help="cores to compute with (all that the process may use)")
        add("--seed", type=int, metavar="N", help="seed of the engine (requests without a seed get random ones)")
        add("--tensor-parallel-size", "-tp", type=count, metavar="N", help="1")
        add("--pipeline-parallel-size", "-pp", type=count, metavar="N", help="1")
        add("--data-parallel-size", "-dp", type=count, metavar="N", help="1")

    def _add_speculation_flags(self) -> None:
        add = self._section("speculative decoding").add
        add("--speculative-config", "-sc", metavar="CONFIG", help="JSON or YAML text, or @FILE; an object or a list of them")
        add("--spec-method", metavar="METHOD", help="ngram, suffix, draft_model, pard, eagle, eagle3, medusa, mtp, ...")
        add("--speculative-model", "--spec-model", metavar="D", help="a draft model or heads (the content says which method), or [ngram]")
        add("--num-speculative-tokens", "--spec-tokens", type=count, metavar="K", help="most tokens guessed at once")
        add("--ngram-prompt-lookup-max", type=count, metavar="N", help="longest n-gram looked up (4)")
        add("--ngram-prompt-lookup-min", type=count, metavar="N", help="shortest n-gram looked up (1)")
        add("--speculative-max-model-len", type=count, metavar="N", help="context length of the draft model")
        add(
            "--speculative-disable-by-batch-size", "--speculative-disable-queue-size",
            type=count, metavar="N", help="no speculation in steps with more than N running requests",
        )  # fmt: skip
        add("--speculative-draft-tensor-parallel-size", "-spec-draft-tp", type=count, metavar="N", help="1")
        add("--speculative-model-quantization", type=str.lower, metavar="NAME", help="int8 (the default natively), int4 or none")
        add(
            "--spec-decoding-acceptance-method",
            choices=["rejection_sampler", "typical_acceptance_sampler"], help="rejection_sampler; the other one is lossy and refused",
        )  # fmt: skip
        add("--speculation-corpus-dir", metavar="DIR", help="keep the texts that suffix and ngram look in across restarts")
        add("--allow-synthetic-acceptance", action="store_true", help="benchmarks only: guesses pass by chance, outputs are nonsense")

    def _add_engine_flags(self) -> None:
        add = self._section("engine").add
        add("--max-num-seqs", type=count, metavar="N", help="most requests running at once")
        add("--max-num-batched-tokens", type=count, metavar="N", help="most tokens in one step")
        add("--max-draft-tokens-per-step", type=count, metavar="N", help="most guessed tokens in one step")
        add("--kv-cache-gb", type=positive, metavar="GB", help="size of the KV cache, in units of 2**30 bytes")
        add("--kv-cache-memory-bytes", type=count, metavar="BYTES", help="the same in bytes")
        add("--gpu-memory-utilization", type=share, metavar="SHARE", help="share of free memory that the KV cache may take")
        add("--num-gpu-blocks-override", type=count, metavar="N", help="exact number of cache blocks, for tests")
        add("--enable-prefix-caching", action="store_true", help="reuse the cache of equal prompt beginnings (default)")
        add("--no-enable-prefix-caching", action="store_false", dest="enable_prefix_caching", help="do not")
        add("--max-queued-requests", "--max-num-queued-reqs", type=count, metavar="N", help="more are answered with 503")

    def _add_server_flags(self) -> None:
        add = self._section("server").add
        add("--host", metavar="HOST", help="address to listen on (127.0.0.1)")
        add("--port", type=port, metavar="PORT", help="0 = any free one (8000)")
        add("--api-key", action="append", type=key, dest="api_keys", metavar="KEY", help="clients must send it; may be repeated")
        add("--insecure-no-auth", action="store_true", help="no key although the host is reachable from outside")
        add("--tool-call-parser", choices=[*FORMATS, NO_PARSER], help="how the model writes tool calls (what its chat template says)")
        add("--reasoning-parser", choices=[*REASONING_FORMATS, NO_PARSER], help="how it marks reasoning (what its chat template says)")
        add("--allowed-origins", type=origins, metavar="ORIGINS", help="web pages that may call: a JSON list, or commas")
        add("--max-body-bytes", type=count, metavar="N", help="longer requests are refused")
        add("--request-timeout", type=positive, dest="request_timeout_s", metavar="S", help="a request that takes longer fails (600)")
        add("--drain-timeout", "--shutdown-timeout", type=seconds, dest="drain_timeout_s", metavar="S", help="time to finish on SIGTERM")
        add("--log-level", "--uvicorn-log-level", choices=["debug", "info", "warning", "error"], help="debug shows tracebacks")
        add("--config", metavar="FILE", help="YAML with the flags' names as keys")


class Section:
    """A titled group of flags that tells its parser every spelling."""

    def __init__(self, parser: ServeParser, title: str) -> None:
        self.parser = parser
        self.group = parser.add_argument_group(title)

    def add(self, *spellings: str, **settings: Any) -> None:
        self.parser.flags.update(spellings)
        self.group.add_argument(*spellings, **settings)


# Forms of values. argparse turns ArgumentTypeError into "argument --port: ...".


def count(text: str) -> int:
    """A positive integer. As in vLLM 1k is 1000 and 1K is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    number = float(match[1]) * scale[match[2]] if match else 0.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(number)


def key(text: str) -> str:
    """One that a header can carry. An empty one, from a variable that is not set, would let everybody in."""
    if not re.fullmatch(r"[!-~]+", text):
        raise argparse.ArgumentTypeError("must be printable ASCII without spaces, and not empty")
    return text


def name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def positive(text: str) -> float:
    number = seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return number


def origins(text: str) -> tuple[str, ...]:
    """`["https://a.example"]`, `https://a.example,https://b.example` or `*`."""
    if not text.lstrip().startswith("["):
        return tuple(origin.strip() for origin in text.split(",") if origin.strip())
    try:
        listed = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON list: {error}") from None
    if not all(isinstance(origin, str) for origin in listed):
        raise argparse.ArgumentTypeError("every origin must be a string")
    return tuple(listed)
