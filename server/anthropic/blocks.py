"""An answer as Anthropic's API has it: the parts of a reply as content blocks, whole or event by event, and why it ended.

Knows nothing of requests, and how bytes are sent.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...engine.request import TokenDelta

Event = dict[str, Any]


class BlockEvents:
    """content_block_start, content_block_delta and content_block_stop, as the parts of a reply come."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the block that is open

    def of(self, parts: Iterable[dict[str, Any]]) -> Iterator[Event]:
        for part in parts:
            match part:
                case {"content": text}:
                    yield from self._enter("text", {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case {"reasoning": text}:
                    yield from self._enter("thinking", {"thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case {"tool_calls": [call]}:
                    function = call["function"]
                    if "id" in call:
                        yield from self.end()
                        yield from self._enter("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
                    if function["arguments"]:
                        yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def end(self) -> Iterator[Event]:
        """Close the block that is open."""
        if self._kind:
            self._kind = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _enter(self, kind: str, empty: dict[str, Any]) -> Iterator[Event]:
        if kind != self._kind:
            yield from self.end()
            self._kind = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind} | empty}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def content(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All blocks of an answer whose parts these are."""
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for event in BlockEvents().of(parts):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append([])
        elif event["type"] == "content_block_delta":
            _, text = event["delta"].values()
            texts[-1].append(text)
    for block, said in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = _input("".join(said))
        else:
            block[block["type"]] = "".join(said)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that are no JSON object, as where the answer was cut, stand under the name that Anthropic proposes for them."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def ending(last: TokenDelta, num_calls: int, *, fills_context: bool) -> dict[str, Any]:
    """stop_reason and stop_sequence. fills_context: whether the context ends before max_tokens does."""
    match last.finish_reason, last.stop_reason:
        case "length", _:
            reason, sequence = "model_context_window_exceeded" if fills_context else "max_tokens", None
        case _, str(sequence):
            reason = "stop_sequence"
        case _:
            reason, sequence = "tool_use" if num_calls else "end_turn", None
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(totals: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's usage as Anthropic's, where input tokens that were found in the cache are counted apart."""
    cached = totals["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": totals["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": totals["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": totals["completion_tokens_details"]["reasoning_tokens"]},
    }
