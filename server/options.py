"""What a command line, a `--config` file and the environment say together, merged by precedence.

Knows no flag (those are the parser's), no defaults (those stand in the config types) and no meaning of a value.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .flags import UnknownFlag, separate
from .serve_parser import ServeParser

SPECULATION_OPTIONS = frozenset(
    {
        "speculative_config", "spec_method", "speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_min",
        "ngram_prompt_lookup_max", "speculative_max_model_len", "speculative_disable_by_batch_size",
        "speculative_draft_tensor_parallel_size", "speculative_model_quantization",
    }
)
SWITCHED = {"1": True, "true": True, "0": False, "false": False}  # what a variable may say of a flag without a value
_REPEATED = {"--api-key"}  # a list in a file becomes one flag an item
_TAKING_VALUES = {"--served-model-name", "--lora-modules"}  # ... or one flag with several values


@dataclass
class Options:
    """What all sources say together, by the flag's name with underscores. A flag nobody gave is absent."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_options(argv: Sequence[str], environment: Mapping[str, str], parser: ServeParser) -> Options:
    """Parse the words after the parser's command; `environment` maps flag names (without dashes) to text.

    Exits with status 2 and one line on a mistake, 0 after --help.
    """
    line = _parse(parser, argv, "")
    around = {name: SWITCHED.get(text.lower(), text) if name in parser.switches else text for name, text in environment.items()}
    surrounding = _parse(parser, _words_of(around, parser), "environment: ")
    sources = [line, surrounding]
    if path := line.values.get("config", surrounding.values.get("config")):
        parser.where = ""
        sources.insert(1, _parse(parser, _words_of_file(parser, Path(path)), f"{path}: "))
        if "config" in sources[1].values:
            parser.error("a file cannot name another with config: give one --config file")
    merged = Options({}, [warning for source in sources for warning in source.warnings])
    for source in reversed(sources):
        if SPECULATION_OPTIONS & source.values.keys():  # a drafter is chosen as a whole, never half from here and half from there
            merged.values = {name: value for name, value in merged.values.items() if name not in SPECULATION_OPTIONS}
        merged.values.update(source.values)
    parser.where = ""  # mistakes found from now on are of what all sources say together
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
    if len(positional) > len(parser.operands):
        most = " and ".join(f"one {operand.upper()}" for operand in parser.operands)
        parser.error(f"{most} at most, not {' '.join(map(shlex.quote, positional))}")
    for operand, word in zip(parser.operands, positional, strict=False):
        if values.setdefault(operand, word) != word:
            parser.error(f"two {operand}s: {word} and --{operand} {values[operand]}; name one")
    return Options(values, [where + warning for warning in separated.warnings])


def _words_of_file(parser: ServeParser, path: Path) -> list[str]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config {path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        parser.error(f"--config {path} must map the flags' names to values")
    return _words_of(settings, parser)


def _words_of(settings: Mapping[Any, Any], parser: ServeParser) -> list[str]:
    """`port: 9000` -> `--port=9000`. True gives the bare flag, False its `--no-` form where there is one.

    What is null or switched off is left out, unless it is no flag of ours: then the parser has to say so.
    """
    words: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-").removeprefix("--")
        match value:
            case None if flag in parser.flags:
                pass
            case False if (no := flag.replace("--", "--no-", 1)) in parser.flags:
                words.append(no)
            case False if flag[2:] in parser.switches:
                pass
            case None | bool():
                words.append(flag)
            case list() if flag in _REPEATED:
                words.extend(f"{flag}={item}" for item in value)
            case list() if flag in _TAKING_VALUES:
                words.extend([flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)])
            case list() | dict():
                words.append(f"{flag}={json.dumps(value, default=str)}")  # a date, which JSON does not know, as it is written
            case _:
                words.append(f"{flag}={value}")
    return words
