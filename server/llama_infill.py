"""POST /infill: what stands at the cursor, asked for and told as llama.cpp's plugins of editors do it."""

import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.errors import ContextTooLong
from .errors import unsupported
from .generation import Generation
from .infill import Infill
from .json_answer import JsonAnswer
from .request_base import OpenAIObject
from .schemas import GenerationRequest
from .serving import Serving
from .streaming import EventStream, event, failure, unless_gone

MAX_INDENT = 1000
SHORTER = 0.95  # than what would fit if tokens were alike everywhere


class OtherFile(OpenAIObject):
    filename: str = "tmp"
    text: str = ""
    time: Any = None


class InfillRequest(GenerationRequest):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[OtherFile] = []
    prompt: str = ""  # behind input_prefix, on the cursor's line
    n_indent: int = 0
    t_max_predict_ms: float = 0
    response_fields: list[str] = []
    samplers: Any = None  # the fields beside it say what each does


async def create_infill(request: Request, serving: Serving) -> Response:
    body = await serving.read(request, InfillRequest)
    serving.require_model(body.model)
    infill = serving.require_infill("input_suffix")
    if body.n not in (None, 1):
        raise unsupported("n")
    # llama.cpp's sampler "infill" keeps to what is likely; greedy is the nearest to it, and guessed best.
    params = infill.ending(body.sampling_params({**serving.sampling, "temperature": 0}, max_tokens=body.most_tokens()[1]))
    token_ids, is_cut = await _fitted(body, infill, serving, serving.max_tokens - (params.max_tokens or 1))
    generation = await serving.generation(request, body, [token_ids], params, id_prefix="infill-")
    middle = Middle(generation, body, is_cut, serving.max_model_len)
    if body.stream:
        return EventStream(generation, middle.events())
    with closing(generation):
        return JsonAnswer(await unless_gone(request.receive, middle.whole()))


async def _fitted(body: InfillRequest, infill: Infill, serving: Serving, room: int) -> tuple[list[int], bool]:
    """The prompt's tokens, and whether it had to be cut: first go the oldest files, then what is farthest from the cursor."""
    files = [(file.filename, file.text) for file in body.input_extra]
    before, after, is_cut = body.input_prefix + body.prompt, body.input_suffix, False
    while True:
        try:
            token_ids = await serving.chat_format.encode(infill.prompt(before, after, files))
            share = SHORTER * max(room, 0) / len(token_ids)
        except ContextTooLong:  # unread
            token_ids, share = [], 0.5
        if 0 < len(token_ids) <= room or not (files or before or after):
            return token_ids, is_cut
        is_cut = True
        if files:
            files = files[len(files) - int(len(files) * share) :]
        else:
            before, after = before[len(before) - int(len(before) * share) :], after[: int(len(after) * share)]


@dataclass
class Middle:
    """One answer in the making."""

    generation: Generation
    body: InfillRequest
    is_cut: bool
    max_model_len: int
    text: str = ""
    stop_reason: int | str | None = None

    async def whole(self) -> dict[str, Any]:
        """Raises ForetokenError."""
        async for _ in self._texts():
            pass
        return self._told(self.text)

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            async for text in self._texts():
                yield event({"content": text, "stop": False})
            yield event(self._told(""))
        except Exception as error:
            yield event(failure(self.generation, error).body)

    async def _texts(self) -> AsyncGenerator[str]:
        """As they come, up to a line that is less indented than n_indent, and until there are two lines and the time is up."""
        choice, limit_s = self.generation.choices[0], self.body.t_max_predict_ms / 1000
        outdented = re.compile(rf"\n[ \t]{{0,{min(self.body.n_indent, MAX_INDENT) - 1}}}[^ \t]")
        async with aclosing(self.generation.deltas()) as deltas:
            async for _, delta in deltas:
                num_told, self.text, self.stop_reason = len(self.text), self.text + delta.text, delta.stop_reason
                found = outdented.search(self.text) if self.body.n_indent > 0 else None
                if found is not None:
                    self.text = self.text[: found.start()]
                late = limit_s > 0 and "\n" in self.text and time.monotonic() - (choice.first_token_time or 0) > limit_s
                yield self.text[num_told:]
                if found or late:
                    self.generation.end()
                    return

    def _told(self, content: str) -> dict[str, Any]:
        usage, times = self.generation.usage(), self.generation.metrics()
        num_prompt, num_predicted = usage["prompt_tokens"], usage["completion_tokens"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt_ms = round(times.get("time_to_first_token_ms", 0) - (times.get("queue_time_ms") or 0), 3)
        timings = _timed("prompt", num_prompt - num_cached, prompt_ms)
        timings |= _timed("predicted", num_predicted, times.get("generation_time_ms", 0))
        if (guesses := times["speculative_decoding"])["num_draft_tokens"]:
            timings |= {"draft_n": guesses["num_draft_tokens"], "draft_n_accepted": guesses["num_accepted_draft_tokens"]}
        word = self.stop_reason if isinstance(self.stop_reason, str) else ""
        ended = "word" if word else "eos" if self.generation.choices[0].finish_reason == "stop" else "limit"
        told = {
            "content": content,
            "stop": True,
            "stop_type": ended,
            "stopping_word": word,
            "tokens_evaluated": num_prompt,
            "tokens_predicted": num_predicted,
            "tokens_cached": num_prompt + num_predicted,
            "truncated": self.is_cut,
            "generation_settings": {"n_ctx": self.max_model_len, "temperature": self.generation.params.temperature},
            "timings": timings,
        }
        return _picked(told, self.body.response_fields) if self.body.response_fields else told


def _timed(name: str, n: int, ms: float) -> dict[str, float]:
    per_token, per_second = ms / max(n, 1), n / ms * 1000 if ms else 0.0
    return {f"{name}_n": n, f"{name}_ms": ms, f"{name}_per_token_ms": per_token, f"{name}_per_second": per_second}


def _picked(told: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """{"timings/prompt_n": 5}: an entry for each path that there is."""
    inner = {f"{name}/{key}": value for name in ("generation_settings", "timings") for key, value in told[name].items()}
    return {path: value for path, value in (told | inner).items() if path in paths}
