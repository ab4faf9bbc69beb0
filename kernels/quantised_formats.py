"""What a quantised tensor means in plain numbers: a pure function for each way in which checkpoints store a weight.

Results are float32 [out, in]. ValueError for shapes that do not fit together. Knows no names and no files.
"""

import math

import torch
from torch import Tensor

FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1; the highest of four bits is the sign
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs in a word of AWQ's gemm layout
_ROWS_AT_ONCE = 256  # so that scales are spread over some rows at a time, not over all


def scaled(values: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Narrow values [out, in], each times its scale.

    scale: one number; [out] or [out, 1]; [out, g] of g runs of columns; or [ceil(out / block[0]), ceil(in / block[1])] of blocks. As
    uint8 it is an exponent of 2, plus 127 (OCP Microscaling Formats 2023).
    """
    outputs, inputs = values.shape
    result, scale = values.to(torch.float32, copy=True), _powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
    if scale.numel() == 1:
        return result.mul_(scale.reshape(()))
    scale = scale[:, None] if scale.dim() == 1 else scale
    if scale.dim() == 2 and len(scale) == outputs and inputs % scale.shape[1] == 0:
        result.view(outputs, scale.shape[1], -1).mul_(scale[..., None])
        return result
    if tuple(scale.shape) != (math.ceil(outputs / block[0]), math.ceil(inputs / block[1])):
        raise ValueError(f"scales {tuple(scale.shape)} do not fit weights {tuple(values.shape)} in blocks {block}")
    for rows, factors in zip(result.split(block[0]), scale, strict=True):
        rows.mul_(factors.repeat_interleave(block[1])[:inputs])
    return result


def grouped(values: Tensor, scales: Tensor, zeros: Tensor | int, groups: Tensor | None = None) -> Tensor:
    """(value - zero) * scale of integers [out, in], where columns of a group share the two: scales and zeros [out, g].

    groups: [in] the group of each column; None = runs of equal length.
    """
    (outputs, inputs), count = values.shape, scales.shape[-1]
    runs = torch.arange(inputs) // math.ceil(inputs / count)
    groups = runs if groups is None else groups.long()
    if len(groups) != inputs or int(groups.min()) < 0 or int(groups.max()) >= count:
        raise ValueError(f"{count} groups of scales do not fit {inputs} inputs")
    result, scales = values.to(torch.float32, copy=True), scales.float().expand(outputs, -1)
    zeros = (zeros.float() if isinstance(zeros, Tensor) else torch.tensor(zeros, dtype=torch.float32)).expand(outputs, count)
    if inputs % count == 0 and torch.equal(groups, runs):
        result.view(outputs, count, -1).sub_(zeros[..., None]).mul_(scales[..., None])
        return result
    parts = (result.split(_ROWS_AT_ONCE), scales.split(_ROWS_AT_ONCE), zeros.split(_ROWS_AT_ONCE))
    for rows, scale, zero in zip(*parts, strict=True):
        rows.sub_(zero[:, groups]).mul_(scale[:, groups])
    return result


def packed_integers(words: Tensor, scales: Tensor, zeros: Tensor | None, shape: tuple[int, int], groups: Tensor | None = None) -> Tensor:
    """compressed-tensors `pack-quantized`: words [out, n] int32 of signed integers, to which half their range has been added.

    zeros: packed likewise along the outputs [m, g], or plain int8 [out, g]; None = 0.
    """
    bits = next((bits for bits in (4, 8, 2, 3, 5, 6, 7) if math.ceil(shape[1] * bits / 32) == words.shape[1]), None)
    if bits is None:
        raise ValueError(f"{words.shape[1]} words a row do not hold {shape[1]} integers of 2 to 8 bits")
    half = 1 << (bits - 1)
    if zeros is not None:
        zeros = unpacked(zeros.T, bits).T[: shape[0]] if zeros.dtype == torch.int32 else zeros.int() + half
    if groups is not None and (groups < 0).any():  # as it is initialised; columns have their own order where it was set
        groups = None
    return grouped(unpacked(words, bits)[:, : shape[1]], scales, half if zeros is None else zeros, groups)


def gptq(words: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, bits: int, zeros_less_one: bool) -> Tensor:
    """GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it.

    words: [in * bits / 32, out]; zeros: [g, out * bits / 32]; scales: [g, out]; groups: [in].
    zeros_less_one: stored zeros are one below those that are meant.
    """
    meant = (unpacked(zeros, bits) + int(zeros_less_one)) & ((1 << bits) - 1)
    return grouped(unpacked(words.T, bits), scales.T, meant[:, : scales.shape[1]].T, groups)


def awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ (Lin et al. 2023) in its gemm layout, 4 bits: words [in, out / 8], zeros [g, out / 8], scales [g, out]."""
    values, meant = (
        torch.stack([(part >> (4 * place) & 15).to(torch.uint8) for place in _AWQ_PLACES], 1).flatten(0, 1)
        for part in (words.T.contiguous(), zeros.T.contiguous())
    )  # [out, in] and [out, g]
    return grouped(values, scales.T, meant)


def fp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Two E2M1 numbers a byte, the lower half first: codes [out, in / 2] uint8. scale: as in `scaled`, of 16 (NVFP4) or 32 (MXFP4)."""
    levels = torch.tensor([*FP4_LEVELS, *(-level for level in FP4_LEVELS)], dtype=torch.float32)
    return scaled(_pairs(codes, levels).view(len(codes), -1), scale)


def bitsandbytes4(codes: Tensor, levels: Tensor, absmax: Tensor, shape: tuple[int, ...], block: int) -> Tensor:
    """NF4 or FP4 (Dettmers et al. 2023): two numbers a byte, the upper half first, row after row; absmax: [ceil(n / block)].

    codes: in whatever dtype the bytes are kept (`bnb_4bit_quant_storage`).
    """
    size = math.prod(shape)
    result = _pairs(codes.view(torch.uint8), levels).view(-1, 2).flip(1).flatten()[:size]
    whole = size // block
    result[: whole * block].view(whole, block).mul_(absmax[:whole, None])
    result[whole * block :].mul_(absmax[whole:])
    return result.view(shape)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n * 32 / bits] uint8; the lowest bits of a word are the first, and its lowest byte is in front.

    With 3, 5, 6 or 7 bits some begin in one byte and end in the next.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"its words are {str(words.dtype).removeprefix('torch.')}, not int32")
    packed, most = words.contiguous().view(torch.uint8), (1 << bits) - 1
    if 8 % bits == 0:
        return torch.stack([packed >> place & most for place in range(0, 8, bits)], -1).flatten(-2)
    first = torch.arange(packed.shape[-1] * 8 // bits) * bits
    low, high = packed[..., first // 8], packed[..., (first // 8 + 1).clamp(max=packed.shape[-1] - 1)]
    return ((low.int() | high.int() << 8) >> (first % 8).int() & most).to(torch.uint8)


def _pairs(codes: Tensor, levels: Tensor) -> Tensor:
    """uint8 of n bytes -> [2 n] float32 levels of their halves, the lower one first."""
    both = torch.stack((levels.float().repeat(16), levels.float().repeat_interleave(16)), 1)  # [256, 2]
    return both.index_select(0, codes.flatten().int()).flatten()


def _powers_of_two(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.float() - 127)
