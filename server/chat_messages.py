"""What the messages of a conversation may look like, calls of tools and their results included, and as what a template gets them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .errors import ApiError
from .request_base import OpenAIObject

MAX_MESSAGES = 4096
MAX_CALLS = 128
MAX_NAME_CHARS = 256


def _text(value: object) -> object:
    """A message's content: a string, or text parts. Parts of other kinds are refused, never dropped."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return [_part_text(part) for part in value]


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PydanticCustomError("content", "a content part must be an object with a type")
    kind = part["type"]
    if kind not in ("text", "refusal"):
        raise ApiError(400, "This server reads text only; send content parts of type 'text'", param="messages", code="unsupported_content")
    if not isinstance(part.get(kind), str):
        raise PydanticCustomError("content", "a text part must have a text that is a string")
    return part[kind]


TextContent = Annotated[Any, BeforeValidator(_text)]  # str, list[str] (the texts of its parts), or None


class CalledFunction(OpenAIObject):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    arguments: str


class ToolCall(OpenAIObject):
    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": self.function.arguments}}


class Message(OpenAIObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and self.role != "assistant":  # which may have thought, called or refused only
            raise PydanticCustomError("content", "a message of the role '{role}' needs content", {"role": self.role})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "only a message of the assistant has tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise PydanticCustomError("role", "a message of the role 'tool', and no other, needs the tool_call_id that it answers")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(self.content)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it. Keys that a template asks for the presence of are only there if they say something."""
        # Few templates know OpenAI's newer name of the system role.
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            turn["name"] = self.name
        if reasoning := self.reasoning or self.reasoning_content:
            turn["reasoning"] = turn["reasoning_content"] = turn["thinking"] = reasoning
        return turn


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
