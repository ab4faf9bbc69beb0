"""The log: one line an event on stderr, one `key=value` line a request; nothing a client sent can break or colour a line.

Prompts, answers and whatever else a client wrote are never logged; of a request's id only letters, digits and `._-` are taken.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

if TYPE_CHECKING:
    from .generation import Generation

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_UNPRINTABLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_PLAIN = re.compile(r'[^ "=\\]+')
_PROBED = ("/health", "/metrics", "/ping")
_PARTS = "/page/"  # of the chat page: a visit is one line


class OneLineFormatter(logging.Formatter):
    """Escapes control characters of the message: carriage returns, newlines, terminal escapes. Tracebacks keep theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_UNPRINTABLE)


def is_quiet(scope: Scope, status: int) -> bool:
    """Whether an answer needs no line: those of probes and scrapes come by the clock and say nothing, unless they failed."""
    path = scope["path"]
    return (status == 200 and path.startswith(_PROBED)) or (status in (200, 304) and path.startswith(_PARTS))


def request_line(scope: Scope, status: int) -> str:
    """What became of one HTTP request, in logfmt: `key=value` with spaces between, without a key where there is no value.

    `scope["state"]` has request_id and start_time, and generation and model if the engine took the request.
    """
    state, client = scope["state"], scope.get("client")
    route = scope.get("route")
    facts: dict[str, object] = {
        "request_id": state["request_id"],
        "client": client[0] if client else None,
        "method": scope["method"] if route is not None else None,  # else it is any word of the client's
        "route": route.path if route is not None else "other",
        "status": status,
        "e2e_ms": round((time.monotonic() - state["start_time"]) * 1000, 3),
    }
    if (generation := state.get("generation")) is not None:
        facts |= {"model": state["model"]} | _generated(generation)
    return " ".join(f"{key}={_written(value)}" for key, value in facts.items() if value is not None)


def _generated(generation: Generation) -> dict[str, object]:
    """What the engine did for a request that has ended. Of choices that were given up it never says all: the last keys would be lies."""
    usage, metrics = generation.usage(), generation.metrics()
    speculation = metrics["speculative_decoding"]
    facts = {
        "id": generation.request_id,
        "finish_reason": ",".join(sorted({choice.finish_reason or "abort" for choice in generation.choices})),
        "choices": len(generation.choices),
        "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "ttft_ms": metrics.get("time_to_first_token_ms"),
    }
    if any(choice.finish_reason not in ("stop", "length") for choice in generation.choices):
        return facts
    return facts | {
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "queue_ms": metrics.get("queue_time_ms"),
        "drafted": speculation["num_draft_tokens"],
        "accepted": speculation["num_accepted_draft_tokens"],
        "mean_accepted_length": speculation["mean_acceptance_length"],
    }


def _written(value: object) -> str:
    """A value that cannot be taken for the next key: a model's name may have spaces."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def log_config(level: str) -> dict[str, Any]:
    """For `logging.config.dictConfig`. `level` is debug, info, warning or error."""
    ours = level.upper()
    quiet = ours if level in ("debug", "error") else "WARNING"  # uvicorn narrates its start; we say it ourselves
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": OneLineFormatter, "fmt": FORMAT}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {
            "foretoken": {"level": ours},
            "uvicorn.access": {"level": "WARNING"},  # our own line says more
            "uvicorn.error": {"level": quiet},
        },
    }
