"""The hand-overs of one step: who runs (Grants), what runs (StepPlan), what the target said (Verdict)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ..kernels.layout import ForwardOutput
from ..kernels.record import record
from ..kernels.state_slots import RowState
from ..proposers.base import FORCED, DraftContext, DraftRow, Draw, Ended, Feedback, RowUnderWay, UnderWay, VerifiedNodes
from .prompt_logprobs import Scores
from .request import Request, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


SURE_OF = 3  # guesses in a row that a table's chain seldom goes beyond: so many places are held ready


@record
class RowGrant:
    """One row of a step: it computes known tokens num_computed : num_computed + num_scheduled and may guess `ceiling` more.

    Prefill is a row with many scheduled tokens, decode a row with one.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    ceiling: int  # most draft tokens (tree nodes)
    assigned: int  # proposer to ask first, -1 = none
    block_table: array[int]  # live view
    num_filled: tuple[int, ...]  # as in DraftRow
    forced: Sequence[int] = ()  # next tokens that a grammar leaves no choice about, at most the ceiling

    @property
    def samples(self) -> bool:
        """Whether the row reaches its last known token and so gets a new one."""
        return self.num_computed + self.num_scheduled == len(self.request.token_ids)


@record
class RowLookups:
    """Most guesses of a row's round: from its prediction, else from the text or the table: from whom more is expected. Or a draft."""

    predicted_k: int = 0
    text_k: int = 0
    table_k: int = 0
    text_gain: float = 0.0  # tokens that a guess from the text brings beyond its price
    trust: float = 1.0  # of what the table expects to be accepted, the share that is
    draft_k: int = 0  # from a draft model; then none from elsewhere

    @property
    def k(self) -> int:
        """Guesses that a round has at most, as a rule: the table is seldom sure of more."""
        return max(self.predicted_k, self.text_k, min(self.table_k, SURE_OF), self.draft_k)


@record
class RoundsAsked:
    """What a step in rounds may do."""

    most_rounds: int
    most_seconds: float  # after which no further round begins
    lookups: list[RowLookups]  # of each row
    prices: Sequence[float] = ()  # of 0, 1, ... guesses of each row: tokens of one row that they must bring. As far as the table guesses


@record
class RowRounds:
    """One row of a step in rounds: it decodes, and what it guesses is looked up or drafted within the call."""

    request: Request
    num_computed: int
    num_places: int  # that the table holds
    most_new: int  # tokens that may still come, at least 1
    block_table: array[int]  # live view
    lookups: RowLookups


@record
class RoundsPlan:
    """Several passes over the same rows, without anybody in between."""

    rows: list[RowRounds]
    most_rounds: int
    most_seconds: float
    ends_with_row: bool  # somebody waits for its seat
    prices: Sequence[float] = ()  # as in RoundsAsked

    @property
    def num_drafted(self) -> int:
        """Rows that a draft model guesses for."""
        return sum([row.lookups.draft_k > 0 for row in self.rows])


@record
class Grants:
    """What the scheduler allows in a step. Slots for every scheduled token and every ceiling are reserved."""

    rows: list[RowGrant]
    max_ingest_tokens: int  # as in DraftContext
    block_size: int
    is_steady: bool = False  # the next step is likely the same rows: nobody waits who could join them, and no guesses were left for it
    rounds: RoundsPlan | None = None  # the step may be this instead

    @property
    def may_draft(self) -> bool:
        """Whether proposers have anything to do: a row to guess for, or context to read."""
        return self.max_ingest_tokens > 0 or any(g.ceiling for g in self.rows)

    def draft_context(self) -> DraftContext:
        rows = [
            DraftRow(
                request_id=g.request.request_id,
                token_ids=g.request.token_ids,
                num_prompt_tokens=g.request.num_prompt_tokens,
                computed_after=g.num_computed + g.num_scheduled,
                ceiling=g.ceiling,
                assigned=g.assigned,
                block_table=g.block_table,
                num_filled=g.num_filled,
                draw=_draw(g.request),
                prediction=g.request.prediction,
                forced=g.forced,
                corpus_id=g.request.corpus_id,
                num_computed=g.num_computed,
                adapter=slot_of(g.request),
            )
            for g in self.rows
        ]
        return DraftContext(rows, self.max_ingest_tokens, self.block_size)


@record
class PlanRow:
    """One row as it runs: its scheduled known tokens, then its draft. A row that does not sample has no draft.

    Node numbering, used by logits and verification: node 0 is the last known token, node i + 1 is draft token i.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    draft_token_ids: list[int]
    parents: list[int]  # within the draft, -1 = the last known token
    source: list[int]
    block_table: Sequence[int]
    samples: bool
    state: RowState | None = None  # of a recurrent target
    is_asked: bool = False  # it may have guesses, and in the next step probably too

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def num_tokens(self) -> int:
        return self.num_scheduled + len(self.draft_token_ids)

    def settled(self, num_accepted: int) -> Settled:
        """Its draft, of which so much stood. Nothing but forced tokens stands before a proposer's."""
        return Settled(self.source[-1], 0, len(self.source), num_accepted, forced=self.source.count(FORCED))

    def said(self, verdict: RowVerdict) -> RowSaid:
        """What the step brought, if it was no error."""
        if not self.draft_token_ids:
            return RowSaid(verdict.token_ids, [], logprobs=verdict.logprobs)
        nodes = verdict.accepted
        whose, accepted = [self.source[node] for node in nodes], sum(1 << node for node in nodes)
        return RowSaid(verdict.token_ids, [self.settled(len(nodes))], logprobs=verdict.logprobs, whose=whose, accepted=accepted)


@record
class ScoredPart:
    """Tokens of a prompt that one pass scores: each by the logits of the token before it."""

    request: Request
    row: int  # of the plan
    offset: int  # of the first such logits among the row's tokens
    token_ids: Sequence[int]  # [n]


def scored_parts(rows: Sequence[PlanRow]) -> list[ScoredPart]:
    """What these rows compute of prompts that want scores and lack them: a prompt that is computed anew was scored before."""
    parts: list[ScoredPart] = []
    for index, row in enumerate(rows):
        said = row.request.prompt_logprobs
        if said is None or said.complete:
            continue
        assert row.num_computed <= said.num_scored, "a part of the prompt was passed over"
        known = row.num_computed + row.num_scheduled  # their last one scores the next token, if that is the prompt's
        token_ids = said.token_ids[said.num_scored : known]
        if token_ids:
            parts.append(ScoredPart(row.request, index, said.num_scored - row.num_computed, token_ids))
    return parts


@record
class StepPlan:
    """All rows of a step. Its tokens are flat, row by row: scheduled tokens, then draft tokens.

    So are the nodes that logits are wanted of: 1 + len(draft) of each row that samples; behind them, in order, those that score prompts.
    """

    rows: list[PlanRow]
    block_size: int
    draft_probs: Tensor | None = None  # [sum of draft lengths, V], p/q rules only
    filled: Mapping[tuple[int, str], int] = field(default_factory=dict)  # as in Draft
    scored: Sequence[ScoredPart] = ()
    is_steady: bool = False  # as in Grants

    @property
    def num_scored(self) -> int:
        return sum(len(part.token_ids) for part in self.scored)

    def under_way(self, answer: Tensor, hidden: Mapping[int, Tensor]) -> UnderWay:
        """For those who go on from the step before it is committed: its rows that get tokens, but for those with trees. answer, hidden:
        on the device, of this plan's pass."""
        rows: list[RowUnderWay] = []
        num_answers = first = 0
        for row in self.rows:
            if row.samples:
                if row.is_chain:
                    request, draft, node = row.request, row.draft_token_ids, first + row.num_scheduled - 1
                    known = request.request_id, request.token_ids, row.block_table, _draw(request)
                    rows.append(RowUnderWay(*known, draft, num_answers, node))
                num_answers += 1
            first += row.num_tokens
        return UnderWay(rows, answer, hidden, self.block_size)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


NOT_FINITE = "the model's scores for this request were not finite"


@record
class RowVerdict:
    """What the target said about one row. Rows that do not sample have no tokens."""

    accepted: list[int]  # the accepted path: indices into the row's draft, root to leaf
    token_ids: list[int]  # the accepted tokens, then one more of the target's own
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    error: str | None = None  # the row's logits were not finite, or its parameters broke
    error_code: str = "numerical_error"  # of the error, as in RequestFailed


@record
class Verdict:
    """One verdict per row of the plan, in order."""

    rows: list[RowVerdict]
    scores: Sequence[Scores] = ()  # one for each of the plan's scored parts

    def feedback(self, plan: StepPlan, target: ForwardOutput, hears_nodes: bool = False) -> Feedback:
        """Call after the commit: it reads what the rows have become. hears_nodes: as of `Needs.argmax`."""
        starts = [0]
        for row in plan.rows:
            starts.append(starts[-1] + row.num_tokens)
        requests = [row.request for row in plan.rows]
        return Feedback(
            request_ids=[request.request_id for request in requests],
            num_committed=[request.num_computed_tokens for request in requests],
            num_drafted=[len(row.draft_token_ids) for row in plan.rows],
            accepted=[verdict.accepted for verdict in self.rows],
            emitted=[row.request.token_ids[row.num_computed + row.num_scheduled :] if row.samples else [] for row in plan.rows],
            finished=[request.finish_reason is not None for request in requests],
            hidden=target.hidden,
            query_start_loc=starts,
            num_scheduled=[row.num_scheduled for row in plan.rows],
            token_ids=[request.token_ids for request in requests],
            ended=_ended(requests),
            nodes=self._nodes(plan, target) if hears_nodes else None,
        )

    @staticmethod
    def _nodes(plan: StepPlan, target: ForwardOutput) -> VerifiedNodes:
        firsts: list[int] = []
        first = 0
        for row in plan.rows:
            firsts.append(first if row.samples else -1)
            first += (1 + len(row.draft_token_ids)) * row.samples
        return VerifiedNodes([row.draft_token_ids for row in plan.rows], [row.parents for row in plan.rows], firsts, target.argmax)


@record
class Settled:
    """A draft of a row, and how much of it stood."""

    proposer: int  # FORCED if all of it is
    first: int  # tokens of the row that came before it in the same step
    drafted: int
    accepted: int
    expected: float = 0.0  # accepted ones, by a table
    forced: int = 0  # its first tokens that a form leaves no choice about: they are not the proposer's


@record
class RowSaid:
    """What a step, or its rounds, brought to one row."""

    token_ids: list[int]
    drafts: list[Settled]
    error: str | None = None  # its logits were not finite, and nothing came
    num_passes: int = 1
    logprobs: list[TokenLogprobs] | None = None  # as in RowVerdict
    whose: Sequence[int] | None = None  # sources of the accepted tokens, where one draft has several
    accepted: int = 0  # bits of that draft's nodes

    def sources(self, num_tokens: int) -> list[int]:
        """[num_tokens] who guessed each of the first tokens, -1 = the target's own."""
        if self.whose is not None:
            return [*self.whose[:num_tokens], *[-1] * (num_tokens - len(self.whose))]
        whose = [-1] * num_tokens
        for draft in self.drafts:
            for i in range(draft.first, min(draft.first + draft.accepted, num_tokens)):
                whose[i] = draft.proposer
        return whose


@record
class RoundsVerdict:
    """One for each row of the plan, in order; and of each round the tokens of its pass and its seconds."""

    rows: list[RowSaid]
    tokens: list[int]
    seconds: list[float]
    draft_seconds: Sequence[float] = ()  # of a draft model before each pass; empty = nobody was asked
    filled: Mapping[tuple[int, str], int] = field(default_factory=dict)  # as in Draft

    def feedback(self, plan: RoundsPlan) -> Feedback:
        """Call after the commit. As of rows that nobody guessed for: those who did learn nothing from it."""
        requests = [row.request for row in plan.rows]
        return Feedback(
            request_ids=[request.request_id for request in requests],
            num_committed=[request.num_computed_tokens for request in requests],
            num_drafted=[0] * len(requests),
            accepted=[[] for _ in requests],
            emitted=[row.request.token_ids[row.num_computed + 1 :] for row in plan.rows],
            finished=[request.finish_reason is not None for request in requests],
            hidden={},
            query_start_loc=list(range(len(requests) + 1)),
            num_scheduled=[1] * len(requests),
            token_ids=[request.token_ids for request in requests],
            ended=_ended(requests),
        )


def slot_of(request: Request) -> int:
    """Of its adapter, 0 if it has none."""
    return 0 if request.adapter is None else request.adapter.slot


def _draw(request: Request) -> Draw:
    return Draw(float(request.params.temperature), request.seed, request.choice)


def _ended(requests: Sequence[Request]) -> list[Ended]:
    """Of those that said all they had to."""
    return [
        Ended(request.request_id, request.corpus_id, request.token_ids[request.num_prompt_tokens :])
        for request in requests
        if request.finish_reason in ("stop", "length")
    ]
