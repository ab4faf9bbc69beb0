"""The log: one line an event on stderr, with a timestamp, and nothing a client sent can break or colour a line."""

from __future__ import annotations

import logging
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


class OneLineFormatter(logging.Formatter):
    """Escapes control characters of the message: carriage returns, newlines, terminal escapes. Tracebacks keep theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        return super().formatMessage(record).translate(_UNPRINTABLE)


class NoProbes(logging.Filter):
    """Drops the access log's lines of probes and scrapes: they come by the clock and say nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case (_, _, str(path), _, 200):
                return not path.startswith(("/health", "/metrics"))
            case _:
                return True


def log_config(level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`. `level` is debug, info, warning or error."""
    ours = level.upper()
    quiet = ours if level in ("debug", "error") else "WARNING"  # uvicorn narrates its start; we say it ourselves
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": OneLineFormatter, "fmt": FORMAT}},
        "filters": {"no_probes": {"()": NoProbes}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {
            "foretoken": {"level": ours},
            "uvicorn.access": {"level": ours, "filters": ["no_probes"]},
            "uvicorn.error": {"level": quiet},
        },
    }
