"""The completion scripts in the shells they are for."""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from running_server import environment
from terminal import Terminal

from foretoken.server.cli import BENCHES, COMMANDS
from foretoken.server.completion import commands, parser_of
from foretoken.server.completion_scripts import SCRIPTS, Command
from foretoken.server.reasoning import REASONING_FORMATS
from foretoken.server.serve_parser import ServeParser

ASKED = [  # words and what is offered for the last one
    (["foretoken", "ser"], ["serve"]),
    (["foretoken", "bench", ""], [*BENCHES]),
    (["foretoken", "serve", "--dty"], ["--dtype"]),
    (["foretoken", "serve", "--reasoning-parser", ""], [*REASONING_FORMATS, "none"]),
    (["foretoken", "train", "head", "--method", "eag"], ["eagle3", "eagle"]),
    (["foretoken", "run-batch", "--config", "some-fi"], ["some-file.yaml"]),
    (["foretoken", "serve", "some-f"], ["some-file.yaml"]),
    (["foretoken", "serve", "--port", ""], []),
    (["foretoken", "chat", "--color", "n"], ["never"]),
    (["foretoken", "completion", ""], ["bash", "zsh", "fish"]),
    (["foretoken", "version", ""], []),
]


@pytest.fixture(scope="module")
def found() -> list[Command]:
    return commands()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some-file.yaml").touch()
    return tmp_path


def script(shell: str, found: Sequence[Command], folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder / f"completion.{shell}"
    path.write_text(SCRIPTS[shell](found))
    return path


def run(folder: Path, *command: str) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=environment())
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout


def test_every_command_and_flag_is_known(found: list[Command]) -> None:
    assert list(dict.fromkeys(command.words[0] for command in found)) == [*COMMANDS]
    serve = next(command for command in found if command.words == ("serve",))
    assert {flag.name for flag in serve.flags} == {action.option_strings[0] for action in ServeParser()._actions}
    assert all(command.flags for command in found if command.words[0] not in ("version", "help"))
    assert all(command.help for command in found)


def test_finding_parsers_leaves_argparse_as_it_was() -> None:
    parser = parser_of(["train", "head"])
    assert parser.prog == "foretoken train head"
    other = argparse.ArgumentParser()
    other.add_argument("--x")
    assert other.parse_args(["--x", "1"]).x == "1"


def test_bash(found: list[Command], folder: Path) -> None:
    path = script("bash", found, folder)
    ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _foretoken; printf "%s\\n" "${COMPREPLY[@]}"'
    cases = [*ASKED, (["foretoken", "serve", "--log-level", "=", "war"], ["warning"])]
    for words, offered in cases:
        assert run(folder, "bash", "-c", ask, "bash", str(path), *words).split() == offered, words


def test_fish(found: list[Command], folder: Path) -> None:
    path = script("fish", found, folder)
    for words, offered in ASKED:
        shown = run(folder, "fish", "--no-config", "-c", f"source {path}; complete -C '{' '.join(words)}'")
        assert sorted(line.partition("\t")[0] for line in shown.splitlines()) == sorted(offered), words


def test_zsh(found: list[Command], folder: Path) -> None:
    """At a terminal, as zsh completes nothing elsewhere."""
    path = script("zsh", found, folder)
    settings = ("autoload -Uz compinit", "compinit -u -D", f"source {path}", f"cd {folder}")
    says_when_it_reads = ("zle-line-init() { print -n '<ready>' > /dev/tty }", "zle -N zle-line-init")
    (folder / ".zshrc").write_text("\n".join([*settings, *says_when_it_reads]))
    with Terminal(["zsh", "-d", "-i"], environment(PS1="ask> ", HOME=str(folder), ZDOTDIR=str(folder)), columns=160) as terminal:
        for words, offered in ASKED:
            if len(offered) == 1:
                terminal.wait_for("<ready>")
                terminal.type(" ".join(words) + "\t")
                terminal.wait_for(" ".join([*words[:-1], offered[0]]) + " ")
                terminal.type("\x15\n")  # an interrupt could hit the completion itself
