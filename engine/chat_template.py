"""What chat templates want to be given, whoever renders them: the server for its clients, `LLM.chat` for scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
