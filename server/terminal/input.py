"""What a person types at the prompt of `foretoken chat`: lines with history and completion, and messages of several lines."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

QUOTES = '"""'
HISTORY_LINES = 1000


class Prompt:
    """Reads messages from stdin. commands: completed by Tab. History is kept across sessions, if stdin is a terminal."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._history: Path | None = None
        if self._is_terminal:
            self._open_readline(sorted(commands))

    def read(self) -> str:
        '''One message: a line; with a backslash at its end the next one, too; or all between """ and """. Raises EOFError.'''
        line = self._line("> ")
        if line.lstrip().startswith(QUOTES):
            return self._quoted(line.lstrip().removeprefix(QUOTES))
        lines: list[str] = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join([*lines, line]).strip()

    def close(self) -> None:
        """Keeps the history, which is for its owner's eyes."""
        if self._history is None:
            return
        import readline

        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.set_history_length(HISTORY_LINES)
            readline.write_history_file(self._history)

    def _quoted(self, line: str) -> str:
        lines: list[str] = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = self._line(". ")
        lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        typed = input(prompt if self._is_terminal else "")
        # Bytes that are no text in the terminal's encoding come marked, and could not be sent. Often they are UTF-8 all the same.
        return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _open_readline(self, commands: Sequence[str]) -> None:
        try:
            import readline  # not on every system
        except ImportError:
            return
        with suppress(OSError, RuntimeError):  # the latter of a user without a home
            self._history = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "foretoken" / "chat_history"
            readline.read_history_file(self._history)

        def complete(text: str, state: int) -> str | None:
            found = [command + " " for command in commands if text.startswith("/") and command.startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" \n")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted together are one message
