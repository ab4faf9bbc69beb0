"""A chat template, and what it wants to be given, whoever renders it: the server for its clients, `LLM.chat` for scripts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError

from .chat_turns import Turn, Written, turns_of, ways
from .errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("foretoken.engine")

TOLD_OF_TOOLS = {"role": "system", "content": "You are a helpful assistant with some tools."}
PROBE_NAME = "probe_of_a_name"
PROBE = "The quick brown fox"
"""For templates of models that also see: they may read a message as a list of parts only, and lose a text unsaid."""


class ChatTemplate:
    """The tokenizer's template, or one that is given, and how it wants to be told a conversation, which is found out by trying.

    written: for a template that leaves out the calls of earlier turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, given: str | None = None, written: Written | None = None) -> None:
        self._tokenizer = tokenizer
        self._given = given
        self._wants_parts = wants_parts(tokenizer, given)
        self.tools_from = takes_tools(tokenizer, given)
        self._written = None if written is None or writes_calls(tokenizer, given) else written

    @property
    def text(self) -> str:
        """"" if there is none."""
        return template_text(self._tokenizer, self._given)

    def render(
        self,
        messages: Sequence[Turn],
        *,
        generates: bool,
        continues: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """messages: as OpenAI's, their contents texts. A conversation that it refuses is told in other ways. Raises InvalidRequest."""
        offered: dict[str, Any] = {"tools": list(tools)} if tools and self.tools_from != "system" else {}
        refusal: TemplateError | None = None
        try:
            told = turns_of(messages, _reads_arguments_as_text(self.text), self._written)
            for turns in ways(with_tools(told, tools) if tools and self.tools_from == "system" else told):
                try:
                    text = self._tokenizer.apply_chat_template(
                        in_parts(turns) if self._wants_parts else turns,
                        chat_template=self._given,
                        tokenize=False,
                        add_generation_prompt=generates,
                        continue_final_message=continues,
                        **offered,
                        **(kwargs or {}),
                    )
                    return str(text)
                except TemplateError as error:
                    refusal = refusal or error
                    if type(error) is not TemplateError:
                        break
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidRequest("the model's chat template cannot render this conversation", "messages") from error
        # Exactly TemplateError is the template's own raise_exception(), written to be read; the rest is the template's matter.
        reason = str(refusal) if type(refusal) is TemplateError else "it cannot render them"
        if isinstance(refusal, TemplateSyntaxError):
            logger.error("the chat template is broken at its line %d: %s", refusal.lineno, refusal.message)
        raise InvalidRequest(f"the model's chat template refuses this conversation: {reason}", "messages") from refusal


def template_text(tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> str:
    """The chat template; all of them where there are several, by name."""
    template: Any = given or tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def syntax_mistake(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the template is no Jinja, and why; "" if it is."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": PROBE}], tokenize=False)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:  # it may refuse the probe
        pass
    return ""


def _reads_arguments_as_text(template: str) -> bool:
    """Whether it takes the arguments of a call as the model wrote them: the prompt then repeats its very tokens."""
    return "arguments is string" in template


def wants_parts(tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> bool:
    """Whether the template writes a message only where it comes in parts. Found out by trying."""
    text, parts = (_written(tokenizer, [{"role": "user", "content": content}], given) for content in (PROBE, _parts(PROBE)))
    return PROBE not in text and PROBE in parts


def takes_tools(tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> Literal["argument", "system"] | None:
    """Where the template takes tools from: its argument, or, as Phi-4-mini's, a message of the system. Found out by trying."""
    if "tools" not in template_text(tokenizer, given):
        return None
    asked = [{"role": "user", "content": PROBE}]
    tool = {"type": "function", "function": {"name": PROBE_NAME, "description": PROBE, "parameters": {"type": "object", "properties": {}}}}
    told = [_written(tokenizer, turns, given, tools=[tool]) for turns in (asked, in_parts(asked))]
    if PROBE_NAME not in "".join(told) and PROBE_NAME in _written(tokenizer, with_tools(asked, [tool]), given):
        return "system"
    return "argument" if PROBE_NAME in "".join(told) or not any(told) else None  # also where it cannot be tried


def writes_calls(tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> bool:
    """Whether the template writes the calls of earlier turns. Found out by trying."""
    call = {"id": "probe0000", "type": "function", "function": {"name": PROBE_NAME, "arguments": "{}"}}
    messages = [
        {"role": "user", "content": PROBE},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": PROBE, "tool_call_id": "probe0000", "name": "other"},
    ]
    turns = turns_of(messages, _reads_arguments_as_text(template_text(tokenizer, given)))
    text = _written(tokenizer, turns, given) or _written(tokenizer, in_parts(turns), given)
    return not text or PROBE_NAME in text


def with_tools(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns of which the first, the system's, has the tools."""
    system, others = (turns[0], turns[1:]) if turns[0]["role"] == "system" else (TOLD_OF_TOOLS, turns)
    return [{**system, "tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}, *map(dict, others)]


def in_parts(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose contents are texts, with lists of parts instead."""
    return [{**turn, "content": _parts(turn["content"])} for turn in turns]


def _written(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Any], given: str | None = None, tools: Any = None) -> str:
    """What the template makes of a conversation, "" if it makes nothing."""
    try:
        return str(tokenizer.apply_chat_template(list(turns), chat_template=given, tools=tools, tokenize=False))
    except Exception:  # whatever a template of a model's folder may raise; a request will hear of it
        return ""


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []
