"""What `LLM.generate` returns, with vLLM's attribute names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

from ..kernels.record import record
from .request import FinishReason, SamplingParams, SpeculationStats, TokenDelta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@record
class Logprob:
    """The target's log probability of one token, before any penalty."""

    logprob: float
    rank: int | None  # 1 = the best; None of a token that logprob_token_ids named
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # per token: itself and the best alternatives
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with finish_reason "error"

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class SpeculativeDecodingMetrics:
    """What speculation did for a request, all choices together. A step is one target pass with a draft."""

    mean_acceptance_length: float  # tokens per step, the target's own one included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [j]: steps in which j drafts were accepted
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int  # the most that a step drafts, predictions aside
    lossy: str | None = None  # the acceptance rule, if it is one that changes what is said: "typical" or "synthetic"

    @classmethod
    def of(cls, parts: Sequence[SpeculationStats], num_spec_tokens: int, lossy: str | None) -> SpeculativeDecodingMetrics:
        histogram = [0] * max((len(part.histogram) for part in parts), default=0)
        for part in parts:
            for num_accepted, num_steps in enumerate(part.histogram):
                histogram[num_accepted] += num_steps
        total = SpeculationStats(
            num_steps=sum(part.num_steps for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        )
        return cls(
            total.mean_acceptance_length, total.draft_acceptance_rate, histogram,
            total.num_steps, total.num_draft_tokens, total.num_accepted_tokens, num_spec_tokens, lossy,
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of one monotonic clock; None if no token came."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    num_generation_tokens: int
    speculative_decoding: SpeculativeDecodingMetrics


@dataclass
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # as of a choice's tokens; None for the first, which follows nothing


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt as a vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


RANKS = range(1, 2**31)


class GrowingOutput:
    """A RequestOutput in the making."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, arrival_time: float
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._choices = [CompletionOutput(index) for index in range(params.n)]
        self._texts: list[list[str]] = [[] for _ in range(params.n)]
        self._stats = [SpeculationStats() for _ in range(params.n)]
        self._ranks = repeat(None) if params.logprob_token_ids else RANKS  # of the tokens beside a chosen one
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._arrival_time = arrival_time
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def add(self, delta: TokenDelta, tokenizer: PreTrainedTokenizerBase, now: float) -> None:
        choice = self._choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        self._texts[delta.choice].append(delta.text)
        if delta.token_ids:
            self._first_token_time = now if self._first_token_time is None else self._first_token_time
            self._last_token_time = now
        if delta.logprobs is not None:
            self._add_logprobs(choice, delta, tokenizer)
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            told = (_logprobs(token, logprob, rank, top, RANKS, tokenizer) for token, logprob, rank, top in delta.prompt_logprobs)
            self._prompt_logprobs = [None, *told]
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
            self._stats[delta.choice] = delta.stats or SpeculationStats()
            if delta.choice == 0:  # later choices find the first one's prompt in the cache
                self._num_cached_tokens = delta.num_cached_tokens

    def build(self, num_spec_tokens: int, lossy: str | None) -> RequestOutput:
        for choice, parts in zip(self._choices, self._texts, strict=True):
            choice.text = "".join(parts)
        metrics = RequestMetrics(
            self._arrival_time,
            self._first_token_time,
            self._last_token_time,
            sum(len(choice.token_ids) for choice in self._choices),
            SpeculativeDecodingMetrics.of(self._stats, num_spec_tokens, lossy),
        )
        return RequestOutput(
            self._request_id, self._prompt, self._prompt_token_ids, self._choices, self.finished, self._num_cached_tokens, metrics,
            self._prompt_logprobs,
        )

    def _add_logprobs(self, choice: CompletionOutput, delta: TokenDelta, tokenizer: PreTrainedTokenizerBase) -> None:
        if choice.logprobs is None or choice.cumulative_logprob is None:
            choice.logprobs, choice.cumulative_logprob = [], 0.0
        for token, said in zip(delta.token_ids, delta.logprobs or (), strict=True):
            choice.logprobs.append(_logprobs(token, said.logprob, said.rank, said.top, self._ranks, tokenizer))
            choice.cumulative_logprob += said.logprob


def _logprobs(
    token: int,
    logprob: float,
    rank: int,
    top: Sequence[tuple[int, float]],
    ranks: Iterable[int | None],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[int, Logprob]:
    """A token and others, the best alternatives or those that were asked for."""
    told = zip(top, ranks, strict=False)
    others = {other: Logprob(said, place, str(tokenizer.decode([other]))) for (other, said), place in told if other != token}
    return {token: Logprob(logprob, rank, str(tokenizer.decode([token])))} | others
