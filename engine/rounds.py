"""Steps in rounds: where every row decodes and guesses are looked up, or a draft model's, several passes are one native call.

Owns the form in which the native side has each request's text. What is guessed and what is kept is what the proposers and the
verifier would do (kernels/rounds.py); how many rounds, and how much each row may guess, is decided elsewhere.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

from ..kernels.growing_text import GrowingText
from ..kernels.layout import KVTensors
from ..kernels.ngram_table import NgramTable
from ..kernels.record import record
from ..kernels.rounds import (
    FROM_DRAFT,
    FROM_PREDICTION,
    FROM_TABLE,
    FROM_TEXT,
    RoundsExecutor,
    RoundsLimits,
    RoundsRow,
    answers,
    cursors,
    nums_read,
)
from ..proposers.base import Proposer
from ..proposers.config import NgramConfig
from ..proposers.learned import LearnedProposer
from ..proposers.ngram import NgramProposer
from ..proposers.ngram_cache import NgramCacheProposer
from ..proposers.prediction import PredictionProposer
from .config import SchedulerConfig
from .plan import NOT_FINITE, RoundsPlan, RoundsVerdict, RowGrant, RowRounds, RowSaid, Settled
from .request import Request
from .runner import slot_of
from .sampler import Sampler

MAX_FAILURES_IN_A_ROW = 3

logger = logging.getLogger("foretoken.engine")


@record
class Lookups:
    """Who guesses in rounds: indices in the proposer set, -1 = nobody."""

    prediction: int
    text: int
    table: int
    ngram: NgramConfig | None  # how the text is looked in, ...
    ngram_table: NgramTable | None  # ... and the table; None = nobody does
    draft: int = -1
    drafting: LearnedProposer | None = None  # the same, if its network can guess in rounds as it does

    @staticmethod
    def among(proposers: Sequence[Proposer]) -> Lookups:
        """The first of each kind. A drafter only where nobody else guesses, predictions aside: rounds have nobody to fall back on."""
        prediction = text = table = -1
        ngram, ngram_table = None, None
        for i, proposer in enumerate(proposers):
            match proposer:
                case PredictionProposer() if prediction < 0:
                    prediction = i
                case NgramProposer(lookup=NgramConfig() as config) if text < 0:
                    text, ngram = i, config
                case NgramCacheProposer(table=found) if table < 0:
                    table, ngram_table = i, found
                case _:
                    pass
        match [(i, proposer) for i, proposer in enumerate(proposers) if i != prediction]:
            case [(draft, LearnedProposer() as drafting)] if drafting.drafter is not None:
                return Lookups(prediction, text, table, ngram, ngram_table, draft, drafting)
            case _:
                return Lookups(prediction, text, table, ngram, ngram_table)

    def knows(self, proposer: int) -> bool:
        """Whether rounds can do what that one does."""
        return proposer in (self.prediction, self.text, self.table)

    def place(self, proposer: int) -> Literal["text", "table"] | None:
        """Where that one looks, aside from predictions."""
        return "text" if proposer == self.text else "table" if proposer == self.table else None


class Rounds:
    """Of one engine. `interrupt` may be called by any thread, everything else by the engine's."""

    def __init__(
        self,
        executor: RoundsExecutor,
        kv: KVTensors,
        sampler: Sampler,
        vocab_size: int,
        limits: SchedulerConfig,
        lookups: Lookups,
        works: Callable[[int], bool] = lambda proposer: True,
    ) -> None:
        """works: whether a proposer was not switched off."""
        self.lookups = lookups
        self._works = works
        self._executor = executor
        self._kv = kv
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._limits = limits
        self._source = {
            FROM_PREDICTION: lookups.prediction, FROM_TEXT: lookups.text, FROM_TABLE: lookups.table, FROM_DRAFT: lookups.draft,
        }
        self._rows: dict[str, _Row] = {}
        self._num_failures = 0  # in a row
        self._interrupt = array("i", [0])

    def takes(self, request: Request) -> bool:
        """Whether a decoding row may be in a step of rounds: each of its tokens depends on logits and noise only."""
        params = request.params
        return (
            self._num_failures < MAX_FAILURES_IN_A_ROW
            and params.logprobs is None
            and not params.is_penalised
            and not params.logit_bias
            and params.allowed_token_ids is None
            and request.grammar is None
            and request.thinking is None
            and not request.bad_word_ids
            and not params.min_tokens
        )

    def drafts(self, row: RowGrant) -> bool:
        """Whether the row's guesses can be made within the call: a drafter's that has read nearly all, where no prediction goes first."""
        request, drafting = row.request, self.lookups.drafting
        if drafting is None or row.assigned != self.lookups.draft or request.prediction or not self._works(row.assigned):
            return False
        return drafting.num_read(request.request_id, len(request.token_ids)) is not None

    def interrupt(self) -> None:
        """Let the call that is running, or the next one, end after its round: somebody waits."""
        self._interrupt[0] = 1

    def resume(self) -> None:
        """Who waited until now is about to be served."""
        self._interrupt[0] = 0

    def failed(self) -> None:
        """A call raised. Where that goes on there are no more."""
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES_IN_A_ROW:
            logger.error("steps in rounds are off: %d calls in a row failed", MAX_FAILURES_IN_A_ROW)

    def run(self, plan: RoundsPlan) -> RoundsVerdict:
        """Waits for the result. Raises what the executor raises; no request has changed then."""
        rows = [self._row(row) for row in plan.rows]
        drafting = self.lookups.drafting if plan.num_drafted else None
        packed = bytearray().join([row.begin(planned, drafting) for row, planned in zip(rows, plan.rows, strict=True)])
        most_tokens = min(self._limits.max_num_batched_tokens, len(rows) + self._limits.max_draft_tokens_per_step)
        limits = RoundsLimits(plan.most_rounds, most_tokens, plan.most_seconds, plan.ends_with_row, plan.prices)
        drafter = None if drafting is None else drafting.drafter
        output = self._executor.run_rounds(packed, self._kv, limits, self._interrupt, self.lookups.ngram_table, drafter)
        self._num_failures = 0
        drafts: list[list[Settled]] = [[] for _ in rows]
        from_guesses = [0] * len(rows)  # tokens that were guessed, the one aside that ended the row: its pass brought none of its own
        for draft in output.drafts:
            from_guesses[draft.row] += draft.emitted
            drafts[draft.row].append(Settled(self._source[draft.source], draft.first, draft.drafted, draft.accepted, draft.expected))
        said: list[RowSaid] = []
        for row, mine, guessed, (num_new, _, has_failed) in zip(rows, drafts, from_guesses, answers(packed), strict=True):
            # What failed behind tokens that are fine fails again, alone, in the next step.
            error = NOT_FINITE if has_failed and not num_new else None
            if mine and mine[-1].first + mine[-1].accepted >= num_new:
                guessed -= 1
            said.append(RowSaid(row.take(num_new), mine, error, max(1, num_new - guessed)))
        for row, where in zip(rows, cursors(packed) if any([row.prediction for row in rows]) else (), strict=False):
            row.cursor = where
        tokens, seconds = output.tokens.tolist(), output.seconds.tolist()
        if drafting is None:
            return RoundsVerdict(said, tokens, seconds)
        return RoundsVerdict(said, tokens, seconds, output.draft_seconds.tolist(), self._read(plan, said, nums_read(packed), drafting))

    def _read(
        self, plan: RoundsPlan, said: Sequence[RowSaid], read: Sequence[int], drafting: LearnedProposer
    ) -> dict[tuple[int, str], int]:
        """Tell the drafter how far its network has read each row; the same as `Draft.filled` has it."""
        filled: dict[tuple[int, str], int] = {}
        for row, its, num_read in zip(plan.rows, said, read, strict=True):
            if row.lookups.draft_k:
                drafting.went_on(row.request.request_id, num_read)
                filled[self.lookups.draft, row.request.request_id] = min(num_read, row.num_computed + len(its.token_ids))
        return filled

    def forget(self, request_id: str) -> None:
        """Finished or aborted. Unknown ids are fine."""
        self._rows.pop(request_id, None)

    def _row(self, planned: RowRounds) -> _Row:
        request = planned.request
        row = self._rows.get(request.request_id)
        if row is None or row.request is not request:
            ngram, sampling = self.lookups.ngram or NgramConfig(), self._sampler.packed(request, self._vocab_size)
            row = self._rows[request.request_id] = _Row(planned, ngram, sampling)
        return row


class _Row:
    """A request as the native side sees it, and the memory that its addresses point to."""

    __slots__ = ("request", "prediction", "cursor", "_ngram", "_text", "_stops", "_sampling")

    def __init__(self, planned: RowRounds, ngram: NgramConfig, sampling: bytes) -> None:
        """sampling: how its tokens are chosen."""
        request = self.request = planned.request
        self.prediction = array("i", request.prediction)
        self.cursor: tuple[int, int, int] = (0, 0, request.num_prompt_tokens)  # cursor, is_lost, num_followed
        self._ngram, self._sampling = ngram, sampling
        self._text = GrowingText(len(request.token_ids) + planned.most_new)
        params = request.params
        self._stops = array("i", {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)})

    def begin(self, planned: RowRounds, drafting: LearnedProposer | None) -> bytes:
        """Packed for a call."""
        request, text, asked, ngram = self.request, self._text, planned.lookups, self._ngram
        text.follow(request.token_ids)
        num_read = drafting.num_read(request.request_id, text.num_tokens) if drafting is not None and asked.draft_k else 0
        assert num_read is not None, "a row that is far behind was to be guessed for"
        table, num_blocks = planned.block_table.buffer_info()
        stops, num_stops = self._stops.buffer_info()
        prediction, num_predicted = self.prediction.buffer_info()
        return RoundsRow(
            text.address, table, prediction, stops,
            request.num_prompt_tokens, text.num_tokens, planned.most_new, num_blocks, planned.num_places,
            num_stops, num_predicted, *self.cursor, asked.predicted_k, asked.text_k,
            ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.match == "latest",
            asked.table_k, asked.text_gain, asked.trust, asked.draft_k, slot_of(request), num_read,
        ).packed(self._sampling)

    def take(self, num_new: int) -> list[int]:
        """The tokens that have come."""
        return self._text.taken(num_new)
