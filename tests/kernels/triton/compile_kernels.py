"""Calls the kernels as a server on an H200 would, in the shapes of real models, and prints what each build takes as JSON.

`python tests/kernels/triton/compile_kernels.py GROUP [CAPABILITY]` with tests/support on PYTHONPATH; no GPU needed, nothing runs.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from probing_kernels import farthest, noise_under
from torch import Tensor
from triton_compilation import builds

from foretoken.kernels.adapters import Factors
from foretoken.kernels.continuation import Continuation, Ways
from foretoken.kernels.device_chain import Choosing
from foretoken.kernels.expert_weights import ExpertWeights
from foretoken.kernels.following import Follower, Followers
from foretoken.kernels.int4 import GROUP, TILE, Int4Matrix
from foretoken.kernels.layout import RaggedBatch, RowStates
from foretoken.kernels.lookup import Lookup, Lookups
from foretoken.kernels.matching import Guesses
from foretoken.kernels.sampling import neutral
from foretoken.kernels.static_batch import BlockTables, Rung, StaticBatch
from foretoken.kernels.torch_executor import Computed
from foretoken.kernels.triton import (
    activations,
    argmax,
    attention,
    attention_kernels,
    block_linear,
    cache_write,
    causal_conv,
    chain,
    continuation,
    early_launch,
    edits,
    expert_routes,
    experts,
    following,
    linear,
    linear_attention,
    linear_int4,
    lookup,
    low_rank,
    matching,
    norms,
    quantise,
    sample_rows,
    sampling,
    static_batch,
)
from foretoken.kernels.triton.rows import rows_of

HALF, WIDE, INT, LONG, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def attend(tokens: int, rows: int, dim: int, heads: int = 32, kv_heads: int = 8, cache: torch.dtype = HALF, **options: object) -> None:
    batch = ragged(tokens, rows, bool(options.pop("has_first", False)))
    k, v = empty(2, 16, kv_heads, dim, dtype=cache)
    attention.ragged_paged_attention(empty(tokens, heads, dim), k, v, batch, 0.1, **options)  # type: ignore[arg-type]


def attend_latent(
    tokens: int, rows: int, heads: int, cache: torch.dtype = HALF, rank: int = 512, turned: int = 64, **options: object
) -> None:
    k = empty(16, 1, turned + rank, dtype=cache)
    batch = ragged(tokens, rows, has_first=False)
    attention.ragged_paged_attention(empty(tokens, heads, turned + rank), k, k[..., turned:], batch, 0.1, **options)  # type: ignore[arg-type]


def ragged(tokens: int, rows: int, has_first: bool) -> RaggedBatch:
    """Block tables are those of 16384 places."""
    return RaggedBatch(
        *(empty(tokens, dtype=LONG) for _ in range(3)),
        *(empty(*shape, dtype=INT) for shape in [(rows + 1,), (rows,), (rows, 1024), (rows,)]),
        *(empty(n, dtype=LONG) for n in (tokens, rows, rows)), block_size=16, first_places=empty(rows, dtype=INT) if has_first else None,
    )


def one_of_each() -> None:
    """Of those that read the most, as a single request needs them; each is in a group of its own too."""
    workspace = linear.Workspace("cpu")
    for dtype in (HALF, FP8):
        attend(1, 1, 128, cache=dtype)
        linear.skinny_linear(empty(1, 4096), empty(4096, 4096, dtype=dtype), workspace, None, empty(1, 4096))
    linear_int4.skinny_int4_linear(empty(1, 4096), four_bits(28672, 4096), workspace, empty(28672), empty(1, 28672))


def attention_of_llama() -> None:
    for tokens, rows in [(1, 1), (5 * 32, 32), (2048, 40)]:
        attend(tokens, rows, 128)


def attention_of_others() -> None:
    for dim in (64, 256, 512):
        for tokens, rows in [(64, 64), (9, 1), (2048, 4)]:
            attend(tokens, rows, dim)
    attend(9, 1, 128)
    for tokens in (64, 2048):
        attend(tokens, 64, 80)
        attend(tokens, 64, 128, window=4096, softcap=50.0)
        attend(tokens, 64, 128, has_first=True)
        attend(tokens, 64, 128, split_places=512)
        attend(tokens, 64, 64, heads=64, window=128, sinks=empty(64, dtype=WIDE))  # gpt-oss
    attend(9, 1, 128, split_places=512)


def attention_over_float8() -> None:
    for tokens, rows in [(1, 1), (5 * 32, 32), (2048, 40)]:
        attend(tokens, rows, 128, cache=FP8)
    attend(64, 64, 128, heads=28, kv_heads=4, cache=FP8, window=4096, softcap=50.0)
    attend(64, 64, 128, cache=FP8, split_places=512)
    attend(64, 64, 64, cache=FP8)
    attend(2048, 4, 256, cache=FP8)


def latent_attention() -> None:
    """Of DeepSeek-V2-Lite (16 heads), GLM-4.7-Flash (20), MiniCPM3 (40, narrower ones) and DeepSeek-V3 (128), in few rows of a tile."""
    for heads in (16, 20):
        attend_latent(1, 1, heads)
    attend_latent(1, 1, 16, FP8)
    attend_latent(9, 1, 16, split_places=512)
    small_latent_ones()


def other_latent_attention() -> None:
    for heads in (16, 20, 128):
        attend_latent(9, 1, heads, FP8)
        for cache in (HALF, FP8):
            attend_latent(64, 64, heads, cache, split_places=512)
    for cache in (HALF, FP8):
        attend_latent(1, 1, 40, cache, 256, 32)
    attend_latent(64, 64, 16, FP8, window=4096, softcap=50.0)


def latent_attention_of_many_rows() -> None:
    for tokens, rows, heads in [(1, 1, 128), (4, 1, 16), (2048, 4, 16), (2048, 4, 20), (2048, 4, 128)]:
        attend_latent(tokens, rows, heads)


def small_latent_ones() -> None:
    """What stands before attention and behind it. heads, and the widths that a block goes from and to."""
    places = empty(9, dtype=LONG)
    for heads, plain, values in [(16, 128, 128), (20, 192, 256), (128, 128, 128)]:
        for cache in (HALF, FP8):
            k_cache = empty(16, 1, 576, dtype=cache)
            q, k = empty(9, heads, 576), empty(9, 1, 576)
            cache_write.rotate_and_store(q, k, None, k_cache, k_cache[..., 64:], places, places, empty(4096, 64))
        for rows in (1, 32, 2048):
            block_linear.block_linear(empty(rows, heads * plain), empty(heads * 512, plain), heads)
            block_linear.block_linear(empty(rows, heads * 512), empty(heads * values, 512), heads)


def attention_on_a_desktop() -> None:
    """Tiles that take the most memory, where a program has 99 KiB of it."""
    attention.shared_bytes = lambda device: 99 * 1024
    for dim in (128, 256, 512):
        attend(2048, 4, dim)
        attend(9, 1, dim)
    for tokens in (1, 4, 2048):
        for cache in (HALF, FP8):
            attend_latent(tokens, 1, 16, cache)
            attend_latent(tokens, 1, 40, cache, 256, 32)


def attention_of_any_number_of_rows() -> None:
    attend(640, 1, 128)
    with nothing_built(attention_kernels.attend):
        for rows in (31, 32, 100, 256):
            attend(600 + 40 * rows, rows, 128)


def products() -> None:
    workspace = linear.Workspace("cpu")
    for rows in (1, 16, 32):
        for out, depth in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 1088)]:
            linear.skinny_linear(empty(rows, depth), empty(out, depth), workspace, None, empty(rows, out))
        linear.skinny_linear(empty(rows, 4096), empty(4096, 4096, dtype=FP8), workspace, empty(4096), None, empty(4096, dtype=WIDE))
        gated_products(rows, workspace)
    linear.fixed_linear(empty(9, 4096), empty(4096, 4096))


def gated_products(rows: int, workspace: linear.Workspace) -> None:
    """Of an 8B Llama and of a drafter, whose products are split."""
    for out, depth in [(28672, 4096), (6144, 1024)]:
        x, scales = empty(rows, depth), empty(out, dtype=WIDE)
        linear.skinny_linear(x, empty(out, depth), workspace, function="silu")
        linear.skinny_linear(x, empty(out, depth, dtype=FP8), workspace, scales=scales, function="silu")


def gated_narrow_products(rows: int, workspace: linear.Workspace) -> None:
    for out, depth in [(28672, 4096), (6144, 1024)]:
        linear_int4.skinny_int4_linear(empty(rows, depth), four_bits(out, depth), workspace, function="silu")


def narrow_products() -> None:
    workspace = linear.Workspace("cpu")
    for rows, out, depth in [(1, 28672, 4096), (1, 4096, 14336), (1, 1024, 1088), (32, 4096, 14336), (64, 4096, 14336)]:
        linear_int4.skinny_int4_linear(empty(rows, depth), four_bits(out, depth), workspace, empty(out), empty(rows, out))
    for rows in (1, 32, 64):
        gated_narrow_products(rows, workspace)
    linear_int4.fixed_int4_linear(empty(9, 4096), four_bits(4096, 4096))
    linear_int4.dequantised(four_bits(28672, 4096), 0, 8192, HALF)


def four_bits(out: int, depth: int) -> Int4Matrix:
    tiles = -(-depth // TILE)
    return Int4Matrix(empty(tiles, out, GROUP // 2, dtype=INT), empty(tiles, out, dtype=INT), empty(out, dtype=WIDE), depth)


def experts_of(
    tokens: int, count: int, width: int, hidden: int, top: int, form: str | None = None, groups: tuple[int, int] = (1, 1)
) -> None:
    """Of Qwen3-30B-A3B: 128 experts of 768; of Mixtral 8x7B: 8 of 14336; of DeepSeek-V3: 256 in 8 groups."""

    def weights(outputs: int, depth: int) -> ExpertWeights:
        if form == "int4":
            tiles = -(-depth // TILE)
            words, groups = empty(count, tiles, outputs, GROUP // 2, dtype=INT), empty(count, tiles, outputs, dtype=INT)
            return ExpertWeights(words, empty(count, outputs, dtype=WIDE), groups, outputs, depth)
        scales = empty(count, outputs, dtype=WIDE) if form else None
        return ExpertWeights(empty(count, outputs, depth, dtype=FP8 if form else HALF), scales, None, outputs, depth)

    inner, outer = weights(2 * width, hidden), weights(hidden, width)
    correction = empty(count, dtype=WIDE) if groups > (1, 1) else None
    router = expert_routes.Router(top, True, correction is not None, correction, *groups, scales=correction)
    experts.experts(empty(tokens, hidden), empty(tokens, count), inner, outer, "silu", router, is_fixed=False)


def experts_of_models() -> None:
    for form in (None, "fp8", "int4"):
        for tokens in (1, 2048):
            experts_of(tokens, 128, 768, 2048, 8, form)
    experts_of(1, 256, 2048, 7168, 8, groups=(8, 4))
    kernels = (expert_routes._route, expert_routes._group, experts._visit, experts._add_up)
    for tokens in (1, 2048):
        experts_of(tokens, 8, 14336, 4096, 2)
    with nothing_built(*kernels):
        for tokens in (2, 3, 16, 17, 64, 65, 100):
            experts_of(tokens, 8, 14336, 4096, 2)


def adapters_of(tokens: int, rank: int, slots: int, width: int, *outs: int) -> None:
    factors = Factors(empty(len(outs), slots, rank, width), tuple(empty(slots, rank, out) for out in outs), empty(0, dtype=INT))
    low_rank.low_rank(empty(tokens, width), factors, empty(tokens, dtype=INT), empty(tokens, sum(outs)))


def recurrent(tokens: int, rows: int, heads: tuple[int, int, int, int], dtype: torch.dtype = HALF) -> None:
    """One layer of each kind. heads: of keys, of values, k_dim, v_dim."""
    num_k, num_v, k_dim, v_dim = heads
    keys, values, numbers = num_k * k_dim, num_v * v_dim, empty(num_v, dtype=WIDE)
    long, narrow = empty(rows, dtype=LONG), empty(rows, dtype=INT)
    ends, places = empty(rows + 1, dtype=INT), empty(tokens, dtype=LONG)
    batch = RaggedBatch(places, places, places, ends, narrow, empty(rows, 1024, dtype=INT), narrow, places, long, long, block_size=16)
    states = RowStates(narrow, narrow, long, narrow, narrow, narrow)
    width = 2 * keys + values
    records = causal_conv.trace(batch, states, 3)
    x, gates = empty(tokens, width, dtype=dtype), empty(tokens, values + 2 * num_v, dtype=dtype)
    guesses = empty(2 * rows, 16, width, dtype=dtype)
    causal_conv.causal_conv(x, empty(4, width, dtype=dtype), None, "silu", records, empty(2 * rows, 3 * width, dtype=WIDE), guesses)
    z, b, a = gates.split_with_sizes([values, num_v, num_v], -1)
    read = x
    for skip, kept in ((numbers, num_v), (None, 2 * num_v)):
        layer = empty(2, values * k_dim, dtype=WIDE), empty(2, 16, width + kept, dtype=dtype)
        memory = linear_attention.Memory(*heads, numbers, numbers, skip)
        read = linear_attention.linear_attention(x, b if skip is None else a, a, memory, batch, states, *layer)
    linear_attention.gated_norm(read, z, empty(v_dim, dtype=WIDE), 1e-6)


def recurrent_layers() -> None:
    """Of Qwen3.5-9B."""
    of_9b = (16, 32, 128, 128)
    recurrent(9, 1, of_9b)
    with nothing_built(causal_conv._trace, causal_conv._convolve, linear_attention._scan, linear_attention._gated_norm):
        for tokens, rows in [(1, 1), (2, 1), (16, 16), (40, 8), (2048, 33)]:
            recurrent(tokens, rows, of_9b)


def other_recurrent_layers() -> None:
    """In float32, of Granite 4.0-H Tiny, and of heads that are wider or no power of two."""
    recurrent(9, 1, (16, 32, 128, 128), WIDE)
    for heads in ((1, 48, 128, 64), (4, 8, 256, 256), (3, 6, 96, 80)):
        recurrent(9, 1, heads)


def small_ones() -> None:
    tokens = 9
    for rank in (8, 16, 64):
        adapters_of(tokens, rank, 4, 4096, 4096, 1024, 1024)
        adapters_of(tokens, rank, 1, 14336, 4096)
    for width in (576, 4096, 16384):
        norms.rms_norm(empty(tokens, width), empty(width), 1e-5)
        quantise.quantised(empty(tokens, width))
        norms.rms_norm(empty(tokens, width), empty(width, dtype=WIDE), 1e-5, empty(width), True, True)
    for function in ("", "silu", "gelu", "gelu_tanh", "relu", "sigmoid", "relu2"):
        activations.gated_activation(empty(tokens, 28672), None, function)
    activations.gated_activation(empty(tokens, 1), empty(tokens, 4096), "sigmoid")
    for dim, rotated in [(128, 128), (64, 64), (80, 32), (256, 256), (512, 512)]:
        packed = empty(tokens, 48 * dim)
        q, k, v = (part.view(tokens, -1, dim) for part in packed.split([32 * dim, 8 * dim, 8 * dim], -1))
        places, norm = empty(tokens, dtype=LONG), empty(dim, dtype=WIDE)
        for cache in (HALF, FP8):
            k_cache, v_cache = empty(2, 16, 8, dim, dtype=cache)
            cache_write.rotate_and_store(q, k, v, k_cache, v_cache, places, places, empty(4096, rotated), norm, norm, 1e-6)
            cache_write.rotate_and_store(None, k, v, k_cache, v_cache, places, places)
            cache_write.rotate_and_store(q, None, None, k_cache, v_cache, places, places, empty(4096, rotated), norm, None, 1e-6)
    argmax.best_of_rows(empty(tokens, 128256))


def chain_of(rows: int, steps: int, choosing: Choosing, columns: int, has_first: bool = False) -> None:
    """What stands between its passes. Block tables are those of 16384 places."""
    long, narrow = empty(rows, dtype=LONG), empty(rows, dtype=INT)
    tables, starts = empty(rows, 1024, dtype=INT), empty(rows + 1, dtype=INT)
    batch = RaggedBatch(
        long, long, long, starts, narrow, tables, narrow, long, long, long[:0], 16, first_places=narrow if has_first else None
    )
    chain.follow_ups(batch, long, steps, 16384)
    choices = chain.BestChoices(choosing, rows, steps, torch.device("cpu"))
    for _ in range(steps):
        choices.add(Computed(long, empty(rows, dtype=WIDE), empty(rows, columns), {}))


def chains() -> None:
    """Of an EAGLE-3 head with its own 32000 columns, and of a draft model that has all tokens."""
    ids, barred = empty(32000, dtype=LONG), torch.zeros(32000, dtype=torch.bool)
    mapped = Choosing(128256, None, ids, None, True)
    every = Choosing(151936, None, None, None, True)
    for choosing, columns in ((mapped, 32000), (every, 151936)):
        chain_of(1, 5, choosing, columns)
        with nothing_built(chain._lay_out, chain._choose):
            for rows in (2, 3, 17, 256):
                for steps in (2, 5):
                    chain_of(rows, steps, choosing, columns)
    chain_of(3, 5, Choosing(100000, None, ids, barred, False), 32000, has_first=True)


def early() -> None:
    """One of each that a pass is made of, as programs that come before what they read is written."""
    early_launch.launching_early.add(torch.device("cpu"))
    one_of_each()
    workspace = linear.Workspace("cpu")
    gated_products(1, workspace)
    gated_narrow_products(1, workspace)
    attend(9, 1, 128, split_places=512)
    x, places = empty(1, 4096), empty(1, dtype=LONG)
    norms.rms_norm(x, empty(4096), 1e-5)
    rows_of(empty(32000, 4096), places)
    quantise.quantised(x)
    activations.gated_activation(x, None, "silu")
    q, k, v = (empty(1, heads, 128) for heads in (32, 8, 8))
    cache_write.rotate_and_store(q, k, v, empty(16, 8, 128), empty(16, 8, 128), places, places, empty(4096, 128))
    block_linear.block_linear(x, empty(8192, 256), 16)
    argmax.best_of_rows(x)
    adapters_of(1, 16, 4, 4096, 14336, 14336)
    linear_int4.dequantised(four_bits(4096, 4096), 0, 4096, HALF)
    experts_of(1, 128, 768, 2048, 8)
    recurrent(1, 1, (16, 32, 128, 128))
    chain_of(1, 5, Choosing(32000, None, None, None, True), 32000)


def choices() -> None:
    places = 40
    long, integer, real = (empty(places, dtype=dtype) for dtype in (LONG, INT, WIDE))
    wanted = sampling.Places(long, long, real, integer, empty(places, dtype=torch.float64), real)
    ranges = empty(places, 2, dtype=INT)
    changes = edits.Edits(
        integer, empty(1, 4008, dtype=INT), ranges, integer, ranges, integer, real, ranges, integer, real, empty(places, 8, dtype=INT),
        real, real, real,
    )
    for vocab_size, dtype in ((32000, WIDE), (151936, HALF)):
        logits = empty(places, vocab_size, dtype=dtype)
        sampling.choose(edits.edit_logits(logits, long, changes), wanted)
    chosen = sampling.choose(empty(places, 32000), wanted)
    guesses = Guesses.of([(range(4), range(-1, 3), True)] * 8)
    for choices in (chosen, None):
        matching.match(long, real, choices, guesses)


def of_tests() -> None:
    """What tests launch to see what functions of kernels give."""
    double = empty(1, dtype=torch.float64)
    noise_under[(12, 6)](empty(12, dtype=LONG), empty(12, 3001, dtype=WIDE), 3001)  # type: ignore[arg-type]
    farthest[(1,)](empty(128, dtype=WIDE), empty(128, dtype=WIDE), empty(1, dtype=WIDE), double, double, 2**14, 128, 128, 128)  # type: ignore[arg-type]


def behind_a_pass() -> None:
    """What requests ask for behind a pass, after the warm-up: every build that is found must come from there."""
    vocab_size = 128256  # an odd number of blocks times 2 is no multiple of 16 bytes
    host = torch.device("cpu")
    matching.warm_up(vocab_size, HALF, host)
    continuation.warm_up(host)
    following.warm_up(host)
    lookup.warm_up(host)
    static_batch.warm_up(host)
    behind = (matching._match, continuation._lay_out, following._lay_out, lookup._compare, lookup._write, static_batch._take)
    with nothing_built(edits._copy, edits._edit, sampling._summarise, sampling._choose, *behind):
        ids = np.zeros(64, np.int32)
        for dtype in (HALF, WIDE):
            for places in (1, 2, 3, 16, 17):
                logits = empty(places, vocab_size, dtype=dtype)
                rows = neutral(places)
                chosen = sample_rows.sample(logits, np.arange(places), rows)
                rows["banned"] = rows["seen"] = rows["counts"] = rows["bias"] = rows["bias_ids"] = rows["path"] = ids.ctypes.data
                rows["num_banned"], rows["num_seen"], rows["num_bias"] = 1, 16, 3
                for length in (0, 1, 5, 8, 16, 33, 64):
                    rows["path_length"] = length
                    sample_rows.sample(logits, np.arange(places), rows)
                for depth in (1, 2, 15, 16):
                    guesses = Guesses.of([(range(depth), range(-1, depth - 1), True)] * places)
                    for choices in (chosen, None):
                        answer = matching.match(empty(17 * places, dtype=LONG), empty(17 * places, dtype=WIDE), choices, guesses)
                    rows = [Continuation(row, 100, depth, depth - 1, 0, array("i", range(99)), row % 2, depth) for row in range(places)]
                    continuation.laid_out(Ways.of(rows, host, 16, vocab_size, 4096), answer)
                    texts = [Lookup(row, 100 * depth, array("i", range(99))) for row in range(places)]
                    lookups = Lookups.of(texts, host, 16, (1, depth), depth % 2 == 0, depth)
                    lookup.looked_up(lookups, empty(4096, dtype=torch.int32), answer)
                    fed = [Follower(row, 100, row, depth * (row % 2), array("i", range(99)), row % 3 == 0) for row in range(places)]
                    for made in (empty(places, depth, dtype=LONG), None):
                        batch = following.laid_out(Followers.of(fed, host, 16, vocab_size), answer, made)
                        for has_firsts in (False, True):
                            rung = Rung(17 * places, 2 * places, 17 * places, has_firsts)
                            static = StaticBatch(rung, BlockTables(2 * places, 1024, host), 16, has_adapters=has_firsts)
                            static_batch.take(static.batch, batch)


@contextmanager
def nothing_built(*kernels: Any) -> Iterator[None]:
    def num_builds() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    known = num_builds()
    yield
    assert num_builds() == known, "something is built while a request waits"


GROUPS: dict[str, Callable[[], None]] = {
    group.__name__: group
    for group in (
        one_of_each, attention_of_llama, attention_of_others, attention_over_float8, attention_on_a_desktop,
        latent_attention, other_latent_attention, latent_attention_of_many_rows,
        attention_of_any_number_of_rows, products, narrow_products, experts_of_models, recurrent_layers, other_recurrent_layers, small_ones,
        chains, early, choices, of_tests, behind_a_pass,
    )
}

if __name__ == "__main__":
    with builds(*map(int, sys.argv[2:])) as found:
        GROUPS[sys.argv[1]]()
    print(json.dumps([asdict(build) for build in found]))
