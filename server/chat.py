"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.errors import ContextTooLong
from ..engine.request import SamplingParams, TokenDelta
from .chat_format import OFF_LOOP_CHARS, ChatPrompt
from .generation import ChoiceProgress, Generation
from .logprobs import TokenText, annotated, chat_logprobs, prompt_logprobs
from .replies import Reply, message
from .schemas import AS_MANY_AS_FIT, ChatRequest, StreamOptions
from .serving import SYSTEM_FINGERPRINT, Serving
from .streaming import answer


async def create_chat_completion(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, ChatRequest)
    model = serving.require_model(body.model)
    options = serving.stream_options(body)
    chat = await read_chat(body, serving)
    try:
        generation = await serving.generation(request, body, [chat.prompt.token_ids], chat.params, id_prefix="chatcmpl-")
    except ContextTooLong as error:  # told of the engine's parameters, not the client's
        error.param = {"prompt": "messages", "max_tokens": body.most_tokens()[0]}.get(error.param or "", error.param)
        raise
    if chat.plain:
        shape = ChatShape(generation, body, model, serving, options)
    else:
        shape = ParsedChatShape(generation, body, model, serving, options, [chat.new_reply() for _ in generation.choices])
    return await answer(request, generation, shape, bool(body.stream), options)


@dataclass(frozen=True)
class Chat:
    """A conversation as the engine gets it, and how its answer is read."""

    prompt: ChatPrompt
    params: SamplingParams
    plain: bool  # an answer is its text alone
    new_reply: Callable[[], Reply]  # for one choice


async def read_chat(body: ChatRequest, serving: Serving) -> Chat:
    """Raises ApiError, InvalidRequest."""
    params = body.to_sampling_params(serving.sampling)
    offer, formats = body.offer(), serving.reply_formats
    tools = formats.of_tools(offer)
    if formats.needs_special_tokens(tools):
        params = replace(params, skip_special_tokens=False)
    prompt = await serving.chat_format.encode_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.template_kwargs(),
        tools=offer.tools,
    )
    if body.truncate_prompt_tokens is not None:
        prompt = replace(prompt, token_ids=body.truncated(prompt.token_ids, serving.max_tokens, params.max_tokens))
    wants_all = AS_MANY_AS_FIT in (body.max_tokens, body.max_completion_tokens)
    most = None if wants_all else serving.sampling.get("max_tokens")
    if params.max_tokens is None and most is not None and most < serving.max_tokens - len(prompt.token_ids):
        params = replace(params, max_tokens=most)
    thinking, work = formats.thinking(body.thinking_budget, prompt), partial(formats.grammar, params.grammar, tools, offer, prompt)
    is_long = tools is not None or len(params.grammar.text if params.grammar else "") > OFF_LOOP_CHARS
    grammar = await asyncio.to_thread(work) if is_long else work()  # up to 0.1 s
    if grammar is not params.grammar or thinking is not None:  # a copy is checked anew: that takes as long as the first time
        params = replace(params, grammar=grammar, thinking=thinking)
    return Chat(prompt, params, formats.plain(tools), lambda: formats.reply(tools, offer, prompt, body.includes_reasoning))


class ChatShape:
    """OpenAI's chat.completion and chat.completion.chunk, where a reply's text is its content."""

    def __init__(self, generation: Generation, body: ChatRequest, model: str, serving: Serving, options: StreamOptions) -> None:
        self.only_text = not body.return_token_ids
        self._id = generation.request_id
        self._model = model
        self._prompt = generation.prompts[0]
        self._token_ids = bool(body.return_token_ids)
        self._prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
        self._choices: Sequence[ChoiceProgress] = generation.choices
        self._created = int(time.time())
        self._spell: TokenText = serving.token_text.as_ids() if body.return_tokens_as_token_ids else serving.token_text
        # Who proposed each token, where asked for.
        self._proposer_names = serving.proposer_names if options.include_speculation else None

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        """Of a whole answer: once its choices are made."""
        about_prompt: dict[str, Any] = {} if self._prompt_logprobs is None else {"prompt_logprobs": self._prompt_logprobs}
        if self._token_ids and not chunk:
            about_prompt["prompt_token_ids"] = list(self._prompt)
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        } | about_prompt

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        told = {"prompt_token_ids": list(self._prompt), "token_ids": []} if self._token_ids else {}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None} | told
        return [{"index": index} | choice for index in range(len(self._choices))]

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        return [self._chunk(index, delta, {"content": delta.text} if delta.text or delta.finish_reason is None else {})]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        return self._whole(index, deltas, message([{"content": delta.text} for delta in deltas]))

    def _chunk(self, index: int, delta: TokenDelta, part: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": part,
            "logprobs": chat_logprobs(delta, self._spell),
            "finish_reason": self._finish_reason(index, delta),
        }
        return annotated(choice, delta, self._proposer_names, self._token_ids)

    def _whole(self, index: int, deltas: list[TokenDelta], message: dict[str, Any]) -> dict[str, Any]:
        parts = [part for delta in deltas if (part := chat_logprobs(delta, self._spell))]
        content = [entry for part in parts for entry in part["content"]]
        if index == 0 and (said := deltas[0].prompt_logprobs) is not None:
            self._prompt_logprobs = prompt_logprobs(said, self._spell)
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": content, "refusal": None} if parts else None,
            "finish_reason": self._finish_reason(index, deltas[-1]),
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._token_ids:
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        return choice

    def _finish_reason(self, index: int, delta: TokenDelta) -> str | None:
        return delta.finish_reason


class ParsedChatShape(ChatShape):
    """The same where a reply's text is told apart into reasoning, content and tool calls: one chunk for every part."""

    def __init__(
        self, generation: Generation, body: ChatRequest, model: str, serving: Serving, options: StreamOptions, replies: Sequence[Reply]
    ) -> None:
        super().__init__(generation, body, model, serving, options)
        self.only_text = False
        self._replies = replies

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        parts = self._parts(index, delta)
        told = delta.finish_reason is not None or delta.logprobs is not None or self._proposer_names is not None or self._token_ids
        if not parts and not told:
            return []  # the text is held back
        *before, last = parts or [{}]
        empty = {"token_ids": []} if self._token_ids else {}
        plain = [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} | empty for part in before]
        return [*plain, self._chunk(index, delta, last)]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        return self._whole(index, deltas, message([part for delta in deltas for part in self._parts(index, delta)]))

    def _parts(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        reply = self._replies[index]
        parts = reply.feed(delta)
        self._choices[index].num_reasoning_tokens = reply.num_reasoning_tokens
        return parts

    def _finish_reason(self, index: int, delta: TokenDelta) -> str | None:
        return self._replies[index].finish_reason(delta)
