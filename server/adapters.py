"""Adapters over HTTP: what is loaded, as llama.cpp lists it, and loading and unloading at run time, as vLLM and SGLang do."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..engine.errors import ModelLoadError
from .errors import ApiError
from .json_answer import JsonAnswer
from .model_names import no_adapter, number_of
from .option_forms import is_adapter_name
from .request_base import OpenAIObject
from .serving import Serving

logger = logging.getLogger("foretoken.server")


class UnloadAdapter(OpenAIObject):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's own business


class LoadAdapter(UnloadAdapter):
    lora_path: str
    load_inplace: bool | None = None


def add_adapters(app: FastAPI, serving: Serving) -> None:
    engine, names = serving.engine, serving.names

    async def load(request: Request) -> str:
        body = await serving.read(request, LoadAdapter)
        _require_allowed(serving)
        name = body.lora_name
        if not is_adapter_name(name) or name in names.own:
            problem = "is the model's own name" if name in names.own else "is not a name: it must be printable, without commas"
            raise ApiError(400, f"{name[:100]!r} {problem}", param="lora_name")
        try:
            await engine.load_adapter(name, body.lora_path, replace=bool(body.load_inplace))
        except ModelLoadError as error:
            raise ApiError(400, str(error), param="lora_path") from error
        logger.info("adapter %r loaded from %r", name, body.lora_path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(request: Request) -> str:
        name = (await serving.read(request, UnloadAdapter)).lora_name
        _require_allowed(serving)
        if name not in (there := [adapter.name for adapter in names.adapters]):
            raise no_adapter("lora_name", name, there)
        engine.unload_adapter(name)
        logger.info("adapter %r unloaded", name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def add(path: str, act: Callable[[Request], Awaitable[str]]) -> None:
        @app.post(f"/v1/{path}", response_model=None)
        async def of_vllm(request: Request) -> Response:
            return PlainTextResponse(await act(request))

        @app.post(f"/{path}", response_model=None)
        async def of_sglang(request: Request) -> Response:
            await act(request)
            return JsonAnswer({"success": True, "loaded_adapters": {adapter.name: adapter.path for adapter in names.adapters}})

    add("load_lora_adapter", load)
    add("unload_lora_adapter", unload)

    @app.get("/lora-adapters")
    async def lora_adapters() -> list[dict[str, Any]]:
        return [{"id": number_of(it), "path": it.path, "scale": 1.0, "name": it.name} for it in names.adapters]


def _require_allowed(serving: Serving) -> None:
    """Paths that strangers name would be read on this machine. Raises ApiError."""
    if serving.engine.engine.adapters is None:
        raise ApiError(400, "adapters are not served: start the server with --enable-lora")
    if not serving.config.allow_runtime_lora_updating:
        message = (
            "this server loads no adapters while it runs, as clients could name any path of its machine: if you trust them, "
            "start it with --allow-runtime-lora-updating (or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
        )
        raise ApiError(403, message, type="permission_error")
