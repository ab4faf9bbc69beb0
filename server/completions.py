"""POST /v1/completions."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.request import TokenDelta
from .errors import ApiError
from .generation import Generation
from .infill import Infill
from .logprobs import CompletionLogprobs, annotated, prompt_logprobs
from .schemas import CompletionRequest, StreamOptions
from .serving import SYSTEM_FINGERPRINT, Serving
from .streaming import Shape, answer


async def create_completion(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, CompletionRequest)
    return await complete(request, body, serving, serving.stream_options(body), CompletionShape)


async def complete(
    request: Request, body: CompletionRequest, serving: Serving, options: StreamOptions, spelled: Callable[..., Shape]
) -> Response:
    """spelled: makes the answer's shape of what CompletionShape takes."""
    model = serving.require_model(body.model)
    params = body.to_sampling_params(serving.sampling)
    serving.require_room(len(body.prompt), params.n)
    texts: Sequence[str | list[int]] = body.prompt
    if body.suffix:
        infill = _infill(body, serving)
        params = infill.ending(params)
        texts = [infill.prompt(str(text), body.suffix) for text in texts]
    encoded = [await _token_ids(text, body, serving) for text in texts]
    prompts = [body.truncated(token_ids, serving.max_tokens, params.max_tokens) for token_ids in encoded]
    generation = await serving.generation(request, body, prompts, params, id_prefix="cmpl-")
    return await answer(request, generation, spelled(generation, body, model, serving, options), bool(body.stream), options)


def _infill(body: CompletionRequest, serving: Serving) -> Infill:
    """Raises ApiError if this model, or this request, has no gap to fill."""
    infill = serving.require_infill("suffix")
    for name, given in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens is not None)):
        if given:
            raise ApiError(400, f"{name} goes without suffix, which has the prompt stand between other tokens", param=name)
    if not all(isinstance(prompt, str) for prompt in body.prompt):
        raise ApiError(400, "suffix goes with prompts that are text: token ids can have the gap's own tokens in them", param="suffix")
    return infill


async def _token_ids(prompt: str | list[int], body: CompletionRequest, serving: Serving) -> list[int]:
    if isinstance(prompt, list):
        return serving.require_tokens(prompt, "prompt")
    return await serving.chat_format.encode(prompt, body.add_special_tokens is not False)


class CompletionShape:
    """OpenAI's text_completion; its chunks have the same object name. With `echo` each text begins with its prompt."""

    def __init__(self, generation: Generation, body: CompletionRequest, model: str, serving: Serving, options: StreamOptions) -> None:
        self.only_text = not body.return_token_ids
        self._id = generation.request_id
        self._model = model
        self._body = body
        self._prompts: Sequence[Sequence[int]] = [prompt for prompt in generation.prompts for _ in range(generation.params.n)]
        self._echoed = _echoed(generation, body, serving)
        self._created = int(time.time())
        self._spell = serving.token_text.as_ids() if body.return_tokens_as_token_ids else serving.token_text
        self._proposer_names = serving.proposer_names if options.include_speculation else None
        # Of each choice's next token, for streamed logprobs.
        self._places = [serving.token_text.place(generation.params) for _ in self._prompts]

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def opening(self) -> list[dict[str, Any]]:
        """The echoed prompts, unless they come with their logprobs; prompts as token ids."""
        choices: list[dict[str, Any]] = []
        for index, prompt in enumerate(self._prompts):
            text = "" if self._body.echoes_logprobs else self._echoed[index]
            if text or self._body.return_token_ids:
                choices.append({"index": index, "text": text, "logprobs": None, "finish_reason": None})
            if self._body.return_token_ids:
                choices[-1] |= {"prompt_token_ids": list(prompt), "token_ids": []}
        return choices

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        echoed = self._echoed[index] if self._body.echoes_logprobs and delta.prompt_logprobs is not None else ""
        choice = {
            "index": index,
            "text": echoed + delta.text,
            "logprobs": self._logprobs(index, [delta]),
            "finish_reason": delta.finish_reason,
        }
        return [annotated(choice, delta, self._proposer_names, bool(self._body.return_token_ids))]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": self._echoed[index] + "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(index, deltas),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        said = deltas[0].prompt_logprobs
        if self._body.prompt_logprobs is not None and said is not None:
            choice["prompt_logprobs"] = prompt_logprobs(said, self._spell)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompts[index])
            choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        return choice

    def _logprobs(self, index: int, deltas: Sequence[TokenDelta]) -> dict[str, Any] | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        logprobs = CompletionLogprobs(self._places[index])
        for delta in deltas:
            if self._body.echo and delta.prompt_logprobs is not None:
                logprobs.add_prompt(self._prompts[index], delta.prompt_logprobs, self._spell, self._echoed[index])
            if delta.logprobs is not None:
                logprobs.add(delta, self._spell)
        return logprobs.body()


def _echoed(generation: Generation, body: CompletionRequest, serving: Serving) -> list[str]:
    """[choices] what is put before each text."""
    if not body.echo:
        return [""] * len(generation.choices)
    whole = body.truncate_prompt_tokens is None
    return [
        prompt if isinstance(prompt, str) and whole else serving.chat_format.decode(token_ids)
        for prompt, token_ids in zip(body.prompt, generation.prompts, strict=True)
        for _ in range(generation.params.n)
    ]
