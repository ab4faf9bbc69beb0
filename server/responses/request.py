"""What POST /v1/responses may be asked, and the same request in the words of chat completions.

Owns the renaming, errors included: a client reads the names that it wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ...engine.errors import InvalidRequest
from ...engine.request import SamplingParams
from ..chat_messages import Message
from ..errors import ApiError, from_engine, unsupported
from ..request_base import OpenAIObject
from ..schemas import ChatRequest, GenerationRequest, ReasoningField, TemplateKwargs
from ..serving import invalid_body
from ..tools.request import MAX_TOOLS
from .functions import chat_choice, chat_tools, checked
from .items import Item, Items, messages

MAX_METADATA = 16
_LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs", "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _finite(value: object) -> object:
    """What is told back as it came must be JSON: Python reads NaN and Infinity in it too."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("json", "NaN and Infinity are no JSON") from None
    return value


Object = Annotated[dict[str, Any], AfterValidator(_finite)]


class ResponseReasoning(ReasoningField):
    summary: Literal["auto", "concise", "detailed"] | None = None  # no summaries are written: the reasoning itself is there


class TextField(OpenAIObject):
    format: Object | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(GenerationRequest):
    """Beside these the fields of chat completions that say how to sample, to speculate and to constrain."""

    input: Items = []  # none: on from an earlier response
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that a server runs itself
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    reasoning: ResponseReasoning | None = None
    text: TextField | None = None
    tools: Annotated[list[Object], BeforeValidator(checked), Field(max_length=MAX_TOOLS)] = []
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None

    @model_validator(mode="after")
    def _is_served(self) -> ResponseRequest:
        for name in ("conversation", "prompt", "context_management", "return_token_ids", "return_tokens_as_token_ids"):
            if getattr(self, name):
                raise unsupported(name)
        if self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs")
        if self.n not in (None, 1):
            raise ApiError(400, "a response has one choice: leave n out", param="n")
        if len(self.metadata or {}) > MAX_METADATA or any(len(key) > 64 for key in self.metadata or {}):
            raise ApiError(400, f"metadata holds at most {MAX_METADATA} keys of at most 64 characters", param="metadata")
        if self.background and self.store is False:
            raise ApiError(400, "a response in the background must be stored: leave store out", param="background")
        return self

    def described(self, id: str, model: str, stored: bool, params: SamplingParams) -> dict[str, Any]:
        """A response without an output, with what was asked as it was understood."""
        text, reasoning = self.text, self.reasoning
        return {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(self.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "model": model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": reasoning.summary if reasoning else None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": stored,
            "temperature": params.temperature,
            "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": (text and text.verbosity) or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self.truncation or "disabled",
            "usage": None,
            "user": self.user,
            "metadata": self.metadata or {},
        }

    def chat(self, items: Sequence[Item]) -> ChatRequest:
        """The request as one for chat completions. items: the whole conversation. Raises ApiError, with our names."""
        conversation = messages(items)
        if self.instructions is not None:
            conversation.insert(0, Message(role="system", content=self.instructions))
        told = {name: getattr(self, name) for name in self.model_fields_set & ChatRequest.model_fields.keys()}
        told |= (self.model_extra or {}) | {
            "messages": conversation,
            "tools": chat_tools(self.tools),
            "tool_choice": chat_choice(self.tool_choice),
            "max_completion_tokens": self.max_completion_tokens if self.max_output_tokens is None else self.max_output_tokens,
            "logprobs": True if self.top_logprobs or _LOGPROBS in (self.include or ()) else None,
            "top_logprobs": self.top_logprobs or None,
        }
        if self.text is not None and self.text.format is not None:
            told["response_format"] = _response_format(self.text.format)
        with our_names():
            try:
                return ChatRequest.model_validate(told)
            except ValidationError as error:
                raise invalid_body(error) from None


def _response_format(format: Mapping[str, Any]) -> dict[str, Any]:
    """Ours has the schema's name, strictness and text beside the type; theirs has them inside."""
    if format.get("type") != "json_schema":
        return dict(format)
    return {"type": "json_schema", "json_schema": {key: value for key, value in format.items() if key != "type"}}


# What chat completions call it, and what it is called here. The first that fits counts.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("prompt", "input"),
    ("logprobs", "top_logprobs"),
)


@contextmanager
def our_names() -> Iterator[None]:
    """Mistakes that are found under the names of chat completions are told under those of this API."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        told = error if isinstance(error, ApiError) else from_engine(error)
        param, message = told.param or "", told.message
        if param.startswith("tools."):
            param, message = param.replace(".function.", "."), message.replace(".function.", ".")
        for theirs, ours in _NAMES:
            if param == theirs or param.startswith(theirs + "."):
                param, message = param.replace(theirs, ours, 1), message.replace(theirs, ours)
                break
        raise ApiError(told.status, message, type=told.type, param=param or None, code=told.code, headers=told.headers) from None
