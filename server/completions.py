"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.request import TokenDelta
from .logprobs import CompletionLogprobs, annotated
from .schemas import CompletionRequest, StreamOptions
from .serving import SYSTEM_FINGERPRINT, Serving
from .streaming import answer


async def create_completion(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, CompletionRequest)
    model = serving.require_model(body.model)
    options = serving.stream_options(body)
    params = body.to_sampling_params()
    serving.require_room(len(body.prompt) * params.n)
    prompts = [await _token_ids(prompt, body, serving) for prompt in body.prompt]
    echoed = [_echo(prompt, serving) if body.echo else "" for prompt in body.prompt for _ in range(params.n)]
    generation = await serving.generation(request, body, prompts, params, id_prefix="cmpl-")
    shape = CompletionShape(generation.request_id, model, echoed, serving, options)
    return await answer(request, generation, shape, bool(body.stream), options)


async def _token_ids(prompt: str | list[int], body: CompletionRequest, serving: Serving) -> list[int]:
    if isinstance(prompt, list):
        return serving.require_tokens(prompt, "prompt")
    return await serving.chat_format.encode(prompt, body.add_special_tokens is not False)


def _echo(prompt: str | list[int], serving: Serving) -> str:
    return prompt if isinstance(prompt, str) else serving.chat_format.decode(prompt)


class CompletionShape:
    """OpenAI's text_completion; its chunks have the same object name. `echoed` [choices] is put before each text."""

    only_text = True

    def __init__(self, id: str, model: str, echoed: Sequence[str], serving: Serving, options: StreamOptions) -> None:
        self._id = id
        self._model = model
        self._echoed = echoed
        self._created = int(time.time())
        self._spell = serving.token_text
        self._proposer_names = serving.proposer_names if options.include_speculation else None
        self._offsets = [0] * len(echoed)  # of each choice's next token, for streamed logprobs

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def opening(self) -> list[dict[str, Any]]:
        return [{"index": index, "text": text, "logprobs": None, "finish_reason": None} for index, text in enumerate(self._echoed) if text]

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, [delta]),
            "finish_reason": delta.finish_reason,
        }
        return [annotated(choice, delta, self._proposer_names)]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoed[index] + "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(index, deltas),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def _logprobs(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any] | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        logprobs = CompletionLogprobs(self._offsets[index])
        for delta in deltas:
            if delta.logprobs is not None:
                logprobs.add(delta, self._spell)
        self._offsets[index] = logprobs.offset
        return logprobs.body()
