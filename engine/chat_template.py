"""What chat templates want to be given, whoever renders them: the server for its clients, `LLM.chat` for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROBE = "The quick brown fox"
"""For templates of models that also see: they may read a message as a list of parts only, and lose a text unsaid."""


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template; all of them where there are several, by name."""
    template: Any = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def reads_arguments_as_text(template: str) -> bool:
    """Whether it takes the arguments of a call as the model wrote them: the prompt then repeats its very tokens."""
    return "arguments is string" in template


def call_arguments(arguments: str, as_text: bool) -> dict[str, Any] | str:
    """A call's arguments for a template. What is no JSON object, as a model may once have written them, stays text."""
    if as_text:
        return arguments
    try:
        parsed: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def wants_parts(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> bool:
    """Whether the template, by default the tokenizer's own, writes a message only where it comes in parts. Found out by trying."""
    return PROBE not in _written(tokenizer, chat_template, PROBE) and PROBE in _written(tokenizer, chat_template, _parts(PROBE))


def in_parts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose contents are texts, with lists of parts instead."""
    return [{**turn, "content": _parts(turn["content"])} for turn in turns]


def _written(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, content: str | list[dict[str, str]]) -> str:
    """What the template makes of one message of a user, "" if it makes nothing."""
    conversation: list[Any] = [{"role": "user", "content": content}]
    try:
        return str(tokenizer.apply_chat_template(conversation, chat_template=chat_template, tokenize=False))
    except Exception:  # whatever a template of a model's folder may raise; a request will hear of it
        return ""


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []
