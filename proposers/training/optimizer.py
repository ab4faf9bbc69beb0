"""One optimizer for a training: Muon for the matrices between layers, AdamW for tables, heads and norms. Owns their state.

Muon (https://arxiv.org/abs/2502.16982) makes each matrix's step orthogonal, and reaches AdamW's loss with markedly fewer tokens.
Embeddings and heads are tables of rows, not maps between layers: they keep AdamW.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptimizerSettings:
    """Peak learning rates of both kinds, and what they share."""

    lr: float = 2e-3                 # of Muon's matrices, on AdamW's scale
    table_lr: float = 3e-3           # of everything else
    weight_decay: float = 0.05
    clip: float = 1.0                # largest norm of all gradients together
    muon: bool = True                # False: AdamW for everything, at `table_lr`


class Optimizer:
    """Steps over `parameters`. The matrices are dealt to `workers` threads by size: Muon's products are small and many."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, workers: int = 1):
        self.settings = settings
        named = list(named)
        self.parameters = [parameter for _, parameter in named]
        matrices = [parameter for name, parameter in named if settings.muon and is_matrix(name, parameter)]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in self.parameters if id(parameter) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = []
        for hand in _dealt(matrices, workers):
            self.optimizers.append(torch.optim.Muon(
                hand, lr=settings.lr, weight_decay=settings.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
        decayed, plain = ([p for p in others if (p.dim() > 1) == wanted] for wanted in (True, False))
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if groups:
            self.optimizers.append(torch.optim.AdamW(groups, lr=settings.table_lr, betas=(0.9, 0.97), eps=1e-10, fused=True))
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.pool = ThreadPoolExecutor(workers)

    def step(self, grads: Sequence[Tensor | None], factor: float) -> float:
        """Clip, set the learning rates to `factor` of their peaks, step. Returns the gradients' norm before clipping."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether the parameter maps one layer's values to the next one's. Tables are told by the names that models give them."""
    return parameter.dim() == 2 and not any(table in name for table in ("embed", "lm_head", "head.", "codebook"))


def _dealt(matrices: Sequence[nn.Parameter], hands: int) -> list[list[nn.Parameter]]:
    """About equal hands, the biggest first; empty hands are left out."""
    dealt: list[list[nn.Parameter]] = [[] for _ in range(hands)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.numel()):
        min(dealt, key=lambda hand: sum(p.numel() for p in hand)).append(matrix)
    return [hand for hand in dealt if hand]
