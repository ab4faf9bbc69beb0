"""MLP speculators as folders, of IBM's kind or Arctic's, and what they guess for a few rows over many steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from last_state_runs import Run, opened, resources, save
from pretended_engine import TORCH, Guess
from torch import Tensor

from foretoken.kernels import noise
from foretoken.kernels.execution import Execution
from foretoken.proposers import mlp_speculator
from foretoken.proposers.base import Draw
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.loading import LoadedProposer


class Published(Protocol):
    """What a folder holds, and the formula written out."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


def load(folder: Path, published: Published, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
    saved = save(folder / "speculator", published.config, published.tensors)
    return mlp_speculator.load(MlpSpeculatorConfig(str(saved), quantization="none", **settings), resources(folder, execution))


def started(loaded: LoadedProposer, temperatures: tuple[float, ...] = (0.0, 0.0, 0.0), return_probs: bool = False) -> Run:
    run = Run(loaded.open(opened(return_probs=return_probs)), seed=4)
    for i, temperature in enumerate(temperatures):
        run.add(f"r{i}", 4 + i, Draw(temperature, 7 + i, i))
    return run


def guesses_of(run: Run, steps: int = 12) -> list[tuple[str, Guess]]:
    """Of all rows over many steps, with ceilings that change."""
    found: list[tuple[str, Guess]] = []
    for step in range(steps):
        found += run.step({name: 1 + (step + i) % 5 for i, name in enumerate(run.texts)}).items()
    return [(name, guess) for name, guess in found if guess.tokens]


def is_drawn_as_the_target_would(guess: Guess, draw: Draw, j: int, logits: Tensor) -> bool:
    """Guess number j from these scores [V]: the best, or under the target's own noise; near ties may fall either way."""
    if not draw.temperature:
        return guess.tokens[j] == int(logits.argmax())
    scaled, key = logits[None] / draw.temperature, noise.keys([noise.stream(draw.seed, draw.choice)], [len(guess.text) + j])
    return bool(noise.margin(scaled, key)[0] <= 1e-3) or guess.tokens[j] == int(noise.sample(scaled, key)[0])
