"""What requests may look like: strict types of the bodies, and how they become SamplingParams.

Types and shapes are checked here, numeric ranges where they are owned (SamplingParams), vocabulary and context by the engine.
What other fields a body has is judged by extras.py; our own objects refuse them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasGenerator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..engine.request import SamplingParams
from .chat_messages import Messages, TextContent
from .errors import ApiError, unsupported
from .extras import any_name
from .request_base import OpenAIObject, OurObject
from .structured import grammar_of
from .tools.request import Choice, Offer, Tools, offer

MAX_CHOICES = 128
"""To one prompt. How many a request may ask for in all is the queue's to say."""
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024
AS_MANY_AS_FIT = -1
"""Of max_tokens: what llama.cpp, Ollama and LM Studio have as its default, and their clients write out."""


def _stop(value: object) -> object:
    """None, a string or a list of strings -> a list of strings."""
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise PydanticCustomError("stop", "must be a string or a list of strings")


def _prompts(value: object) -> object:
    """A text, a list of texts, token ids, or a list of token id lists -> a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise PydanticCustomError("prompt", "must be a string, a list of strings, a list of token ids or a list of such lists")


TemplateKwargs = dict[str, str | int | float | bool | None]


class SpeculationField(OurObject):
    """`speculation`: "auto", "off" or the name of a configured proposer, a ceiling for this request, and whom it learns from."""

    method: str = "auto"
    num_speculative_tokens: int | None = None
    corpus_id: str | None = None


class LoraScale(OpenAIObject):
    """`lora`, an entry: how llama.cpp's clients ask for an adapter."""

    id: Annotated[int, Field(ge=0)]
    scale: float


class StreamOptions(OpenAIObject):
    include_usage: bool | None = None
    include_speculation: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(OpenAIObject):
    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(self.content or ())


class GenerationRequest(OpenAIObject):
    """What both generating routes share. A field that is null or missing has the model's default, or SamplingParams'."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=any_name))

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prediction: Prediction | None = None
    speculation: SpeculationField | None = None
    lora_path: str | None = None
    lora: list[LoraScale] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **settled: Any) -> SamplingParams:
        """defaults: as Engine.sampling. `settled` are the fields that the routes spell differently. Raises InvalidRequest."""
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "best_of other than n")
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = _token_bias(self.logit_bias)
        if self.prediction is not None:
            given["prediction"] = self.prediction.text
        if self.speculation is not None:
            given["speculation"] = self.speculation.model_dump()
        if (grammar := grammar_of(self.model_extra or {})) is not None:
            given["grammar"] = grammar
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs come with whole answers only; leave out one of both", param="prompt_logprobs")
        return SamplingParams(**{**defaults, "stop": self.stop, **given, **settled})

    def most_tokens(self, default: int | None = None) -> tuple[str, int | None]:
        """The longest output under the name that it came by, the newer one first; None = as many as fit."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        most = default if (given := getattr(self, name)) is None else given
        return name, None if most == AS_MANY_AS_FIT else most

    def truncated(self, token_ids: list[int], most: int, max_tokens: int | None) -> list[int]:
        """The prompt cut to truncate_prompt_tokens; -1 = to what an output of max_tokens leaves of `most`, None being at least one.

        The end is kept, with truncation_side "right" the start.
        """
        if self.truncate_prompt_tokens is None:
            return token_ids
        size = self.truncate_prompt_tokens
        if size == -1:
            size = max(most - (1 if max_tokens is None else max_tokens), 0)
        return token_ids[:size] if self.truncation_side == "right" else token_ids[max(len(token_ids) - size, 0) :]


_SAME_NAME = (
    "n temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty bad_words allowed_token_ids min_tokens "
    "ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens seed prompt_logprobs logprob_token_ids"
).split()


def _token_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if (bad := next((key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)), None)) is not None:
        raise ApiError(400, f"logit_bias maps token ids to numbers; {bad[:40]!r} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningField(OpenAIObject):
    """`reasoning`: what several servers take in place of reasoning_effort, include_reasoning and a budget."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ChatRequest(GenerationRequest):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    reasoning: ReasoningField | None = None
    tools: Tools | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None

    def offer(self) -> Offer:
        """Raises ApiError."""
        return offer(self.tools, self.tool_choice, self.parallel_tool_calls)

    def template_kwargs(self) -> dict[str, Any]:
        """chat_template_kwargs, and what reasoning_effort means to the templates that have a word for it."""
        asked = self.reasoning or ReasoningField()
        word = self.reasoning_effort or asked.effort or ("none" if asked.enabled is False else None)
        effort = {} if word is None else {"reasoning_effort": word}
        off = {"enable_thinking": False, "thinking": False} if word == "none" else {}
        return effort | off | (self.chat_template_kwargs or {})

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning; None = as many as the model likes."""
        budget = self.thinking_token_budget
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        return None if budget == -1 else budget

    @property
    def includes_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)

    def to_sampling_params(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:  # clients that write out every default send 0
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {self.top_logprobs}", param="top_logprobs")
        name, max_tokens = self.most_tokens()
        if max_tokens is not None and max_tokens < 1:
            raise ApiError(400, f"{name} must be at least 1, not {max_tokens}", param=name)
        return self.sampling_params(defaults, max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    most_unasked: ClassVar[int | None] = 16  # max_tokens where a request has none

    def to_sampling_params(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        name, max_tokens = self.most_tokens(self.most_unasked)
        if max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise ApiError(400, f"{name} 0 needs echo or prompt_logprobs: nothing else would be in the answer", param=name)
        params = self.sampling_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)
        if self.echoes_logprobs and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        return params

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt's tokens stand among those with logprobs."""
        return bool(self.echo) and self.logprobs is not None


class TokenizeRequest(OpenAIObject):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(OpenAIObject):
    model: str | None = None
    tokens: list[int]
