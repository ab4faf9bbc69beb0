"""Small random networks bound by hand, for tests of what runs a network: no folder, no checkpoint."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tiny_models import tiny_config
from torch import Tensor

from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse
from foretoken.kernels.ops import ArgMax, Embed, GatherRows, Linear, RMSNorm
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import Kernels, TorchExecutor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def random_weights(program: Program, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Wide enough that logits differ, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in program.weights.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5 * 1.5).to(device)
    return weights


def small_program(family: str = "llama", **settings: Any) -> Program:
    return fuse(decoder_program(tiny_config(family, **settings)))


def small_network(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kernels: Kernels | None = None,
    weights: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> TorchExecutor:
    program = small_program(family, **settings)
    return TorchExecutor(program, weights or random_weights(program, device=device), dtype, device=device, kernels=kernels)


def between_tables(vocab: int, width: int, shared: Collection[str] = (), head: str = HEAD) -> Program:
    """A drafter with a product and a norm of its own between an embedding and a head, which may be the target's."""
    best = ArgMax(("logits",), ("argmax", "top"))
    ops = (
        Embed((), ("e",), EMBEDDING), Linear(("e",), ("h",), ("fc.weight",)), GatherRows(("h",), ("rows",)),
        RMSNorm(("rows",), ("n",), "norm.weight", 1e-5), Linear(("n",), ("logits",), (head,)), best,
    )
    shapes = {EMBEDDING: (vocab, width), "fc.weight": (width, width), "norm.weight": (width,), head: (vocab, width)}
    return Program(ops, shapes, (), {}, vocab, 64, (), "", "logits", best, shared=frozenset(shared))


def made_difficult(weight: Tensor) -> Tensor:
    """[6, n], now with zeros, a group of zeros, groups of different sizes, an infinity, and numbers that are hardly any."""
    weight[0] = 0
    weight[1, :32] = 0
    weight[2, :32] *= 1e-3
    weight[3, 5] = torch.inf
    weight[4] *= 1e-36
    return weight
