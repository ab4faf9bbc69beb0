"""A command at a real terminal: a pseudo-terminal of given size, what is typed and what is shown."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence

ANSI = re.compile(r"\x1b\[\?2004l\r|\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs `command`. `shown` has everything that was written so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80) -> None:
        self.pid, self._file = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a script starts in the background, and so in all that it starts
            os.execvpe(command[0], list(command), dict(environment) | {"TERM": "xterm-256color", "COLUMNS": ""})
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.shown = ""
        self._awaited = 0  # end of what was awaited, in `plain`
        self.status: int | None = None

    @property
    def plain(self) -> str:
        """Without colours, with simple line ends."""
        return ANSI.sub("", self.shown).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def enter(self, line: str, words: str = "> ") -> str:
        """Types the line and waits for these words."""
        self.type(line + "\n")
        return self.wait_for(words)

    def wait_for(self, words: str, timeout_s: float = 60.0) -> str:
        """Reads until `words` are shown behind what was awaited before; what is shown up to their end, without colours."""
        start, deadline = self._awaited, time.monotonic() + timeout_s
        while (found := self.plain.find(words, start)) < 0:
            assert time.monotonic() < deadline and self._read(), f"{words!r} was not shown:\n{self.plain[start:]}\n{self.shown!r}"
        self._awaited = found + len(words)
        return self.plain[start : self._awaited]

    def interrupt(self, words: str, again_after_s: float = 5.0) -> None:
        """Ctrl-C, as a person does it: once more if nothing happens. One that comes just before a wait for keys can go unnoticed."""
        for _ in range(5):
            self.type("\x03")
            deadline = time.monotonic() + again_after_s
            while time.monotonic() < deadline and self.plain.find(words, self._awaited) < 0 and self._read():
                pass
            if self.plain.find(words, self._awaited) >= 0:
                break
        self.wait_for(words, 0.0)

    def end(self, timeout_s: float = 30.0) -> int:
        """Reads to the end. Returns the exit status."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"it does not end:\n{self.shown}"
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._file)

    def _read(self) -> bool:
        """Whether more may come."""
        if not select.select([self._file], [], [], 0.1)[0]:
            return True
        try:
            new = os.read(self._file, 1 << 16)
        except OSError:  # what Linux says when the other side has closed
            return False
        self.shown += new.decode(errors="replace")
        return bool(new)
