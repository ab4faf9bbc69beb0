"""POST /v1/embeddings: texts as vectors, which are the served model's own hidden states. Owns the shapes; the engine computes."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from ..engine.errors import RequestFailed
from .errors import ApiError, unsupported
from .json_answer import JsonAnswer
from .request_base import OpenAIObject
from .serving import Serving
from .streaming import unless_gone

MAX_TEXTS = 2048
MAX_TOKENS = 300_000
"""Of all texts of a request together: OpenAI's limit, and some minutes of a small machine's time."""


def _texts(value: object) -> object:
    """A text, a list of texts, token ids, or a list of token id lists -> a list of texts."""
    match value:
        case str():
            return [value]
        case [int(), *_] if all(type(item) is int for item in value):
            return [value]
        case [_, *_] if len(value) > MAX_TEXTS:
            raise PydanticCustomError("input", "may hold at most {limit} texts", {"limit": MAX_TEXTS})
        case [_, *_] if all(isinstance(item, str) for item in value):
            return value
        case [_, *_] if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise PydanticCustomError("input", "must be a string, a list of strings, a list of token ids or a list of such lists")


class EmbeddingRequest(OpenAIObject):
    model: str | None = None
    input: Annotated[list[str] | list[list[int]], BeforeValidator(_texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


def add_embeddings(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request) -> Response:
        body = await serving.read(request, EmbeddingRequest)
        request.state.model = model = serving.require_model(body.model)
        adapter = serving.names.adapter_of(body.model)
        if body.truncate_prompt_tokens is not None:
            raise unsupported("truncate_prompt_tokens")
        size = serving.embedder.size
        if body.dimensions is not None and not 1 <= body.dimensions <= size:
            message = f"dimensions must be from 1 to {size:,}, the numbers in this model's vectors, not {body.dimensions:,}"
            raise ApiError(400, message, param="dimensions")
        texts = await serving.in_reader(lambda: _token_ids(body, serving))
        vectors = await unless_gone(request.receive, _embedded(texts, body, None if adapter is None else adapter.name, serving))
        return await asyncio.to_thread(_answer, vectors, model, sum(map(len, texts)), body)


async def _embedded(texts: Sequence[list[int]], body: EmbeddingRequest, adapter: str | None, serving: Serving) -> Tensor:
    """Raises what the engine does, RequestFailed if it takes too long."""
    limit_s = serving.config.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await serving.embedder.embed(texts, body.pooling or "last", adapter)
    except TimeoutError:
        raise RequestFailed(f"the request did not finish within {limit_s:g} s; send fewer or shorter texts", "timeout") from None


def _token_ids(body: EmbeddingRequest, serving: Serving) -> list[list[int]]:
    """Raises ApiError, and InvalidRequest for what cannot be read."""
    texts: list[list[int]] = []
    num_tokens = 0
    for text in body.input:
        if isinstance(text, str):
            if not text:
                raise ApiError(400, "input holds an empty string; every text must have at least one token", param="input")
            text = serving.engine.engine.intake.encode(text, body.add_special_tokens is not False, "input")
        texts.append(text)
        num_tokens += len(text)
        if num_tokens > MAX_TOKENS:
            raise ApiError(400, f"the texts of input have more than {MAX_TOKENS:,} tokens together; send them in parts", param="input")
    return texts


def _answer(vectors: Tensor, model: str, num_tokens: int, body: EmbeddingRequest) -> JsonAnswer:
    if body.dimensions is not None:
        vectors = torch.nn.functional.normalize(vectors[:, : body.dimensions], dim=-1)
    if body.encoding_format == "base64":
        rows: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors.numpy()]
    else:
        rows = vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JsonAnswer({"object": "list", "data": data, "model": model, "usage": usage})
