"""vLLM's flags that have no meaning here, so that its command lines run unchanged.

Owns the walk over a command line that takes those flags out. Knows no value of any flag of ours.
"""

import difflib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import yaml

from ..engine.vllm_flags import NOTES, SWITCHES, TAKING_A_VALUE, TAKING_VALUES

# What to say here in place of SGLang's, llama.cpp's, LMDeploy's, TGI's and mlx-lm's flags.
ELSEWHERE = {
    **dict.fromkeys(["--speculative-algorithm", "--spec-type"], "--spec-method"),
    **dict.fromkeys(
        ["--draft-model", "--model-draft", "-md", "--spec-draft-model", "--speculative-draft-model", "--speculative-draft-model-path"],
        "--speculative-model",
    ),
    **dict.fromkeys(
        ["--draft", "--draft-n", "--draft-max", "--spec-draft-n-max", "--num-draft-tokens", "--speculate"],
        "--num-speculative-tokens",
    ),
    "--speculative-num-draft-tokens": '--num-speculative-tokens, or for a tree "num_draft_tokens" in --speculative-config',
    "--speculative-num-steps": '--num-speculative-tokens, or for a tree "num_steps" in --speculative-config',
    "--speculative-eagle-topk": '"eagle_topk" in --speculative-config',
    **dict.fromkeys(["--draft-p-min", "--spec-draft-p-min"], '"confidence_threshold" in --speculative-config'),
    "--uno-lora-path": '"uno_lora_path" in --speculative-config',
    "--sampling-defaults": "--generation-config",
    **dict.fromkeys(["--model-path", "--model-id", "-m"], "--model"),
    **dict.fromkeys(["--ctx-size", "-c", "--context-length", "--session-len"], "--max-model-len"),
    **dict.fromkeys(["--parallel", "-np", "--max-running-requests", "--max-batch-size"], "--max-num-seqs"),
    **dict.fromkeys(["--mem-fraction-static", "--cache-max-entry-count", "--cuda-memory-fraction"], "--gpu-memory-utilization"),
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    **dict.fromkeys(["--cache-type-k", "-ctk", "--cache-type-v", "-ctv"], "--kv-cache-dtype"),
    **dict.fromkeys(["--n-gpu-layers", "--gpu-layers", "-ngl"], "--device: a model lies on one as a whole"),
    **dict.fromkeys(["--tp-size", "--tp"], "--tensor-parallel-size"),
    **dict.fromkeys(["--alias", "-a", "--model-name"], "--served-model-name"),
    **dict.fromkeys(["--server-name", "--hostname"], "--host"),
    "--server-port": "--port",
    "--random-seed": "--seed",
    "-t": "--threads",
    **dict.fromkeys(["--lora-paths", "--lora", "--lora-scaled", "--adapters", "--lora-adapters"], "--lora-modules NAME=FOLDER ..."),
    **dict.fromkeys(["--max-loras-per-batch", "--max-loaded-loras"], "--max-loras"),
    "--speculative-draft-model-quantization": "--speculative-model-quantization",
    "--speculative-draft-model-revision": '"revision" in --speculative-config',
}
_OBJECTS = {name: name for name in ("--speculative-config", "--default-chat-template-kwargs", "--override-generation-config")}
_OBJECTS |= {"-sc": "--speculative-config"}
_BOOLEANS = {"true", "false"}
_NUMBER = re.compile(r"-\d|-\.\d")


class UnknownFlag(ValueError):
    """A flag that neither we nor vLLM know; the message names the nearest."""


@dataclass(frozen=True)
class Separated:
    """A command line in two parts."""

    own: list[str]  # flags of ours, spelled with dashes, and positional words
    warnings: list[str]  # what was taken out, ready to be shown


def separate(argv: Sequence[str], own_flags: Collection[str]) -> Separated:
    """Take vLLM's flags without meaning here out of a command line.

    Underscores count as dashes (`--max_model_len`); `--speculative-config.method ngram` and entries of other objects become one JSON value.
    Raises UnknownFlag.
    """
    own: list[str] = []
    ignored: list[str] = []
    dotted: dict[str, dict[str, object]] = {}
    words = list(argv)
    while words and words[0] != "--":
        word = words.pop(0)
        if not word.startswith("-") or word == "-" or _NUMBER.match(word):
            own.append(word)
            continue
        name, equals, value = word.partition("=")
        name, dot, key = name.partition(".")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if dot and name in _OBJECTS:
            _assign(dotted.setdefault(_OBJECTS[name], {}), key, value if equals else _take_value(words, word), name)
        elif name in own_flags and not dot:
            own.append(name + equals + value)
        elif _skip_foreign(name, bool(equals), words):
            ignored.append(name)
        else:
            raise UnknownFlag(_unknown(word, name, own_flags))
    own += [f"{name}={json.dumps(entries, default=str)}" for name, entries in dotted.items()]
    return Separated(own + words, _warnings(ignored))  # behind -- are no flags


def _skip_foreign(name: str, has_value: bool, words: list[str]) -> bool:
    """Drop the values of a flag of vLLM's from the words that follow it. False if vLLM has no such flag."""
    switch = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    if switch in SWITCHES:
        if not has_value and words and words[0].lower() in _BOOLEANS:  # old versions: --enable-chunked-prefill False
            words.pop(0)
    elif name in TAKING_A_VALUE:
        if not has_value and words and not _is_flag(words[0]):
            words.pop(0)
    elif name in TAKING_VALUES:
        while not has_value and words and not _is_flag(words[0]):
            words.pop(0)
    else:
        return re.fullmatch(r"-O\d", name) is not None
    return True


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def _take_value(words: list[str], flag: str) -> str:
    if not words:
        raise UnknownFlag(f"{flag} expects a value")
    return words.pop(0)


def _assign(target: dict[str, object], key: str, text: str, flag: str) -> None:
    """`a.b`, "1" -> {"a": {"b": 1}}."""
    *parents, last = key.replace("-", "_").split(".")
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UnknownFlag(f"{flag}.{key} contradicts an earlier value of {parent}")
        target = inner
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        target[last] = text


def _unknown(word: str, name: str, own_flags: Collection[str]) -> str:
    if name in ELSEWHERE:
        return f"unknown flag {name}: here it is {ELSEWHERE[name]}"
    known = [flag[2:] for flag in (*own_flags, *SWITCHES, *TAKING_A_VALUE, *TAKING_VALUES) if flag.startswith("--")]
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
    hint = f": did you mean --{near[0]}?" if near else "; `foretoken serve --help` lists the flags"
    return f"unknown flag {word.partition('=')[0]}{hint}"


def _warnings(ignored: list[str]) -> list[str]:
    names = list(dict.fromkeys(ignored))
    warnings = [f"{name} has no effect: {NOTES[name]}" for name in names if name in NOTES]
    if plain := [name for name in names if name not in NOTES]:
        warnings.append(f"vLLM's {', '.join(plain)} {'has' if len(plain) == 1 else 'have'} no meaning here and no effect")
    return warnings
