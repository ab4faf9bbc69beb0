"""The documents are true: links lead to files and headings, commands have the flags that they are shown with, code can be read."""

import argparse
import ast
import functools
import importlib.util
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from foretoken.engine.vllm_flags import SWITCHES, TAKING_A_VALUE, TAKING_VALUES
from foretoken.server.cli import BENCHES, COMMANDS
from foretoken.server.completion import parser_of
from foretoken.server.config import ServerConfig
from foretoken.server.reasoning import REASONING_FORMATS
from foretoken.server.tools.formats import FORMATS
from foretoken.server.train.command import COMMANDS as TRAININGS

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "engine" / "demo_model" / "README.md", *(ROOT / "docs").rglob("*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
SUBCOMMANDS = {"bench": BENCHES, "train": TRAININGS}
FENCE = re.compile(r"^(`{3,4})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, punctuation gone, spaces to hyphens, `-1` on a repetition."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        unique, repetition = slug, 0
        while unique in found:
            repetition += 1
            unique = f"{slug}-{repetition}"
        found.add(unique)
    return found


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = FENCE.sub("", text_of(page))
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose)
    for target in (a or b for a, b in targets):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading; there are {sorted(anchors(file))}"


@each_page
def test_files_and_targets_of_make_that_are_named_exist(page: Path) -> None:
    text, makefile = text_of(page), (ROOT / "Makefile").read_text()
    for name in re.findall(r"`((?:server|engine|proposers|kernels|docs|docker|tests)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"^make ([a-z-]+)", "\n".join(code(page)), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def commands(page: Path) -> list[list[str]]:
    return commands_in(code(page))


def code(page: Path) -> list[str]:
    """The lines of the blocks, and what stands as code within sentences."""
    text = text_of(page).replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for _, _, block in FENCE.findall(text) for line in block.splitlines()]
    return [*lines, *re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands_in(shown: Sequence[str]) -> list[list[str]]:
    """The words of every `foretoken ...` and `python -m foretoken...` that has all its words: no `...`, up to a pipe."""
    found: list[list[str]] = []
    for line in (" ".join(line.split()) for line in shown):
        if re.match(r"(foretoken|python -m foretoken[\w.]+) [\w<-]", line) and "..." not in line and "[" not in line.partition("'")[0]:
            words = shlex.split(line, comments=True)
            ends = [number for number, word in enumerate(words) if word in ("|", "&", "&&", ">", "<")]
            found.append(words[: min(ends, default=len(words))])
    return found


@functools.cache
def parser(words: tuple[str, ...]) -> argparse.ArgumentParser:
    return parser_of(words)


def words_of_command(words: list[str]) -> tuple[str, ...]:
    assert words[0] in COMMANDS, words[0]
    assert words[0] not in SUBCOMMANDS or words[1] in SUBCOMMANDS[words[0]], words[:2]
    return tuple(words[:2] if words[0] in SUBCOMMANDS else words[:1])


@each_page
def test_commands_have_the_flags_that_they_are_shown_with(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETOKEN_CONFIG", raising=False)
    check_commands(commands(page))


def test_examples_of_every_help_have_flags_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETOKEN_CONFIG", raising=False)
    below = [(command, name) for command, names in SUBCOMMANDS.items() for name in names]
    for command in [*((name,) for name in COMMANDS if name not in (*SUBCOMMANDS, "version", "help")), *below]:
        text = (parser(command).epilog or "").replace("\\\n", " ").replace("%%", "%")
        check_commands(commands_in([line.partition("        (")[0] for line in text.splitlines()]))


def check_commands(shown: Sequence[Sequence[str]]) -> None:
    for program, *words in shown:
        if program == "python":
            assert importlib.util.find_spec(words[1]), words[1]
            continue
        if words[0] in ("version", "--version", "--help", "COMMAND") or words in (["bench"], ["train"]):
            continue
        command = words_of_command(words)
        flags = {word.partition("=")[0] for word in words[len(command) :] if re.match(r"--?[a-z]", word)}
        assert flags <= parser(command)._option_string_actions.keys() | {"--help", "-h"}, f"foretoken {' '.join(words)}"
        if command == ("serve",) and "--help" not in words and not re.search(r"@|--config|\bbigram\.py", " ".join(words)):
            ServerConfig.from_cli(words[1:])


def json_values(block: str) -> None:
    """One value, or several one below the other."""
    while block := block.strip():
        _, end = json.JSONDecoder().raw_decode(block)
        block = block[end:]


@each_page
def test_code_can_be_read(page: Path) -> None:
    read = {"python": ast.parse, "json": json_values, "yaml": yaml.safe_load}
    for _, language, block in FENCE.findall(text_of(page)):
        if language in read:
            read[language](block)


def test_every_flag_of_serve_is_told_somewhere() -> None:
    told = "\n".join(text_of(page) for page in PAGES)
    flags = [action.option_strings for action in parser(("serve",))._actions if action.option_strings]
    assert not [names for names in flags if not any(re.search(rf"{re.escape(name)}(?![\w-])", told) for name in names)]


def test_no_page_asks_for_a_flag_that_has_no_effect() -> None:
    told = "\n".join(text_of(page) for page in PAGES if page.name not in ("cli.md", "clients.md"))
    assert not (SWITCHES | TAKING_A_VALUE | TAKING_VALUES) & set(re.findall(r"(?<![\w-])--[a-z][\w-]*", told))


def test_the_api_names_every_format_of_calls_and_of_reasoning() -> None:
    told = text_of(ROOT / "docs" / "api.md")
    assert not [name for name in (*FORMATS, *REASONING_FORMATS) if f"`{name}`" not in told]


def test_the_readers_of_this_test_find_something() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 60
    assert "how-long-a-model-may-reason" in anchors(ROOT / "docs" / "structured_output.md")
