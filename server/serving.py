"""What every route works with: the engine, the settings, and the steps that all requests share."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Scope

from .. import __version__
from ..engine.embedding import Embedder
from ..engine.origin import Origin
from ..engine.request import SamplingParams
from .chat_format import ChatFormat
from .config import ServerConfig
from .errors import ApiError, unsupported
from .extras import settle_extras
from .generation import Generation
from .infill import Infill, infill_of
from .logprobs import TokenText
from .logs import is_quiet, request_line
from .metrics import Metrics
from .model_names import ModelNames
from .replies import ReplyFormats
from .schemas import GenerationRequest, StreamOptions

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine

request_logger = logging.getLogger("foretoken.request")

SYSTEM_FINGERPRINT = f"fp_foretoken_{__version__}"

OFF_LOOP_BYTES = 64 * 2**10
"""Longer bodies are parsed in a thread: megabytes of small values take a second, in which no stream would move."""
NUM_READERS = 2
"""Threads in which long requests are read, however many come at once: with each more the event loop waits longer for its turn. With one
a book would hold up all that are longer than a page."""

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


class Serving:
    """One engine behind one API."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        loaded = engine.engine
        self.engine = engine
        self.config = config
        self.names = ModelNames(config.served_model_names or (loaded.model.name,), loaded.adapters)
        self.max_model_len = loaded.model.max_model_len
        self.sampling = loaded.sampling
        self.max_tokens = loaded.intake.max_tokens  # of one request, prompt and output together
        self.proposer_names = loaded.proposer_names
        self.metrics = Metrics(engine.stats, self.names.own[0], self.proposer_names, loaded.max_loras)
        self.embedder = Embedder(engine)
        self.reply_formats = ReplyFormats(loaded.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.readers = ThreadPoolExecutor(NUM_READERS, "foretoken-reader")
        self.chat_format = ChatFormat(
            loaded.tokenizer, loaded.intake.encode, self.reply_formats.written, self.readers, config.default_chat_template_kwargs
        )
        self._infill = infill_of(loaded.tokenizer)
        self.token_text = TokenText(loaded.tokenizer)
        self._vocab_size = loaded.model.vocab_size
        self._num_spec_tokens, self._lossy = loaded.num_spec_tokens, loaded.speculative.lossy

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The request's JSON body as `model`; with it the request has arrived. Raises ApiError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "send the body as Content-Type: application/json, without Content-Encoding", code="unsupported_media_type")
        raw = await request.body()
        request.state.arrival_time = time.monotonic()
        body, num_unknown = await self.in_reader(lambda: _parsed(raw, model), len(raw) > OFF_LOOP_BYTES)
        self.metrics.on_unknown_fields(num_unknown)
        return body

    async def in_reader(self, work: Callable[[], T], is_long: bool = True) -> T:
        """What `work` returns, done in a thread for what is read of requests, where it waits for others, unless it is short."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work) if is_long else work()

    def require_model(self, name: str | None) -> str:
        """The model's or an adapter's name as asked for; without one, the first. Raises ApiError with the names there are."""
        self.names.adapter_of(name)
        return self.names.own[0] if name is None else name

    def require_room(self, num_prompts: int, n: int) -> None:
        """Each choice of each prompt is a request to the queue. Raises ApiError if they could never fit."""
        limit = self.config.engine.scheduler.max_num_seqs + self.config.max_queued_requests
        if num_prompts * n > limit:
            message = f"{num_prompts} prompts with n {n} are {num_prompts * n} answers; this server takes at most {limit} at once"
            raise ApiError(400, message, param="n" if n > 1 else "prompt")

    def require_infill(self, param: str) -> Infill:
        """Raises ApiError if this model has no gap to fill."""
        if self._infill is None:
            raise unsupported(param, f"{param} with a model that has no tokens for filling in the middle")
        return self._infill

    def require_tokens(self, token_ids: list[int], param: str) -> list[int]:
        """The same, if the model has all of them. Raises ApiError."""
        if not token_ids:
            raise ApiError(400, f"{param} is empty", param=param)
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise ApiError(400, f"{param} holds a token id that is not from 0 to {self._vocab_size - 1}", param=param)
        return token_ids

    def stream_options(self, body: GenerationRequest) -> StreamOptions:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return body.stream_options or StreamOptions()

    async def generation(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        id_prefix: str,
    ) -> Generation:
        """Queue it. Raises ApiError, and what Generation raises."""
        self.require_room(len(prompts), params.n)
        if isinstance(params.prediction, str):  # it may be a whole file: tokenized where it blocks nobody
            prediction = await self.chat_format.encode(params.prediction, add_special_tokens=False, param="prediction")
            params = replace(params, prediction=prediction)
        intake = self.engine.engine.intake
        if params.grammar is not None and not intake.is_prepared(params):  # compiling may take seconds
            await asyncio.to_thread(intake.prepare, params, time.monotonic())
        adapter = self.names.chosen(body)
        generation = Generation(
            self.engine,
            self.metrics,
            prompts,
            params,
            request_id=id_prefix + uuid.uuid4().hex,
            arrival_time=request.state.arrival_time,
            origin=Origin(_priority(body.priority, request.state.best_priority), body.cache_salt or "", request.state.tenant),
            adapter=None if adapter is None else adapter.name,
            num_spec_tokens=self._num_spec_tokens,
            lossy=self._lossy,
            timeout_s=self.config.request_timeout_s,
        )
        request.state.generation, request.state.model = generation, body.model or self.names.own[0]  # for the log
        return generation

    def on_response(self, scope: Scope, status: int) -> None:
        """An answer has left, or its client: count it, and log it unless it is a probe's."""
        self.metrics.on_response(scope, status)
        if not is_quiet(scope, status):
            request_logger.info("%s", request_line(scope, status))


def _priority(asked: int | None, best: int | None) -> int:
    """Where several share a server nobody may go before the others by asking for it. best: what the key allows; None = anything."""
    if asked is None or best is None:
        return asked or best or 0
    if asked < best:
        message = f"with this API key priority may be {best} or more: lower goes first, before the requests of others"
        raise ApiError(400, message, param="priority", code="priority_not_allowed")
    return asked


def _parsed(raw: bytes, model: type[Body]) -> tuple[Body, int]:
    """The body, and how many of its fields nobody knows. Raises ApiError."""
    try:
        body = model.model_validate_json(raw.removeprefix(BOM_UTF8))  # as files have it that some editors wrote
    except ValidationError as error:
        raise invalid_body(error) from None
    return body, settle_extras(body)


def invalid_body(error: ValidationError) -> ApiError:
    """The first mistake, by its field's path; the value itself is not repeated."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if not first["loc"]:
        problem = first["msg"] if first["type"] == "json_invalid" else "the body must be a JSON object"
        if "hex escape" in problem:  # an emoji is two of them, and programs that count in UTF-16 cut texts between the two
            problem += r": \ud800 to \udfff stand in pairs only; was a text cut in the middle of a character?"
        return ApiError(400, problem, code="invalid_json")
    path = ".".join(str(part) for part in first["loc"])[:200]
    return ApiError(400, f"{path}: {first['msg']}", param=path)
