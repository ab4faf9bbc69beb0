"""One response as it is written: from the parts of a reply to items, and the events that tell a client of each step.

Owns the response object, the order of events and their numbers, from 0 without gaps. Knows no engine and no connection.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...engine.request import FinishReason, SamplingParams, TokenDelta
from ..errors import ApiError
from ..generation import Generation
from ..logprobs import TokenText, chat_logprobs, speculation
from ..replies import Reply
from .items import new_id

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
_FINISHED: dict[FinishReason | None, str] = {"stop": "completed", "length": "incomplete"}


class Writer:
    """`response` is the object without its output's last item, which may be open; `snapshot` has all.

    namespaces: namespace and name of the functions in one, by the names that the model calls.
    """

    def __init__(
        self,
        response: dict[str, Any],
        reply: Reply,
        spell: TokenText,
        params: SamplingParams,
        proposer_names: Sequence[str] | None,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.response = response
        self.reply = reply
        self._spell = spell
        self._place, self._num_chars = spell.place(params), 0  # of the next token, and before the next delta
        self._proposer_names = proposer_names  # None: nobody asked who guessed the tokens
        self._namespaces = namespaces
        self._number = 0
        self._item: OpenItem | None = None
        self._gap = ""  # white space behind a call: of a message, if one follows
        self._logprobs: list[dict[str, Any]] = []  # of text that is held back
        self._sources: list[dict[str, Any]] = []
        self._finish_reason: FinishReason | None = None
        self._is_cut_call = False  # the item that the answer ends in: a stop string came in its arguments

    def opening(self) -> list[Event]:
        """What a client is told before there is any token."""
        events = [self._lifecycle("created")]
        if self.response["status"] == "queued":
            events.append(self._lifecycle("queued"))
        self.response["status"] = "in_progress"
        return [*events, self._lifecycle("in_progress")]

    def write(self, delta: TokenDelta) -> list[Event]:
        said, names, events, at = chat_logprobs(delta, self._spell), self._proposer_names, list[Event](), 0
        logprobs, sources = said["content"] if said else [], speculation(delta, names) if names is not None else []
        for i, token in enumerate(delta.token_ids if logprobs or sources else ()):
            # First the text before it: whose item a token is must not depend on its step.
            end = max(at, self._place.next(token, self._spell(token)[1]) - self._num_chars)
            events += self._read(replace(delta, token_ids=[], text=delta.text[at:end], finish_reason=None))
            self._logprobs += logprobs[i : i + 1]
            self._sources += sources[i : i + 1]
            at = end
        self._num_chars += len(delta.text)
        self._finish_reason = delta.finish_reason
        events += self._read(replace(delta, text=delta.text[at:]))
        if delta.finish_reason == "stop" and self._item is not None and self._item.kind == "function_call":
            self._is_cut_call = self.reply.finish_reason(delta) != "tool_calls"
        return events

    def _read(self, delta: TokenDelta) -> list[Event]:
        return [event for part in self.reply.feed(delta) for event in self._part(part)]

    def finish(self, generation: Generation) -> list[Event]:
        """The end, however it was reached: a generation that was closed before its end was cancelled. `last` comes behind it."""
        self.response["status"] = status = _FINISHED.get(self._finish_reason, "cancelled")
        events: list[Event] = []
        if self._item is None and not self.response["output"] and status != "cancelled":  # an answer without a word is one all the same
            events += self._open(OpenItem("message"))
        if self._item is not None and (self._sources or (self._logprobs and self._item.kind == "message")):
            events.append(self._delta(""))  # tokens without a text, as the end's is, whether a step brought them alone or behind others
        events += self._close("completed" if status == "completed" and not self._is_cut_call else "incomplete")
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._total(generation)
        return events

    def fail(self, error: ApiError, generation: Generation) -> list[Event]:
        told = {"code": error.code or "server_error", "message": error.message}
        events = self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        self._total(generation)
        return [*events, self._event("error", **told, param=error.param)]

    def last(self) -> Event:
        """The event that ends a stream."""
        status = self.response["status"]
        return self._lifecycle("incomplete" if status == "cancelled" else status)  # OpenAI has no event for cancelled ones

    def snapshot(self) -> dict[str, Any]:
        """The response so far."""
        if self._item is None:
            return self.response
        return self.response | {"output": [*self.response["output"], self._item.told("in_progress")]}

    def _total(self, generation: Generation) -> None:
        generation.choices[0].num_reasoning_tokens = self.reply.num_reasoning_tokens
        completed_at = int(time.time()) if self.response["status"] == "completed" else None  # as OpenAI has it
        self.response |= {"completed_at": completed_at, "usage": usage(generation), "metrics": generation.metrics()}

    def _part(self, part: dict[str, Any]) -> list[Event]:
        match part:
            case {"content": text}:
                if self._item is None or self._item.kind != "message":
                    if self._item is not None and self._item.kind == "function_call" and not (self._gap + text).strip():
                        self._gap += text
                        return []
                    text, self._gap = self._gap + text, ""
                return [*self._within("message"), self._delta(text)]
            case {"reasoning": text}:
                return [*self._within("reasoning"), self._delta(text)]
            case {"tool_calls": [{"id": id, "function": {"name": name}}]}:
                self._gap = ""
                namespace, name = self._namespaces.get(name, (None, name))
                return [*self._close(), *self._open(OpenItem("function_call", call_id=id, name=name, namespace=namespace))]
            case {"tool_calls": [{"function": {"arguments": text}}]}:
                return [self._delta(text)]
            case _:
                raise AssertionError(f"a part of another kind: {list(part)}")

    def _within(self, kind: Literal["message", "reasoning"]) -> list[Event]:
        """Go on with the open item, if it is of this kind."""
        return [] if self._item is not None and self._item.kind == kind else [*self._close(), *self._open(OpenItem(kind))]

    def _open(self, item: OpenItem) -> list[Event]:
        self._item = item
        events = [self._event("response.output_item.added", output_index=len(self.response["output"]), item=item.told("in_progress", True))]
        if item.kind != "function_call":
            events.append(self._of_item("response.content_part.added", content_index=0, part=item.part(empty=True)))
        return events

    def _delta(self, text: str) -> Event:
        item = self._item
        assert item is not None, "a text of no item"
        item.pieces.append(text)
        more: dict[str, Any] = {"delta": text}
        if item.kind != "function_call":
            more["content_index"] = 0
        if item.kind == "message":
            more["logprobs"] = self._logprobs
            item.logprobs += self._logprobs
        if self._proposer_names is not None:
            more["speculation"] = self._sources
        self._logprobs, self._sources = [], []  # new lists: the event has the old ones
        return self._of_item(f"response.{item.text_event}.delta", **more)

    def _close(self, status: Status = "completed") -> list[Event]:
        item = self._item
        if item is None:
            return []
        if item.kind == "function_call":
            events = [self._of_item("response.function_call_arguments.done", name=item.name, arguments=item.text)]
        else:
            logprobs = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = [
                self._of_item(f"response.{item.text_event}.done", content_index=0, text=item.text, **logprobs),
                self._of_item("response.content_part.done", content_index=0, part=item.part()),
            ]
        whole = item.told(status)
        events.append(self._event("response.output_item.done", output_index=len(self.response["output"]), item=whole))
        self.response["output"].append(whole)
        self._item = None
        return events

    def _of_item(self, type: str, **fields: Any) -> Event:
        assert self._item is not None, "an event of no item"
        return self._event(type, item_id=self._item.id, output_index=len(self.response["output"]), **fields)

    def _lifecycle(self, name: str) -> Event:
        """With the response as it is now, of which later events change nothing."""
        return self._event(f"response.{name}", response=self.response | {"output": list(self.response["output"])})

    def _event(self, type: str, **fields: Any) -> Event:
        event = {"type": type, "sequence_number": self._number} | fields
        self._number += 1
        return event


class OpenItem:
    """The item that is being written."""

    def __init__(
        self, kind: Literal["message", "reasoning", "function_call"], call_id: str = "", name: str = "", namespace: str | None = None
    ) -> None:
        self.kind = kind
        self.id = new_id(kind)
        self.call_id = call_id
        self.name = name
        self.namespace = namespace
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.text_event = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}[kind]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, empty: bool = False) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "" if empty else self.text}
        return {"type": "output_text", "annotations": [], "logprobs": [] if empty else self.logprobs, "text": "" if empty else self.text}

    def told(self, status: Status, empty: bool = False) -> dict[str, Any]:
        about: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            within = {} if self.namespace is None else {"namespace": self.namespace}
            return about | {"call_id": self.call_id, "name": self.name, "arguments": "" if empty else self.text} | within
        of_kind = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return about | of_kind | {"content": [] if empty else [self.part()]}


def usage(generation: Generation) -> dict[str, Any]:
    """Chat completions' usage under this API's names."""
    told = generation.usage()
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0} | told["prompt_tokens_details"],
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": told["completion_tokens_details"],
        "total_tokens": told["total_tokens"],
    }
