"""Requests and schedulers for tests, in one line each."""

from typing import Any

from foretoken.engine.config import SchedulerConfig
from foretoken.engine.controller import Controller
from foretoken.engine.kv_cache import KVCache
from foretoken.engine.policy.base import ProposerInfo
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.scheduler import NetworkNeeds, Scheduler
from foretoken.proposers.config import SpeculativeConfig

VOCAB = 50


def a_request(
    request_id: str, num_prompt: int = 3, *, arrival: float = 0.0, priority: int = 0, max_tokens: int = 20, **params: Any
) -> Request:
    """A greedy request whose prompt is 1, 2, 3, ..."""
    settings: dict[str, Any] = {"temperature": 0.0, "detokenize": False, **params}
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(num_prompt))
    return Request(request_id, prompt, SamplingParams(**settings), arrival, max_tokens, seed=0, priority=priority)


def a_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_drafts: int = 16,
    k: int = 4,
    disable_by_batch_size: int = 16,
    num_ingesting: int = 0,
    per_batch_size: tuple[tuple[int, int, int], ...] = (),
    prefix_caching: bool = True,
) -> Scheduler:
    speculative = SpeculativeConfig(disable_by_batch_size=disable_by_batch_size, num_speculative_tokens_per_batch_size=per_batch_size)
    proposers = (ProposerInfo("prediction", 9), ProposerInfo("guess", k)) if k else ()
    return Scheduler(
        SchedulerConfig(budget, max_num_seqs, max_drafts), KVCache(num_blocks, block_size, "test", prefix_caching),
        Controller(speculative, proposers), NetworkNeeds(VOCAB, 256, num_ingesting),
    )


def computed(scheduler: Scheduler, request: Request, next_token: int | None = 7) -> None:
    """As if a pass had computed all known tokens of a running request and the target had said next_token."""
    request.num_computed_tokens = len(request.token_ids)
    scheduler.kv.commit(request.request_id, request.token_ids, request.num_computed_tokens)
    if next_token is not None:
        request.token_ids.append(next_token)
