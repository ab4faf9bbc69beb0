"""Exit statuses of commands: those of sysexits.h, so that a supervisor can tell a mistake from an accident."""

from __future__ import annotations

USAGE, DATA, UNAVAILABLE, SOFTWARE, CONFIG, INTERRUPTED = 2, 65, 69, 70, 78, 130
