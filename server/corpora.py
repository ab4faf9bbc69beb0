"""GET and DELETE /v1/speculation/corpora: what earlier answers speculation learns from, for those whose answers they are.

Corpora belong to the engine's thread; what is shown here was copied there. Prompts are in none of them.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..engine.core import EngineCore
from ..engine.origin import ANYONE
from .errors import ApiError
from .serving import Serving

PATH = "/v1/speculation/corpora"
RESPONSES_A_CHUNK = 64


def add_corpora(app: FastAPI, serving: Serving) -> None:
    @app.get(PATH)
    async def corpora(request: Request) -> dict[str, Any]:
        tenant = _tenant(request)
        return {"object": "list", "data": await serving.engine.call(lambda core: _listed(core, tenant))}

    @app.get(PATH + "/{corpus_id}", response_model=None)
    async def corpus(request: Request, corpus_id: str) -> Response:
        """One JSON object a line for each response, oldest first: {"token_ids": [...], "text": "..."}."""
        _require_own(request, corpus_id)
        responses = await serving.engine.call(lambda core: _responses(core, corpus_id))
        if responses is None:
            raise _not_found(corpus_id)
        return StreamingResponse(_lines(responses, serving), media_type="application/jsonl")

    @app.delete(PATH + "/{corpus_id}")
    async def delete(request: Request, corpus_id: str) -> dict[str, Any]:
        """Memory and disk; answers that are being given now go to a new corpus."""
        _require_own(request, corpus_id)
        if not await serving.engine.call(lambda core: _delete(core, corpus_id)):
            raise _not_found(corpus_id)
        return {"id": corpus_id, "object": "speculation.corpus", "deleted": True}


def _tenant(request: Request) -> str:
    return request.state.tenant or ANYONE


def _require_own(request: Request, corpus_id: str) -> None:
    """Those of others are as if they were not there. Raises ApiError."""
    if not corpus_id.startswith(_tenant(request) + "."):
        raise _not_found(corpus_id)


def _not_found(corpus_id: str) -> ApiError:
    message = f"there is no corpus {corpus_id[:100]!r}; GET {PATH} lists yours"
    return ApiError(404, message, type="not_found_error", param="corpus_id", code="corpus_not_found")


def _listed(core: EngineCore, tenant: str) -> list[dict[str, Any]]:
    return [
        {
            "id": corpus.corpus_id,
            "object": "speculation.corpus",
            "corpus_id": corpus.corpus_id.split(".")[1],  # as requests give it
            "num_responses": len(corpus),
            "num_tokens": corpus.num_tokens,
        }
        for corpus in core.proposers.corpora or ()
        if corpus.corpus_id.startswith(tenant + ".")
    ]


def _responses(core: EngineCore, corpus_id: str) -> list[array[int]] | None:
    corpora = core.proposers.corpora
    corpus = None if corpora is None else corpora.get(corpus_id)
    return None if corpus is None else [response.token_ids for response in corpus]  # which nobody changes


def _delete(core: EngineCore, corpus_id: str) -> bool:
    corpora = core.proposers.corpora
    return corpora is not None and corpora.delete(corpus_id)


async def _lines(responses: Sequence[array[int]], serving: Serving) -> AsyncIterator[bytes]:
    def spelled(part: Sequence[array[int]]) -> bytes:
        lines = [json.dumps({"token_ids": ids.tolist(), "text": serving.chat_format.decode(ids)}) + "\n" for ids in part]
        return "".join(lines).encode()

    for first in range(0, len(responses), RESPONSES_A_CHUNK):
        yield await asyncio.to_thread(spelled, responses[first : first + RESPONSES_A_CHUNK])
