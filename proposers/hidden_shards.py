"""Hidden states on disk: shards of safetensors, written whole or not at all, beside an index of them.

A shard `states-000000.safetensors` holds the parts of some requests, one after the other, n tokens in all:
    token_ids            [n] int64
    hidden.{boundary}    [n, H], as the target computed them: the state at each token; boundary k is the input of layer k,
                         -1 the state after the final norm
    offsets              [parts + 1] int64: part i owns rows offsets[i]:offsets[i + 1]
    start                [parts] int64: position of a part's first token; tokens before it came from the prefix cache, or are in
                         an earlier part of the same request
    finished             [parts] bool: whether the request ends with the part, but for the last token, which has no state
and as metadata: format, version, model, layers, dtype, and requests, the parts' request ids (JSON lists where there are several).
Several processes may write into one folder, one after the other or at once. Knows no engine.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config_entry import SpeculativeConfigError

FORMAT = "foretoken-hidden-states"
VERSION = 1
INDEX, LOCK = "index.json", ".lock"
_SHARD = re.compile(r"^states-(\d{6,})\.safetensors$")


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one request with their states."""

    request_id: str
    start: int  # position of the first token
    token_ids: Sequence[int]  # [n]
    states: dict[int, Tensor]  # boundary id -> [n, H]
    finished: bool


class ShardFolder:
    """One folder for one model and one choice of layers."""

    def __init__(self, path: Path, model: str, layers: tuple[int, ...]) -> None:
        """Makes the folder. Raises SpeculativeConfigError if it cannot be written to, or holds states of something else."""
        self.path, self._model, self._layers = path, model, layers
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpeculativeConfigError(f"'directory' {path} cannot be made: {error.strerror}") from None
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise SpeculativeConfigError(f"'directory' {path} cannot be read and written by this process")
        if (path / INDEX).exists():
            self._check_index()

    def write(self, parts: Sequence[Part]) -> Path:
        """A new shard, then the index with it. Raises OSError and leaves neither half-written."""
        counts = torch.tensor([len(part.token_ids) for part in parts])
        tensors = {
            "token_ids": torch.tensor([token for part in parts for token in part.token_ids], dtype=torch.int64),
            "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
            "start": torch.tensor([part.start for part in parts]),
            "finished": torch.tensor([part.finished for part in parts]),
        }
        for boundary in self._layers:
            tensors[f"hidden.{boundary}"] = torch.cat([part.states[boundary] for part in parts])
        dtype = str(tensors[f"hidden.{self._layers[0]}"].dtype).removeprefix("torch.")
        requests = json.dumps([part.request_id for part in parts])
        unfinished = self.path / f".states.{os.getpid()}.tmp"
        try:
            save_file(tensors, unfinished, {**self._description(), "dtype": dtype, "requests": requests})
            with self._locked():
                numbers = [int(match[1]) for match in map(_SHARD.match, os.listdir(self.path)) if match]
                shard = self.path / f"states-{max(numbers, default=-1) + 1:06d}.safetensors"
                os.replace(unfinished, shard)
                self._write_index()
        except SafetensorError as error:  # a full disk, for one
            raise OSError(str(error)) from error
        finally:
            unfinished.unlink(missing_ok=True)
        return shard

    def _description(self) -> dict[str, str]:
        return {"format": FORMAT, "version": str(VERSION), "model": self._model, "layers": json.dumps(list(self._layers))}

    def _check_index(self) -> None:
        try:
            found = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
            theirs = (found["format"], found["version"], found["model"], tuple(found["layers"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise SpeculativeConfigError(f"{self.path / INDEX} is no index of hidden states: take another 'directory'") from None
        if theirs != (FORMAT, VERSION, self._model, self._layers):
            raise SpeculativeConfigError(
                f"'directory' {self.path} holds states of {theirs[2]}, layers {list(theirs[3])} ({theirs[0]} {theirs[1]}), not of "
                f"{self._model}, layers {list(self._layers)}: take another one"
            )

    def _write_index(self) -> None:
        """From the shards that are there: a process may have been killed between its shard and the index."""
        path = self.path / INDEX
        known: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["shards"] if path.exists() else []
        by_file = {entry["file"]: entry for entry in known}
        files = sorted(file for file in os.listdir(self.path) if _SHARD.match(file))
        index = {
            **self._description(),
            "version": VERSION,
            "layers": list(self._layers),
            "shards": [by_file.get(file) or _described(self.path / file) for file in files],
        }
        unfinished = self.path / f".index.{os.getpid()}.tmp"
        unfinished.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time numbers its shard and writes the index."""
        with open(self.path / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _described(shard: Path) -> dict[str, Any]:
    with safe_open(shard, framework="pt") as file:
        num_tokens, num_parts = (file.get_slice(name).get_shape()[0] for name in ("token_ids", "start"))
        return {"file": shard.name, "num_tokens": num_tokens, "num_parts": num_parts, "dtype": file.metadata()["dtype"]}
