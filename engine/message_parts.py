"""Chat templates that read a message as a list of parts only, as those of models that also see do: a text they would lose unsaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "The quick brown fox"


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
