"""The messages of Anthropic's API: turns of content blocks, and what they are as messages of a chat.

Owns the shapes of the blocks. Text, thinking, calls of tools and their results are read; blocks of other kinds are refused.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..chat_messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME_CHARS, CalledFunction, ToolCall
from ..chat_messages import Message as ChatMessage
from ..errors import ApiError
from ..request_base import OpenAIObject

Id = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class AnthropicObject(OpenAIObject):
    """Where a prefix may be cached is this server's own choice: every one is."""

    cache_control: Any = None


class TextBlock(AnthropicObject):
    type: Literal["text"]
    text: str
    citations: Any = None  # of an earlier answer


class ThinkingBlock(AnthropicObject):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(AnthropicObject):
    """Another server's, which nobody else can read."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(AnthropicObject):
    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, Any]

    @property
    def call(self) -> ToolCall:
        return ToolCall(id=self.id, function=CalledFunction(name=self.name, arguments=json.dumps(self.input, ensure_ascii=False)))


def _text_blocks(value: object) -> object:
    return _blocks(value, ("text",))


TextBlocks = Annotated[list[TextBlock], BeforeValidator(_text_blocks)]


class ToolResultBlock(AnthropicObject):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: TextBlocks = []
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """What the tool said; templates have no other place for the news that it failed."""
        return ("Error: " if self.is_error else "") + joined(self.content)


Block = Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def _blocks(content: object, kinds: Sequence[str]) -> object:
    """A text or blocks -> blocks. Raises ApiError if some are not of these kinds: they are never dropped."""
    if content is None or isinstance(content, str):
        return [] if content is None else [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind not in kinds:
            message = f"This server reads text only: a block of the type {kind[:40]!r} cannot stand here; use {' or '.join(kinds)}"
            raise ApiError(400, message, param="messages", code="unsupported_content")
    return content


def _turn(value: object) -> object:
    if isinstance(value, dict) and isinstance(role := value.get("role"), str) and role in _KINDS and "content" in value:
        return value | {"content": _blocks(value["content"], _KINDS[role])}
    return value


class Turn(AnthropicObject):
    role: Literal["user", "assistant", "system"]
    content: list[Block]


Turns = Annotated[list[Annotated[Turn, BeforeValidator(_turn)]], Field(min_length=1, max_length=MAX_MESSAGES)]


def chat_messages(system: Sequence[TextBlock], turns: Sequence[Turn]) -> list[ChatMessage]:
    """The conversation as chat templates know it; turns of one role in a row are one. Raises ApiError."""
    messages = [ChatMessage(role="system", content=joined(system))] if system else []
    called: set[str] = set()  # ids of the calls so far
    for role, group in groupby(turns, lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        text = joined([block for block in blocks if isinstance(block, TextBlock)])
        if role == "assistant":
            messages.append(_assistant(blocks, text, called))
            continue
        if not blocks:
            raise ApiError(400, f"messages: a message of the role {role} has no content", param="messages")
        results = [_result(block, called) for block in blocks if isinstance(block, ToolResultBlock)]
        messages += results  # first: templates want them right behind the calls
        if text or not results:
            messages.append(ChatMessage(role="user" if role == "user" else "system", content=text))
    return messages


def joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def goes_on(messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer goes on with the last message, which is the assistant's. Raises ApiError if that cannot be."""
    if messages[-1].role != "assistant":
        return False
    if messages[-1].tool_calls:
        message = "messages: the last one calls tools; send their results, as tool_result blocks of a message of the user"
        raise ApiError(400, message, param="messages")
    return True


def _assistant(blocks: Sequence[Block], text: str, called: set[str]) -> ChatMessage:
    calls = [block.call for block in blocks if isinstance(block, ToolUseBlock)]
    if len(calls) > MAX_CALLS:
        raise ApiError(400, f"messages: {len(calls)} tool_use blocks in a row; at most {MAX_CALLS} are read", param="messages")
    called.update(call.id for call in calls)
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return ChatMessage(role="assistant", content=text, tool_calls=calls or None, reasoning=thinking or None)


def _result(result: ToolResultBlock, called: set[str]) -> ChatMessage:
    if result.tool_use_id not in called:
        message = f"messages: a tool_result has the tool_use_id {result.tool_use_id[:60]!r}, which no tool_use block before it has"
        raise ApiError(400, message, param="messages")
    return ChatMessage(role="tool", content=result.text, tool_call_id=result.tool_use_id)
