"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.request import TokenDelta
from .generation import ChoiceProgress, Generation
from .logprobs import TokenText, annotated, chat_logprobs
from .replies import Reply, message
from .schemas import ChatRequest, StreamOptions
from .serving import SYSTEM_FINGERPRINT, Serving
from .streaming import answer


async def create_chat_completion(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, ChatRequest)
    model = serving.require_model(body.model)
    options = serving.stream_options(body)
    params = body.to_sampling_params()
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
    params = replace(params, grammar=formats.grammar(params.grammar, tools, offer, prompt))
    generation = await serving.generation(request, body, [prompt.token_ids], params, id_prefix="chatcmpl-")
    if formats.plain(tools):
        shape = ChatShape(generation, model, serving, options)
    else:
        replies = [formats.reply(tools, offer, prompt, body.include_reasoning is not False) for _ in generation.choices]
        shape = ParsedChatShape(generation, model, serving, options, replies)
    return await answer(request, generation, shape, bool(body.stream), options)


class ChatShape:
    """OpenAI's chat.completion and chat.completion.chunk, where a reply's text is its content."""

    only_text = True

    def __init__(self, generation: Generation, model: str, serving: Serving, options: StreamOptions) -> None:
        self._id = generation.request_id
        self._model = model
        self._choices: Sequence[ChoiceProgress] = generation.choices
        self._created = int(time.time())
        self._spell: TokenText = serving.token_text
        # Who proposed each token, where asked for.
        self._proposer_names = serving.proposer_names if options.include_speculation else None

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(len(self._choices))]

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
        return annotated(choice, delta, self._proposer_names)

    def _whole(self, index: int, deltas: list[TokenDelta], message: dict[str, Any]) -> dict[str, Any]:
        parts = [part for delta in deltas if (part := chat_logprobs(delta, self._spell))]
        content = [entry for part in parts for entry in part["content"]]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": content, "refusal": None} if parts else None,
            "finish_reason": self._finish_reason(index, deltas[-1]),
            "stop_reason": deltas[-1].stop_reason,
        }

    def _finish_reason(self, index: int, delta: TokenDelta) -> str | None:
        return delta.finish_reason


class ParsedChatShape(ChatShape):
    """The same where a reply's text is told apart into reasoning, content and tool calls: one chunk for every part."""

    only_text = False

    def __init__(self, generation: Generation, model: str, serving: Serving, options: StreamOptions, replies: Sequence[Reply]) -> None:
        super().__init__(generation, model, serving, options)
        self._replies = replies

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        parts = self._parts(index, delta)
        told = delta.finish_reason is not None or delta.logprobs is not None or self._proposer_names is not None
        if not parts and not told:
            return []  # the text is held back
        *before, last = parts or [{}]
        plain = [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in before]
        return [*plain, self._chunk(index, delta, last)]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        return self._whole(index, deltas, message([part for delta in deltas for part in self._parts(index, delta)]))

    def _parts(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        reply = self._replies[index]
        parts = reply.feed(delta.text, len(delta.token_ids), delta.finish_reason is not None)
        self._choices[index].num_reasoning_tokens = reply.num_reasoning_tokens
        return parts

    def _finish_reason(self, index: int, delta: TokenDelta) -> str | None:
        return "tool_calls" if delta.finish_reason == "stop" and self._replies[index].num_calls else delta.finish_reason
