"""Runs the target on a GPU without letting it wait: the next step is handed over before anybody has seen this one's result.

Every step is finished on the device: choices at all nodes and the walk along every draft are handed over behind the pass, and one copy
brings what each row emits. The host waits once, and not for logits. What the rows emit is known on the device before, so a drafter goes
on from there by itself, and behind its guesses goes the target's next pass: the same rows, each with its newest token and the guesses
that have just been made for it. All that the host does about the step it does meanwhile.

When the core then plans just that step, or less of it (a row ended, or fewer guesses are wanted), its result is on the way already;
when it plans another one, what was begun is dropped. It wrote uncommitted places only, and everything that comes later on the device
comes after it. So nothing else in the engine knows of this, but that newcomers wait for a step that has begun: their prompts could
only be computed behind it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kernels.following import Follower, Followers, following
from ..kernels.layout import ForwardOutput, KVTensors
from ..kernels.matching import Guesses
from ..kernels.started import Fetched, Started, StartingExecutor
from ..proposers.base import ChainsAhead
from .errors import InvalidRequest
from .plan import PlanRow, StepPlan, slot_of
from .request import Request
from .runner import Forward, Runner, batch_lists
from .sampler import Sampler
from .verifier import Verifier

logger = logging.getLogger("foretoken.engine")

MOST_STEPS_APART = 64
"""Steps between two that are begun, where none of them is wanted."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """One row of the step that was begun."""

    request: Request
    first: int  # its first token among all
    count: int  # guesses behind it
    table: array[int]
    draws: bool  # whether its choices are made from whole logits

    def nodes(self, row: PlanRow, positions: list[int], token_ids: list[int], block_size: int) -> range | None:
        """Where the pass has the tokens of the plan's row; None if it has others, or elsewhere."""
        request, place, num_tokens = row.request, row.num_computed, row.num_tokens
        nodes = range(self.first, self.first + num_tokens)
        if request is not self.request or row.num_scheduled != 1 or not row.samples or not row.is_chain:
            return None
        if num_tokens > 1 + self.count or positions[self.first] != place:
            return None
        if token_ids[nodes.start : nodes.stop] != [request.token_ids[place], *row.draft_token_ids]:
            return None
        blocks = -(-(place + num_tokens) // block_size)
        return nodes if array("i", row.block_table[:blocks]) == self.table[:blocks] else None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that was begun before it was planned."""

    rows: dict[str, _Expected]
    started: Started
    positions: Fetched  # [T]
    token_ids: Fetched  # [T]

    @property
    def num_tokens(self) -> int:
        return sum(1 + row.count for row in self.rows.values())


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
        keeps_argmax: bool = False,
    ) -> None:
        """keeps_argmax: what the target thinks best behind each node comes to the host, also where it walks drafts itself."""
        super().__init__(executor, kv, hidden, wants_full_logits)
        self._starting = executor
        self._max_model_len = max_model_len
        self._keeps_argmax = keeps_argmax
        self._verifier: Verifier | None = None
        self._ahead: _Ahead | None = None
        self._was_steady = False  # the step before: one alone says little about the next
        self._is_steady = False  # the latest one
        self._apart = 0  # steps between two that are begun: more where they are begun in vain
        self._pause = 0  # steps before one may be begun again
        self._may_begin = True
        self.num_ahead = 0  # steps that were begun before they were planned
        self.num_used = 0  # those that were then planned
        self.num_matched = 0  # steps whose rows were walked on the device

    @property
    def has_begun(self) -> bool:
        return self._ahead is not None

    def use_verifier(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def start(self, plan: StepPlan) -> Forward:
        self._was_steady, self._is_steady = self._is_steady, plan.is_steady
        started, nodes = self._begun(plan)
        if started is None:
            started = self._starting.start(batch_lists(plan, self._wants_full_logits).batch(), self.kv, self._hidden)
        answer = self._match(plan, started, nodes)
        if answer is None:
            return Forward(started.finish)
        self.num_matched += 1
        logits = started.logits if plan.scored else None
        kept = [started.argmax[: started.num_scores]] if self._keeps_argmax else []
        fetched, *best = Fetched.of(answer, *kept)

        def matched() -> ForwardOutput:
            argmax = best[0].get() if best else started.argmax
            return ForwardOutput(argmax, started.top, logits, started.hidden, matched=fetched.get())

        # Scores of prompts are brought to the host later on: behind what somebody else begins now they would have to wait.
        return Forward(matched) if plan.scored else Forward(matched, answer, started.hidden)

    def begin_next(self, plan: StepPlan, answer: Tensor, chains: ChainsAhead | None) -> None:
        if self._pause:
            self._pause -= 1
            return
        rows = self._followers(plan, chains) if self._may_begin and self._was_steady and plan.is_steady else []
        if not rows:
            return
        try:
            self._ahead = self._handed_over(rows, plan, answer, chains)
        except Exception:  # the step that is under way is fine, and nothing depends on the next one
            self._may_begin = False
            logger.warning("no step is begun before the one before it has ended any more", exc_info=True)
        else:
            self.num_ahead += 1

    def _handed_over(
        self, rows: list[tuple[Request, Follower]], plan: StepPlan, answer: Tensor, chains: ChainsAhead | None
    ) -> _Ahead:
        followers = Followers.of([row for _, row in rows], answer.device, plan.block_size, self._starting.vocab_size)
        batch = following(followers, answer, None if chains is None else chains.token_ids)
        positions, token_ids = Fetched.of(batch.positions, batch.token_ids)
        started = self._starting.start(batch, self.kv, self._hidden)
        expected: dict[str, _Expected] = {}
        first = 0
        for request, row in rows:
            expected[request.request_id] = _Expected(request, first, row.count, row.table, row.draws)
            first += 1 + row.count
        return _Ahead(expected, started, positions, token_ids)

    def drop_begun(self) -> None:
        """The step would find the entries of its tokens overwritten by those of another pass."""
        if self._ahead is not None:
            self._ahead = None
            self._regret()

    def final_states(self, plan: StepPlan) -> Tensor:
        self.drop_begun()
        return super().final_states(plan)

    def _begun(self, plan: StepPlan) -> tuple[Started | None, list[int] | None]:
        """What was begun, if it is the plan's step; and where its nodes are there, if the plan has not all of them."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not any(row.request.request_id in ahead.rows for row in plan.rows):
            return None, None
        nodes = self._taken(ahead, plan)
        if nodes is None:
            self._regret()
            return None, None
        self._apart = max(self._apart - 1, 0)
        self.num_used += 1
        if nodes == list(range(ahead.num_tokens)):
            return ahead.started, None
        drawn = [node for row, node in zip(_owners(plan), nodes, strict=True) if self._wants_full_logits(row.request)]
        return ahead.started.at(nodes, drawn), nodes

    def _regret(self) -> None:
        """A step was begun in vain: the next ones are begun more rarely."""
        self._pause = self._apart = min(2 * self._apart + 2, MOST_STEPS_APART)

    def _taken(self, ahead: _Ahead, plan: StepPlan) -> list[int] | None:
        """Where the plan's nodes are in what was begun; None if the plan is of another step."""
        if plan.scored:
            return None
        # Long here: the step before has been committed.
        positions, token_ids = ahead.positions.get().tolist(), ahead.token_ids.get().tolist()
        places: list[int] = []
        for row in plan.rows:
            expected = ahead.rows.get(row.request.request_id)
            if expected is None or expected.draws != self._wants_full_logits(row.request):
                return None
            nodes = expected.nodes(row, positions, token_ids, plan.block_size)
            if nodes is None:
                return None
            places += nodes
        return places

    def _match(self, plan: StepPlan, started: Started, nodes: list[int] | None) -> Tensor | None:
        """Hand over the rest of a step: what its rows emit, on the device. None if only the verifier can do it. nodes: where its
        scores are, if not in the plan's order."""
        rows, verifier = [row for row in plan.rows if row.samples], self._verifier
        if not rows or verifier is None or any(row.request.params.logprobs is not None for row in rows):
            return None
        chooses = [self._wants_full_logits(row.request) for row in rows]
        if not verifier.only_matches:
            drafted = [own for row, own in zip(rows, chooses, strict=True) if row.draft_token_ids]
            # What is decreed leads to nodes where a row that draws chooses nothing, unless it would have come there by itself.
            if drafted and (any(drafted) or not verifier.can_be_matched):
                return None
        paths = None if verifier.only_matches else [verifier.decreed(row) for row in rows]
        guesses = Guesses.of([(row.draft_token_ids, row.parents, own) for row, own in zip(rows, chooses, strict=True)], paths)
        chosen = None
        if any(chooses):
            starts: list[int] = guesses.row_starts.tolist()
            if nodes is not None:
                starts = [nodes[start] for start in starts[:-1]]
            drawing = [(row, start) for row, start, own in zip(rows, starts, chooses, strict=False) if own]
            chosen = _chosen(started, verifier.sampler, [row for row, _ in drawing], [start for _, start in drawing])
            if chosen is None:
                return None
        return started.match(guesses, chosen)

    def _followers(self, plan: StepPlan, chains: ChainsAhead | None) -> list[tuple[Request, Follower]]:
        """The rows of the next step; none if that is open."""
        rows: list[tuple[Request, Follower]] = []
        known = {} if chains is None else chains.rows
        for answer, row in enumerate(plan.rows):
            request, length = row.request, row.num_computed + row.num_scheduled
            if not row.samples:
                return []
            if request.num_output_tokens + 1 >= request.max_tokens or length + 1 >= self._max_model_len:
                continue  # this step is its last
            chain, count = known.get(request.request_id, (0, 0))
            # Where a device guesses, a row that it can neither guess for now nor before is one that it cannot read.
            if row.is_asked and not count and (chains is None or row.draft_token_ids or row.num_scheduled > 1):
                return []
            least = length + len(row.draft_token_ids) + 1  # places, if all guesses of this step are accepted
            room = min(len(row.block_table) * plan.block_size, self._max_model_len) - least
            if room < 0:
                return []
            count = min(count, room)
            table = array("i", row.block_table[: -(-(least + count) // plan.block_size)])
            rows.append((request, Follower(answer, length, chain, count, table, self._wants_full_logits(request), slot_of(request))))
        return rows


def _chosen(started: Started, sampler: Sampler, rows: list[PlanRow], first_nodes: list[int]) -> Tensor | None:
    """[N] on the device, what the nodes of these rows choose from their scores; None if that has to be left to the verifier."""
    if started.scores is None:
        return None
    try:
        for row in rows:
            sampler.prepare(row.request, started.scores.shape[1])
    except InvalidRequest:
        return None
    return sampler.choose_ahead(started.scores, rows, first_nodes)


def _owners(plan: StepPlan) -> list[PlanRow]:
    """The row of each of the plan's tokens."""
    return [row for row in plan.rows for _ in range(row.num_tokens)]
