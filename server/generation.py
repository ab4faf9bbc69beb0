"""One API request as it runs: its prompts and choices in the engine, its clock, and what the client is told about both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..engine.errors import ForetokenError, RequestFailed
from ..engine.origin import ANYBODY, Origin
from ..engine.outputs import SpeculativeDecodingMetrics
from ..engine.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from .metrics import Metrics

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine
    from ..engine.token_stream import TokenStream


class Outlet(Protocol):
    """The connection of a streamed answer, for its pieces: no layer in between has anything to do with them."""

    @property
    def is_ready(self) -> bool: ...  # whether a piece can go now; else it takes the way of the rest, which waits for the client
    @property
    def is_paused(self) -> bool: ...  # whether bytes wait already for a client that does not keep up
    def write_piece(self, piece: bytes) -> None: ...


@dataclass
class ChoiceProgress:
    """What has come of one choice. Times are of the monotonic clock, in seconds."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # told by whoever reads the text
    first_token_time: float | None = None
    last_token_time: float = 0.0
    finish_reason: FinishReason | None = None
    end_time: float | None = None  # None = it has not ended
    num_cached_tokens: int = 0
    queue_time_s: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class Generation:
    """P prompts with n choices each, queued on construction; choice `index` = prompt * n + choice of that prompt.

    adapter: by name. arrival_time: of its body, by the monotonic clock; reading it, its form included, is part of what the client waits
    for. Whoever makes one closes it, read or not. Raises InvalidRequest, QueueFull, ShuttingDown or EngineDead; then nothing is
    queued.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        origin: Origin = ANYBODY,
        adapter: str | None = None,
        num_spec_tokens: int = 0,
        lossy: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.request_id = request_id
        self.prompts = prompts
        self.params = params
        self.choices = [ChoiceProgress() for _ in range(len(prompts) * params.n)]
        self._num_running = len(self.choices)
        self._metrics = metrics
        self._num_spec_tokens, self._lossy = num_spec_tokens, lossy
        self._start_time = arrival_time
        self._streams: list[TokenStream] = []
        for number, prompt in enumerate(prompts):
            name = f"{request_id}-{number}" if len(prompts) > 1 else request_id
            try:
                stream = engine.generate(prompt, params, request_id=name, origin=origin, adapter=adapter)
            except ForetokenError:
                self._close_streams()
                raise
            self._streams.append(stream)
        self._unfinished: FinishReason | None = "abort"  # what becomes of choices that have not ended; None once all is reported
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out, timeout_s)

    @property
    def finished(self) -> bool:
        return not self._num_running

    async def deltas(self) -> AsyncGenerator[tuple[int, TokenDelta]]:
        """(index, delta) of all choices, as they come; to be read once.

        Raises RequestFailed if a choice ends in an error or the time is up, EngineDead if all do.
        """
        try:
            if len(self._streams) == 1:  # the common case needs no tasks
                async for delta in self._streams[0]:
                    yield self._taken(delta.choice, delta)
                return
            async with aclosing(_merged(self._streams)) as merged:
                async for number, delta in merged:
                    yield self._taken(number * self.params.n + delta.choice, delta)
        except ForetokenError:
            if self._unfinished is not None:
                self._unfinished = "error"
            raise

    def tap(self, outlet: Outlet, spell: Callable[[int, TokenDelta], bytes]) -> None:
        """While the reader of `deltas` waits, write what comes to the outlet if that is ready: as the engine delivers it, without waking
        anyone. The reader gets each choice's beginning and end, and what `spell` raises."""
        if len(self._streams) > 1:  # these are merged in order of arrival
            return
        (stream,) = self._streams

        def tap(delta: TokenDelta) -> bool:
            choice = self.choices[delta.choice]
            if choice.first_token_time is None or not outlet.is_ready:
                return False
            self._record(choice, delta)
            try:
                if said := spell(delta.choice, delta):
                    outlet.write_piece(said)
            except Exception as error:
                stream.fail(error)
            return True

        stream.tap(tap)

    def end(self) -> None:
        """What still runs has said enough: it ends as if by its length."""
        self._unfinished = self._unfinished and "length"
        self.close()

    def close(self) -> None:
        """Abort what still runs and count every choice, once."""
        self._timer.cancel()
        self._close_streams()
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            self._report(unfinished)

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    def _time_out(self, timeout_s: float) -> None:
        has_begun = any(choice.num_tokens for choice in self.choices)
        advice = "ask for fewer tokens" if has_begun else "it waited for others, or its prompt is long: try again later"
        for stream in self._streams:
            stream.fail(RequestFailed(f"the request did not finish within {timeout_s:g} s; {advice}", "timeout"))

    def _taken(self, index: int, delta: TokenDelta) -> tuple[int, TokenDelta]:
        """Both as they came, recorded. Raises RequestFailed if that is how the choice ends."""
        self._record(self.choices[index], delta)
        if delta.finish_reason == "error":
            raise RequestFailed(delta.error or "the request failed", delta.error_code or "engine_error")
        return index, delta

    def _record(self, choice: ChoiceProgress, delta: TokenDelta) -> None:
        now, num_new = time.monotonic(), len(delta.token_ids)
        choice.num_cached_tokens = delta.num_cached_tokens
        if num_new:
            if choice.first_token_time is None:
                choice.first_token_time = now
                self._metrics.on_first_token(now - self._start_time)
            else:
                self._metrics.on_tokens(now - choice.last_token_time, num_new)
            choice.last_token_time = now
            choice.num_tokens += num_new
        if delta.finish_reason is not None:
            self._num_running -= 1
            choice.finish_reason, choice.end_time = delta.finish_reason, now
            choice.queue_time_s = delta.queue_time_s
            if delta.queue_time_s is not None:
                self._metrics.on_queued(delta.queue_time_s)
            choice.stats = delta.stats or choice.stats
            self._metrics.on_speculation(choice.stats)

    def _report(self, unfinished: FinishReason) -> None:
        """Every accepted choice is counted once, whatever became of it."""
        now = time.monotonic()
        for index, choice in enumerate(self.choices):
            num_prompt_tokens = len(self.prompts[index // self.params.n])
            choice.finish_reason, choice.end_time = choice.finish_reason or unfinished, choice.end_time or now
            self._metrics.on_finish(choice.finish_reason, choice.end_time - self._start_time, num_prompt_tokens, choice.num_tokens)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. Rejected drafts, predictions included, are never counted as completion tokens."""
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        # Later choices find the first one's prompt in the cache; what the request found there is what the first one found.
        cached_tokens = sum(choice.num_cached_tokens for choice in self.choices[:: self.params.n])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.stats.accepted_prediction_tokens for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.stats.rejected_prediction_tokens for choice in self.choices),
                "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in self.choices),
            },
        }

    def metrics(self) -> dict[str, Any]:
        """Times in ms and what speculation did, in vLLM's shape. Per token: means over the choices; in the queue: the longest."""
        started = [choice for choice in self.choices if choice.first_token_time is not None]
        first = min((choice.first_token_time or 0.0 for choice in started), default=None)
        if first is None:
            return {"speculative_decoding": self.speculative_decoding(self.choices)}
        last = max(choice.last_token_time for choice in started)
        gaps = sum(choice.num_tokens - 1 for choice in started)
        decoding = sum(choice.last_token_time - (choice.first_token_time or 0.0) for choice in started)
        num_tokens = sum(choice.num_tokens for choice in started)
        queued = [choice.queue_time_s for choice in started if choice.queue_time_s is not None]
        return {
            "queue_time_ms": _ms(max(queued)) if queued else None,
            "time_to_first_token_ms": _ms(first - self._start_time),
            "generation_time_ms": _ms(last - first),
            "mean_itl_ms": _ms(decoding / gaps) if gaps else None,
            "tokens_per_second": round(num_tokens / max(last - self._start_time, 1e-9), 2),
            "speculative_decoding": self.speculative_decoding(self.choices),
        }

    def speculative_decoding(self, choices: Sequence[ChoiceProgress]) -> dict[str, Any]:
        """Over all steps of these choices. acceptance_histogram[j]: steps in which j drafts were accepted. lossy: the acceptance
        rule, if it is one that changes what is said."""
        total = SpeculativeDecodingMetrics.of([choice.stats for choice in choices], self._num_spec_tokens, self._lossy)
        return vars(total) | {
            "mean_acceptance_length": round(total.mean_acceptance_length, 4),
            "draft_acceptance_rate": round(total.draft_acceptance_rate, 4),
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


async def _merged(streams: Sequence[AsyncIterator[TokenDelta]]) -> AsyncGenerator[tuple[int, TokenDelta]]:
    """Items of several streams with their stream's number, in order of arrival; the first error ends it."""
    # Short: what a slow reader leaves waits in the streams, which merge it.
    arrived: asyncio.Queue[tuple[int, TokenDelta | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncIterator[TokenDelta]) -> None:
        try:
            async for delta in stream:
                await arrived.put((number, delta))
            await arrived.put((number, None))
        except Exception as error:
            await arrived.put((number, error))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            number, item = await arrived.get()
            match item:
                case None:
                    num_open -= 1
                case Exception():
                    raise item
                case delta:
                    yield number, delta
    finally:
        for task in pumps:
            task.cancel()
