"""`foretoken completion bash|zsh|fish`: a shell's completion, made from the parsers of all commands.

Owns finding the parsers and reading their flags; completion_scripts.py knows the shells.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from .completion_scripts import SCRIPTS, Command, Flag
from .help_format import CommandParser, HelpFormatter

EXAMPLES = """\
The script is made from the commands as they are installed, which takes some
seconds; write it to a file once, and again after an update:

  foretoken completion bash > ~/.local/share/bash-completion/completions/foretoken
  foretoken completion zsh > "${fpath[1]}/_foretoken"
  foretoken completion fish > ~/.config/fish/completions/foretoken.fish
"""
FILES = ("FILE", "DIR", "FOLDER", "PATH", "MODEL", "CONFIG")  # metavars of values that are names of files


def main(argv: Sequence[str]) -> int:
    """Prints the script. Returns the exit status."""
    args = parser().parse_args(argv)
    print(SCRIPTS[args.shell](commands()), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken completion", description="Print a completion script for a shell.", epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="which shell")
    return parser


def commands() -> list[Command]:
    """All commands, in the order of the help."""
    from .cli import BENCHES, COMMANDS
    from .train.command import COMMANDS as TRAININGS

    below = {"bench": BENCHES, "train": TRAININGS}
    words = [(command, *more) for command in COMMANDS for more in ([(name,) for name in below[command]] if command in below else [()])]
    return [_command(found) for found in tqdm(words, desc="reading flags", delay=1, leave=False, disable=None)]


def _command(words: tuple[str, ...]) -> Command:
    if words in (("version",), ("help",)):
        return Command(words, {"version": "print the version", "help": "list the commands"}[words[0]], (), None)
    parser = parser_of(words)
    flags = tuple(_flag(parser, action) for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS)
    operands = [action for action in parser._actions if not action.option_strings]
    choices = tuple(str(choice) for action in operands for choice in action.choices or ())
    takes_operands = bool(operands) or "MODEL" in (parser.usage or "")
    return Command(words, _sentence(parser.description or ""), flags, choices if takes_operands else None)


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> Flag:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    told = (action.help or "") % (vars(action) | {"prog": parser.prog})
    is_file = action.type is Path or any(word in value for word in FILES)
    choices = tuple(map(str, action.choices or ()))
    name = next((spelling for spelling in action.option_strings if spelling.startswith("--")), action.option_strings[0])
    return Flag(name, " ".join(told.split()), action.nargs != 0, value, choices, is_file and not choices)


def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser that a command reads its flags with: the command is begun, and ended when it is about to read them."""
    from .cli import run

    with _catching_parsers():
        try:
            run([*words])
        except _Caught as caught:
            return caught.parser
    raise AssertionError(f"foretoken {' '.join(words)} reads no flags")


class _Caught(BaseException):
    """Not an Exception: commands report those."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@contextmanager
def _catching_parsers() -> Iterator[None]:
    original = argparse.ArgumentParser.parse_known_args

    def caught(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise _Caught(parser)

    argparse.ArgumentParser.parse_known_args = caught  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = original


def _sentence(description: str) -> str:
    """The first one."""
    return " ".join(description.split()).partition(". ")[0].rstrip(".")
