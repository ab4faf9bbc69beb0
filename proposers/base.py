"""What a proposer is given and what it returns. Types that the engine and the proposers share live here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layout import KVLayerSpec
from ..kernels.record import record

FORCED = -1
"""In `Draft.source`: a grammar left no choice about this token, so that no proposer guessed it."""


Hears = Literal["every step", "own steps", "ends", "nothing"]
"""The steps after which a proposer's `observe` is called: all, those that it was asked in, those in which a request ended, or none."""


@dataclass(frozen=True)
class Needs:
    """What a proposer wants from the engine, declared once and never discovered."""

    hidden: tuple[int, ...] = ()  # boundary ids of target hidden states (kernels/layout.py), FINAL included
    kv_layers: tuple[KVLayerSpec, ...] = ()  # cache layers of its own, behind the target's block ids
    scratch_slots: int = 0  # uncommitted slots per row beyond 1 + ceiling, for trees in the making
    hears: Hears = "every step"
    argmax: bool = False  # the target's best token behind each guess, refused ones too
    is_whole: bool = False  # fewer guesses than it can make are no use to it: it is asked for all or none, unless there is no room
    runs_target: bool = False  # it runs the target itself, over the uncommitted places of the rows that it guesses for

    @property
    def ingests(self) -> bool:
        """Whether this proposer reads every context token itself: those tokens count against the token budget."""
        return bool(self.kv_layers)


@record
class Draw:
    """How a row's target samples, for drafters that sample too. temperature 0 is greedy."""

    temperature: float
    seed: int
    choice: int  # index among the n choices of one request; part of the noise key


@record
class DraftRow:
    """One running request as a proposer sees it. Known tokens are prompt and output so far.

    The next guess goes to position len(token_ids). `computed_after` known tokens have target KV once this step has run: a
    drafter with a cache of its own may ingest token_ids[:computed_after], no more; only if computed_after == len(token_ids)
    can it guess. Slots for len(token_ids) + ceiling places (+ scratch) are behind block_table; places past the known tokens
    are uncommitted. The sequences are live views of the engine's own: read them during the call only.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    computed_after: int
    ceiling: int  # most draft tokens (tree nodes) wanted; 0 = only ingest
    assigned: int  # index in the set of the proposer to ask first; -1 = none
    block_table: Sequence[int]
    num_filled: tuple[int, ...]  # per proposer of the set: leading tokens whose cached blocks it had filled on admission
    draw: Draw
    prediction: Sequence[int] = ()  # token ids of the request's Predicted Output
    forced: Sequence[int] = ()  # tokens that a grammar leaves no choice about
    corpus_id: str = ""  # whose shared corpora this row may see
    num_computed: int = 0  # known tokens that have target KV already
    adapter: int = 0  # slot of the target's adapter for this row, 0 = none


@record
class DraftContext:
    """The rows of a step, and how many context tokens drafters may ingest over all of them."""

    rows: Sequence[DraftRow]
    max_ingest_tokens: int
    block_size: int


@record
class Draft:
    """Guessed tokens of R rows, T in total. Row r owns token_ids[start_loc[r]:start_loc[r + 1]].

    Plain lists, not tensors: T is small and the host walks it token by token.
    """

    token_ids: list[int]  # [T]
    start_loc: list[int]  # [R + 1]
    parents: list[int]  # [T], parent within the row, before its child; -1 = the last known token
    source: list[int]  # [T], index of the proposer in the set, or FORCED
    confidence: list[float] | None = None  # [T] in [0, 1], the drafter's own estimate
    probs: Tensor | None = None  # [T, V] float32 the distribution each token was drawn from (p/q rules only)
    filled: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(proposer index, request_id) -> leading known tokens in that drafter's own cache. A proposer calls itself 0, in
    `source` too; the set puts in its real index."""

    @classmethod
    def empty(cls, num_rows: int) -> Draft:
        return cls([], [0] * (num_rows + 1), [], [])

    @classmethod
    def chains(cls, guesses: Sequence[Sequence[int]]) -> Draft:
        """One chain a row: [[7, 8], [], [9]] -> token_ids [7, 8, 9], start_loc [0, 2, 2, 3], parents [-1, 0, -1]."""
        token_ids: list[int] = []
        parents: list[int] = []
        start_loc = [0]
        for guess in guesses:
            token_ids.extend(guess)
            parents.extend(range(-1, len(guess) - 1))
            start_loc.append(len(token_ids))
        return cls(token_ids, start_loc, parents, [0] * len(token_ids))


@record
class RowUnderWay:
    """A row that gets new tokens in a step whose end the host has not seen. Its fields are those of DraftRow, before these tokens."""

    request_id: str
    token_ids: Sequence[int]
    block_table: Sequence[int]
    draw: Draw
    draft_token_ids: Sequence[int]  # the chain that the target verifies
    answer: int  # its row of `UnderWay.answer`
    node: int  # where its last known token stands among the step's tokens


@record
class UnderWay:
    """A step that a device computes by itself, and what it will have said: who goes on there need not wait for the host."""

    rows: Sequence[RowUnderWay]
    answer: Tensor  # as of matching.match, on the device
    hidden: Mapping[int, Tensor]  # boundary id -> [T, H] there, of the whole step
    block_size: int


@record
class ChainsAhead:
    """Guesses for the step behind one that is under way. A device makes them, and nobody on the host has seen them."""

    rows: Mapping[str, tuple[int, int]]  # request id -> its row of token_ids, and how many there count at most
    token_ids: Tensor  # [N, k] int64 there

    @classmethod
    def of(cls, parts: Sequence[ChainsAhead]) -> ChainsAhead:
        """Those of several drafters. A row that more than one guesses for has the first one's."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.token_ids.shape[1] for part in parts)
        rows: dict[str, tuple[int, int]] = {}
        first = 0
        for part in parts:
            rows = {**{name: (first + row, count) for name, (row, count) in part.rows.items()}, **rows}
            first += len(part.token_ids)
        return cls(rows, torch.cat([F.pad(part.token_ids, (0, width - part.token_ids.shape[1])) for part in parts]))


@record
class Ended:
    """A request that ended well in a step: by a stop or at its length limit, not by an abort or a failure."""

    request_id: str
    corpus_id: str
    token_ids: Sequence[int]  # its whole output


@record
class VerifiedNodes:
    """What was verified in a step, and what the target thinks best behind all of it."""

    token_ids: Sequence[Sequence[int]]  # [R] drafts, as far as no form and nobody who counts costs has cut them
    parents: Sequence[Sequence[int]]  # [R] as in Draft
    first: Sequence[int]  # [R] where a row's begin in argmax: behind its last known token, then behind each of its draft; -1 = nowhere
    argmax: Tensor  # [N] token ids


@record
class Feedback:
    """What a step did to its rows, after the commit. Plain data, so that proposers know no engine."""

    request_ids: Sequence[str]  # [R]
    num_committed: Sequence[int]  # [R] tokens with committed target KV
    num_drafted: Sequence[int]  # [R]
    accepted: Sequence[Sequence[int]]  # [R] accepted path: indices into the row's draft
    emitted: Sequence[Sequence[int]]  # [R] tokens appended to the row, the extra one included
    finished: Sequence[bool]  # [R]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # boundary id -> [T, H] of the whole step
    query_start_loc: Sequence[int] = ()  # [R + 1] rows of `hidden`
    num_scheduled: Sequence[int] = ()  # [R] known tokens among the row's hidden states; its draft tokens follow
    token_ids: Sequence[Sequence[int]] = ()  # [R] the row's known tokens after the commit; live views, as in DraftRow
    ended: Sequence[Ended] = ()
    nodes: VerifiedNodes | None = None  # for whom `Needs.argmax` says so


class KnownRow(Protocol):
    """A running request as it is known before a step is put together: a part of DraftRow, with live views as there."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prediction(self) -> Sequence[int]: ...
    @property
    def corpus_id(self) -> str: ...


@runtime_checkable
class Scout(Protocol):
    """A proposer that can say for next to nothing whether it has a guess: it is asked before every step, and only if it has."""

    def has_guess(self, row: KnownRow) -> bool:
        """Whether `propose` would have something to go on for this row now. Called in any steps, with any rows."""
        ...


Look = Callable[[Sequence[KnownRow]], Sequence[bool]]
"""Which of some rows a scout has a guess for."""


@runtime_checkable
class BatchScout(Scout, Protocol):
    """A scout that is faster for many rows at once."""

    def have_guesses(self, rows: Sequence[KnownRow]) -> Sequence[bool]:
        """`has_guess` of each."""
        ...


@runtime_checkable
class EarlyProposer(Protocol):
    """A proposer that can begin its next guesses behind a step that it was asked in, while nobody has seen the step's end.

    Nothing depends on it: what it then is asked for in `propose` need not be what it began.
    """

    @property
    def num_places_ahead(self) -> int:
        """Places behind the known tokens of a step that it wants to find in every row's blocks; 0 = it begins nothing."""
        ...

    def begin(self, step: UnderWay) -> ChainsAhead | None:
        """Between `propose` and `observe` of the step. Returns what it began."""
        ...


class Proposer(Protocol):
    """Guesses the next tokens of each row. A bad guess costs time, never correctness."""

    name: str
    needs: Needs
    max_tokens: int  # most draft tokens it makes for one row

    def propose(self, context: DraftContext) -> Draft:
        """At most `ceiling` tokens a row; rows it has nothing for get none."""
        ...

    def observe(self, feedback: Feedback) -> None:
        """After the commit of the steps that it wants to hear of (`Needs.hears`); perhaps of others, too."""
        ...

    def forget(self, request_id: str) -> None:
        """Finished, aborted or preempted. Unknown ids are fine."""
        ...

    def check(self) -> None:
        """Raise AssertionError if its own state is inconsistent."""
        ...

    def close(self) -> None:
        """The process ends, or the engine is given up: finish what is being written. Called once, last."""
        ...
