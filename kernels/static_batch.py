"""Ragged batches of one fixed size in memory that never moves, as captured graphs read them; and the ladder of such sizes.

Owns padding and the way from host to device: one packed copy from pinned memory a batch, and one of the block tables; what is on
the device already is put in by one launch.
Knows no network and no graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .layout import RaggedBatch, RowStates

STAGES = 2
"""Host copies in turn: while the device still reads one, the next step's batch is written to the other."""

TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Dense where steps are memory bound and every token more costs little but latency counts; then a quarter more at most."""

TOKENS_PER_ROW = (1, 2, 4, 8)
"""A rung has room for as many rows as it has tokens, or for these shares of them: single tokens, and drafts of some lengths."""

SCORE_COUNTS = (64, 256)
"""A rung scores as many tokens as it has, or so few if that is half of them at most: of a prompt's chunk one is wanted. The head's
product of up to 64 rows takes as long as reading its weights does, so that fewer would save nothing."""

PADDING = {"slot_mapping": -1, "sources": -1, "targets": -1, "copy_places": -1, "copy_slots": -1, "num_known": 2**31 - 1}
"""What stands behind a batch's own values where that is not 0, and where it has none: tokens that are written nowhere, and rows that
begin here, know all of their tokens and keep nothing."""

STATES = tuple(field.name for field in fields(RowStates) if field.name != "chain_slots")  # chains of states are made pass by pass

ALIGNMENT = 16
"""Bytes. Kernels are built once for pointers that are divisible by it and once more for each mix of some that are not."""


@dataclass(frozen=True)
class Rung:
    """A size that batches are padded to: this many tokens and scores, at most this many rows.

    has_firsts: whether rows may begin behind place 0. Attention that need not look has a faster loop.
    """

    tokens: int
    rows: int
    scores: int
    has_firsts: bool = False

    def holds(self, batch: RaggedBatch) -> bool:
        """Whether the batch can be padded to it."""
        fits = len(batch.token_ids) <= self.tokens and len(batch.logits_indices) <= self.scores and len(batch.seq_lens) <= self.rows
        return fits and (self.has_firsts or batch.first_places is None)


class Ladder:
    """The sizes that are captured. A batch climbs to the next one; what is above the last one runs as it is."""

    def __init__(self, counts: tuple[int, ...] = TOKEN_COUNTS) -> None:
        assert list(counts) == sorted(set(counts)), "a ladder goes up"
        self.counts = counts

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)

    def up(self, count: int) -> int | None:
        """The smallest size that holds `count`; None above the last one."""
        return next((size for size in self.counts if size >= count), None)

    def rung(self, batch: RaggedBatch) -> Rung | None:
        """For this batch; None if no size holds it."""
        tokens, scores = len(batch.token_ids), len(batch.logits_indices)
        return self.rung_of(tokens, len(batch.seq_lens), scores, batch.first_places is not None) if tokens else None

    def rung_of(self, tokens: int, rows: int, scores: int, has_firsts: bool = False) -> Rung | None:
        """Rows come in few steps too, as shares of the tokens: kernels cut their work by tokens a row."""
        size = self.up(max(tokens, rows, scores))
        if size is None:
            return None
        share = next(share for share in sorted(-(-size // n) for n in TOKENS_PER_ROW) if share >= rows)
        return Rung(size, share, next((few for few in SCORE_COUNTS if scores <= few <= size // 2), size), has_firsts)

    def chain_rung(self, batch: RaggedBatch) -> Rung | None:
        """For chains that start from this batch: no more scores than rows, of which each has one chain or none."""
        size, rows = self.rung(batch), self.up(len(batch.seq_lens))
        return None if size is None or rows is None else Rung(size.tokens, rows, rows, size.has_firsts)

    def samples(self, most_tokens: int, most_rows: int) -> set[Rung]:
        """Passes that between them take every kernel that any pass of up to so many tokens and rows takes.

        Those of the ladder, and beyond it what attention is cut by: powers of two of tokens a row, and rows that fill 132
        multiprocessors once, twice, four times ..., or a half and a quarter of them.
        """
        every = self.below(most_tokens)
        found = {self.rung_of(size, min(most_rows, -(-size // n)), 1) for size in every for n in TOKENS_PER_ROW}
        first, powers = max(every, default=0) + 1, [1 << power for power in range(most_tokens.bit_length())]
        for tokens in {first, most_tokens, *powers}:
            for rows in {1, most_rows, *(n + max(n // 16, 1) for n in powers)}:
                if first <= tokens <= most_tokens and rows <= min(tokens, most_rows):
                    found.add(Rung(tokens, rows, rows))
        return {rung for rung in found if rung is not None}

    def below(self, most: int) -> Ladder:
        """Sizes up to the first that holds `most`."""
        last = self.up(most)
        return self if last is None else Ladder(tuple(size for size in self.counts if size <= last))


class StaticBatch:
    """The tensors of one rung. `batch` is what a graph reads; `fill` puts another batch into it.

    Behind the given tokens stand tokens with slot -1 that belong to no row, behind the given rows empty ones without states, and
    behind the wanted scores those of token 0 again: computed, and nobody looks.
    """

    def __init__(self, rung: Rung, tables: BlockTables, block_size: int, has_adapters: bool = False, has_states: bool = False) -> None:
        """tables: of as many rows. has_adapters: whether rows of the network may have some. has_states: whether it is recurrent; if
        not, whatever states a batch has are left out."""
        self.rung, self._device = rung, tables.memory.device
        tokens, rows = rung.tokens, rung.rows
        wide, narrow = torch.int64, torch.int32
        optional = [name for name, there in (("first_places", rung.has_firsts), ("adapters", has_adapters)) if there]
        self._layout = [
            *((name, tokens, wide) for name in ("token_ids", "positions", "slot_mapping", "tree_mask")),
            ("logits_indices", rung.scores, wide),
            *((name, rows, narrow) for name in ("seq_lens", "num_causal", *optional)),
            ("query_start_loc", rows + 1, narrow),
            *((name, rows, wide if name == "accepted" else narrow) for name in STATES if has_states),
        ]
        num_bytes = sum(_aligned(count * dtype.itemsize) for _, count, dtype in self._layout)
        self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._stages = [_Stage(memory, self._views(memory)) for memory in self._host_memory(num_bytes)]
        self._turn = 0
        self._tables = tables
        self._own = self._views(self._packed)
        self._empty()  # nothing but padding: what a graph is captured on writes no place of any cache
        self.batch = RaggedBatch(
            block_tables=tables.memory[:rows],
            full_logits=torch.zeros(0, dtype=torch.int64, device=self._device),
            block_size=block_size,
            states=RowStates(**{name: self._own[name] for name in STATES}) if has_states else None,
            scores_every_token=False,
            **{name: view for name, view in self._own.items() if name not in STATES},
        )

    def fill(self, batch: RaggedBatch) -> None:
        """Take in a batch of the host that the rung holds. Returns before the device has it; later work there finds it."""
        assert self.rung.holds(batch), "a batch above its rung"
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % STAGES
        stage.wait()
        for name, view in stage.views.items():
            values, count = _values(batch, name), 0
            if values is not None:
                count = len(values)
                view[:count] = values
            view[count:] = batch.query_start_loc[-1] if name == "query_start_loc" else PADDING.get(name, 0)
        self._packed.copy_(stage.memory, non_blocking=True)
        self._tables.fill(batch.block_tables)
        stage.sent(self._device)

    def take(self, batch: RaggedBatch) -> None:
        """`fill` with a batch that lies on the device already."""
        assert self.rung.holds(batch), "a batch above its rung"
        self._tables.forget()
        if self._device.type == "cuda" and self.batch.states is None:
            from .triton import static_batch  # Triton is there only where torch is built for GPUs

            static_batch.take(self.batch, batch)
        else:
            self.take_by_ops(batch)

    def take_by_ops(self, batch: RaggedBatch) -> None:
        """The reference of `take`, and its way where there are states or no kernels."""
        self._empty()
        self.batch.query_start_loc.copy_(batch.query_start_loc[-1:].expand(self.rung.rows + 1))
        for kind in (torch.int64, torch.int32):  # what has one dtype is copied in one launch
            pairs = [(self._own[name], _values(batch, name)) for name, _, dtype in self._layout if dtype == kind]
            pairs = [(view[: len(values)], values) for view, values in pairs if values is not None]
            torch._foreach_copy_([view for view, _ in pairs], [values for _, values in pairs])
        tables = batch.block_tables[:, : self.batch.block_tables.shape[1]]
        self.batch.block_tables[: len(tables), : tables.shape[1]] = tables

    def _empty(self) -> None:
        self._packed.zero_()
        for name, value in PADDING.items():
            if name in self._own:
                self._own[name].fill_(value)

    def _host_memory(self, num_bytes: int) -> list[Tensor]:
        pinned = self._device.type == "cuda"
        return [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(STAGES)]

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        start = 0
        for name, count, dtype in self._layout:
            num_bytes = count * dtype.itemsize
            views[name] = memory[start : start + num_bytes].view(dtype)
            start += _aligned(num_bytes)
        return views


class BlockTables:
    """Where rows have their blocks, for static batches of up to so many rows. They may share it: each finds there what it was filled
    with as long as none of the others is filled."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        """max_blocks: of the longest row's table."""
        self.memory = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self._sent: Tensor | None = None  # by the host, and nothing else since then

    def fill(self, tables: Tensor) -> None:
        """Have the device know these of the host. A row's grows once in many steps: in most of them it knows them already."""
        tables = tables[:, : self.memory.shape[1]]  # no place stands behind the last position
        rows, width = tables.shape
        sent = None if self._sent is None else self._sent[:rows, :width]
        if sent is not None and sent.shape == tables.shape and torch.equal(sent, tables):
            return
        self._sent = tables.contiguous().pin_memory() if self.memory.is_cuda else tables.clone()
        self.memory[:rows, :width].copy_(self._sent, non_blocking=True)

    def forget(self) -> None:
        """The device puts in others."""
        self._sent = None


def put(memory: Tensor, values: Tensor, padding: int) -> None:
    """Values of the same device in front and padding behind, in the order of its work."""
    memory[: len(values)] = values
    memory[len(values) :] = padding


def _values(batch: RaggedBatch, name: str) -> Tensor | None:
    """None: the batch has none."""
    if name in STATES:
        return None if batch.states is None else getattr(batch.states, name)
    return getattr(batch, name)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Stage:
    """Host memory that the device copies from."""

    def __init__(self, memory: Tensor, views: dict[str, Tensor]) -> None:
        self.memory, self.views = memory, views
        self._event: torch.cuda.Event | None = None

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Until it may be written again. With STAGES in turn that is long past."""
        if self._event is not None:
            self._event.synchronize()
