"""The web app: routes, the layers around them, and what errors become. Nothing here knows of tensors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from .. import __version__
from ..engine.errors import ForetokenError
from .adapters import add_adapters
from .admission import Below, Gate, Labelled
from .anthropic.error_shape import AnthropicErrors
from .anthropic.messages import add_messages
from .chat import create_chat_completion
from .chat_format import OFF_LOOP_CHARS
from .completions import create_completion
from .config import ServerConfig
from .corpora import add_corpora
from .embeddings import add_embeddings
from .errors import ApiError, from_engine
from .json_answer import JsonAnswer
from .llama_infill import create_infill
from .metrics import CONTENT_TYPE
from .mistral_fim import create_fim
from .openapi import add_openapi
from .page import add_page
from .responses.routes import add_responses
from .schemas import DetokenizeRequest, TokenizeRequest
from .serving import Serving
from .tokenizer_info import add_tokenizer_info

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine

WATCHDOG_S = 60.0
"""An engine thread silent for so long hangs."""


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The API of one engine. The caller owns the engine's life; the app only asks it."""
    serving = Serving(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log = asyncio.create_task(serving.metrics.log_traffic())
        yield
        log.cancel()
        await responses.close()

    app = FastAPI(title="Foretoken", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    _add_generation(app, serving)
    add_messages(app, serving)
    add_embeddings(app, serving)
    _add_models(app, serving)
    _add_tokens(app, serving)
    add_tokenizer_info(app, serving)
    add_adapters(app, serving)
    add_corpora(app, serving)
    responses = add_responses(app, serving)
    _add_health(app, serving)
    add_page(app)
    add_openapi(app, serving)
    _add_errors(app)

    def on_response(scope: Scope, status: int) -> None:
        if "route" not in scope and (route := _route(app, scope)) is not None:  # what the door refuses never came to one
            scope["route"] = route
        serving.on_response(scope, status)

    # The last one added is the outermost: preflights carry no key, and refusals must be readable by a page's script.
    app.add_middleware(
        Gate,
        api_keys=config.api_keys,
        max_body_bytes=config.max_body_bytes,
        priorities=config.key_priorities,
        origins=None if config.insecure_no_auth else config.allowed_origins,
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_origin_regex=config.allowed_origin_regex,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    app.add_middleware(Labelled, on_response=on_response)
    app.add_middleware(AnthropicErrors)
    if config.root_path:
        app.add_middleware(Below, root_path=config.root_path)
    return app


def _add_generation(app: FastAPI, serving: Serving) -> None:
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(request, serving)

    async def completions(request: Request) -> Response:
        return await create_completion(request, serving)

    async def fim(request: Request) -> Response:
        return await create_fim(request, serving)

    async def infill(request: Request) -> Response:
        return await create_infill(request, serving)

    routes = {"chat/completions": chat_completions, "completions": completions, "fim/completions": fim, "infill": infill}
    for path, endpoint in [("/infill", infill), *((f"/v1/{name}", endpoint) for name, endpoint in routes.items())]:
        app.router.add_api_route(path, endpoint, methods=["POST"], response_model=None, route_class_override=Direct)


class Direct(APIRoute):
    """Of an endpoint that takes a request and gives a response: FastAPI has nothing to find out for it, nor to make of what it says."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def _add_models(app: FastAPI, serving: Serving) -> None:
    created, names = int(time.time()), serving.names

    def card(name: str) -> dict[str, Any]:
        """Raises ApiError. An adapter's says, as vLLM has it, of which model it is and where it is from."""
        adapter = names.adapter_of(name)
        origin = {} if adapter is None else {"root": adapter.path, "parent": names.own[0]}
        common = {"object": "model", "created": created, "owned_by": "foretoken", "max_model_len": serving.max_model_len}
        return {"id": name, **common, **origin}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        if "anthropic-version" not in request.headers:
            return {"object": "list", "data": [card(name) for name in names.listed]}
        began = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cards = [{"type": "model", "id": name, "display_name": name, "created_at": began} for name in names.listed]
        return {"data": cards, "has_more": False, "first_id": names.listed[0], "last_id": names.listed[-1]}

    @app.get("/v1/models/{name:path}")  # names of the hub have a slash
    async def model(name: str) -> dict[str, Any]:
        return card(name)


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await serving.read(request, TokenizeRequest)
        serving.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None:
            tokens = await serving.chat_format.encode(body.prompt, body.add_special_tokens is not False)
        else:
            prompt = await serving.chat_format.encode_chat(
                body.messages or [],
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
                tools=[tool.for_template() for tool in body.tools or ()],
            )
            tokens = prompt.token_ids
        strings = [serving.token_text(token)[0] for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens, "token_strs": strings}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await serving.read(request, DetokenizeRequest)
        serving.require_model(body.model)
        tokens = serving.require_tokens(body.tokens, "tokens")
        is_long = len(tokens) > OFF_LOOP_CHARS  # a token is sooner decoded than a character is encoded
        return {"prompt": await serving.in_reader(lambda: serving.chat_format.decode(tokens), is_long)}


def _add_health(app: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    def live() -> bool:
        return engine.healthy and engine.last_step_age_s < WATCHDOG_S

    def state(ok: bool, otherwise: str) -> JsonAnswer:
        return JsonAnswer({"status": "ok" if ok else otherwise}, 200 if ok else 503)

    async def health() -> JsonAnswer:
        """Whether a restart would not help: the engine thread is there and moves."""
        return state(live(), "engine not responding")

    async def ready() -> JsonAnswer:
        """Whether new requests are welcome."""
        return state(live() and not engine.draining, "draining" if engine.draining else "engine not responding")

    for path, probe in {"/health": health, "/health/live": health, "/health/ready": ready, "/ping": health}.items():
        app.add_api_route(path, probe, methods=["GET", "HEAD", *(["POST"] if path == "/ping" else [])])  # monitors often send HEAD

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Answers that are being given or wait, one for each choice, and requests for embeddings."""
        return {"server_load": engine.num_in_flight + engine.num_guests}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JsonAnswer:
        return error.response()

    @app.exception_handler(ForetokenError)
    async def on_engine_error(request: Request, error: ForetokenError) -> JsonAnswer:
        return from_engine(error).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JsonAnswer:
        """The framework's own: no such route, no such method."""
        path, codes = request.scope["path"][:100], {404: "not_found", 405: "method_not_allowed"}
        message = {404: f"there is no {path}", 405: f"{path} does not take {request.method[:20]}"}.get(error.status_code, "not possible")
        if error.status_code == 404 and (meant := _meant(app, path)):
            message += f", but there is {meant}: check the client's base URL"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        headers = dict(error.headers or {})
        if error.status_code == 405:  # the framework names the methods of one route only, and a path may have several
            headers["Allow"] = ", ".join(sorted(_methods(app, request)))
        return ApiError(error.status_code, message, type=kind, code=codes.get(error.status_code), headers=headers).response()


def _methods(app: FastAPI, request: Request) -> set[str]:
    """Those that the request's path takes."""
    found = _route(app, request.scope)
    assert found is not None
    return {method for route in _routes(app) if route.path == found.path for method in route.methods or ()}


def _meant(app: FastAPI, path: str) -> str | None:
    """What of the API a path ends in that begins otherwise: clients put their own ends to a base URL, with /v1 or without."""
    paths = [route.path for route in _routes(app) if route.path.startswith("/v1/")]
    return max((known for known in paths if path.endswith(known.removeprefix("/v1"))), key=len, default=None)


def _route(app: FastAPI, scope: Scope) -> Route | None:
    """The first that has the request's path, whatever its method; None if there is none."""
    return next((route for route in _routes(app) if route.matches(scope)[0] is not Match.NONE), None)


def _routes(app: FastAPI) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route)]
