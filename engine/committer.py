"""The only place where requests grow: accepted tokens in, stop rules applied, cache committed, deltas out."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from .detokenizer import Pushed
from .kv_cache import KVCache
from .plan import RoundsPlan, RoundsVerdict, RowSaid, Settled, StepPlan, Verdict
from .request import FinishReason, Request, SpeculationStats, TokenDelta
from .scheduler import Scheduler

logger = logging.getLogger("foretoken.engine")


class TextStream(Protocol):
    """A request's text as it grows (engine/detokenizer.py)."""

    def push(self, token_ids: list[int]) -> Pushed: ...

    def finish(self) -> str: ...


class Committer:
    """Owner of every request's text stream; writer of token ids, statistics and finish reasons."""

    def __init__(
        self,
        kv: KVCache,
        scheduler: Scheduler,
        move_slots: Callable[[list[int], list[int]], None],
        open_text: Callable[[Request], TextStream | None],
        prediction_index: int | None = None,
    ) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._move_slots = move_slots
        self._open_text = open_text
        self._prediction_index = prediction_index
        self._texts: dict[str, TextStream | None] = {}
        self.generation_tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0

    def commit(self, plan: StepPlan, verdict: Verdict) -> list[TokenDelta]:
        """Apply the verdict to every row. Accepted tree paths become contiguous; rejected places are given back."""
        self._compact_trees(plan, verdict)
        deltas: list[TokenDelta] = []
        for part, scores in zip(plan.scored, verdict.scores, strict=True):
            if part.request.prompt_logprobs is not None:
                part.request.prompt_logprobs.extend(scores)
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            num_known = row.num_computed + row.num_scheduled
            if said.error is not None:
                deltas.append(self.fail(row.request, said.error, said.error_code))
            elif row.samples:
                deltas.append(self._grown(row.request, num_known, row.said(said)))
            else:
                self._advance(row.request, num_known)
        self._mark_filled(plan.filled)
        return deltas

    def commit_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict) -> list[TokenDelta]:
        """The same for a step in rounds. Drafts behind a row's end are taken out of the verdict."""
        deltas = [
            self.fail(row.request, said.error, "numerical_error")
            if said.error is not None
            else self._grown(row.request, row.num_computed + 1, said)
            for row, said in zip(plan.rows, verdict.rows, strict=True)
        ]
        self._mark_filled(verdict.filled)
        return deltas

    def fail(self, request: Request, message: str, code: str) -> TokenDelta:
        """End a request with an error; code: as in RequestFailed."""
        return self._ended(request, "error", message, code)

    def abort(self, request: Request) -> TokenDelta:
        """End a request because its client wants no more."""
        return self._ended(request, "abort")

    def check(self) -> None:
        """Raise if a text stream outlived its request."""
        assert set(self._texts) <= set(self._scheduler.requests), "a finished request still has a text stream"

    def _mark_filled(self, filled: Mapping[tuple[int, str], int]) -> None:
        for (proposer, request_id), num_tokens in filled.items():
            if request_id in self._kv.tables:
                self._kv.mark_filled(request_id, proposer, num_tokens)

    def _compact_trees(self, plan: StepPlan, verdict: Verdict) -> None:
        """Move each accepted path to the places right behind the row's known tokens, for all rows in one call."""
        size, src, dst = plan.block_size, [], []
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            if said.error is not None:
                continue
            first = row.num_computed + row.num_scheduled
            for depth, node in enumerate(said.accepted):
                if node != depth:
                    for places, place in ((src, first + node), (dst, first + depth)):
                        places.append(row.block_table[place // size] * size + place % size)
        if src:
            self._move_slots(src, dst)

    def _grown(self, request: Request, num_known: int, said: RowSaid) -> TokenDelta:
        """A request grows; see `_grow`. A text that cannot be written is that request's misfortune alone."""
        try:
            return self._grow(request, num_known, said)
        except Exception as error:
            logger.exception("the text of request %s could not be written", request.request_id)
            message = f"the engine could not write this request's text ({type(error).__name__})"
            return self.fail(request, message, "engine_error")

    def _grow(self, request: Request, num_known: int, said: RowSaid) -> TokenDelta:
        """num_known: tokens that were known before, all of which are computed now, and all but the last of the new ones."""
        first_token = request.num_output_tokens == 0
        if first_token:
            self.prompt_tokens += request.num_prompt_tokens
            self.cached_prompt_tokens += request.num_cached_tokens
        tokens, reason, stop_reason = self._cut(request, said.token_ids)
        text, tokens, reason, stop_reason = self._write(request, tokens, reason, stop_reason)
        request.token_ids.extend(tokens)
        self.generation_tokens += len(tokens)
        self._advance(request, num_known + min(len(said.token_ids) - 1, len(tokens)), said.accepted)
        # Behind a stop string, which only the text shows, nobody would have guessed any more.
        while said.drafts and said.drafts[-1].first >= max(1, len(tokens)):
            said.drafts.pop()
        for draft in said.drafts:
            self._count(request.stats, draft, max(0, min(draft.accepted, len(tokens) - draft.first)))
        logprobs = said.logprobs[: len(tokens)] if said.logprobs is not None else None
        prompt_logprobs = request.prompt_logprobs if first_token else None
        stats, queue_time_s = None, None
        if reason is not None:
            stats, queue_time_s = request.stats, request.queue_time_s
            self._close(request, reason)
        return TokenDelta(
            request.request_id, request.choice, tokens, text, said.sources(len(tokens)), logprobs, reason, stop_reason,
            stats=stats, num_cached_tokens=request.num_cached_tokens, queue_time_s=queue_time_s,
            prompt_logprobs=prompt_logprobs, num_passes=said.num_passes,
        )

    def _cut(self, request: Request, token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Tokens up to the first that ends the request, that one included."""
        params, room = request.params, request.max_tokens - request.num_output_tokens
        if room == 0:  # only the prompt was to be read
            return [], "length", None
        eos = frozenset() if params.ignore_eos else request.eos_token_ids
        for index, token in enumerate(token_ids):
            if token in eos:
                return token_ids[: index + 1], "stop", None
            if token in params.stop_token_ids:
                return token_ids[: index + 1], "stop", token
            if index + 1 >= room:
                return token_ids[: index + 1], "length", None
        return token_ids, None, None

    def _write(
        self, request: Request, tokens: list[int], reason: FinishReason | None, stop_reason: int | str | None
    ) -> tuple[str, list[int], FinishReason | None, int | str | None]:
        """Turn tokens into text; a stop string inside them cuts further."""
        if request.request_id not in self._texts:
            self._texts[request.request_id] = self._open_text(request)
        stream = self._texts[request.request_id]
        if stream is None:
            return "", tokens, reason, stop_reason
        hidden = 1 if reason == "stop" and not request.params.include_stop_str_in_output else 0  # the stop token has no text
        pushed = stream.push(tokens[: len(tokens) - hidden])
        if pushed.num_kept is not None:
            return pushed.text, tokens[: pushed.num_kept], "stop", pushed.stop_reason
        return pushed.text + (stream.finish() if reason else ""), tokens, reason, stop_reason

    def _advance(self, request: Request, num_tokens: int, accepted: int = 0) -> None:
        request.num_computed_tokens = num_tokens
        self._kv.commit(request.request_id, request.token_ids, num_tokens, accepted)

    def _count(self, stats: SpeculationStats, draft: Settled, num_emitted: int) -> None:
        """num_emitted: accepted tokens that a stop rule left. Acceptance is about the draft, the prediction's count about the text."""
        stats.num_steps += 1
        stats.num_draft_tokens += draft.drafted
        stats.num_accepted_tokens += draft.accepted
        stats.histogram.extend([0] * (draft.accepted + 1 - len(stats.histogram)))
        stats.histogram[draft.accepted] += 1
        if draft.proposer >= 0:
            drafts, kept = stats.of_proposer.get(draft.proposer, (0, 0))
            stats.of_proposer[draft.proposer] = drafts + 1, kept + max(0, draft.accepted - draft.forced)
        if draft.proposer == self._prediction_index:
            num_kept = max(0, num_emitted - draft.forced)
            stats.accepted_prediction_tokens += num_kept
            stats.rejected_prediction_tokens += draft.drafted - draft.forced - num_kept

    def _ended(self, request: Request, reason: FinishReason, error: str | None = None, error_code: str | None = None) -> TokenDelta:
        """It ends without another token."""
        self._close(request, reason)
        return TokenDelta(
            request.request_id, request.choice, [], "", [], finish_reason=reason, error=error, error_code=error_code, stats=request.stats,
            num_cached_tokens=request.num_cached_tokens, queue_time_s=request.queue_time_s,
        )

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._texts.pop(request.request_id, None)
        self._scheduler.finish(request)
