"""The folder of an n-gram cache: config.json, and one safetensors file with short runs of tokens and what follows each.

Of each length n from 1 to max_n, with E_n runs:

    runs.n     [E_n, n] int16, int32 or int64, token ids
    next.n     [E_n] likewise, the token that follows most often
    chance.n   [E_n] float16, in (0, 1]: how likely it is to be the target's
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from ..kernels.ngram_table import MOST_N, NgramTable
from .checkpoint import Checkpoint
from .config_entry import SpeculativeConfigError

_IDS = {torch.int16, torch.int32, torch.int64}


class Followed(NamedTuple):
    """Runs of one length, and what follows each."""

    runs: NDArray[np.integer]  # [E, n] token ids
    next: NDArray[np.integer]  # [E]
    chance: NDArray[np.floating]  # [E] in (0, 1]


def read_table(checkpoint: Checkpoint, vocab_size: int) -> NgramTable:
    """vocab_size: the target's. Raises SpeculativeConfigError if the folder holds no n-gram cache, or one of another vocabulary."""
    folder, max_n = checkpoint.folder, checkpoint.integer("max_n")
    if not 1 <= max_n <= MOST_N:
        raise SpeculativeConfigError(f"{folder}/config.json: 'max_n' is {max_n}, but must be from 1 to {MOST_N}")
    of_each = [_read(checkpoint, n) for n in range(1, max_n + 1)]
    highest = max((int(ids.max(initial=-1)) for one in of_each for ids in (one.runs, one.next)), default=-1)
    lowest = min((int(ids.min(initial=0)) for one in of_each for ids in (one.runs, one.next)), default=0)
    if lowest < 0 or highest >= vocab_size:
        raise SpeculativeConfigError(
            f"{folder} names token {highest if highest >= vocab_size else lowest}, but the target has {vocab_size} tokens: "
            "it was counted for another tokenizer; make one with `foretoken train ngram-cache`"
        )
    if highest < 0:
        raise SpeculativeConfigError(f"{folder} holds no runs of tokens: nothing was counted for it")
    return NgramTable(
        [one.runs for one in of_each], np.concatenate([one.next for one in of_each]), np.concatenate([one.chance for one in of_each])
    )


def write_table(folder: Path, of_each: Sequence[Followed], vocab_size: int) -> None:
    """of_each: by length, from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.int16 if vocab_size <= 2**15 else torch.int32
    tensors = {}
    for n, one in enumerate(of_each, 1):
        tensors[f"runs.{n}"] = torch.from_numpy(one.runs.astype(np.int32)).reshape(-1, n).to(ids)
        tensors[f"next.{n}"] = torch.from_numpy(one.next.astype(np.int32)).to(ids)
        tensors[f"chance.{n}"] = torch.from_numpy(one.chance.astype(np.float32)).half()
    config = {"architectures": ["NgramCache"], "model_type": "ngram_cache", "vocab_size": vocab_size, "max_n": len(of_each)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def _read(checkpoint: Checkpoint, n: int) -> Followed:
    runs = checkpoint.take(f"runs.{n}", -1, n)
    following, chance = checkpoint.take(f"next.{n}", len(runs)), checkpoint.take(f"chance.{n}", len(runs)).float()
    if {runs.dtype, following.dtype} - _IDS:
        raise SpeculativeConfigError(f"{checkpoint.folder}: 'runs.{n}' and 'next.{n}' must be int16, int32 or int64")
    if len(chance) and not 0 < float(chance.min()) <= float(chance.max()) <= 1:
        raise SpeculativeConfigError(f"{checkpoint.folder}: 'chance.{n}' must lie above 0 and not above 1")
    return Followed(runs.numpy(), following.numpy(), chance.numpy())
