"""`foretoken chat`: a conversation in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from .config import Environment

EXAMPLES = """\
examples:
  foretoken chat
  foretoken chat --url http://gpu-box:8000 --api-key KEY --system "Answer in one sentence." --temperature 0

An empty line or Ctrl-D ends the conversation, /reset begins a new one.
"""
TIMEOUT = httpx.Timeout(10.0, read=600.0)


def chat(argv: Sequence[str]) -> int:
    """Ask, stream the answer, repeat. Returns the exit status."""
    args = _parser().parse_args(argv)
    key = args.api_key or Environment().api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=args.url.rstrip("/").removesuffix("/v1") + "/v1/", headers=headers, timeout=TIMEOUT) as client:
        try:
            model = args.model or _json(client.get("models"))["data"][0]["id"]
            settings = {"temperature": args.temperature, "max_tokens": args.max_tokens}
            _converse(client, {"model": model, **{k: v for k, v in settings.items() if v is not None}}, args.system)
        except httpx.ConnectError:
            print(f"foretoken: error: no server at {args.url}: start one with `foretoken serve`", file=sys.stderr)
            return 69
        except (httpx.HTTPError, ChatError) as error:
            print(f"\nforetoken: error: {error}", file=sys.stderr)
            return 1
    return 0


class ChatError(Exception):
    """The server answered with an error; the message is the server's."""


def _converse(client: httpx.Client, request: dict[str, Any], system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    print(f"{request['model']} (empty line ends, /reset starts anew)")
    while line := _ask():
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        start, text, num_tokens = time.monotonic(), "", 0
        for delta, usage in stream_chat(client, request | {"messages": messages}):
            print(delta, end="", flush=True)
            text += delta
            num_tokens = usage.get("completion_tokens", num_tokens)
        seconds = time.monotonic() - start
        print(f"\n[{num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s]")
        messages.append({"role": "assistant", "content": text})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def stream_chat(client: httpx.Client, request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (text, usage) of each chunk; usage is empty until the last. Raises ChatError."""
    body = request | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            _json(response)
        for line in response.iter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise ChatError(chunk["error"]["message"])
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            yield text, chunk.get("usage") or {}


def _json(response: httpx.Response) -> Any:
    try:
        answer = response.json()
    except json.JSONDecodeError:
        raise ChatError(f"status {response.status_code}, and not JSON: is this an OpenAI-compatible server?") from None
    if response.is_error:
        raise ChatError(answer["error"]["message"] if "error" in answer else f"status {response.status_code}")
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="foretoken chat",
        description="Talk to a running server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens (%(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="default: FORETOKEN_API_KEY")
    parser.add_argument("--model", metavar="NAME", help="default: the first model of the server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    return parser
