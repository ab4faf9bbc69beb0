"""Runs the target on a GPU without letting it wait: the next step is handed over before anybody has seen this one's result.

A step that the next one can be told from (every row decodes and nobody guesses) is followed at once by a pass over the same rows
one token on; its tokens are chosen on the device, which nobody waits for. When the core then plans just that step, its result is on the
way already; when it plans another one (a request came, ended or was stopped), what was begun is dropped. It wrote uncommitted
places only, and everything that comes later on the device comes after it. So nothing else in the engine knows of this.

Any other step is finished on the device: choices at all nodes and the walk along every draft are handed over behind the pass, and
one copy brings what each row emits. The host waits once, and not for logits. What the rows emit is known on the device before: a
drafter may go on from there by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import torch
from torch import Tensor

from ..kernels.batch_lists import BatchLists
from ..kernels.layout import ForwardOutput, KVTensors, RaggedBatch
from ..kernels.matching import Guesses
from ..kernels.started import Fetched, Started, StartingExecutor
from ..kernels.upload import upload
from .errors import InvalidRequest
from .plan import PlanRow, StepPlan
from .request import Request
from .runner import Forward, Runner, batch_lists
from .verifier import Verifier


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a pass has what it says of one row."""

    node: int  # among its argmax
    logits_row: int  # -1: the argmax is the row's choice


@dataclass(frozen=True, slots=True)
class _Expected:
    """One row of the step that was begun."""

    request: Request
    index: int  # of the plan's row that it comes from
    place: int
    block_table: array[int]
    draws: bool  # whether its choice is made from whole logits

    def is_in(self, row: PlanRow, token: int, block_size: int) -> bool:
        """Whether the plan's row is the one that was begun, with this token."""
        return (
            row.request is self.request
            and (row.num_computed, row.num_scheduled) == (self.place, 1)
            and row.samples
            and not row.draft_token_ids
            and row.request.token_ids[self.place] == token
            and array("i", row.block_table[: self.place // block_size + 1]) == self.block_table
        )


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that was begun before it was planned."""

    rows: dict[str, tuple[_Place, _Expected]]
    started: Started
    tokens: Fetched  # what its rows were fed
    chosen: Fetched | None  # what the step before it chose from its logits


class OverlappedRunner(Runner):
    """A `Runner` whose steps overlap. What it computes is what the runner would."""

    lookahead = 1  # places to keep reserved behind each row, so that the next step's are known

    def __init__(
        self,
        executor: StartingExecutor,
        kv: KVTensors,
        hidden: tuple[int, ...],
        wants_full_logits: Callable[[Request], bool],
        max_model_len: int,
    ) -> None:
        super().__init__(executor, kv, hidden, wants_full_logits)
        self._starting = executor
        self._max_model_len = max_model_len
        self._verifier: Verifier | None = None
        self._ahead: _Ahead | None = None
        self._was_steady = False  # the step before: one alone says little about the next
        self.num_ahead = 0  # steps that were begun before they were planned
        self.num_used = 0  # those that were then planned
        self.num_matched = 0  # steps whose drafts were walked on the device

    @property
    def has_begun(self) -> bool:
        return self._ahead is not None

    def use_verifier(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def start(self, plan: StepPlan) -> Forward:
        ahead, self._ahead = self._ahead, None
        taken = None if ahead is None else self._taken(ahead, plan)
        if ahead is not None and taken is not None:
            self.num_used += 1
            started, places = ahead.started, taken
        else:
            taken = None
            started = self._starting.start(batch_lists(plan, self._wants_full_logits).batch(), self.kv, self._hidden)
            places = self._places(plan)
        following = self._ahead = self._begin(plan, started, places)
        if following is None and taken is None and (answer := self._match(plan, started)) is not None:
            self.num_matched += 1
            logits, fetched = started.logits if plan.scored else None, self._starting.fetch(answer)

            def matched() -> ForwardOutput:
                return ForwardOutput(started.argmax, started.top, logits, started.hidden, matched=fetched.get())

            # Scores of prompts are brought to the host later on: behind what somebody else begins now they would have to wait.
            return Forward(matched) if plan.scored else Forward(matched, answer, started.hidden)
        # What was begun writes over the scores, and all choices that are made from them are made.
        wait = started.finish if following is None else started.best
        chosen = None if following is None else following.chosen

        def finish() -> ForwardOutput:
            output = wait() if taken is None else _rows(wait(), taken)
            return output if chosen is None else ForwardOutput(output.argmax, output.top, None, output.hidden, chosen.get())

        return Forward(finish)

    def final_states(self, plan: StepPlan) -> Tensor:
        self._ahead = None  # the step behind it would read its tokens where this pass writes its own
        return super().final_states(plan)

    def _taken(self, ahead: _Ahead, plan: StepPlan) -> list[_Place] | None:
        """Where the pass that was begun has the plan's rows; None if the plan has others."""
        if plan.scored:
            return None
        tokens = ahead.tokens.get()  # long here: the step before has been committed
        taken: list[_Place] = []
        for row in plan.rows:
            found = ahead.rows.get(row.request.request_id)
            if found is None:
                return None
            place, expected = found
            if expected.draws != self._wants_full_logits(row.request):
                return None
            if not expected.is_in(row, int(tokens[place.node]), plan.block_size):
                return None
            taken.append(place)
        return taken

    def _places(self, plan: StepPlan) -> list[_Place]:
        """Of the rows of a plan that was started as it is, if they all sample and nobody guesses."""
        ranks = count()
        return [_Place(i, next(ranks) if self._wants_full_logits(row.request) else -1) for i, row in enumerate(plan.rows)]

    def _begin(self, plan: StepPlan, started: Started, places: Sequence[_Place]) -> _Ahead | None:
        """Hand over the step behind this one, if it can be told what that will be. places: of the plan's rows in `started`."""
        was_steady, self._was_steady = self._was_steady, plan.is_steady
        expected = self._expected(plan) if was_steady else []
        if not expected:
            return None
        drawing = [i for i, place in enumerate(places) if place.logits_row >= 0]
        chosen = None
        if drawing:
            chosen = self._choose(started, [plan.rows[i] for i in drawing], [places[i].node for i in drawing])
            if chosen is None:
                return None
        tokens = _next_tokens(started.argmax, places, chosen, drawing, expected)
        fed = self._starting.fetch(tokens)
        known = None if chosen is None else self._starting.fetch(chosen)
        self.num_ahead += 1
        started.send()
        following = self._starting.start(_decode_batch(expected, plan.block_size), self.kv, self._hidden, tokens=tokens)
        following.send()
        ranks = count()
        rows = {row.request.request_id: (_Place(i, next(ranks) if row.draws else -1), row) for i, row in enumerate(expected)}
        return _Ahead(rows, following, fed, known)

    def _match(self, plan: StepPlan, started: Started) -> Tensor | None:
        """Hand over the rest of a step that was started as it is. What its rows emit, on the device; None if nothing is left of it, or
        only the verifier can do it."""
        rows = [row for row in plan.rows if row.samples]
        chooses = [self._wants_full_logits(row.request) for row in rows]
        if self._verifier is None or not self._verifier.only_matches or not (any(chooses) or any(row.draft_token_ids for row in rows)):
            return None
        if any(row.request.params.logprobs is not None for row in rows):
            return None
        guesses = Guesses.of([(row.draft_token_ids, row.parents, own) for row, own in zip(rows, chooses, strict=True)])
        chosen = None
        if any(chooses):
            starts = accumulate((1 + len(row.draft_token_ids) for row in rows), initial=0)
            drawing = [(row, start) for row, start, own in zip(rows, starts, chooses, strict=False) if own]
            chosen = self._choose(started, [row for row, _ in drawing], [start for _, start in drawing])
            if chosen is None:
                return None
        return started.match(guesses, chosen)

    def _choose(self, started: Started, rows: list[PlanRow], first_nodes: list[int]) -> Tensor | None:
        """[N] on the device, what the nodes of these rows choose from their scores; None if that has to be left to the verifier."""
        if self._verifier is None or started.scores is None:
            return None
        sampler = self._verifier.sampler
        try:
            for row in rows:
                sampler.prepare(row.request, started.scores.shape[1])
        except InvalidRequest:
            return None
        return sampler.choose_ahead(started.scores, rows, first_nodes)

    def _expected(self, plan: StepPlan) -> list[_Expected]:
        """The rows of the next step; none if that is open."""
        if not plan.is_steady or plan.scored:
            return []
        rows: list[_Expected] = []
        for index, row in enumerate(plan.rows):
            request, place = row.request, row.num_computed + row.num_scheduled
            if not row.samples or row.draft_token_ids or request.params.logprobs is not None:
                return []
            if request.num_output_tokens + 1 >= request.max_tokens or place + 1 >= self._max_model_len:
                continue  # this step is its last
            blocks = place // plan.block_size + 1
            if blocks > len(row.block_table):
                return []
            table = array("i", row.block_table[:blocks])
            rows.append(_Expected(request, index, place, table, self._wants_full_logits(request)))
        return rows


def _next_tokens(
    argmax: Tensor, places: Sequence[_Place], chosen: Tensor | None, drawing: list[int], expected: list[_Expected]
) -> Tensor:
    """[n] on the device: what each expected row is fed. chosen: of the plan's rows `drawing`."""
    nodes = [places[row.index].node for row in expected]
    if chosen is None:
        return argmax[: len(nodes)] if nodes == list(range(len(nodes))) else argmax[_index(nodes, argmax)]
    whole = argmax[_index([place.node for place in places], argmax)].clone()
    # -1 stands for scores that are not finite: the row fails, but must be fed something until then
    whole[_index(drawing, argmax)] = chosen.clamp(min=0)
    return whole[_index([row.index for row in expected], argmax)]


def _decode_batch(rows: list[_Expected], block_size: int) -> RaggedBatch:
    """One token for each row, which the device fills in."""
    count = len(rows)
    every = list(range(count))
    return BatchLists(
        block_size,
        token_ids=[0] * count,
        positions=[row.place for row in rows],
        slots=[row.block_table[-1] * block_size + row.place % block_size for row in rows],
        tree_mask=[0] * count,
        logits_indices=every,
        full_logits=[i for i, row in enumerate(rows) if row.draws],
        query_start_loc=[*every, count],
        seq_lens=[row.place + 1 for row in rows],
        num_causal=[1] * count,
        tables=[row.block_table for row in rows],
    ).batch()


def _rows(output: ForwardOutput, taken: list[_Place]) -> ForwardOutput:
    """These rows of a pass of one token each."""
    nodes = [place.node for place in taken]
    if nodes == list(range(len(output.argmax))):
        return output
    index = torch.tensor(nodes, dtype=torch.int64)
    states = {boundary: state[_index(nodes, state)] for boundary, state in output.hidden.items()}
    drawn = [place.logits_row for place in taken if place.logits_row >= 0]
    logits = output.logits[_index(drawn, output.logits)] if output.logits is not None and drawn else None
    return ForwardOutput(output.argmax[index], output.top[index], logits, states)


def _index(values: list[int], like: Tensor) -> Tensor:
    """On the device of another tensor, without waiting for it."""
    return upload(torch.tensor(values, dtype=torch.int64), like.device)
