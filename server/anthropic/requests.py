"""What POST /v1/messages may be asked, and the same request in the words of chat completions, which all that follows knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ...engine.errors import InvalidRequest
from ...engine.request import MAX_STOP_CHARS, MAX_STOPS
from ..errors import ApiError, from_engine, unsupported
from ..schemas import ChatRequest, SpeculationField
from ..serving import invalid_body
from ..structured import FIELDS as FORM_FIELDS
from ..tools.request import MAX_TOOLS, NAME, Parameters
from .conversation import AnthropicObject, TextBlocks, Turns, chat_messages, goes_on


def _tool(value: object) -> object:
    """Raises ApiError for tools that Anthropic runs itself, or has the schema of."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "custom":
        message = f"this server has no tools of its own: {kind[:40]!r} is not available; send tools with an input_schema"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    return value


class OfferedTool(AnthropicObject):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": function}


class ToolChoice(AnthropicObject):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1)] | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        """Raises ApiError."""
        match self.type:
            case "tool":
                if self.name is None:
                    raise ApiError(400, "tool_choice.name: a tool_choice of the type 'tool' names the tool", param="tool_choice")
                return {"type": "function", "function": {"name": self.name}}
            case "any":
                return "required"
            case other:
                return other


class Thinking(AnthropicObject):
    """adaptive: the model, or its template, decides how much."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None  # no summaries are made, nor updates: the thinking itself is there


class OutputFormat(AnthropicObject):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(AnthropicObject):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(AnthropicObject):
    """The part of a request that becomes its prompt."""

    model: str | None = None
    messages: Turns
    system: TextBlocks = []
    tools: Annotated[list[Annotated[OfferedTool, BeforeValidator(_tool)]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # output_config.format, as the beta of structured outputs had it
    # Known, and not to be had here.
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None
    # Known, and nothing to do for one model on one machine that edits no conversation.
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    context_management: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    @property
    def shows_thinking(self) -> bool:
        """Clients that did not ask for it expect none, whatever the model does."""
        return self.thinking is not None and self.thinking.type != "disabled" and self.thinking.display != "omitted"

    def chat(self) -> ChatRequest:
        """Raises ApiError, with the names of this API."""
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise unsupported(name)
        if self.thread:  # clients that know the code send the whole conversation then
            message = "thread: this server keeps no conversations; send all messages, without thread"
            raise ApiError(400, message, param="thread", code="thread_unsupported_request")
        with anthropic_names():
            try:
                return ChatRequest.model_validate(self._told())
            except ValidationError as error:
                raise invalid_body(error) from None

    def _told(self) -> dict[str, Any]:
        messages = chat_messages(self.system, self.messages)
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        told: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": goes_on(messages),
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "include_reasoning": self.shows_thinking,
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            # Without thinking none is asked for; a budget of nothing holds those models to that which have no switch.
            "thinking_token_budget": self.thinking.budget_tokens if thinks and self.thinking is not None else 0,
        }
        if self.tool_choice is not None:
            told |= {"tool_choice": self.tool_choice.for_chat(), "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use}
        if self.output_config is not None:
            told["reasoning_effort"] = self.output_config.effort
        if (form := (self.output_config and self.output_config.format) or self.output_format) is not None:
            told["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": form.schema_}}
        return told


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)] | None
    ) = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    # This server's own, as in chat completions.
    seed: int | None = None
    speculation: SpeculationField | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def _told(self) -> dict[str, Any]:
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise ApiError(400, "thinking.budget_tokens: it is needed where thinking is enabled", param="thinking")
        if thinking is not None and (thinking.budget_tokens or 0) >= self.max_tokens:
            raise ApiError(400, "thinking.budget_tokens must be below max_tokens, which counts thinking too", param="thinking")
        forms = {name: value for name, value in (self.model_extra or {}).items() if name in FORM_FIELDS}  # other servers' ways to ask
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "speculation", "priority", "cache_salt")
        return forms | super()._told() | {"stop": self.stop_sequences} | {name: getattr(self, name) for name in same}


_NAMES = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("parameters", "input_schema"),
)


@contextmanager
def anthropic_names() -> Iterator[None]:
    """Mistakes that are found under the names of chat completions are told under those of this API."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        told = error if isinstance(error, ApiError) else from_engine(error)
        message = told.message
        for theirs, ours in _NAMES:
            if (told.param or "").startswith(theirs) or message.startswith(theirs):
                message = message.replace(theirs, ours)
                break
        raise ApiError(told.status, message, type=told.type, param=told.param, code=told.code, headers=told.headers) from None
