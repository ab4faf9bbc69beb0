"""What callers of `LLM` hand over, prompts and conversations in many shapes, as what the engine reads.

What it would have to drop is refused.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from torch import Tensor

from .errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": [...]}."""
Message = Mapping[str, Any]


class TextPrompt(TypedDict, total=False):
    """A prompt, typed: the dict that it is."""

    prompt: str
    cache_salt: str


class TokensPrompt(TextPrompt, total=False):
    prompt_token_ids: list[int]


KEYS = ("prompt", "prompt_token_ids", "cache_salt")
SHAPES = 'a prompt is a string, {"prompt": "..."}, {"prompt_token_ids": [...]} or a list of token ids'
CONVERSATION = 'a conversation is a list of messages, such as [{"role": "user", "content": "..."}]'


@dataclass(frozen=True)
class ParsedPrompt:
    """Text and token ids as far as given; token ids go before text."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def parse_prompts(prompts: Prompt | Iterable[Prompt] | None) -> list[ParsedPrompt]:
    """["a", "b"] are two, "a" is one, [1, 2] is one, a table of token ids is one a row. Raises TypeError."""
    if isinstance(prompts, (str, Mapping)):
        return [_parsed(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise TypeError(f"{SHAPES}, not {type(prompts).__name__}")
    # Rows of arrays become lists, so that a row of one token is no number.
    listed: list[Any] = [prompt.tolist() if isinstance(prompt, (np.ndarray, Tensor)) else prompt for prompt in prompts]
    if listed and isinstance(listed[0], (int, np.integer)):
        return [_parsed(listed)]
    parsed: list[ParsedPrompt] = []
    for index, prompt in enumerate(listed):
        with naming("prompts", index, len(listed)):
            parsed.append(_parsed(prompt))
    return parsed


def parse_conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[Message]]:
    """One conversation or several, as several. Raises TypeError."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"{CONVERSATION}; generate() takes texts")
    listed: list[Any] = list(messages)
    conversations: list[list[Message]] = []
    several = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for index, conversation in enumerate(several):
        with naming("conversations", index, len(several)):
            turns: list[Any] = [] if isinstance(conversation, (str, Mapping)) else list(conversation)
            if not turns:
                raise TypeError(f"{CONVERSATION}, not {conversation!r:.60}")
            for number, turn in enumerate(turns):
                if not isinstance(turn, Mapping):
                    raise TypeError(f"message {number} is {type(turn).__name__}; {CONVERSATION} (of a pydantic object: .model_dump())")
            conversations.append(turns)
    return conversations


def turn_of(message: Message) -> dict[str, Any]:
    """A message as chat templates know it. Raises InvalidRequest for what is not text."""
    said = {key: value for key, value in message.items() if value is not None}
    if "role" not in said:
        raise InvalidRequest("a message needs a role", "messages")
    role = "system" if said["role"] == "developer" else said["role"]  # few templates know OpenAI's newer name
    return {**said, "role": role, "content": _joined(message.get("content"))}


@contextmanager
def naming(name: str, index: int, count: int) -> Iterator[None]:
    """What a caller did wrong tells with which one of his many."""
    try:
        yield
    except (InvalidRequest, TypeError) as error:
        if count > 1:
            error.args = (f"{name}[{index}]: {error}",)
        raise


def _parsed(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        given: dict[str, Any] = {key: value for key, value in prompt.items() if value is not None}
        if unknown := sorted(set(given).difference(KEYS)):
            raise TypeError(f"a prompt takes {', '.join(KEYS)}, not {unknown[0]!r}")
        text, ids, salt = (given.get(key) for key in KEYS)
        if ids is not None or isinstance(text, str):
            if not isinstance(salt, str | None):
                raise TypeError(f"cache_salt is a string, not {salt!r}")
            return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt or "")
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return ParsedPrompt(None, _token_ids(prompt))
    raise TypeError(SHAPES)


def _token_ids(tokens: Iterable[Any]) -> list[int]:
    """Of any type that is an integer. True is none: it stays, to be refused with the other checks of ids."""
    try:
        return [token if isinstance(token, bool) else operator.index(token) for token in tokens]
    except TypeError:
        raise TypeError(f"{SHAPES}, which are integers, not {tokens!r:.60}") from None


def _joined(content: object) -> str:
    """Text of a message; parts as in OpenAI's API are joined by line ends."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"the content of a message is text, not {content!r:.60}", "messages")
    return "\n".join(part if isinstance(part, str) else _part(part) for part in content)


def _part(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise InvalidRequest(f"messages may hold text only, not {kind!r}", "messages")
    if not isinstance(text := part.get("text"), str):
        raise InvalidRequest("a text part must have a text", "messages")
    return text
