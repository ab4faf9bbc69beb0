"""Keeps what steps cost between starts: one small JSON file for each model, its drafters and machine, in the cache folder.

Knows what decides costs, not how they are measured. A file that cannot be used is as good as none; one that cannot be written
only makes the next start measure again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...kernels import native
from ...proposers.config import EMBEDDED_MODEL, SpeculativeConfig
from ..cache_folder import cache_folder
from ..config import EngineConfig
from ..model import LoadedModel
from ..model_folder import embedded
from .costs import CostFigures

FORMAT = 3
LONGEST_S = 600.0  # of one step
LEAST_GROWTH = 0.5  # what was learned online may fall a little from one number of tokens to the next, but not to half
MAX_BYTES = 1 << 20

logger = logging.getLogger("foretoken.engine")


def conditions(config: EngineConfig, speculative: SpeculativeConfig, model: LoadedModel, found: Sequence[str]) -> dict[str, str]:
    """Everything that decides costs. found: what drafters turned out to be (engine/drafters.py)."""
    models = [asdict(proposer).get("model") for proposer in speculative.proposers]
    return {
        "model": _folder(model.path),
        "executor": model.plan.describe(),
        "steps": f"{config.scheduler.max_num_batched_tokens} tokens, {config.scheduler.max_num_seqs} rows",
        "cache block": str(config.cache.block_size),
        "proposers": repr(speculative.proposers),
        "draft models": ", ".join(_named(name) for name in models if name),
        "drafters": "; ".join(found),
        "lossy": str(speculative.lossy),
        "cpu": f"{_cpu()}, {native.usable_cores()} cores, {native.threads()} native and {torch.get_num_threads()} torch threads",
        "versions": f"foretoken {__version__}, native code {native.sources()[:12]}, torch {torch.__version__}",
    }


@dataclass(frozen=True)
class CostFile:
    """The figures of one set of conditions."""

    path: Path
    conditions: Mapping[str, str]

    @classmethod
    def of(cls, conditions: Mapping[str, str], folder: Path | None = None) -> CostFile:
        """folder: None = "costs" in the cache folder."""
        key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:24]
        return cls((folder or cache_folder() / "costs") / f"{key}.json", conditions)

    def load(self, proposers: Sequence[str]) -> CostFigures | None:
        """The figures, if they are known. A file that is damaged, or of something else than these proposers, is ignored with a log line."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError("it is too big")
            kept = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the step times in %s cannot be read and are measured anew: %s", self.path, error)
            return None
        try:
            if kept["format"] != FORMAT or kept["conditions"] != dict(self.conditions):
                raise ValueError("they are of another model, machine or version")
            return _figures(kept, proposers)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("the step times in %s are ignored and measured anew: %s", self.path, error)
            return None

    def save(self, figures: CostFigures) -> None:
        """At once or not at all; never raises OSError."""
        kept = {
            "format": FORMAT,
            "conditions": dict(self.conditions),
            "target": {str(tokens): seconds for tokens, seconds in figures.target.items()},
            "per_context_token": figures.per_context_token,
            "passes": {str(tokens): seconds for tokens, seconds in (figures.passes or {}).items()},
            "draft": {name: [[k, rows, s] for (k, rows), s in grid.items()] for name, grid in (figures.draft or {}).items()},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".costs-", suffix=".tmp")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump(kept, file, indent=1)
                os.replace(name, self.path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.info("step times are not kept for the next start: %s", error)


def _figures(kept: Mapping[str, Any], proposers: Sequence[str]) -> CostFigures:
    """Raises ValueError, TypeError or KeyError if this is not what steps can cost."""
    target, passes = _by_tokens(kept["target"]), _by_tokens(kept["passes"])
    draft = {name: {(int(k), int(rows)): _seconds(s) for k, rows, s in cells} for name, cells in kept["draft"].items()}
    for curve in (target, passes):
        if any(later < LEAST_GROWTH * earlier for earlier, later in pairwise(curve.values())):
            raise ValueError("more tokens cost much less")
    if any(name not in proposers for name in draft):
        raise ValueError("a proposer is not configured")
    for name, grid in draft.items():
        depths, rows = {k for k, _ in grid}, {r for _, r in grid}
        if not grid or len(grid) != len(depths) * len(rows) or min(depths) < 1 or min(rows) < 1:
            raise ValueError(f"the draft times of {name} have gaps")
    return CostFigures(target, _seconds(kept["per_context_token"]), draft, passes or None)


def _by_tokens(kept: Mapping[str, Any]) -> dict[int, float]:
    return {int(tokens): _seconds(seconds) for tokens, seconds in sorted(kept.items(), key=lambda item: int(item[0]))}


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < LONGEST_S:  # NaN is in no range
        raise ValueError(f"{value!r} is no time of a step")
    return float(value)


def _named(model: str) -> str:
    """A drafter by name: a folder, a hub id, or NAME/METHOD of the embedded model."""
    if model.partition("/")[0] == EMBEDDED_MODEL:
        return _folder(embedded(model))
    folder = Path(os.path.expanduser(model))
    return _folder(folder) if folder.is_dir() else model


def _folder(folder: Path) -> str:
    """A model's folder by what is in it: moved elsewhere it is the same model, with a changed file another."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        elif file.name == "config.json":
            digest.update(file.read_bytes())
    return f"{folder.name} {digest.hexdigest()[:16]}"


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
