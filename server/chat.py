"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.request import TokenDelta
from .logprobs import TokenText, annotated, chat_logprobs
from .schemas import ChatRequest, StreamOptions
from .serving import SYSTEM_FINGERPRINT, Serving
from .streaming import answer


async def create_chat_completion(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, ChatRequest)
    model = serving.require_model(body.model)
    options = serving.stream_options(body)
    params = body.to_sampling_params()
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await serving.chat_format.encode_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=template_kwargs,
    )
    generation = await serving.generation(request, body, [prompt], params, id_prefix="chatcmpl-")
    shape = ChatShape(generation.request_id, model, len(generation.choices), serving, options)
    return await answer(request, generation, shape, bool(body.stream), options)


class ChatShape:
    """OpenAI's chat.completion and chat.completion.chunk."""

    def __init__(self, id: str, model: str, num_choices: int, serving: Serving, options: StreamOptions) -> None:
        self._id = id
        self._model = model
        self._num_choices = num_choices
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
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(self._num_choices)]

    def chunk(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": chat_logprobs(delta, self._spell),
            "finish_reason": delta.finish_reason,
        }
        return annotated(choice, delta, self._proposer_names)

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        parts = [part for delta in deltas if (part := chat_logprobs(delta, self._spell))]
        content = [entry for part in parts for entry in part["content"]]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None},
            "logprobs": {"content": content, "refusal": None} if parts else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
