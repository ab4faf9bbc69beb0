"""Paged attention in torch: owns what a `RaggedBatch` means for attention, whatever the network. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import RaggedBatch
from .torch_kv import TorchKV

SPAN_TOKENS = 128
"""Most tokens that attend together. Shorter pieces of a prompt skip more of the keys that lie ahead of them."""

WIDE_TOKENS = 16
"""Spans longer than this attend alone: there is enough work in one, and padding others to its length would waste it."""

GROUP_PLACES = 4096
"""Most places that a group reads, one long span apart: what is gathered should still be in the core's own cache when it is used.
Measured with 16 rows of 1000 places (2 kv heads of 64, float32): 3.5 ms a layer, without the limit 5.4 ms."""


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv: TorchKV,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, k_dim] over the cache, [T, H, v_dim]; k and v [T, kv_heads, dim] are written to it first.

    k None: attend only. sinks: [H] float32, see ops.Attention. Who sees whom is said by RaggedBatch. Padding tokens get zeros.
    """
    if k is not None and v is not None:
        plan.write(kv, layer, k, v)
    groups = plan.groups(window)
    if len(groups) == 1 and groups[0].covers_batch:
        return groups[0].attend(q, *kv.read(layer, groups[0].slots), scale, softcap, sinks)
    out = q.new_zeros(q.shape[0], q.shape[1], kv.v[layer].shape[2])
    for group in groups:
        group.put(out, group.attend(group.take(q), *kv.read(layer, group.slots), scale, softcap, sinks))
    return out


class AttentionPlan:
    """Everything about a ragged batch that all layers share, built once per pass.

    Rows are cut into spans; spans of similar shape form groups, each one call of the attention kernel. Groups differ by
    window, so they are built when the first layer with that window asks for them.
    """

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch
        slots = batch.slot_mapping.tolist()
        self._starts: list[int] = batch.query_start_loc.tolist()
        self._seq_lens: list[int] = batch.seq_lens.tolist()
        self._num_causal: list[int] = batch.num_causal.tolist()
        self._firsts: list[int] = [0] * len(self._seq_lens) if batch.first_places is None else batch.first_places.tolist()
        self._has_padding = any(slot < 0 for slot in slots) or self._starts[-1] != len(slots)
        self._is_padding = [slot < 0 for slot in slots] if self._has_padding else []
        self._kept = (batch.slot_mapping >= 0).nonzero()[:, 0]  # tokens that are written
        self._slots = batch.slot_mapping[self._kept] if self._has_padding else batch.slot_mapping
        self._groups: dict[int | None, list[SpanGroup]] = {}

    def write(self, kv: TorchKV, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the batch's k and v [T, kv_heads, dim] in its slots."""
        if self._has_padding:
            k, v = k[self._kept], v[self._kept]
        kv.write_all(layer, self._slots, k, v)

    def groups(self, window: int | None) -> list[SpanGroup]:
        """The spans of all rows, grouped, for layers with this window."""
        if window is not None and window >= max(self._seq_lens, default=0):
            window = None  # nothing is far enough away
        if window not in self._groups:
            groups = _similar(self._spans(window))
            self._groups[window] = [SpanGroup(spans, self.batch, window, self._has_padding) for spans in groups]
        return self._groups[window]

    def _spans(self, window: int | None) -> list[_Span]:
        spans: list[_Span] = []
        for row, seq_len in enumerate(self._seq_lens):
            row_start, row_end = self._starts[row], self._starts[row + 1]
            row_first = seq_len - (row_end - row_start)
            tree = row_first + self._num_causal[row]
            for start in range(row_start, row_end, SPAN_TOKENS):
                length = min(SPAN_TOKENS, row_end - start)
                if self._has_padding and all(self._is_padding[start : start + length]):
                    continue
                first = row_first + start - row_start
                is_causal = first + length <= tree
                end = first + length if is_causal else seq_len
                low = self._firsts[row]
                if window is not None:
                    position = first if is_causal else int(self.batch.positions[start : start + length].min())
                    low = max(low, min(position - window + 1, tree))
                spans.append(_Span(row, start, length, first, low, end, tree))
        return spans


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of one row that attend together, and the places that any of them may see."""

    row: int
    start: int  # flat index of the first token
    length: int
    first: int  # place of the first token
    low: int  # places low:end are read
    end: int
    tree: int  # place of the row's first tree token

    @property
    def num_places(self) -> int:
        return self.end - self.low

    @property
    def is_causal(self) -> bool:
        return self.first + self.length <= self.tree


def _similar(spans: list[_Span]) -> list[list[_Span]]:
    """Spans that may be padded to one shape: all of one token, or of a few, and of similar context."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=lambda s: (s.length > 1, s.length > WIDE_TOKENS, s.num_places)):
        shortest = groups[-1][0] if groups else span
        if (
            not groups
            or span.length > WIDE_TOKENS
            or (span.length > 1) != (shortest.length > 1)
            or span.num_places > shortest.num_places * 3 // 2 + 64
            or span.num_places * (len(groups[-1]) + 1) > GROUP_PLACES
        ):
            groups.append([])
        groups[-1].append(span)
    return [sorted(group, key=lambda s: s.start) for group in groups]


class SpanGroup:
    """G spans padded to Q tokens and C places: indices and masks of one attention call.

    A short span repeats its last token, whose results are dropped, and its own last place, which nobody sees: a row never
    reads another's slots, so not even a NaN spreads from row to row.
    """

    def __init__(self, spans: Sequence[_Span], batch: RaggedBatch, window: int | None, has_padding: bool) -> None:
        self.size = len(spans)
        self.num_tokens = max(span.length for span in spans)
        self.num_places = max(span.num_places for span in spans)
        # Spans of one length that are as many tokens as the batch are the whole batch, in order.
        total = self.size * self.num_tokens
        self.covers_batch = not has_padding and total == len(batch.token_ids) == sum(span.length for span in spans)
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

        device = batch.token_ids.device
        columns = torch.tensor([(s.row, s.start, s.length, s.first, s.low, s.end, s.tree) for s in spans], device=device)
        row, start, length, first, low, end, tree = columns.T[:, :, None]  # each [G, 1]
        offset = torch.arange(self.num_tokens, device=device)
        tokens = start + torch.minimum(offset, length - 1)  # [G, Q]
        places = low + torch.arange(self.num_places, device=device)  # [G, C]
        self._tokens = tokens.flatten()
        self._kept: Tensor | None = None  # of the G * Q tokens those that are no padding; None = all
        if has_padding or any(span.length < self.num_tokens for span in spans):
            self._kept = ((offset < length) & (batch.slot_mapping[tokens] >= 0)).flatten().nonzero()[:, 0]
        self.slots = _slots(spans, batch, row[:, 0], torch.minimum(places, end - 1))

        # Who sees whom: [G, Q, C], or None if everybody sees every place.
        self._visible: Tensor | None = None
        if self.num_tokens == 1 and all(span.is_causal and span.num_places == self.num_places for span in spans):
            return
        own_place = first + tokens - start
        self._visible = places[:, None] <= torch.where(own_place < tree, own_place, tree - 1)[:, :, None]
        has_tree = not all(span.is_causal for span in spans)
        if has_tree:
            bit = (places - tree)[:, None]
            bits = torch.where(own_place < tree, 0, batch.tree_mask[tokens])[:, :, None]
            self._visible |= (bit >= 0) & (places < end)[:, None] & ((bits >> bit.clamp(0, 63)) & 1).bool()
        if window is not None:
            # In places, but for tree tokens, which stand in no order: a token of a frozen network is not at the place of its position.
            own, positions = own_place, places
            if has_tree:
                flat = (start + places - first).clamp(0, len(batch.positions) - 1)
                positions = torch.where(places < tree, places, batch.positions[flat])
                own = torch.where(own_place < tree, own_place, batch.positions[tokens])
            distance = own[:, :, None] - positions[:, None]
            self._visible &= distance.abs() < window

    def take(self, q: Tensor) -> Tensor:
        """q [T, ...] -> this group's tokens [G * Q, ...]."""
        return q.index_select(0, self._tokens)

    def put(self, out: Tensor, result: Tensor) -> None:
        """Store result [G * Q, ...] of this group's tokens, padding left out, in out [T, ...]."""
        if self._kept is None:
            out.index_copy_(0, self._tokens, result)
        else:
            out.index_copy_(0, self._tokens[self._kept], result[self._kept])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
        """q [G * Q, H, k_dim], k [G * C, kv_heads, k_dim], v [G * C, kv_heads, v_dim] -> [G * Q, H, v_dim]."""
        groups, tokens, places = self.size, self.num_tokens, self.num_places
        heads, kv_heads, v_dim = q.shape[1], k.shape[1], v.shape[2]
        sharing = heads // kv_heads  # query heads of one kv head
        q = q.reshape(groups, tokens, kv_heads, sharing, -1)
        if self.is_wide:
            # Heads of one kv head stand side by side and share k and v as a view.
            mask = self._mask(1, q.dtype)[0, 0]
            k, v = (x.transpose(0, 1)[:, None].expand(-1, sharing, -1, -1) for x in (k, v))
            sinks = None if sinks is None else sinks.view(kv_heads, sharing, 1, 1)
            out = _attention(q[0].permute(1, 2, 0, 3), k, v, mask, scale, softcap, sinks)  # [kv_heads, sharing, Q, v_dim]
            return out.permute(2, 0, 1, 3).reshape(tokens, heads, v_dim)
        # Heads of one kv head become more query tokens: larger products over k read once.
        mask = None if self._visible is None else self._mask(sharing, q.dtype)
        q = q.transpose(1, 2).reshape(groups, kv_heads, tokens * sharing, -1)
        k, v = (x.view(groups, places, kv_heads, -1).transpose(1, 2) for x in (k, v))
        sinks = None if sinks is None else sinks.view(kv_heads, 1, sharing).expand(-1, tokens, -1).reshape(kv_heads, -1, 1)
        out = _attention(q, k, v, mask, scale, softcap, sinks)
        return out.view(groups, kv_heads, tokens, sharing, v_dim).transpose(1, 2).reshape(groups * tokens, heads, v_dim)

    @property
    def is_wide(self) -> bool:
        return self.num_tokens > WIDE_TOKENS

    def _mask(self, sharing: int, dtype: torch.dtype) -> Tensor:
        """What to add to the scores, [G, 1, Q * sharing, C]."""
        key = (sharing, dtype)
        if key not in self._masks:
            assert self._visible is not None
            mask = torch.zeros(self._visible.shape, dtype=dtype, device=self._visible.device)
            mask.masked_fill_(~self._visible, -torch.inf)
            self._masks[key] = mask.repeat_interleave(sharing, 1)[:, None]
        return self._masks[key]


def _slots(spans: Sequence[_Span], batch: RaggedBatch, rows: Tensor, places: Tensor) -> slice | Tensor:
    """Slots of places [G, C] of the rows [G]; a slice if it is one row whose blocks lie one behind the other."""
    size = batch.block_size
    if len(spans) == 1:
        (span,) = spans
        blocks = batch.block_tables[span.row, span.low // size : (span.end - 1) // size + 1].tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            start = blocks[0] * size + span.low % size
            return slice(start, start + span.num_places)
    blocks = batch.block_tables[rows].gather(1, places // size).long()
    return (blocks * size + places % size).flatten()


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention of [B, heads, n, dim] tensors, with tanh capped scores (Gemma 2) or sinks, as [heads, n, 1], if asked for."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return (with_sinks.softmax(-1)[..., :-1] @ v.float()).to(q.dtype)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
