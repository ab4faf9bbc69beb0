"""The items of a conversation in the Responses API: messages, calls of functions, their results, and reasoning.

Owns their shapes, as clients send them and as they are kept, and what they mean as messages of a chat.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from ..chat_messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME_CHARS, CalledFunction, Message, ToolCall
from ..errors import ApiError
from ..request_base import OpenAIObject

KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text") | {"refusal": "refusal"}

Id = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


def new_id(kind: str) -> str:
    return ID_PREFIXES[kind] + uuid.uuid4().hex


def full_name(namespace: str, name: str) -> str:
    """What the model calls a function of a namespace."""
    return f"{namespace}.{name}"


def _texts(value: object) -> object:
    """A string, or parts with texts -> the texts. Parts of other kinds are refused, never dropped."""
    if isinstance(value, str):
        return [value]
    if value is None:
        return []
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts with texts")
    return [_text(part) for part in value]


def _text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PydanticCustomError("content", "a part must be an object with a type")
    key = _TEXTS.get(part["type"])
    if key is None:
        message = f"This server reads text only, not {part['type'][:40]!r}; send parts of type 'input_text'"
        raise ApiError(400, message, param="input", code="unsupported_content")
    if not isinstance(part.get(key), str):
        raise PydanticCustomError("content", "a text part must have a text that is a string")
    return part[key]


Texts = Annotated[list[str], BeforeValidator(_texts)]


class _Item(OpenAIObject):
    id: Id | None = None
    status: str | None = None  # of items that are sent back as they came: they are over


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    phase: str | None = None

    def kept(self) -> dict[str, Any]:
        if self.role == "assistant":
            parts: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []} for text in self.content]
        else:
            parts = [{"type": "input_text", "text": text} for text in self.content]
        return {"type": "message", "role": self.role, "status": "completed", "content": parts}


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Id
    name: Id
    namespace: Id | None = None
    arguments: str

    @model_validator(mode="after")
    def _has_a_name_to_tell(self) -> CallItem:
        if len(self.told_name) > MAX_NAME_CHARS:
            raise PydanticCustomError("name", "namespace and name have more than {limit} characters together", {"limit": MAX_NAME_CHARS})
        return self

    @property
    def told_name(self) -> str:
        return self.name if self.namespace is None else full_name(self.namespace, self.name)

    def kept(self) -> dict[str, Any]:
        told = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        within = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": "function_call", "status": "completed"} | told | within


class ResultItem(_Item):
    type: Literal["function_call_output"]
    call_id: Id
    output: Texts

    def kept(self) -> dict[str, Any]:
        return {"type": "function_call_output", "status": "completed", "call_id": self.call_id, "output": "\n".join(self.output)}


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: Texts = []
    summary: Texts = []
    encrypted_content: str | None = None  # of other servers; nothing here can read it

    def kept(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text} for text in self.content]
        summary = [{"type": "summary_text", "text": text} for text in self.summary]
        return {"type": "reasoning", "summary": summary, "content": content}


class Reference(OpenAIObject):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Id


def _kind(value: object) -> str | None:
    """Messages and references need not say that they are."""
    match value:
        case {"type": str(kind)}:
            return kind
        case {"role": _}:
            return "message"
        case {"id": _}:
            return "item_reference"
        case _:
            return None


_Plain = (
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
)
Item = Annotated[_Plain, Discriminator(_kind)]
ItemOrReference = Annotated[_Plain | Annotated[Reference, Tag("item_reference")], Discriminator(_kind)]


def _items(value: object) -> object:
    """A text is a message of the user. Raises ApiError for items that only OpenAI's own server can make anything of."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string or a list of items, at least one")
    for item in value:
        kind = _kind(item)
        if kind is None:
            raise PydanticCustomError("input", "an item must be an object with a type, or a message with a role")
        if kind not in KINDS:
            message = f"items of type {kind[:40]!r} are not supported; this server takes {', '.join(KINDS)}"
            raise ApiError(400, message, param="input", code="unsupported_item")
    return value


Items = Annotated[list[ItemOrReference], BeforeValidator(_items), Field(max_length=MAX_MESSAGES)]


def kept(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items as JSON, each with an id that no other one of them has."""
    told: dict[str, dict[str, Any]] = {}
    for item in items:
        id = item.id if item.id is not None and item.id not in told else new_id(item.type)
        told[id] = {"id": id} | item.kept()
    return list(told.values())


def messages(items: Sequence[Item]) -> list[Message]:
    """The same conversation as a chat: what the assistant thought, said and called in a row is one message.

    Raises ApiError for a result without its call, and for too many calls at once.
    """
    chat: list[Message] = []
    turn = _Turn()
    called: set[str] = set()
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = turn if turn.content is None else turn.end(chat)
                turn.content = item.content
            case ReasoningItem():
                turn = turn if turn.content is None and not turn.calls else turn.end(chat)
                turn.reasoning += item.content or item.summary
            case CallItem():
                called.add(item.call_id)
                turn.calls.append(ToolCall(id=item.call_id, function=CalledFunction(name=item.told_name, arguments=item.arguments)))
            case MessageItem():
                turn = turn.end(chat)
                chat.append(Message(role=item.role, content="\n".join(item.content)))
            case ResultItem():
                if item.call_id not in called:
                    message = f"there is no function_call with the call_id {item.call_id[:100]!r} before its function_call_output"
                    raise ApiError(400, message, param="input", code="unknown_call_id")
                turn = turn.end(chat)
                chat.append(Message(role="tool", content="\n".join(item.output), tool_call_id=item.call_id))
    turn.end(chat)
    return chat


class _Turn:
    """A message of the assistant in the making."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] | None = None
        self.calls: list[ToolCall] = []

    def end(self, chat: list[Message]) -> _Turn:
        """Add the message, if there is one; the next turn."""
        if len(self.calls) > MAX_CALLS:
            raise ApiError(400, f"more than {MAX_CALLS} function_call items in a row", param="input")
        if self.content is not None or self.calls:
            content = None if self.content is None else "\n".join(self.content)
            reasoning = "\n".join(self.reasoning) or None
            chat.append(Message(role="assistant", content=content, tool_calls=self.calls or None, reasoning=reasoning))
        return _Turn()


_STORED = TypeAdapter(list[Item])


def stored_items(items: Sequence[dict[str, Any]]) -> list[Item]:
    """What was kept of a conversation, read back."""
    return _STORED.validate_python(list(items))
