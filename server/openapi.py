"""GET /openapi.json: the API described for tools that read OpenAPI documents.

Owns the list of routes and the assembly: bodies come from openapi_requests.py, answers from openapi_answers.py. Knows no engine.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from .. import __version__
from .adapters import LoadAdapter, UnloadAdapter
from .admission import OPEN_PATHS
from .anthropic.requests import CountTokensRequest, MessagesRequest
from .embeddings import EmbeddingRequest
from .llama_infill import InfillRequest
from .mistral_fim import FimRequest
from .openapi_answers import ANSWERS, Schema, ref
from .openapi_requests import request_schemas
from .responses.request import ResponseRequest
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .serving import Serving

PATH = "/openapi.json"
JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True)
class Operation:
    """One method of one path. `answer` names a component, `event` the one that a stream's events have as their data."""

    method: str
    path: str
    summary: str
    answer: str
    body: type[BaseModel] | None = None
    event: str | None = None
    parameters: tuple[Schema, ...] = ()
    statuses: tuple[int, ...] = ()  # of errors, beside those that all routes may answer
    media_type: str = JSON
    links: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # ids of operations -> their parameters, in this one's answer

    @property
    def id(self) -> str:
        """"get /v1/models/{name}" -> "get_v1_models_name"."""
        return "_".join([self.method, *(part.strip("{}") for part in self.path.split("/") if part)]).replace(".", "_")

    @property
    def error(self) -> str:
        return "AnthropicError" if self.path.startswith("/v1/messages") else "Error"


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_RESPONSE = (_in_path("response_id"),)
_CORPUS = (_in_path("corpus_id"),)
_PAGE = (
    _in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _in_query("order", {"enum": ["asc", "desc"], "default": "desc"}),
    _in_query("after", {"type": "string"}),
)
_FOLLOW = (
    _in_query("stream", {"type": "boolean", "description": "true: its events"}),
    _in_query("starting_after", {"type": "integer", "minimum": 0, "maximum": 2**53}),
)
_OF_RESPONSE = {"response_id": "$response.body#/id"}
_TO_RESPONSE: dict[str, Mapping[str, str]] = dict.fromkeys(
    (
        "get_v1_responses_response_id",
        "delete_v1_responses_response_id",
        "post_v1_responses_response_id_cancel",
        "get_v1_responses_response_id_input_items",
    ),
    _OF_RESPONSE,
)

OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", ChatRequest, "ChatCompletionChunk"),
    Operation("post", "/v1/completions", "Go on with one or several texts", "Completion", CompletionRequest, "Completion"),
    Operation("post", "/v1/fim/completions", "The same for Mistral's clients", "ChatCompletion", FimRequest, "ChatCompletionChunk"),
    Operation("post", "/infill", "Fill a gap, as llama.cpp does", "Infill", InfillRequest, "Infill"),
    Operation("post", "/v1/infill", "The same", "Infill", InfillRequest, "Infill"),
    Operation("post", "/v1/responses", "Answer, and keep it", "Response", ResponseRequest, "ResponseEvent", links=_TO_RESPONSE),
    Operation("post", "/v1/responses/input_tokens", "Count a request's prompt", "InputTokens", ResponseRequest),
    Operation(
        "get", "/v1/responses/{response_id}", "Fetch a response", "Response", None, "ResponseEvent", (*_RESPONSE, *_FOLLOW), (400, 404)
    ),
    Operation("delete", "/v1/responses/{response_id}", "Forget a response", "ResponseDeleted", parameters=_RESPONSE, statuses=(404,)),
    Operation(
        "post", "/v1/responses/{response_id}/cancel", "Stop one in the background", "Response", parameters=_RESPONSE, statuses=(400, 404)
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "The conversation that it answers",
        "ResponseItems",
        parameters=(*_RESPONSE, *_PAGE),
        statuses=(400, 404),
    ),
    Operation("post", "/v1/messages", "Anthropic's Messages", "AnthropicMessage", MessagesRequest, "AnthropicEvent"),
    Operation("post", "/v1/messages/count_tokens", "Count a request's prompt", "InputTokens", CountTokensRequest),
    Operation("post", "/v1/embeddings", "Texts as vectors", "Embeddings", EmbeddingRequest),
    Operation("get", "/v1/models", "The names of the served model and its adapters", "ModelList"),
    Operation("get", "/v1/models/{name}", "One of them", "Model", parameters=(_in_path("name"),), statuses=(404,)),
    Operation("post", "/v1/load_lora_adapter", "Load an adapter", "", LoadAdapter, statuses=(403,), media_type=PLAIN),
    Operation("post", "/v1/unload_lora_adapter", "Unload one", "", UnloadAdapter, statuses=(403,), media_type=PLAIN),
    Operation("post", "/load_lora_adapter", "The same as SGLang has it", "AdaptersLoaded", LoadAdapter, statuses=(403,)),
    Operation("post", "/unload_lora_adapter", "Likewise", "AdaptersLoaded", UnloadAdapter, statuses=(403,)),
    Operation("get", "/lora-adapters", "The adapters, as llama.cpp lists them", "AdapterList"),
    Operation("get", "/v1/speculation/corpora", "Earlier answers that speculation learns from", "CorpusList"),
    Operation(
        "get",
        "/v1/speculation/corpora/{corpus_id}",
        "The answers of one, a JSON object a line",
        "",
        parameters=_CORPUS,
        statuses=(404,),
        media_type="application/jsonl",
    ),
    Operation("delete", "/v1/speculation/corpora/{corpus_id}", "Forget one", "CorpusDeleted", parameters=_CORPUS, statuses=(404,)),
    Operation("post", "/tokenize", "Text or messages as token ids", "Tokens", TokenizeRequest),
    Operation("post", "/detokenize", "Token ids as text", "Detokenized", DetokenizeRequest),
    Operation("get", "/tokenizer_info", "The tokenizer's settings", "TokenizerInfo"),
    Operation("get", "/health", "Whether the engine moves", "Health"),
    Operation("get", "/health/live", "The same", "Health"),
    Operation("get", "/ping", "The same", "Health"),
    Operation("post", "/ping", "The same", "Health"),
    Operation("get", "/health/ready", "Whether new requests are welcome", "Health"),
    Operation("get", "/load", "How much is being done", "Load"),
    Operation("get", "/version", "The server's version", "Version"),
    Operation("get", "/metrics", "Prometheus", "", media_type=PLAIN),
    Operation("get", PATH, "This document", "OpenAPI"),
)


def add_openapi(app: FastAPI, serving: Serving) -> None:
    @lru_cache(maxsize=1)
    def content(names: tuple[str, ...]) -> bytes:
        servers = {"servers": [{"url": serving.config.root_path or "/"}]}
        return json.dumps(document(names, bool(serving.config.api_keys)) | servers, ensure_ascii=False).encode()

    @app.get(PATH, response_model=None)
    async def openapi() -> Response:
        return Response(await asyncio.to_thread(content, serving.names.listed), media_type=JSON)


def document(model_names: Sequence[str], has_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server whose model has these names, and that wants a key if it has_keys."""
    models = list(dict.fromkeys(operation.body for operation in OPERATIONS if operation.body is not None))
    bodies, schemas = request_schemas(models, model_names)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, bodies, has_keys)
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Foretoken", "version": __version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas | ANSWERS | {"OpenAPI": {"type": "object", "required": ["openapi", "paths"]}}},
    }
    if has_keys:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return whole


def _described(operation: Operation, bodies: Mapping[type[BaseModel], Schema], has_keys: bool) -> dict[str, Any]:
    answer: Schema = ref(operation.answer) if operation.answer else {"type": "string"}
    content: dict[str, Any] = {operation.media_type: {"schema": answer}}
    if operation.event is not None:
        data: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": ref(operation.event)}
        if operation.error == "Error":
            data = {"anyOf": [data, {"const": "[DONE]"}]}
        content[EVENTS] = {"schema": {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}}
    is_open = operation.path in OPEN_PATHS
    statuses = {*operation.statuses, *(() if is_open else (503,))}
    if has_keys and not is_open:
        statuses.add(401)
    if operation.body is not None:
        statuses |= {400, 404, 408, 413, 415, 500, 504}
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {"200": {"description": "Done", "content": content}},
    }
    error = {JSON: {"schema": ref(operation.error)}}
    described["responses"] |= {str(status): {"description": _ERRORS[status], "content": error} for status in sorted(statuses)}
    if operation.answer == "Health":
        described["responses"]["503"] = {"description": "No", "content": {JSON: {"schema": ref("Health")}}}
    if operation.links:
        described["responses"]["200"]["links"] = {id: {"operationId": id, "parameters": operation.links[id]} for id in operation.links}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": bodies[operation.body]}}}
    if has_keys:
        described["security"] = [] if is_open else [{"key": []}]
    return described


_ERRORS = {
    400: "A value that is wrong, or cannot be honoured; param names it",
    401: "No key, or a wrong one",
    403: "The server's owner has not allowed it",
    404: "There is no such thing; for a request, no such model",
    408: "The body took too long to arrive",
    413: "The body is too large",
    415: "The body is not JSON",
    500: "The server's fault",
    503: "The queue is full, or the server stops; Retry-After says when to come back",
    504: "It took too long",
}
