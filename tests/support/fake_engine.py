"""An AsyncEngine for tests of the web layer alone: it says a fixed reply, two tokens a step, the second of them drafted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerBase

from foretoken.engine.intake import Intake
from foretoken.engine.origin import ANYBODY, Origin
from foretoken.engine.policy.base import BATCH_SIZE
from foretoken.engine.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta, TokenLogprobs
from foretoken.engine.stats import EngineStats, ProposerStats
from foretoken.proposers.config import NgramConfig, SpeculativeConfig, Typical
from foretoken.server.app import create_app
from foretoken.server.config import ServerConfig

if TYPE_CHECKING:
    from foretoken.engine.async_engine import AsyncEngine

STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    kv_blocks_total=8,
    kv_blocks_used=2,
    num_steps=40,
    prompt_tokens=100,
    generation_tokens=90,
    num_drafts=10,
    num_draft_tokens=50,
    num_accepted_tokens=30,
    accepted_per_position=(10, 9, 6, 4, 1),
    recent_draft_tokens=20,
    recent_accepted_tokens=15,
    num_speculative_tokens=5,
    acceptance="typical",
    is_lossy=True,
    steps_with_speculation_off={BATCH_SIZE: 3},
    mean_draft_ceiling=4.5,
    proposers=(ProposerStats("ngram", 10, 50, 30, verify_seconds=0.5, num_failures=1, draft_seconds=0.25),),
)


@dataclass
class FakeEngine:
    """`reply` to every prompt. `error` is raised before the first delta; `stuck` never says anything."""

    tokenizer: PreTrainedTokenizerBase
    reply: str = "The quick brown fox"
    error: Exception | None = None
    ending: tuple[FinishReason, str | None] = ("stop", None)  # and the stop string, which is none of the reply
    fails_after: int | None = None  # deltas, then one with finish_reason "error"
    stuck: bool = False
    healthy: bool = True
    draining: bool = False
    last_step_age_s: float = 0.0
    calls: list[SimpleNamespace] = field(default_factory=list)
    num_open: int = 0
    num_guests: int = 0
    typical: Typical | None = None  # a lossy rule, if it is to be on
    cache_tokens: int = 512
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> SimpleNamespace:
        model = SimpleNamespace(name="tiny", max_model_len=512, vocab_size=300)
        speculative = SpeculativeConfig(proposers=(NgramConfig(num_speculative_tokens=5),), typical=self.typical)
        return SimpleNamespace(
            model=model, tokenizer=self.tokenizer, proposer_names=("ngram",), speculative=speculative, num_spec_tokens=5,
            intake=self.intake, adapters=None, max_loras=None, sampling=self.sampling,
        )

    @property
    def intake(self) -> Intake:
        """The real one: what a request must be is the engine's to say."""
        return Intake(self.tokenizer, 300, 300, 512, self.cache_tokens, [0], ("ngram",))

    @property
    def num_in_flight(self) -> int:
        return self.num_open

    def stats(self) -> EngineStats:
        return STATS

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        origin: Origin = ANYBODY,
        adapter: str | None = None,
    ) -> FakeStream:
        first = self.intake.requests(request_id, prompt_token_ids, params, 0.0, origin)[0]
        salts = {"salt": first.cache_salt, "corpus_id": first.corpus_id}
        self.calls.append(SimpleNamespace(prompt=list(prompt_token_ids), params=params, id=request_id, priority=origin.priority, **salts))
        if self.error is not None:
            raise self.error
        return FakeStream(self, self._deltas(request_id, params))

    def _deltas(self, request_id: str, params: SamplingParams) -> list[TokenDelta]:
        tokens = self.tokenizer.encode(self.reply, add_special_tokens=False)
        steps = [tokens[start : start + 2] for start in range(0, len(tokens), 2)]
        stats = SpeculationStats(len(steps), len(steps) * 2, len(tokens) // 2, [0, len(steps)], 4, 1, {0: (len(steps), len(tokens) // 2)})
        deltas: list[TokenDelta] = []
        for number, step in enumerate(steps):
            if number == self.fails_after:
                failed = TokenDelta(request_id, 0, [], "", [], finish_reason="error", error="not finite", error_code="numerical_error")
                return [*deltas, failed]
            for choice in range(params.n):
                last = number == len(steps) - 1
                top = tuple((token, -1.0 - rank) for rank, token in enumerate(range(10, 10 + (params.logprobs or 0))))
                deltas.append(
                    TokenDelta(
                        request_id,
                        choice,
                        step,
                        str(self.tokenizer.decode(step, skip_special_tokens=params.skip_special_tokens)),
                        [-1, 0][: len(step)],
                        logprobs=[TokenLogprobs(-0.5, 1, top)] * len(step) if params.logprobs is not None else None,
                        finish_reason=self.ending[0] if last else None,
                        stop_reason=self.ending[1] if last else None,
                        stats=stats if last else None,
                        num_cached_tokens=3,
                        queue_time_s=0.25 if last else None,
                    )
                )
        return deltas

    def prompt(self, call: int = -1) -> str:
        """What the model was given."""
        return str(self.tokenizer.decode(self.calls[call].prompt))

    def as_engine(self) -> AsyncEngine:
        return cast("AsyncEngine", self)

    def app(self, **settings: Any) -> FastAPI:
        """settings: ServerConfig's."""
        return create_app(self.as_engine(), ServerConfig(**settings))

    def client(self, **settings: Any) -> TestClient:
        return TestClient(self.app(**settings))


class FakeStream:
    """Delta after delta, each when it is asked for."""

    def __init__(self, engine: FakeEngine, deltas: list[TokenDelta]) -> None:
        self._engine = engine
        self._deltas = deltas
        self._open = True
        self._error: Exception | None = None
        self._failed = asyncio.Event()
        engine.num_open += 1

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._engine.stuck:
            await self._failed.wait()
        if self._error is not None:
            raise self._error
        await asyncio.sleep(0)
        if not self._deltas or not self._open:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    def fail(self, error: Exception) -> None:
        self._error = error
        self._failed.set()

    def close(self) -> None:
        self._engine.num_open -= self._open
        self._open = False
        self._failed.set()  # whoever waits looks again
