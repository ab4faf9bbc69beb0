"""Weights of GGUF files as plain numbers: the formats that most files have, in torch, tens of times as fast as the gguf package's numpy.

A format stores weights in blocks, each with its scale in half precision, sometimes a minimum, and of K formats scales of parts of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def _half(blocks: Tensor, at: int) -> Tensor:
    """[n, 1]"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor, dim: int) -> Tensor:
    """First all the low ones, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), dim)


def _fifth_bits(words: Tensor) -> Tensor:
    """[n, 32] of [n, 4], each at its place above four others."""
    return ((words[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:], 1).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 1).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 6:], 1) | _fifth_bits(blocks[:, 2:6])).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:], 1) | _fifth_bits(blocks[:, 4:8])
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _of_eight_parts(blocks: Tensor, codes: Tensor) -> Tensor:
    """codes [n, 256], whose parts of 32 have scales and minima of six bits in bytes 4 to 15."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), 1).float() * _half(blocks, 0)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), 1).float() * _half(blocks, 2)
    return codes.view(-1, 8, 32).float().mul_(scales[:, :, None]).sub_(minima[:, :, None])


def _q4_k(blocks: Tensor) -> Tensor:
    return _of_eight_parts(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 1, 32), 2))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = torch.stack([((blocks[:, 16:48] >> part) & 1) << 4 for part in range(8)], 1).view(-1, 4, 2, 32)
    return _of_eight_parts(blocks, _nibbles(blocks[:, 48:].view(-1, 4, 1, 32), 2) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 1, 2, 32), 2).view(-1, 2, 4, 32)
    high = torch.stack([((blocks[:, 128:192].view(-1, 2, 32) >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], 2)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (low | high).view(-1, 16, 16).float().sub_(32).mul_(scales[:, :, None])


_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32) / 2


def _mxfp4(blocks: Tensor) -> Tensor:
    """A sign and a size in four bits; the block's scale is a power of two."""
    scales = torch.exp2(blocks[:, :1].float() - 127)
    return torch.cat((_FP4, -_FP4))[_nibbles(blocks[:, 1:], 1).int()].mul_(scales)


FORMATS: dict[int, Callable[[Tensor], Tensor]] = {
    2: _q4_0, 3: _q4_1, 6: _q5_0, 7: _q5_1, 8: _q8_0, 12: _q4_k, 13: _q5_k, 14: _q6_k, 39: _mxfp4,
}
"""ggml's number of a format -> from blocks [n, bytes] uint8 to numbers, in the blocks' order and as many to each as it has."""
