"""What drafters with a cache of their own share: knowing what it holds, catching up, and the batch that does both at once.

Owns the bookkeeping of a drafter's cache places. Knows no network and chooses no token.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from torch import Tensor

from ..kernels.batch_lists import BatchLists
from ..kernels.continuation import Continuation
from ..kernels.record import record
from .base import DraftContext, DraftRow, Feedback, RowUnderWay, UnderWay
from .draft_states import DraftStates, FeedState
from .features import Features


@record
class Feed:
    """One row's part of a drafter's pass: read the entries of positions start:stop, then guess `count` more (0 = only read)."""

    index: int  # of the row in the context
    row: DraftRow
    start: int
    stop: int
    count: int
    first: int = 0  # positions before it have no entry
    state: FeedState | None = None  # of a recurrent drafter


@dataclass(frozen=True)
class Pairing:
    """What the entry of position p is made of: token p, and the target's state of position p - shift if states are read.

    shift 1: EAGLE, MTP and PARD-2 pair a token with the state that predicted it. shift 0: DFlash and DSpark keep entries of
    committed positions only, and the last known token is part of the guess. first: the position of the first entry.
    """

    shift: int = 1
    first: int = 0


@dataclass(slots=True)
class _Holding:
    age: int  # rank by first sight: lower is older
    num_known: int  # entries of positions first:num_known are in place
    first: int
    guessed: list[int]  # own guesses fed behind them; worth something only if the next commit keeps them
    restarted: bool = False  # entries before `first` are missing because their states were dropped


class OwnCache:
    """Which positions of each request have their entries in a drafter's own cache layers.

    The layers lie behind the target's block ids, so the place of an entry is its position, and a block taken over from the
    prefix cache may be filled already. Entries of guesses hold what they should after they were accepted if they are made of
    tokens alone; entries made of the drafter's own guessed states never do, and are made anew from the target's.
    """

    def __init__(
        self,
        max_model_len: int,
        max_tokens: int,
        vocab_size: int,
        pairing: Pairing = Pairing(),
        features: Features | None = None,
        states: DraftStates | None = None,
    ) -> None:
        """What the drafter can read: texts shorter than max_model_len, of ids below vocab_size (a target's may be padded further).

        features: the target's states, for drafters that read them. states: the drafter's own, if it is recurrent.
        """
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.pairing = pairing
        self.features = features
        self.own_states = states
        self._holdings: dict[str, _Holding] = {}
        self._num_seen = 0

    def plan(self, context: DraftContext) -> list[Feed]:
        """Who reads what, in the context's row order: at most max_ingest_tokens over all rows, the oldest rows first.

        A row that is still behind afterwards guesses nothing; a row with ceiling 0 keeps up all the same. Rows that the
        drafter cannot read are left alone. Changes nothing but this: guesses that no commit confirmed are given up.
        """
        feeds: list[Feed] = []
        budget = context.max_ingest_tokens
        holdings = [self._holding(row) for row in context.rows]
        features, shift = self.features, self.pairing.shift
        for _, index in sorted([(holding.age, index) for index, holding in enumerate(holdings)]):
            row, holding = context.rows[index], holdings[index]
            holding.guessed = []
            length = len(row.token_ids)
            readable = row.computed_after if features is None else self._follow(row, holding, features)
            if self.own_states is not None and length < self.max_model_len:
                held = self.own_states.seat(row.request_id, row.token_ids, holding.num_known)
                if held is None:
                    continue
                holding.num_known = held  # keys and values behind it are of no use without a state
            start, stop = holding.num_known, min(readable, holding.num_known + budget)
            if length >= self.max_model_len or stop < start or (start < stop and max(row.token_ids[start:stop]) >= self.vocab_size):
                continue
            is_ready = stop == length - 1 + shift
            count = min(row.ceiling, self.max_tokens, self.max_model_len - length) if is_ready else 0
            if stop > start or count:
                state = None if self.own_states is None else self.own_states.plan(row.request_id, row.token_ids, start, stop)
                feeds.append(Feed(index, row, start, stop, count, holding.first, state))
                budget -= stop - start
        feeds.sort(key=attrgetter("index"))
        return feeds

    def continuations(self, step: UnderWay, counts: Mapping[str, int]) -> list[tuple[RowUnderWay, Continuation]]:
        """Where the rows that want counts[request_id] guesses go on behind the step. Changes nothing.

        Left out are rows of which that is not known: a row that is behind, or near the end of what can be read.
        """
        found: list[tuple[RowUnderWay, Continuation]] = []
        assert self.pairing.shift == 1, "the last known token is read before it is guessed from"
        for row in step.rows:
            holding, count, length = self._holdings.get(row.request_id), counts.get(row.request_id, 0), len(row.token_ids)
            if holding is None or not count or holding.num_known != length:
                continue
            num_drafted = len(row.draft_token_ids)
            end, table = length + num_drafted + 1, array("i", row.block_table)
            if end >= self.max_model_len or end > len(table) * step.block_size:
                continue
            pairs = zip(row.draft_token_ids, holding.guessed, strict=False)
            num_held = sum(takewhile(bool, (token == guess for token, guess in pairs)))
            found.append((row, Continuation(row.answer, length, num_drafted, num_held, row.node, table, holding.first, count)))
        return found

    def states(self, feeds: Sequence[Feed]) -> Tensor:
        """[T, width] the target's states that the feeds' entries are made of, in the order of `batch_lists`."""
        assert self.features is not None
        shift = self.pairing.shift
        return self.features.rows_of_all([(feed.row.request_id, feed.start - shift, feed.stop - shift) for feed in feeds])

    def fed(self, feeds: Sequence[Feed], in_place: Sequence[Sequence[int]]) -> None:
        """The pass is done. in_place[i]: leading guesses behind feeds[i] whose entries hold if they are accepted."""
        features, shift = self.features, self.pairing.shift
        for feed, guessed in zip(feeds, in_place, strict=True):
            request_id = feed.row.request_id
            holding = self._holdings[request_id]
            holding.num_known = feed.stop
            holding.guessed = list(guessed)
            if features is not None:
                features.drop_before(request_id, feed.stop - shift)
            if self.own_states is not None:
                self.own_states.passed(request_id)

    def filled(self, context: DraftContext) -> dict[tuple[int, str], int]:
        """`Draft.filled` of these rows."""
        return {(0, row.request_id): self._num_filled(row) for row in context.rows}

    def observe(self, feedback: Feedback) -> None:
        """Take in new states; keep the guesses that were committed where they stand.

        Equal tokens are not enough: a guess that was cut from the draft may come back as the target's own choice, but its
        place was given up in between. And the path of another proposer's tree was moved over it.
        """
        if self.features is not None:
            self.features.observe(feedback)
        for request_id, accepted, emitted in zip(feedback.request_ids, feedback.accepted, feedback.emitted, strict=True):
            holding = self._holdings.get(request_id)
            if holding is None:
                continue
            for i, (node, token, guess) in enumerate(zip(accepted, emitted, holding.guessed, strict=False)):
                if node != i or token != guess:
                    break
                holding.num_known += 1
            holding.guessed = []

    def num_known(self, request_id: str) -> int | None:
        """Positions of the text whose entries are in place; None = it was never planned for."""
        holding = self._holdings.get(request_id)
        return None if holding is None else holding.num_known

    def went_on(self, request_id: str, num_known: int) -> None:
        """A call that guessed and verified by itself has left the entries of so many committed positions in place."""
        holding = self._holdings[request_id]
        holding.num_known, holding.guessed = num_known, []

    def forget(self, request_id: str) -> None:
        self._holdings.pop(request_id, None)
        if self.features is not None:
            self.features.forget(request_id)
        if self.own_states is not None:
            self.own_states.forget(request_id)

    def check(self) -> None:
        for holding in self._holdings.values():
            assert 0 <= holding.num_known <= self.max_model_len, "more tokens held than the drafter can read"
            assert len(holding.guessed) < self.max_tokens, "more guesses fed than made"
        if self.features is not None:
            self.features.check()
        if self.own_states is not None:
            self.own_states.check()

    def _follow(self, row: DraftRow, holding: _Holding, features: Features) -> int:
        """How far the target's states let the row be read. Behind states that were dropped the drafter starts anew."""
        span, shift = features.span(row.request_id), self.pairing.shift
        if span is None:
            return -1
        features.keep_edges(row.request_id, row.block_table)
        wanted = max(holding.num_known - shift, 0)  # position of the first state to be read
        if wanted == span[0] - 1 and shift and holding.num_known == row.num_filled[0] and not holding.restarted:
            features.prepend_edge(row.request_id, row.block_table[wanted // features.block_size])
        elif wanted < span[0]:
            holding.first = holding.num_known = span[0] + shift
            holding.restarted = True
        return min(span[1] + shift, len(row.token_ids) - 1 + shift)

    def _num_filled(self, row: DraftRow) -> int:
        holding = self._holdings[row.request_id]
        if self.features is None:
            return min(holding.num_known, row.computed_after)
        span = self.features.span(row.request_id)
        return 0 if holding.restarted or span is None else min(holding.num_known, span[1])

    def _holding(self, row: DraftRow) -> _Holding:
        holding = self._holdings.get(row.request_id)
        if holding is None:
            # The last known token is always read here: the first guess comes from it.
            num_known = max(min(row.num_filled[0], len(row.token_ids) - 1, self.max_model_len), self.pairing.first)
            holding = self._holdings[row.request_id] = _Holding(self._num_seen, num_known, self.pairing.first, [])
            self._num_seen += 1
        return holding


def batch_lists(feeds: Sequence[Feed], block_size: int, tail: int | None = None) -> BatchLists:
    """The pass over all feeds: one row each, all causal, scores wanted behind the rows that guess. At least one feed.

    tail: a mask token; count - 1 of them follow the known tokens of each row that guesses, and scores are wanted behind them
    too. Without it blocks are listed as far as a chain of each row's `count` reaches: its last token is never fed.
    """
    lists = BatchLists(block_size)
    token_ids = lists.token_ids
    for feed in feeds:
        table, start, num_guessed = feed.row.block_table, feed.start, max(feed.count - 1, 0)
        token_ids += feed.row.token_ids[start : feed.stop]
        last = len(token_ids) - 1
        stop = feed.stop
        if tail is not None:
            token_ids += [tail] * num_guessed
            stop += num_guessed
        if feed.count:
            lists.logits_indices += range(last, len(token_ids))
        lists.positions += range(start, stop)
        lists.add_slots(table, start, stop)
        lists.query_start_loc.append(len(token_ids))
        lists.seq_lens.append(stop)
        lists.num_causal.append(stop - start)
        lists.tables.append(table[: -(-(feed.stop + num_guessed) // block_size)])
        lists.first_places.append(feed.first)
        if feed.state is not None:
            lists.states.append(feed.state.row)
    lists.tree_mask += [0] * len(token_ids)
    return lists
