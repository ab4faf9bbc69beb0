"""What the trainings of a target, a draft and a head have in common: the work folder, packed files, plan and run. Knows no models."""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...kernels.native import availability, usable_cores
from ...proposers.training.encoding import AnyDocument
from ...proposers.training.loop import Plan, Run, Trainee
from ...proposers.training.optimizer import OptimizerSettings
from ...proposers.training.packing import Document, Packed, PackedStream, mean_tokens, write
from ...proposers.training.reading import DataError, read_data
from .options import Sources, Training

log = logging.getLogger("foretoken.train")

HELD_OUT_BATCHES = 8                 # read at each evaluation
BFLOAT16_CORES = ("avx512_bf16", "amx")      # instruction sets with products of bfloat16


@dataclass(frozen=True)
class WorkFolder:
    """A training's files. The settings that they were made with lie beside them, so that others are not mixed in."""

    path: Path

    @staticmethod
    def claim(sources: Sources, settings: Mapping[str, Any]) -> WorkFolder:
        """Begin the folder, or go on with it. Raises DataError if it was begun with other settings, or if OUT is somebody else's."""
        record = sources.work / "settings.json"
        data = sorted(str(path.resolve()) for path in sources.data)
        given = json.loads(json.dumps({"data": data, "data_bytes": _num_bytes(sources.data), "seed": sources.seed, **settings}))
        if record.exists() and any(path != record for path in sources.work.iterdir()):  # else a mistake ended it before anything was made
            begun = json.loads(record.read_text(encoding="utf-8"))
            if begun.get("data_bytes") is None or given["data_bytes"] is None:  # of an older version; or what is packed is all there is
                begun["data_bytes"] = given["data_bytes"]
            if changed := [name for name in {**begun, **given} if begun.get(name) != given.get(name)]:
                was = ", ".join(f"{name} {begun[name]}" for name in changed if name in begun) or f"no {', '.join(changed)}"
                raise DataError(f"{sources.work} was begun with {was}: use that again, choose another --work, or delete the folder")
            return WorkFolder(sources.work)
        if sources.out.exists() and (not sources.out.is_dir() or any(sources.out.iterdir())):
            raise DataError(f"--out {sources.out} is there already, but no training in {sources.work}: choose another or delete it")
        sources.work.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
        return WorkFolder(sources.work)

    def packed(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether packed file `name` is there, whole: its bounds are written last."""
        return self.packed(name).with_suffix(".bounds").exists()

    def pack(self, name: str, documents: Iterable[tuple[bool, Document]], vocab_size: int) -> None:
        """Write NAME and NAME_held_out from (is held out, document). Raises DataError if there is nothing to train on."""
        parts: dict[bool, list[Document]] = {False: [], True: []}
        for held_out, document in tqdm(documents, desc="packing", unit=" documents", dynamic_ncols=True, leave=False, disable=None):
            parts[held_out].append(document)
        if not any(len(document) > 1 for document in parts[False]):
            raise DataError("there is nothing to train on: too little data")
        write(self.packed(f"{name}_held_out"), parts[True], vocab_size)
        tokens = write(self.packed(name), parts[False], vocab_size)
        log.info("packed %s tokens in %s documents; %s held out", f"{tokens:,}", f"{len(parts[False]):,}", f"{len(parts[True]):,}")


def _num_bytes(data: Iterable[Path]) -> int | None:
    """Of all files together, so that text which has grown since is not taken for what was packed; None if one is gone."""
    files = [file for path in data for file in (path.rglob("*") if path.is_dir() else [path])]
    try:
        return sum(file.stat().st_size for file in files if not file.is_dir())
    except OSError:
        return None


def read_shuffled(sources: Sources) -> list[AnyDocument]:
    """All of the data, in an order that only the seed and the data decide."""
    bar = tqdm(read_data(sources.data), desc="reading", unit=" records", dynamic_ncols=True, leave=False, disable=None)
    documents: list[AnyDocument] = list(bar)
    random.Random(sources.seed).shuffle(documents)
    return documents


def cut(document: Document, context: int) -> Iterator[Document]:
    """Parts of at most `context` tokens."""
    for start in range(0, len(document), context):
        yield Document(document.token_ids[start:start + context], document.learn[start:start + context])


@dataclass(frozen=True)
class Machine:
    """Where it is trained, how narrow its products are, and what its cores do."""

    device: torch.device
    half: bool
    cores: int = field(default_factory=usable_cores)

    @staticmethod
    def choose(device: str, precision: str) -> Machine:
        """Raises DataError for a device that is not here."""
        gpus = torch.cuda.device_count()
        name = device if device != "auto" else "cuda" if gpus else "cpu"
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or (kind == "cuda" and (int(index) if index.isdecimal() else 0) >= gpus):
            raise DataError(f"--device {name}: this machine has a CPU and {gpus} GPUs")
        half = kind == "cuda" or availability().isa in BFLOAT16_CORES
        return Machine(torch.device(name), half if precision == "auto" else precision == "bfloat16")

    def workers(self, accumulate: int) -> int:
        """Batches computed side by side."""
        return 1 if self.device.type == "cuda" else min(self.cores, accumulate)


def plan_for(training: Training, machine: Machine, stream: PackedStream, share: float = 1.0) -> Plan:
    """Steps for the tokens, epochs or minutes asked for, whichever ends first; `share` of them for a stage."""
    step_tokens = mean_tokens(stream) * training.accumulate
    epoch_tokens = mean_tokens(stream) * len(stream)
    epochs = training.epochs or (1.0 if training.tokens is None and training.minutes is None else math.inf)
    tokens = share * min(training.tokens or math.inf, epochs * epoch_tokens)
    steps = max(1, round(tokens / step_tokens)) if tokens < math.inf else sys.maxsize
    optimizer = OptimizerSettings() if training.lr is None else OptimizerSettings(lr=training.lr, table_lr=1.5 * training.lr)
    return Plan(
        steps=steps, accumulate=training.accumulate, optimizer=optimizer, half=machine.half, device=machine.device,
        minutes=None if training.minutes is None else share * training.minutes, workers=machine.workers(training.accumulate),
    )


def train(trainee: Trainee, folder: WorkFolder, name: str, training: Training, machine: Machine, share: float = 1.0) -> Path:
    """Train on packed file `name` to the end of the plan; returns the folder with log.csv and curves.png.

    Raises KeyboardInterrupt, with everything saved, when SIGINT or SIGTERM asked to stop.
    """
    stream = PackedStream([folder.packed(name)], training.batch_tokens)
    held_out = _held_out(folder.packed(f"{name}_held_out"), training.batch_tokens)
    plan = plan_for(training, machine, stream, share)
    torch.set_num_threads(max(1, machine.cores // plan.workers))
    run = Run(trainee, stream, plan, folder.path / f"run_{name}", held_out)
    trained = sum(parameter.numel() for parameter in trainee.parameters())
    log.info("training %s parameters on %s in %s", f"{trained:,}", machine.device, "bfloat16" if machine.half else "float32")
    if not run.train(say):
        raise KeyboardInterrupt
    return run.work


def open_to_readers(folder: Path) -> None:
    """What was exported, for everybody who may read the rest of it: safetensors makes its files the owner's alone, and a server in a
    container is somebody else."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), weights)  # an adapter's has another name


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _held_out(path: Path, batch_tokens: int) -> list[Packed]:
    try:
        stream = PackedStream([path], batch_tokens)
    except ValueError:
        log.warning("nothing is held out of so little data: the curves show training only")
        return []
    return some(stream)


def some(stream: PackedStream) -> list[Packed]:
    """Enough of it to evaluate with."""
    return [stream[number] for number in range(min(HELD_OUT_BATCHES, len(stream)))]
