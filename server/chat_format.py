"""Text and messages to token ids: the tokenizer, and the model's own chat template.

The template is the model's, or one that the server was started with, and runs in transformers' sandbox; a request can neither bring one nor
override an argument of the rendering.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.chat_template import ChatTemplate
from ..engine.chat_turns import Written
from ..engine.errors import ConfigError
from .chat_messages import Message
from .errors import ApiError
from .tools.parser import Tool

TEMPLATE_KWARGS = frozenset(
    "add_vision_id clear_thinking date_string enable_thinking preserve_thinking reasoning_effort thinking thinking_budget "
    "tools_in_user_message".split()
)
MAX_KWARG_CHARS = 256
OFF_LOOP_CHARS = 8_000
"""Longer texts are rendered and tokenized in a thread: about 2 ms of work, what a stream's chunk may wait."""
TURN_CHARS = 200
"""What a template takes for a message beside its text, as characters."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model gets it."""

    text: str
    token_ids: list[int]
    continued: str | None  # the message of the assistant that the prompt ends in, where it is to be continued


class ChatFormat:
    """Renders and tokenizes for one model. Safe to use from several threads.

    encode(text, add_special_tokens, param) -> token ids is the engine's own, which refuses what cannot fit the context. threads: for
    longer texts; None = the event loop's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[str, bool, str], list[int]],
        written: Written | None = None,
        threads: Executor | None = None,
        defaults: Mapping[str, Any] = {},
    ) -> None:
        """defaults: chat_template_kwargs of requests that do not name them. Raises ConfigError."""
        if mistake := _mistake(defaults):
            raise ConfigError(f"default_{mistake}")
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._encode = encode
        self._threads = threads
        self._template = ChatTemplate(tokenizer, written=written)

    async def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Raises InvalidRequest that names `param`."""
        if len(text) <= OFF_LOOP_CHARS:
            return self._encode(text, add_special_tokens, param)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, text, add_special_tokens, param)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> ChatPrompt:
        """By default the prompt ends where the assistant begins to speak. Raises ApiError, InvalidRequest."""
        continues = bool(continue_final_message)
        generates = not continues if add_generation_prompt is None else add_generation_prompt
        if continues and generates:
            raise ApiError(400, "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message")
        if continues and (messages[-1].role != "assistant" or messages[-1].tool_calls):
            message = "continue_final_message needs a last message of the assistant, without tool_calls"
            raise ApiError(400, message, param="continue_final_message")
        if mistake := _mistake(template_kwargs or {}):
            raise ApiError(400, mistake, param="chat_template_kwargs")
        kwargs = {**self._defaults, **(template_kwargs or {})}
        chars = sum(len(message.text) + TURN_CHARS for message in messages)

        def work() -> ChatPrompt:
            text = self._render(messages, generates, continues, kwargs, tools)
            token_ids = self._encode(text, False, "messages")  # the template has the special tokens
            return ChatPrompt(text, token_ids, messages[-1].text if continues else None)

        is_short, calls = chars <= OFF_LOOP_CHARS, any(message.tool_calls for message in messages)
        if is_short and not tools and not calls:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None if is_short else self._threads, work)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _render(
        self, messages: Sequence[Message], generates: bool, continues: bool, kwargs: Mapping[str, Any], tools: Sequence[Tool]
    ) -> str:
        if not self._template.text:
            raise ApiError(
                400, "this model has no chat template; use /v1/completions with a prompt", param="messages", code="no_chat_template"
            )
        turns = [message.for_template() for message in messages]
        return self._template.render(turns, generates=generates, continues=continues, tools=tools, kwargs=kwargs)


def _mistake(kwargs: Mapping[str, Any]) -> str:
    for name, value in kwargs.items():
        if name not in TEMPLATE_KWARGS or (isinstance(value, str) and len(value) > MAX_KWARG_CHARS):
            return f"chat_template_kwargs takes short values of {', '.join(sorted(TEMPLATE_KWARGS))}, not {name[:40]!r}"
    return ""
