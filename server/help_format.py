"""How a command speaks of its flags: `--help` in two columns that fit the terminal, and mistakes in one line."""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

MAX_WIDTH = 100
"""Longer lines are hard to read, however wide the terminal."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Description and examples as they were written; of a flag's spellings the first one and the short ones."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=30, width=min(columns - 1, MAX_WIDTH))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        first, *others = action.option_strings
        # Long spellings after the first are those of other programs; a single dash is short unless it is one of these (-spec-draft-tp).
        shown = [first, *(other for other in others if not other.startswith("--") and len(other) <= 3)]
        value = "" if action.nargs == 0 else " " + self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(shown) + value

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # a flag's name is one word


class CommandParser(argparse.ArgumentParser):
    """Flags are spelled out, texts stand as they were written. A mistake is told in one line, without the list of all flags above it."""

    def __init__(self, **options: Any) -> None:
        usual: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**usual | options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"foretoken: error: {message}; see {self.prog} --help\n")


def unknown(what: str, word: str, known: Sequence[str], help: str) -> str:
    """What to say to a word that is none of these: the nearest of them, or the command that lists them."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"unknown {what} {word!r}{f': did you mean {near[0]}?' if near else f'; see {help}'}"
