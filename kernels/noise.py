"""The server's only source of chance: counter-based noise, keyed by seed, choice, absolute position and purpose.

Knows nothing of requests. There is no state: the same key gives the same noise in any batch, any step and any process
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A key is SplitMix64 (Steele, Lea, Flood 2014) of its
parts; the noise under a key is a 32-bit SplitMix sequence with its own odd increment, finished by Wellons' lowbias32.

A token is drawn by an exponential race, which is Gumbel-max written without logarithms: the winner of p_i / E_i with
E_i ~ Exp(1) is distributed as p, and two distributions raced under the same noise agree with probability at least
(1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024). We race in two rounds, each with that bound for what it decides: between
blocks of 128 token ids by their mass, then inside the winning block.

Measured on one core of a Xeon with AVX-512, microseconds for all rows, softmax included (V = vocabulary), against a race
over every token id and against one uniform through the inverse CDF:

    V        rows   every id   two rounds   inverse CDF
    8192      1        124         83           19
    8192      8        385        140          109
    151936    1        804        190          241
    151936    8       6820        973         2020

(The native library, see sampling.py, on one core of a Zen 4: 19, 33, 31 and 135 microseconds for two rounds.)

    draft and target agree, at TV 0.10 / 0.13 / 0.29     every id 0.88 0.84 0.65   two rounds 0.86 0.83 0.64
                                                      inverse CDF 0.58 0.69 0.50  argmax draft 0.41 0.56 0.40

Two rounds cost about what the inverse CDF costs and agree nearly as often as a race over every id: one design for the
whole server. (Skipping ids whose noise cannot win is exact too, but 32-bit noise spans 26 nats: next to none are skipped.)
"""

import enum
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import sampling

BLOCK = 128
"""Token ids raced together in the second round. Part of the rule: changing it changes every seeded text."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What noise is for. Different purposes are independent; drafters coupled with the target use TARGET."""

    TARGET = 0  # the target's own choice of a token
    DRAFT = 1  # a drafter's choice under the p/q rules, which need it independent of the target's
    ACCEPT = 2  # the coin that accepts a drafted token (p/q rules)
    RECOVER = 3  # the token emitted after a rejection (p/q rules)
    FILL = 4  # tokens that stand where guesses will be, for a network that reads noise


def stream(seed: int, choice: int, purpose: Purpose = Purpose.TARGET) -> int:
    """The keys of one request and purpose, as the int64 that `keys` takes. Compute it once per request."""
    return _signed(_mix(_mix(_mix(seed + _GOLDEN) + choice) + purpose))


def key(seed: int, choice: int, position: int, purpose: Purpose = Purpose.TARGET) -> int:
    """One int64 key. position: absolute index of the token being chosen, the prompt's first being 0."""
    return _signed(_mix(stream(seed, choice, purpose) + position * _GOLDEN))


def step_stream(seed: int, choice: int, first_position: int, purpose: Purpose) -> int:
    """Like `stream`, for the noise of one step alone, whose first guess goes to first_position. Of what is drawn under it no later
    step draws again.

    What block verification emits says something about the guesses and coins behind it, so those must not come back when the
    next step reaches their positions: keyed by position alone they would bend the distribution.
    """
    return key(seed, choice, first_position, purpose)


def keys(streams: Sequence[int] | NDArray[np.int64], positions: Sequence[int]) -> Tensor:
    """[N] int64 on the CPU: `key` for many at once. Keys stay on the host, where noise is made for every device."""
    z = np.asarray(streams, np.int64).view(np.uint64) + np.asarray(positions, np.int64).view(np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64))


def uniform(keys: Tensor) -> Tensor:
    """[N] float64 in [0, 1), one per key [N] int64."""
    return torch.from_numpy((keys.numpy().view(np.uint64) >> np.uint64(11)) * 2.0**-53)


def exponential(keys: Tensor, n: int) -> Tensor:
    """[N, n] float32 ~ Exp(1), all positive and finite. Column j depends on the key and j only, not on n.

    numpy, because these are many operations on little data: a third of the time that torch's dispatch takes.
    """
    z = keys.numpy().view(np.uint64)[:, None]
    increment = (z >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    x = np.arange(n, dtype=np.uint32) * increment + z.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    # -log(1 - u) rather than -log(u), in float64: rare tokens keep their exact small chances, libraries' rounding is lost
    u = (x + 0.5) * 2.0**-32
    return torch.from_numpy(-np.log1p(-u)).to(torch.float32)


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Token ids [N] int64, row r drawn with probability weights[r] / sum(weights[r]) under keys [N] int64 (on the CPU).

    weights [N, V]: not negative, at least one positive in a row. A token of weight 0 is never drawn. A row with NaN
    gives some id in range.
    """
    blocks, by_block, block = _first_round(weights, keys)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block] / by_block[:, :BLOCK]
    # only NaN can make the padding win
    return (block * BLOCK + within.argmax(-1)).clamp_(max=weights.shape[-1] - 1)


def sample(logits: Tensor, keys: Tensor) -> Tensor:
    """Token ids [N] int64 ~ softmax(logits [N, V]); -inf is never drawn. By the native library if it is there: the same tokens,
    up to rounding."""
    if sampling.takes(logits):
        return sampling.race(logits, keys)
    return draw(torch.softmax(logits, -1), keys)


def margin(logits: Tensor, keys: Tensor) -> Tensor:
    """[N] float32, nats: how far the choice of `sample` is from another one, the closer of its two rounds.

    Logits that differ by less than half of it choose the same; for tests that compare networks with different rounding.
    """
    blocks, noise, block = _first_round(torch.softmax(logits, -1), keys)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block] / noise[:, :BLOCK]
    rounds = [blocks.sum(-1) / noise[:, BLOCK:], within]
    gaps = [best[:, 0] - best[:, 1] for best in (r.log().topk(2).values for r in rounds if r.shape[-1] > 1)]
    return torch.stack(gaps).amin(0)


def _first_round(weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as blocks [N, B, BLOCK], the noise [N, BLOCK + B] (inside a block first), the winning block [N].

    All blocks may share the noise inside: only the winner's is used, and it is independent of who won.
    """
    if surplus := -weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, surplus))
    blocks = weights.view(len(weights), -1, BLOCK)
    noise = exponential(keys, BLOCK + blocks.shape[1]).to(weights)
    return blocks, noise, (blocks.sum(-1) / noise[:, BLOCK:]).argmax(-1)


def _mix(z: int) -> int:
    """SplitMix64's finaliser, on integers of any sign."""
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the same bits."""
    return z - (1 << 64) if z >= 1 << 63 else z
