"""What drafters with a cache of their own share: knowing what it holds, catching up, and the batch that does both at once.

Owns the bookkeeping of a drafter's cache places. Knows no network and chooses no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.layout import RaggedBatch
from .base import DraftContext, DraftRow, Feedback


@dataclass(frozen=True, slots=True)
class Feed:
    """One row's part of a drafter's pass: read known tokens start:stop, then guess `count` more (0 = only read)."""

    index: int  # of the row in the context
    row: DraftRow
    start: int
    stop: int
    count: int


@dataclass(slots=True)
class _Holding:
    age: int  # rank by first sight: lower is older
    num_known: int  # leading known tokens whose entries are in place
    guessed: list[int]  # own guesses fed behind them; worth something only if the next commit keeps them


class OwnCache:
    """Which leading tokens of each request a drafter's own cache layers hold.

    The layers lie behind the target's block ids, so the place of a token is its position, and a block taken over from the
    prefix cache may be filled already. After a step the places of accepted guesses hold what they should; the last guess of
    a chain was never fed, so after full acceptance two tokens are to be read next, after a rejection one.
    """

    def __init__(self, max_model_len: int, max_tokens: int, vocab_size: int) -> None:
        """What the drafter can read: texts shorter than max_model_len, of ids below vocab_size (a target's may be padded further)."""
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
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
        for index in sorted(range(len(holdings)), key=lambda i: holdings[i].age):
            row, holding = context.rows[index], holdings[index]
            holding.guessed = []
            length = len(row.token_ids)
            stop = min(row.computed_after, holding.num_known + budget)
            if length >= self.max_model_len or stop <= holding.num_known:
                continue
            if max(row.token_ids[holding.num_known : stop]) >= self.vocab_size:
                continue
            count = min(row.ceiling, self.max_tokens, self.max_model_len - length) if stop == length else 0
            feeds.append(Feed(index, row, holding.num_known, stop, count))
            budget -= stop - holding.num_known
        return sorted(feeds, key=lambda feed: feed.index)

    def fed(self, feeds: Sequence[Feed], guesses: Sequence[Sequence[int]]) -> None:
        """The pass is done: guesses[i] [count] is what feeds[i] brought forth."""
        for feed, guess in zip(feeds, guesses, strict=True):
            holding = self._holdings[feed.row.request_id]
            holding.num_known = feed.stop
            holding.guessed = list(guess[:-1])

    def filled(self, context: DraftContext) -> dict[tuple[int, str], int]:
        """`Draft.filled` of these rows."""
        return {
            (0, row.request_id): min(self._holdings[row.request_id].num_known, row.computed_after) for row in context.rows
        }

    def observe(self, feedback: Feedback) -> None:
        """Keep the guesses that were committed where they stand.

        Equal tokens are not enough: a guess that was cut from the draft may come back as the target's own choice, but its
        place was given up in between. And the path of another proposer's tree was moved over it.
        """
        for request_id, accepted, emitted in zip(feedback.request_ids, feedback.accepted, feedback.emitted, strict=True):
            holding = self._holdings.get(request_id)
            if holding is None:
                continue
            for i, (node, token, guess) in enumerate(zip(accepted, emitted, holding.guessed, strict=False)):
                if node != i or token != guess:
                    break
                holding.num_known += 1
            holding.guessed = []

    def forget(self, request_id: str) -> None:
        self._holdings.pop(request_id, None)

    def check(self) -> None:
        for holding in self._holdings.values():
            assert 0 <= holding.num_known <= self.max_model_len, "more tokens held than the drafter can read"
            assert len(holding.guessed) < self.max_tokens, "more guesses fed than made"

    def _holding(self, row: DraftRow) -> _Holding:
        holding = self._holdings.get(row.request_id)
        if holding is None:
            # The last known token is always read here: the first guess comes from it.
            num_known = min(row.num_filled[0], len(row.token_ids) - 1, self.max_model_len)
            holding = self._holdings[row.request_id] = _Holding(self._num_seen, num_known, [])
            self._num_seen += 1
        return holding


def ragged_batch(feeds: Sequence[Feed], block_size: int) -> RaggedBatch:
    """The pass over all feeds: one row each, all causal, scores wanted behind the rows that guess. At least one feed.

    Blocks are listed as far as a chain of each row's `count` reaches: its last token is never fed. numpy, because on so little
    data a torch op costs several times as much.
    """
    token_ids: list[int] = []
    tables: list[list[int]] = []
    for feed in feeds:
        token_ids.extend(feed.row.token_ids[feed.start : feed.stop])
        num_places = feed.stop + max(feed.count - 1, 0)
        tables.append(list(feed.row.block_table[: -(-num_places // block_size)]))
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for index, table in enumerate(tables):
        block_tables[index, : len(table)] = table

    starts = np.array([feed.start for feed in feeds])
    stops = np.array([feed.stop for feed in feeds])
    lengths = stops - starts
    query_start_loc = np.zeros(len(feeds) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    ends = query_start_loc[1:].astype(np.int64)
    rows = np.arange(len(feeds)).repeat(lengths)
    positions = np.arange(len(token_ids)) - (ends - stops)[rows]
    guessing = np.array([feed.count > 0 for feed in feeds])
    return RaggedBatch(
        token_ids=torch.from_numpy(np.array(token_ids)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(stops.astype(np.int32)),
        block_tables=torch.from_numpy(block_tables),
        num_causal=torch.from_numpy(lengths.astype(np.int32)),
        tree_mask=torch.from_numpy(np.zeros(len(token_ids), np.int64)),
        logits_indices=torch.from_numpy(ends[guessing] - 1),
        full_logits=torch.from_numpy(np.zeros(0, np.int64)),
        block_size=block_size,
    )
