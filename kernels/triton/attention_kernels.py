"""The kernels of ragged paged attention: one walks a row's places for a tile of its tokens, one joins pieces.

A program takes a tile of query tokens of one row, with all query heads that share a kv head, and walks the row's places in
tiles of its own (Dao 2023, "FlashAttention-2"). Where there are fewer such tiles than the GPU has room for, several programs
share a tile's places and a second launch joins their results ("Flash-Decoding"). Which row a program works on it finds itself
from query_start_loc. Of more heads than a tile has rows, programs take a part.

Where values are the last numbers of the keys, behind K_OWN others (latent attention), they are fetched once, for scores and sums.

Where bits must not depend on the batch, places are cut at fixed points, and the pieces of a token are folded one by one in their
order: by the program that walks them all, or by the second launch. Both do the very same arithmetic (`_folded`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .early_launch import await_inputs, let_next_come, wait_for_inputs


# one build for all batches, whatever their sizes are divisible by
@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_rows", "splits", "table_stride", "window", "first_token", "end_token", "first_tile", "pieces"
    ]
)
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    spans_ptr,
    sinks_ptr,
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
    first_token,
    end_token,
    first_tile,
    pieces,
    KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    K_OWN: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    let_next_come(EARLY)
    # Row r's tiles are numbered from starts[r] // TILE_TOKENS + r: room for all of them, found without a prefix sum. What comes
    # behind the last row is one more row, of padding. The longest walks, those of a prompt's last tokens, start first.
    # Where SPLIT_PLACES is given, this launch has tokens first_token to end_token - 1, whose tiles begin no earlier than first_tile.
    tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    part = tl.program_id(1)
    kv_head = part // PARTS
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
    if SPLIT_PLACES > 0:
        if (row_start + offset >= end_token) | (row_start + offset + TILE_TOKENS <= first_token):
            return

    m = tl.arange(0, BLOCK_M)
    token = row_start + offset + m // GROUP
    is_row = (m // GROUP < TILE_TOKENS) & (token < row_end)
    is_asked = is_row
    head = part * GROUP + m % GROUP
    v_dim = tl.arange(0, V_PAD)
    out_row = token.to(tl.int64) * (KV_HEADS * PARTS * GROUP) + head
    scratch_row = out_row
    if SPLIT_PLACES > 0:
        is_asked = is_row & (token >= first_token) & (token < end_token)
        scratch_row = (token - first_token).to(tl.int64) * (KV_HEADS * PARTS * GROUP) + head
    out_mask = is_asked[:, None] & (v_dim < V_DIM)[None, :]
    if is_padding:
        wait_for_inputs(EARLY)
        if IS_SPLIT and SPLIT_PLACES > 0:
            _store_span(spans_ptr, token - first_token, is_asked, m, part + split, 0, 0, GROUP)
        elif IS_SPLIT:
            tl.store(lse_ptr + scratch_row * splits + split, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_asked)
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
    # A window counts places, but for tree tokens, which stand in no order.
    in_tree = own_place >= tree
    position = tl.load(positions_ptr + token, mask=is_row & in_tree, other=1 << 30).to(tl.int32)
    position = tl.where(is_row & (own_place < tree), own_place, position)
    if HAS_WINDOW:
        low = tl.maximum(low, tl.minimum(tl.min(position, 0) - window + 1, tree))
    bits = tl.load(tree_mask_ptr + token, mask=is_row & in_tree, other=0)
    has_slot = tl.load(slots_ptr + token, mask=is_row, other=-1) >= 0
    wait_for_inputs(EARLY)

    k_dim = tl.arange(0, K_PAD)
    q_at = q_ptr + token.to(tl.int64)[:, None] * q_stride + head[:, None] * K_DIM + k_dim[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & (k_dim < K_OWN)[None, :], other=0.0)
    q_of_values = q
    if K_OWN < K_DIM:
        q_at = q_ptr + token.to(tl.int64)[:, None] * q_stride + head[:, None] * K_DIM + K_OWN + v_dim[None, :]
        q_of_values = tl.load(q_at, mask=is_row[:, None] & (v_dim < V_DIM)[None, :], other=0.0)
    table = tables_ptr + row.to(tl.int64) * table_stride
    step_positions = positions_ptr + row_start - first  # of a place of this step
    # Tiles of places start at multiples of BLOCK_N, whatever the row's range is.
    base = low // BLOCK_N * BLOCK_N
    if SPLIT_PLACES > 0:
        first_piece = base // SPLIT_PLACES
        end_piece = tl.cdiv(end, SPLIT_PLACES)
        if IS_SPLIT:
            _store_span(spans_ptr, token - first_token, is_asked, m, part + split, first_piece, end_piece, GROUP)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, V_PAD), tl.float32)
        for piece in range(first_piece + split, end_piece, splits):
            begin = tl.maximum(base, piece * SPLIT_PLACES)
            stop = tl.minimum(end, (piece + 1) * SPLIT_PLACES)
            result, lse = _attended(
                q, q_of_values, k_ptr, v_ptr, table, step_positions, has_slot, begin, begin, stop, low, end, tree, own_place, position,
                bits, kv_head, scale, cap, window, KV_HEADS, K_DIM, K_OWN, V_DIM, K_PAD, V_PAD,
                BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False,
            )
            if IS_SPLIT:
                at = scratch_row * pieces + piece
                tl.store(lse_ptr + at, lse, mask=is_asked)
                tl.store(partial_ptr + at[:, None] * V_DIM + v_dim[None, :], result, mask=out_mask & (lse != float("-inf"))[:, None])
            else:
                peak, decay, weight = _folding(peak, lse)
                total = tl.fma(total, decay, weight)
                acc = _folded(acc, decay[:, None], result, weight[:, None])
        if not IS_SPLIT:
            if sinks_ptr is not None:
                total += _sink(tl.load(sinks_ptr + head), peak)
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + out_row[:, None] * V_DIM + v_dim[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        begin = base
        stop = end
        if IS_SPLIT:
            share = tl.cdiv(tl.cdiv(end - base, splits), BLOCK_N) * BLOCK_N
            begin = base + split * share
            stop = tl.minimum(end, begin + share)
            if begin >= stop:
                tl.store(lse_ptr + scratch_row * splits + split, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_asked)
                return
        # Before this place everybody sees everything.
        seen_by_all = begin
        if HAS_OPEN_TILES:
            seen_by_all = tl.maximum(begin, tl.minimum(stop, tl.minimum(first + offset + 1, tree) // BLOCK_N * BLOCK_N))
        result, lse = _attended(
            q, q_of_values, k_ptr, v_ptr, table, step_positions, has_slot, begin, seen_by_all, stop, low, end, tree, own_place, position,
            bits, kv_head, scale, cap, window, KV_HEADS, K_DIM, K_OWN, V_DIM, K_PAD, V_PAD,
            BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, HAS_OPEN_TILES,
        )
        if IS_SPLIT:
            at = scratch_row * splits + split
            tl.store(lse_ptr + at, lse, mask=is_asked)
            tl.store(partial_ptr + at[:, None] * V_DIM + v_dim[None, :], result, mask=out_mask & (lse != float("-inf"))[:, None])
        else:
            if sinks_ptr is not None:
                result /= (1.0 + tl.exp2(tl.load(sinks_ptr + head) - lse))[:, None]
            tl.store(out_ptr + out_row[:, None] * V_DIM + v_dim[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _store_span(spans_ptr, token, is_asked, m, program, first_piece, end_piece, GROUP: tl.constexpr):
    """Which pieces a tile's tokens have: its first program says so, once for each token."""
    if program == 0:
        says = is_asked & (m % GROUP == 0)
        tl.store(spans_ptr + 2 * token, tl.zeros_like(m) + first_piece, mask=says)
        tl.store(spans_ptr + 2 * token + 1, tl.zeros_like(m) + end_piece, mask=says)


@triton.jit
def _attended(
    q,
    q_of_values,
    k_ptr,
    v_ptr,
    table,
    step_positions,
    has_slot,
    begin,
    seen_by_all,
    stop,
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
    K_OWN: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_OPEN_TILES: tl.constexpr,
):
    """Attention over places begin to stop - 1, [BLOCK_M, V_PAD], and log2 of its exponential sum; zeros and -inf for who sees none."""
    acc = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # The block ids of a tile are fetched one tile ahead: an address that waits for another load would not be fetched ahead itself.
    if HAS_OPEN_TILES:
        block = _blocks(table, begin, low, end, BLOCK_SIZE, BLOCK_N)
        for start in range(begin, seen_by_all, BLOCK_N):
            following = _blocks(table, start + BLOCK_N, low, end, BLOCK_SIZE, BLOCK_N)
            acc, peak, total = _walk(
                acc, peak, total, q, q_of_values, k_ptr, v_ptr, block, step_positions, start, low, end, tree, own_place, position,
                bits, kv_head, scale, cap, window, KV_HEADS, K_DIM, K_OWN, V_DIM, K_PAD, V_PAD,
                BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False,
            )
            block = following
    block = _blocks(table, seen_by_all, low, end, BLOCK_SIZE, BLOCK_N)
    for start in range(seen_by_all, stop, BLOCK_N):
        following = _blocks(table, start + BLOCK_N, low, end, BLOCK_SIZE, BLOCK_N)
        acc, peak, total = _walk(
            acc, peak, total, q, q_of_values, k_ptr, v_ptr, block, step_positions, start, low, end, tree, own_place, position,
            bits, kv_head, scale, cap, window, KV_HEADS, K_DIM, K_OWN, V_DIM, K_PAD, V_PAD,
            BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True,
        )
        block = following
    has_result = has_slot & (total != 0.0)
    result = tl.where(has_result[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    return result, tl.where(has_result, peak + tl.log2(total), float("-inf"))


@triton.jit
def _folding(peak, lse):
    """(greatest log2 sum so far, factor of what was folded before, weight of a piece with this log2 sum). -inf changes nothing."""
    new_peak = tl.maximum(peak, lse)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, tl.exp2(peak - base), tl.exp2(lse - base)


@triton.jit
def _folded(acc, decay, result, weight):
    """acc * decay + result * weight, rounded twice: left to itself a compiler fuses either product, and not everywhere the same."""
    return tl.fma(acc, decay, result * weight)


@triton.jit
def _sink(sink, peak):
    """What a sink adds to an exponential sum over this peak. Both are log2."""
    return tl.exp2(sink - tl.where(peak == float("-inf"), 0.0, peak))


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
    q_of_values,
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
    K_OWN: tl.constexpr,
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
    k_mask = (k_dim < K_OWN)[:, None]
    v_mask = (v_dim < V_DIM)[None, :]
    in_range = (place >= low) & (place < end)
    if MASKED:
        # Nothing outside the row's range is read: not even a NaN spreads from row to row.
        k_mask = k_mask & in_range[None, :]
        v_mask = v_mask & in_range[:, None]
    slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    entry = slot * KV_HEADS + kv_head
    # e4m3 by way of float32: straight to bfloat16 each number goes through a unit that takes longer than reading it does.
    k = tl.load(k_ptr + entry[None, :] * K_DIM + k_dim[:, None], mask=k_mask, other=0.0).to(tl.float32).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    # Numbers of 8 bits are widened in registers, by each product where it wants them: a tile that two share would be fetched too late.
    SHARED: tl.constexpr = K_OWN < K_DIM and k_ptr.dtype.element_ty.primitive_bitwidth > 8
    if SHARED:
        v = tl.load(v_ptr + entry[:, None] * K_DIM + v_dim[None, :], mask=v_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q_of_values, tl.trans(v), scores, input_precision="ieee")
    elif K_OWN < K_DIM:
        c = tl.load(v_ptr + entry[None, :] * K_DIM + v_dim[:, None], mask=tl.trans(v_mask), other=0.0).to(tl.float32).to(q.dtype)
        scores = tl.dot(q_of_values, c, scores, input_precision="ieee")
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
    if not SHARED:
        PLACE: tl.constexpr = V_DIM if K_OWN == K_DIM else K_DIM
        v = tl.load(v_ptr + entry[:, None] * PLACE + v_dim[None, :], mask=v_mask, other=0.0).to(tl.float32).to(q.dtype)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["splits"])
def join(
    partial_ptr,
    lse_ptr,
    out_ptr,
    sinks_ptr,
    splits,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Columns of a head of a token: the mean of its pieces, weighted by their exponential sums; zeros if none has seen anything."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    piece = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, COLUMNS)
    if COLUMNS < V_DIM:
        dim += tl.program_id(2) * COLUMNS
    lse = tl.load(lse_ptr + row * splits + piece, mask=piece < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    mask = (dim < V_DIM)[None, :] & (lse != float("-inf"))[:, None]
    pieces = tl.load(partial_ptr + (row * splits + piece)[:, None] * V_DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += _sink(tl.load(sinks_ptr + tl.program_id(1)), peak)
    result = tl.sum(pieces * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * V_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < V_DIM)


@triton.jit(do_not_specialize=["pieces", "first_token"])
def fold(
    partial_ptr,
    lse_ptr,
    spans_ptr,
    out_ptr,
    sinks_ptr,
    pieces,
    first_token,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same in order, of the pieces that the token has: the result does not depend on how many there might have been."""
    await_inputs(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * HEADS + head
    dim = tl.arange(0, V_PAD)
    first_piece = tl.load(spans_ptr + 2 * token)
    end_piece = tl.load(spans_ptr + 2 * token + 1)
    peak = tl.full((V_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((V_PAD,), tl.float32)
    acc = tl.zeros((V_PAD,), tl.float32)
    for start in range(first_piece, end_piece, AHEAD):
        for i in tl.static_range(AHEAD):  # loads of all of these are under way at once
            piece = start + i + tl.zeros_like(dim)
            at = row * pieces + piece
            lse = tl.load(lse_ptr + at, mask=piece < end_piece, other=float("-inf"))
            result = tl.load(partial_ptr + at * V_DIM + dim, mask=(dim < V_DIM) & (lse != float("-inf")), other=0.0)
            peak, decay, weight = _folding(peak, lse)
            total = tl.fma(total, decay, weight)
            acc = _folded(acc, decay, result, weight)
    if sinks_ptr is not None:
        total += _sink(tl.load(sinks_ptr + head), peak)
    result = acc / tl.where(total == 0.0, 1.0, total)
    out_row = (first_token + token) * HEADS + head
    tl.store(out_ptr + out_row * V_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < V_DIM)
