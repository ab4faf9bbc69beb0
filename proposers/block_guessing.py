"""Guesses by filling in a block: mask tokens behind the last known one, all in one pass (DFlash: Chen et al. 2026).

A cache entry of the context is made of the target's states alone and never changes; those of a block are worth nothing once its
pass is over, and the next step's context is written over them. Knows passes, not where programs and weights come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..kernels.batch_lists import BatchLists
from ..kernels.layout import FINAL, Executor, KVTensors, RaggedBatch
from ..kernels.upload import upload
from .block_heads import Heads, draw
from .block_program import CONTEXT
from .block_tree import grow, places_of
from .config import BlockTree
from .drafting import Feed, batch_lists
from .guessing import FEATURE, Drawing, Guesses, pick

_NOTHING = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Stage:
    """Layers that see a block in the same way: two networks over one cache."""

    context: Executor  # writes the context's entries
    block: Executor
    kv: KVTensors
    is_causal: bool
    input: str = ""  # of `block`: where it takes the state of the stage before; "" = it embeds
    states: tuple[str, ...] = (FEATURE,)  # of `context`: where it takes the target's, all in one or each tapped layer's; then c is its own


class BlockGuesser:
    """Implements `Guesser`: places of a block are those of its positions, from that of the last known token on."""

    scratch_slots = 0

    def __init__(
        self,
        stages: Sequence[Stage],
        drawing: Drawing,
        mask_token: int,
        from_anchor: bool,
        heads: Heads | None = None,
        tree: BlockTree | None = None,
    ) -> None:
        """from_anchor: the first guess is made in the last known token's own place, and the next token's position is predicted
        everywhere (DSpark); else each mask predicts the token of its own position, and one place more is filled (DFlash).
        tree: without heads only."""
        self._stages = tuple(stages)
        self._drawing = drawing
        self._mask_token = mask_token
        self._from_anchor = from_anchor
        self._heads = heads
        self._tree = tree

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        assert states is not None
        reading = [feed for feed in feeds if feed.start < feed.stop]
        read = self._read(reading, states, block_size)
        able = [feed for feed in feeds if feed.count]
        if not able:
            return Guesses.none(len(feeds))
        columns = self._stages[-1].block.token_ids
        if (tree := self._tree) is not None:
            logits, _, _ = self._fill([replace(feed, count=places_of(feed, tree)) for feed in able], block_size)
            return grow(feeds, logits, self._drawing, columns, tree)
        logits, hidden, anchors = self._fill(able, block_size)
        if self._heads is None:
            return pick(feeds, logits, self._drawing, columns)
        self._heads = self._heads.on(logits.device)  # nobody knows before the first of them comes
        context = None if read is None else _context_of(able, reading, read, hidden)
        return draw(feeds, logits, hidden, context, anchors, self._drawing, columns, self._heads, waits=logits.device.type == "cpu")

    @property
    def _reads_context(self) -> bool:
        return self._heads is not None and self._heads.correction is not None and self._heads.correction.reads_context

    def _read(self, feeds: Sequence[Feed], states: Tensor, block_size: int) -> Tensor | None:
        """Write the entries of start:stop. What they were made of [sum of tokens, H], if the heads want to know."""
        if not feeds:
            return torch.zeros(0, dtype=torch.float32) if self._reads_context else None
        batch = replace(batch_lists(feeds, block_size).batch(), logits_indices=_NOTHING)
        names = self._stages[0].states
        inputs = {name: part.contiguous() for name, part in zip(names, states.chunk(len(names), -1), strict=True)}
        for i, stage in enumerate(self._stages):
            wanted = (FINAL,) if i == 0 and len(names) == 1 and (len(self._stages) > 1 or self._reads_context) else ()
            output = stage.context.run(batch, stage.kv, wanted, inputs)
            if wanted:
                inputs = {CONTEXT: output.hidden[FINAL].float().contiguous()}
        return inputs[CONTEXT] if self._reads_context else None

    def _fill(self, feeds: Sequence[Feed], block_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores [sum of counts, V] of each feed's guesses, the states [sum of counts, H] that they were made of (none if nobody
        wants them), and those in the last known tokens' places [feeds, H] if these have no guess."""
        hidden = torch.zeros(0, dtype=torch.float32)
        for i, stage in enumerate(self._stages):
            is_last = i == len(self._stages) - 1
            batch = block_batch(feeds, block_size, self._mask_token, self._from_anchor, stage.is_causal)
            if not is_last:
                batch = replace(batch, logits_indices=_NOTHING, full_logits=_NOTHING)
            wanted = (FINAL,) if not is_last or self._heads is not None else ()
            output = stage.block.run(batch, stage.kv, wanted, {stage.input: hidden} if stage.input else None)
            hidden = output.hidden[FINAL].float().contiguous() if wanted else hidden
            if is_last:
                assert output.logits is not None
                if not wanted:
                    return output.logits, hidden, None
                if self._from_anchor:
                    return output.logits, hidden[upload(batch.logits_indices, hidden.device)], None
                places = torch.cat([batch.logits_indices, batch.query_start_loc[:-1].long()])  # on their way together
                states = hidden[upload(places, hidden.device)]
                return output.logits, states[: -len(feeds)], states[-len(feeds) :]
        raise AssertionError("a drafter without layers")


def _context_of(feeds: Sequence[Feed], read: Sequence[Feed], context: Tensor, like: Tensor) -> Tensor:
    """[feeds, H] each one's last row of context [tokens of read, H], zeros where nothing was read."""
    ends = dict(zip(map(id, read), accumulate(feed.stop - feed.start for feed in read), strict=True))
    found = like.new_zeros(len(feeds), like.shape[1])
    known = [(i, ends[id(feed)] - 1) for i, feed in enumerate(feeds) if id(feed) in ends]
    if known:
        places, rows = (upload(torch.tensor(column, dtype=torch.int64), like.device) for column in zip(*known, strict=True))
        found[places] = context[rows]
    return found


def block_batch(
    feeds: Sequence[Feed], block_size: int, mask_token: int, from_anchor: bool, is_causal: bool, spare: int = 0
) -> RaggedBatch:
    """A row for each feed: its last known token and masks, so many that there are `count` guesses, and `spare` ones that only others
    see. At least one feed.

    Causal blocks are causal tokens; in others every token sees the whole block, so they are trees with all bits set.
    """
    lengths = [feed.count + (0 if from_anchor else 1) + spare for feed in feeds]
    starts = [0, *accumulate(lengths)]
    firsts = [len(feed.row.token_ids) - 1 for feed in feeds]
    stops = [first + length for first, length in zip(firsts, lengths, strict=True)]
    tables = [feed.row.block_table[: -(-stop // block_size)] for feed, stop in zip(feeds, stops, strict=True)]
    lists = BatchLists(
        block_size,
        query_start_loc=starts,
        seq_lens=stops,
        num_causal=lengths if is_causal else [0] * len(feeds),
        first_places=[feed.first for feed in feeds],
        tables=tables,
    )
    for feed, start, first, stop, table in zip(feeds, starts[:-1], firsts, stops, tables, strict=True):
        lists.token_ids += [feed.row.token_ids[first], *[mask_token] * (stop - first - 1)]
        lists.positions += range(first, stop)
        lists.add_slots(table, first, stop)
        lists.tree_mask += [0 if is_causal else _lowest_bits(stop - first)] * (stop - first)
        end = start + stop - first - spare
        lists.logits_indices += range(end - feed.count, end)
    lists.full_logits += range(len(lists.logits_indices))
    return lists.batch()


def _lowest_bits(count: int) -> int:
    """An int64 with bits 0:count set; count at most 64."""
    return (1 << count) - 1 if count < 64 else -1
