"""What chat templates want to be given, whoever renders them: the server for its clients, `LLM.chat` for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOLD_OF_TOOLS = {"role": "system", "content": "You are a helpful assistant with some tools."}
PROBE_NAME = "probe_of_a_name"
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
    text, parts = (_written(tokenizer, [{"role": "user", "content": content}], chat_template) for content in (PROBE, _parts(PROBE)))
    return PROBE not in text and PROBE in parts


def takes_tools(tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> Literal["argument", "system"] | None:
    """Where the template, by default the tokenizer's own, takes tools from: its argument, or, as Phi-4-mini's, a message of the system.

    Found out by trying. None: it takes none.
    """
    if "tools" not in (chat_template or template_text(tokenizer)):
        return None
    asked = [{"role": "user", "content": PROBE}]
    tool = {"type": "function", "function": {"name": PROBE_NAME, "description": PROBE, "parameters": {"type": "object", "properties": {}}}}
    told = [_written(tokenizer, turns, chat_template, [tool]) for turns in (asked, in_parts(asked))]
    if PROBE_NAME not in "".join(told) and PROBE_NAME in _written(tokenizer, with_tools(asked, [tool]), chat_template):
        return "system"
    return "argument" if PROBE_NAME in "".join(told) or not any(told) else None  # also where it cannot be tried


def writes_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's template writes the calls of earlier turns. Found out by trying."""
    function = {"name": PROBE_NAME, "arguments": call_arguments("{}", reads_arguments_as_text(template_text(tokenizer)))}
    call = {"id": "probe0000", "type": "function", "function": function}
    turns = [
        {"role": "user", "content": PROBE},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": PROBE, "tool_call_id": "probe0000", "name": "other"},
    ]
    text = _written(tokenizer, turns) or _written(tokenizer, in_parts(turns))
    return not text or PROBE_NAME in text


def with_tools(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns of which the first, the system's, has the tools."""
    system, others = (turns[0], turns[1:]) if turns[0]["role"] == "system" else (TOLD_OF_TOOLS, turns)
    return [{**system, "tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}, *map(dict, others)]


def in_parts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose contents are texts, with lists of parts instead."""
    return [{**turn, "content": _parts(turn["content"])} for turn in turns]


def _written(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Any], chat_template: str | None = None, tools: Any = None) -> str:
    """What the template makes of a conversation, "" if it makes nothing."""
    try:
        return str(tokenizer.apply_chat_template(list(turns), chat_template=chat_template, tools=tools, tokenize=False))
    except Exception:  # whatever a template of a model's folder may raise; a request will hear of it
        return ""


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []
