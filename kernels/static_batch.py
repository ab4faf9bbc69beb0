"""Ragged batches of one fixed size in memory that never moves, as captured graphs read them; and the ladder of such sizes.

Owns padding and the way from host to device: one packed copy from pinned memory a batch, and one of the block tables.
Knows no network and no graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import RaggedBatch

STAGES = 2
"""Host copies in turn: while the device still reads one, the next step's batch is written to the other."""

TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Dense where steps are memory bound and every token more costs little but latency counts; then a quarter more at most."""

TOKENS_PER_ROW = (1, 2, 4, 8)
"""A rung has room for as many rows as it has tokens, or for these shares of them: single tokens, and drafts of some lengths."""

_WIDE = ("token_ids", "positions", "slot_mapping", "tree_mask", "logits_indices")  # [T] int64 each
_NARROW = ("seq_lens", "num_causal", "first_places")  # [R] int32 each


@dataclass(frozen=True)
class Rung:
    """A size that batches are padded to: this many tokens, as many scores, at most this many rows."""

    tokens: int
    rows: int

    def holds(self, batch: RaggedBatch) -> bool:
        """Whether the batch can be padded to it."""
        return max(len(batch.token_ids), len(batch.logits_indices)) <= self.tokens and len(batch.seq_lens) <= self.rows


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
        return self.rung_of(max(len(batch.token_ids), len(batch.logits_indices)), len(batch.seq_lens)) if len(batch.token_ids) else None

    def rung_of(self, tokens: int, rows: int) -> Rung | None:
        """Rows come in few steps too, as shares of the tokens: kernels cut their work by tokens a row."""
        size = self.up(max(tokens, rows))
        if size is None:
            return None
        return Rung(size, next(share for share in sorted(-(-size // n) for n in TOKENS_PER_ROW) if share >= rows))

    def below(self, most: int) -> Ladder:
        """Sizes up to the first that holds `most`."""
        last = self.up(most)
        return self if last is None else Ladder(tuple(size for size in self.counts if size <= last))


class StaticBatch:
    """The tensors of one rung. `batch` is what a graph reads; `fill` puts another batch into it.

    Behind the given tokens stand tokens with slot -1 that belong to no row, behind the given rows empty ones, and behind the
    wanted scores those of token 0 again: computed, and nobody looks.
    """

    def __init__(self, rung: Rung, max_blocks: int, block_size: int, device: torch.device) -> None:
        """max_blocks: of the longest row's table."""
        self.rung, self._device = rung, device
        tokens, rows = rung.tokens, rung.rows
        self._wide_bytes = len(_WIDE) * tokens * 8
        num_bytes = self._wide_bytes + (len(_NARROW) * rows + rows + 1) * 4
        self._packed = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._stages = [_Stage(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)) for _ in range(STAGES)]
        self._turn = 0
        self._tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        views = self._views(self._packed)
        self.batch = RaggedBatch(
            block_tables=self._tables,
            full_logits=torch.zeros(0, dtype=torch.int64, device=device),
            block_size=block_size,
            **views,
        )
        self._empty()

    def fill(self, batch: RaggedBatch) -> None:
        """Take in a batch of the host that the rung holds. Returns before the device has it; later work there finds it."""
        rung = self.rung
        assert rung.holds(batch), "a batch above its rung"
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % STAGES
        stage.wait()
        views = self._views(stage.memory)
        padding = {"slot_mapping": -1}
        for name in (*_WIDE, *_NARROW):
            values: Tensor | None = getattr(batch, name)
            view, count = views[name], 0
            if values is not None:
                count = len(values)
                view[:count] = values
            view[count:] = padding.get(name, 0)
        starts = views["query_start_loc"]
        starts[: len(batch.query_start_loc)] = batch.query_start_loc
        starts[len(batch.query_start_loc) :] = batch.query_start_loc[-1]
        self._packed.copy_(stage.memory, non_blocking=True)
        tables = batch.block_tables[:, : self._tables.shape[1]]  # no place stands behind the last position
        if self._device.type == "cuda":
            tables = tables.contiguous().pin_memory()
        self._tables[: len(tables), : tables.shape[1]].copy_(tables, non_blocking=True)
        stage.sent(self._device)

    def _empty(self) -> None:
        """Nothing but padding: what a graph is captured on writes no place of any cache."""
        self._packed.zero_()
        self.batch.slot_mapping.fill_(-1)

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        tokens, rows = self.rung.tokens, self.rung.rows
        wide = memory[: self._wide_bytes].view(torch.int64).split([tokens] * len(_WIDE))
        narrow = memory[self._wide_bytes :].view(torch.int32).split([*[rows] * len(_NARROW), rows + 1])
        return dict(zip((*_WIDE, *_NARROW, "query_start_loc"), (*wide, *narrow), strict=True))


class _Stage:
    """Host memory that the device copies from."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._event: torch.cuda.Event | None = None

    def sent(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Until it may be written again. With STAGES in turn that is long past."""
        if self._event is not None:
            self._event.synchronize()
