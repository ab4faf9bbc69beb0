"""What a server says once it is ready: what it serves, by what means, within which limits, and the addresses to open."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from .config import ServerConfig

if TYPE_CHECKING:
    from ..engine.boot import Engine

LABEL_WIDTH = 12  # of every line of Engine.banner, too
INDENT = "  "


def banner(config: ServerConfig, engine: Engine, base_url: str, made_key: bool, columns: int | None = None) -> list[str]:
    """Lines of label and text. columns: where to break them; None = not at all, for logs."""
    about = [(line[:LABEL_WIDTH].strip(), line[LABEL_WIDTH:]) for line in engine.banner]
    if not any(label == "memory" for label, _ in about) and (held := _memory_held()):
        about.append(("memory", held))
    about.append(("limits", _limits(config, engine)))
    if engine.tokenizer.chat_template:
        about.append(("replies", _replies(config, engine)))
    lines = [f"Foretoken {__version__}"]
    for label, text in about:
        lines.extend(_entry(label, text, columns))
    lines.append("")
    for label, text in _addresses(config, base_url, made_key):
        lines.extend(_entry(label, text, columns))
    return [*lines, *(_entry(label, text, None)[0] for label, text in _examples(config, engine, base_url, made_key))]


def _entry(label: str, text: str, columns: int | None) -> list[str]:
    start = f"{INDENT}{label:<{LABEL_WIDTH}}"
    if columns is None:
        return [start + text]
    return textwrap.wrap(
        text, max(columns - 1, 60), initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
    )


def _limits(config: ServerConfig, engine: Engine) -> str:
    scheduler = engine.config.scheduler
    return (
        f"{scheduler.max_num_seqs:,} rows at once, {config.max_queued_requests:,} more may wait; context {engine.model.max_model_len:,}; "
        f"{scheduler.max_num_batched_tokens:,} tokens a step, "
        f"{min(scheduler.max_draft_tokens_per_step, scheduler.max_num_batched_tokens):,} of them guessed"
    )


def _replies(config: ServerConfig, engine: Engine) -> str:
    from .replies import ReplyFormats

    return ReplyFormats(engine.tokenizer, config.tool_call_parser, config.reasoning_parser).describe()


def _memory_held() -> str:
    """What the process holds now and what is free. Pages of the KV cache are taken when they are first written."""
    from ..engine.cache_size import free_memory_bytes

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # no such file outside of Linux
        return ""
    held = pages * os.sysconf("SC_PAGE_SIZE")
    return f"{held / 1e9:.2f} GB held, {free_memory_bytes() / 1e9:.1f} GB free; the KV cache takes its share as it fills"


def _addresses(config: ServerConfig, base_url: str, made_key: bool) -> list[tuple[str, str]]:
    found = [("listening", base_url)]
    if base_url.startswith("unix:"):
        base_url = ""
    found += [
        ("page", f"{base_url}/  (chat, live metrics)"),
        ("API", f"{base_url}/v1  (described by /openapi.json)"),
        ("metrics", f"{base_url}/metrics"),
    ]
    if made_key:
        note = "(made now, because this address is reachable from outside; --api-key sets your own)"
        found.append(("api key", f"{config.api_keys[0]}  {note}"))
    elif not config.api_keys and config.insecure_no_auth:
        found.append(("api key", "none: everyone who reaches this address may use it (--insecure-no-auth)"))
    return found


def _examples(config: ServerConfig, engine: Engine, base_url: str, made_key: bool) -> list[tuple[str, str]]:
    """To be copied, so never broken."""
    key = config.api_keys[0] if config.api_keys else None
    auth = f'-H "Authorization: Bearer {key if made_key else "$FORETOKEN_API_KEY"}" ' if key else ""  # in quotes in which $ counts
    sdk_key = repr(key if made_key else "...") if key else "'none'"
    chats = bool(engine.tokenizer.chat_template)
    route = "chat/completions" if chats else "completions"
    asked = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Once upon a time"}
    body = shlex.quote(json.dumps({"model": engine.model.name, **asked}))
    sdk_more = curl_more = ""
    talk = f"foretoken chat --url {shlex.quote(base_url)}" + (f" --api-key {key}" if made_key else "")
    if base_url.startswith("unix:"):
        path, base_url = base_url[5:], f"http{'s' * bool(config.tls.ssl_certfile)}://localhost"  # what a request has to name
        sdk_more = f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={path!r}))"
        curl_more = f"--unix-socket {shlex.quote(path)} "
    return [
        ("chat", talk if chats else "not with this model: it has no chat template, so /v1/completions continues prompts"),
        ("SDK", f"OpenAI(base_url='{base_url}/v1', api_key={sdk_key}{sdk_more})"),
        ("curl", f"curl {curl_more}{base_url}/v1/{route} -H 'Content-Type: application/json' {auth}-d {body}"),
    ]
