"""Texts as vectors: the target's last hidden states, computed between the steps of the requests that run.

Owns whose turn it is and the reading of a text in passes of bounded size. Places in the cache are borrowed from the free ones
for as long as a text is read; nothing is looked up in the prefix cache, and nothing is left there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..kernels.rope import UnsupportedModel
from .errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from .plan import PlanRow, StepPlan
from .request import Adapter, Request, SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .core import EngineCore

Pooling = Literal["last", "mean"]
"""The state of the last token, or the mean over all tokens. Either is behind the target's final norm."""

BUSY_SHARE = 8
"""While requests run, a pass takes this part of a step's token budget: their next tokens wait for it. And then they have the engine
for themselves for as long as the pass took, so that they keep half of its time."""
RETRY_S = 0.02
"""Until free blocks are looked for again."""
_UNUSED = SamplingParams(temperature=0.0)  # nothing is sampled


class Embedder:
    """Embeds for the callers of one event loop. They take turns, so that there is at most one pass between two steps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        text_config: Any = self._engine.engine.model.hf_config.get_text_config()
        return int(text_config.hidden_size)  # by attribute: GPT-2 calls it n_embd in its file

    async def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "last", adapter: str | None = None) -> Tensor:
        """[N, H] float32, one row of length 1 for each of N texts, which are token ids. adapter: by name.

        Raises InvalidRequest (ContextTooLong among them), QueueFull, ShuttingDown or EngineDead before anything is computed,
        RequestFailed if the target's states are not finite, or a drain did not wait so long.
        """
        engine = self._engine.engine
        for text in texts:
            engine.intake.check_text("input", text)
        if (num_waiting := self._engine.num_guests) >= max(engine.config.max_queued_requests, 1):
            raise QueueFull(f"the queue is full: {num_waiting:,} requests for embeddings are waiting", 1)
        with self._engine.guest(adapter) as its_adapter:
            reading = Reading(texts, pooling, its_adapter)
            try:
                while not reading.done:
                    self._engine.ask_for_time()
                    async with self._turn:
                        seconds = await self._engine.call(reading.advance)
                        if seconds and self._engine.num_in_flight:
                            await asyncio.sleep(seconds)
                    if not seconds:
                        await asyncio.sleep(RETRY_S)
            except BaseException:
                with suppress(EngineDead, RequestFailed):
                    await self._engine.call(reading.close)
                raise
            return await asyncio.to_thread(reading.vectors)


@dataclass
class _Text:
    """A text as far as it is read."""

    request: Request
    num_read: int = 0
    pooled: Tensor | None = None  # [H] float32

    @property
    def num_left(self) -> int:
        return len(self.request.token_ids) - self.num_read


class Reading:
    """The texts of one caller on their way through the target. `advance` and `close` belong to the engine thread."""

    _numbers = count()

    def __init__(self, texts: Sequence[Sequence[int]], pooling: Pooling, adapter: Adapter | None = None) -> None:
        self._texts = [_Text(_request(f"embedding-{next(self._numbers)}", text, adapter)) for text in texts]
        self._pooling = pooling
        self.num_done = 0  # texts, the first ones

    @property
    def done(self) -> bool:
        return self.num_done == len(self._texts)

    def advance(self, core: EngineCore) -> float:
        """One pass, and its seconds. 0, and nothing done, if free blocks are too few for the next text now. Raises InvalidRequest."""
        started = time.perf_counter()
        config, kv = core.scheduler.config, core.scheduler.kv
        left = config.max_num_batched_tokens
        if core.has_work:
            left = max(left // BUSY_SHARE, 1)
        rows: list[PlanRow] = []
        texts = self._texts[self.num_done :][: config.max_num_seqs]
        for text in texts:
            name, num_tokens = text.request.request_id, len(text.request.token_ids)
            if left == 0 or not (text.num_read or kv.open_scratch(name, num_tokens)):
                break
            num_new = min(left, text.num_left)
            state = kv.row_state(name, text.num_read, text.num_read + num_new)
            rows.append(PlanRow(text.request, text.num_read, num_new, [], [], [], kv.block_table(name), False, state))
            left -= num_new
        if not rows:
            return 0.0
        try:
            states = core.runner.final_states(StepPlan(rows, kv.block_size))
        except UnsupportedModel as error:
            raise InvalidRequest(f"this model cannot embed texts: {error}", code="unsupported_model") from error
        for text, row, part in zip(texts, rows, states.split([row.num_scheduled for row in rows]), strict=False):
            kv.scratch_passed(text.request.request_id)
            self._take(text, row.num_scheduled, part)
            if not text.num_left:
                kv.free(text.request.request_id)
                core.committer.prompt_tokens += text.num_read
                self.num_done += 1
        return time.perf_counter() - started

    def close(self, core: EngineCore) -> None:
        """Give back the places of what will not be read to its end."""
        kv = core.scheduler.kv
        for text in self._texts:
            if text.request.request_id in kv.tables:
                kv.free(text.request.request_id)

    def vectors(self) -> Tensor:
        """[N, H] float32, each row of length 1, once all is read. Raises RequestFailed."""
        vectors = torch.stack([text.pooled for text in self._texts if text.pooled is not None])
        if not bool(vectors.isfinite().all()):
            raise RequestFailed("the model's states for this text are not finite numbers", "numerical_error")
        return torch.nn.functional.normalize(vectors, dim=-1)

    def _take(self, text: _Text, num_new: int, states: Tensor) -> None:
        """states [num_new, H]: of the text's next tokens."""
        text.num_read += num_new
        if self._pooling == "mean":  # its length is settled in the end
            part = states.sum(0, dtype=torch.float32).cpu()
            text.pooled = part if text.pooled is None else text.pooled + part
        elif not text.num_left:
            text.pooled = states[-1].to("cpu", torch.float32, copy=True)


def _request(name: str, token_ids: Sequence[int], adapter: Adapter | None) -> Request:
    """A text in the form that plans have rows in."""
    return Request(name, token_ids, _UNUSED, arrival_time=0.0, max_tokens=0, seed=0, adapter=adapter)
