"""Steps in rounds: where every row decodes and guesses are only looked up, several passes are one native call.

Owns the form in which the native side has each request's text. What is looked up and what is kept is what the proposers and the
verifier would do (kernels/rounds.py); how many rounds, and how much each row may guess, is decided elsewhere.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..kernels.layout import KVTensors
from ..kernels.record import record
from ..kernels.rounds import FROM_PREDICTION, FROM_TEXT, ROW, RoundsExecutor
from ..proposers.config import NgramConfig
from .plan import RoundsPlan, RoundsVerdict, RowRounds, RowSaid, Settled
from .request import Request
from .sampler import Sampler

_NOT_FINITE = "the model's scores for this request were not finite"


@record
class Lookups:
    """Who guesses in rounds: indices in the proposer set, -1 = nobody."""

    prediction: int
    text: int
    ngram: NgramConfig  # how the text is looked in


class Rounds:
    """Of one engine. `interrupt` may be called by any thread, everything else by the engine's."""

    def __init__(
        self,
        executor: RoundsExecutor,
        kv: KVTensors,
        sampler: Sampler,
        vocab_size: int,
        max_model_len: int,
        most_tokens: int,
        lookups: Lookups,
    ) -> None:
        """most_tokens: of one pass."""
        self.lookups = lookups
        self._executor = executor
        self._kv = kv
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._most_tokens = most_tokens
        self._source = {FROM_PREDICTION: lookups.prediction, FROM_TEXT: lookups.text}
        self._rows: dict[str, _Row] = {}
        self._interrupt = np.zeros(1, np.int32)

    def takes(self, request: Request) -> bool:
        """Whether a decoding row may be in a step of rounds: each of its tokens depends on logits and noise only, and there is room."""
        params = request.params
        return (
            params.logprobs is None
            and not params.is_penalised
            and not params.logit_bias
            and params.allowed_token_ids is None
            and request.grammar is None
            and request.thinking is None
            and not request.bad_word_ids
            and not params.min_tokens
            and request.num_output_tokens < request.max_tokens
            and len(request.token_ids) < self._max_model_len
        )

    def most_new(self, request: Request) -> int:
        """Tokens that may still come."""
        return min(request.max_tokens - request.num_output_tokens, self._max_model_len - len(request.token_ids))

    def interrupt(self) -> None:
        """Let the call that is running, or the next one, end after its round: somebody waits."""
        self._interrupt[0] = 1

    def run(self, plan: RoundsPlan) -> RoundsVerdict:
        """Waits for the result. Raises what the executor raises; no request has changed then."""
        rows = [self._row(row) for row in plan.rows]
        packed = np.concatenate([row.packed for row in rows]) if len(rows) > 1 else rows[0].packed
        output = self._executor.run_rounds(packed, self._kv, plan.most_rounds, self._most_tokens, self._interrupt)
        self._interrupt[0] = 0
        drafts: list[list[Settled]] = [[] for _ in rows]
        for row, source, first, drafted, accepted, _ in output.drafts.tolist():
            drafts[row].append(Settled(self._source[source], first, drafted, accepted))
        said: list[RowSaid] = []
        for row, mine, num_new, has_failed in zip(rows, drafts, packed["num_new"].tolist(), packed["has_failed"].tolist(), strict=True):
            # What failed behind tokens that are fine fails again, alone, in the next step.
            error = _NOT_FINITE if has_failed and not num_new else None
            said.append(RowSaid(row.take(num_new), mine, error))
        if len(rows) > 1:
            for i, row in enumerate(rows):
                row.packed[0] = packed[i]
        return RoundsVerdict(said, output.tokens.tolist(), output.seconds.tolist())

    def forget(self, request_id: str) -> None:
        """Finished or aborted. Unknown ids are fine."""
        self._rows.pop(request_id, None)

    def _row(self, row: RowRounds) -> _Row:
        request = row.request
        known = self._rows.get(request.request_id)
        if known is None or known.request is not request:
            known = self._rows[request.request_id] = _Row.of(
                request, self.most_new(request), self.lookups.ngram, self._sampler.packed(request, self._vocab_size)
            )
        known.begin(row, self.most_new(request))
        return known


@dataclass(slots=True)
class _Row:
    """A request as the native side sees it, and the memory that its addresses point to."""

    request: Request
    packed: NDArray[np.void]  # [1] of ROW
    text: NDArray[np.int32]  # as long as the request may become
    num_known: int  # tokens in it that are the request's
    kept: tuple[array[int], ...]

    @classmethod
    def of(cls, request: Request, most_new: int, ngram: NgramConfig, sampling: bytes) -> _Row:
        params = request.params
        stops = array("i", {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)})
        prediction = array("i", request.prediction)
        text = np.empty(len(request.token_ids) + most_new, np.int32)
        packed = np.zeros(1, ROW)
        packed["sampling"] = np.frombuffer(sampling, ROW["sampling"])
        packed["text"] = text.ctypes.data
        packed["stops"], packed["num_stops"] = stops.buffer_info()
        packed["prediction"], packed["num_predicted"] = prediction.buffer_info()
        packed["num_prompt"] = packed["num_followed"] = request.num_prompt_tokens
        packed["lookup_min"], packed["lookup_max"] = ngram.prompt_lookup_min, ngram.prompt_lookup_max
        packed["latest"] = ngram.match == "latest"
        return cls(request, packed, text, 0, (stops, prediction))

    def begin(self, row: RowRounds, most_new: int) -> None:
        token_ids, packed = self.request.token_ids, self.packed
        known = min(self.num_known, len(token_ids))
        if known < len(token_ids):
            self.text[known : len(token_ids)] = token_ids[known:]
        self.num_known = len(token_ids)
        address, num_blocks = row.block_table.buffer_info()
        packed["table"], packed["num_blocks"], packed["num_places"] = address, num_blocks, row.num_places
        packed["num_known"], packed["most_new"], packed["num_new"] = len(token_ids), most_new, 0
        packed["has_ended"] = packed["has_failed"] = 0
        packed["predicted_k"], packed["lookup_k"] = row.predicted_k, row.lookup_k

    def take(self, num_new: int) -> list[int]:
        """The tokens that have come."""
        self.num_known += num_new
        return self.text[self.num_known - num_new : self.num_known].tolist()
