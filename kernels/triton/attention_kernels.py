"""The kernels of ragged paged attention: one walks a row's places for a tile of its tokens, one joins pieces.

A program takes a tile of query tokens of one row, with all query heads that share a kv head, and walks the row's places in
tiles of its own (Dao 2023, "FlashAttention-2"). Where there are fewer such tiles than the GPU has room for, several programs
share a tile's places and a second launch joins their results ("Flash-Decoding"). Which row a program works on it finds itself
from query_start_loc.
"""

from __future__ import annotations

import triton
import triton.language as tl


# one build for all batches, whatever their sizes are divisible by
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "splits", "table_stride", "window"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    tables_ptr,
    num_causal_ptr,
    first_places_ptr,
    tree_mask_ptr,
    positions_ptr,
    slots_ptr,
    num_tokens,
    num_rows,
    splits,
    q_stride,
    table_stride,
    scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPLIT_PLACES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_OPEN_TILES: tl.constexpr,
):
    # Row r's tiles are numbered from starts[r] // TILE_TOKENS + r: room for all of them, found without a prefix sum. What comes
    # behind the last row is one more row, of padding. The longest walks, those of a prompt's last tokens, start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    index = tl.arange(0, ROWS_PAD)
    starts = tl.load(starts_ptr + index, mask=index <= num_rows, other=1 << 30)
    row = tl.sum((starts // TILE_TOKENS + index <= tile).to(tl.int32), 0) - 1
    row_start = tl.load(starts_ptr + row)
    is_padding = row == num_rows
    row_end = tl.load(starts_ptr + tl.minimum(row + 1, num_rows))
    row_end = tl.where(is_padding, num_tokens, row_end)
    offset = (tile - row_start // TILE_TOKENS - row) * TILE_TOKENS
    if row_start + offset >= row_end:
        return

    m = tl.arange(0, BLOCK_M)
    token = row_start + offset + m // GROUP
    is_row = (m // GROUP < TILE_TOKENS) & (token < row_end)
    head = kv_head * GROUP + m % GROUP
    v_dim = tl.arange(0, V_PAD)
    out_row = token.to(tl.int64) * (KV_HEADS * GROUP) + head
    out_mask = is_row[:, None] & (v_dim < V_DIM)[None, :]
    if is_padding:
        if IS_SPLIT:
            tl.store(lse_ptr + out_row * splits + split, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
        else:
            nothing = tl.zeros((BLOCK_M, V_PAD), out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] * V_DIM + v_dim[None, :], nothing, mask=out_mask)
        return

    seq_len = tl.load(seq_lens_ptr + row)
    length = row_end - row_start
    first = seq_len - length  # place of the row's first token
    tree = first + tl.load(num_causal_ptr + row)  # place of its first tree token
    own_place = first + token - row_start
    last_place = first + tl.minimum(offset + TILE_TOKENS, length) - 1
    end = tl.where(last_place < tree, last_place + 1, seq_len)
    low = 0
    if HAS_FIRST:
        low = tl.load(first_places_ptr + row)
    position = tl.load(positions_ptr + token, mask=is_row, other=1 << 30).to(tl.int32)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.minimum(tl.min(position, 0) - window + 1, tree))
    bits = tl.load(tree_mask_ptr + token, mask=is_row & (own_place >= tree), other=0)

    # Tiles of places start at multiples of BLOCK_N, whatever the row's range is.
    base = low // BLOCK_N * BLOCK_N
    begin = base
    stop = end
    if SPLIT_PLACES > 0:
        begin = tl.maximum(base, split * SPLIT_PLACES)
        stop = tl.minimum(end, (split + 1) * SPLIT_PLACES)
    elif IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
        begin = base + split * share
        stop = tl.minimum(end, begin + share)
    if IS_SPLIT:
        if begin >= stop:
            tl.store(lse_ptr + out_row * splits + split, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
            return
    # Before this place everybody sees everything.
    seen_by_all = begin
    if HAS_OPEN_TILES:
        seen_by_all = tl.maximum(begin, tl.minimum(stop, tl.minimum(first + offset + 1, tree) // BLOCK_N * BLOCK_N))

    k_dim = tl.arange(0, K_PAD)
    q_at = q_ptr + token.to(tl.int64)[:, None] * q_stride + head[:, None] * K_DIM + k_dim[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & (k_dim < K_DIM)[None, :], other=0.0)
    table = tables_ptr + row.to(tl.int64) * table_stride
    step_positions = positions_ptr + row_start - first  # of a place of this step
    acc = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # The block ids of a tile are fetched one tile ahead: an address that waits for another load would not be fetched ahead itself.
    if HAS_OPEN_TILES:
        block = _blocks(table, begin, low, end, BLOCK_SIZE, BLOCK_N)
        for start in range(begin, seen_by_all, BLOCK_N):
            following = _blocks(table, start + BLOCK_N, low, end, BLOCK_SIZE, BLOCK_N)
            acc, peak, total = _walk(
                acc, peak, total, q, k_ptr, v_ptr, block, step_positions, start, low, end, tree, own_place, position, bits, kv_head,
                scale, cap, window, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False,
            )  # fmt: skip
            block = following
    block = _blocks(table, seen_by_all, low, end, BLOCK_SIZE, BLOCK_N)
    for start in range(seen_by_all, stop, BLOCK_N):
        following = _blocks(table, start + BLOCK_N, low, end, BLOCK_SIZE, BLOCK_N)
        acc, peak, total = _walk(
            acc, peak, total, q, k_ptr, v_ptr, block, step_positions, start, low, end, tree, own_place, position, bits, kv_head,
            scale, cap, window, KV_HEADS, K_DIM, V_DIM, K_PAD, V_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip
        block = following

    has_slot = tl.load(slots_ptr + token, mask=is_row, other=-1) >= 0
    has_result = has_slot & (total != 0.0)
    result = tl.where(has_result[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    if IS_SPLIT:
        tl.store(lse_ptr + out_row * splits + split, tl.where(has_result, peak + tl.log2(total), float("-inf")), mask=is_row)
        at = partial_ptr + (out_row * splits + split)[:, None] * V_DIM + v_dim[None, :]
        tl.store(at, result, mask=out_mask & has_result[:, None])
    else:
        tl.store(out_ptr + out_row[:, None] * V_DIM + v_dim[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _blocks(table, start, low, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of a tile of places; nothing outside the row's range is read."""
    place = start + tl.arange(0, BLOCK_N)
    return tl.load(table + place // BLOCK_SIZE, mask=(place >= low) & (place < end), other=0)


@triton.jit
def _walk(
    acc,
    peak,
    total,
    q,
    k_ptr,
    v_ptr,
    block,
    step_positions,
    start,
    low,
    end,
    tree,
    own_place,
    position,
    bits,
    kv_head,
    scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One more tile of places, from `start` on: the sums over it join acc, peak and total of the online softmax."""
    place = start + tl.arange(0, BLOCK_N)
    k_dim = tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    k_mask = (k_dim < K_DIM)[:, None]
    v_mask = (v_dim < V_DIM)[None, :]
    in_range = (place >= low) & (place < end)
    if MASKED:
        # Nothing outside the row's range is read: not even a NaN spreads from row to row.
        k_mask = k_mask & in_range[None, :]
        v_mask = v_mask & in_range[:, None]
    slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    entry = slot * KV_HEADS + kv_head
    k = tl.load(k_ptr + entry[None, :] * K_DIM + k_dim[:, None], mask=k_mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), whose limits need no care
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.8853900817779268)) + 1.0))
    else:
        scores = scores * scale
    if MASKED:
        sees = place[None, :] <= tl.where(own_place < tree, own_place, tree - 1)[:, None]
        bit = place - tree
        of_tree = (bits[:, None] >> tl.minimum(tl.maximum(bit, 0), 63).to(tl.int64)[None, :]) & 1
        sees = sees | ((of_tree != 0) & (bit >= 0)[None, :])
        if HAS_WINDOW:
            own = tl.load(step_positions + place, mask=in_range & (bit >= 0), other=0).to(tl.int32)
            distance = position[:, None] - tl.where(bit >= 0, own, place)[None, :]
            sees = sees & (tl.abs(distance) < window)
        scores = tl.where(sees & in_range[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    v = tl.load(v_ptr + entry[:, None] * V_DIM + v_dim[None, :], mask=v_mask, other=0.0).to(q.dtype)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["splits"])
def join(
    partial_ptr,
    lse_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """One head of one token: the mean of its pieces, weighted by their exponential sums; zeros if none has seen anything."""
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    piece = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, V_PAD)
    lse = tl.load(lse_ptr + row * splits + piece, mask=piece < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    if IN_ORDER:
        # one by one: the sum does not depend on how many empty pieces follow
        result = tl.zeros((V_PAD,), tl.float32)
        total = tl.zeros((V_PAD,), tl.float32)
        for i in range(0, splits):
            one_lse = tl.load(lse_ptr + row * splits + i + tl.zeros_like(dim))
            weight = tl.exp2(one_lse - peak)
            mask = (dim < V_DIM) & (one_lse != float("-inf"))
            result += weight * tl.load(partial_ptr + (row * splits + i) * V_DIM + dim, mask=mask, other=0.0)
            total += weight
        result = result / tl.where(total == 0.0, 1.0, total)
    else:
        weight = tl.exp2(lse - peak)
        mask = (dim < V_DIM)[None, :] & (lse != float("-inf"))[:, None]
        pieces = tl.load(partial_ptr + (row * splits + piece)[:, None] * V_DIM + dim[None, :], mask=mask, other=0.0)
        result = tl.sum(pieces * weight[:, None], 0)
        total = tl.sum(weight, 0)
        result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * V_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < V_DIM)
