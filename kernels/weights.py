"""Checkpoints: reads the tensors of files, checks them against a program, and binds the two to an executor.

Safetensors and GGUF (gguf_model.py) are read. Weights that are quantised there are plain numbers here (quantised_checkpoint.py). Knows no
model family: names and shapes come from the program.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from . import native, torch_executor
from .adapters import AdapterBank, adapted
from .config_limits import entry
from .decoder import decoder_program
from .execution import Execution, UnsupportedExecution
from .freed_memory import returned_at_once
from .fuse import fuse
from .gguf_file import GgufError
from .gguf_model import GgufWeights
from .layout import Executor
from .program import Program, RowsOf
from .quantised_checkpoint import Quantisation, UnsupportedQuantisation, plain, read_quantisation, stored_parts, stored_shape
from .text_names import text_names, view_names
from .weight_bank import WeightBank

PROGRESS_INTERVAL_S = 2.0
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightError(ValueError):
    """A checkpoint is missing, damaged or not the one its config describes. The message names the tensors."""


def network_program(
    hf_config: PreTrainedConfig, max_model_len: int | None = None, dtype: torch.dtype = torch.float32
) -> Program:
    """The program that executors are given; dtype rounds the constants of some families.

    Raises UnsupportedModel where supports() is False.
    """
    return fuse(decoder_program(hf_config, max_model_len, dtype))


def load_program_executor(
    files: Sequence[Path],
    hf_config: PreTrainedConfig,
    execution: Execution,
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    bank: WeightBank | None = None,
    adapters: AdapterBank | None = None,
) -> Executor:
    """The network of a checkpoint, ready to run: natively where that is possible and preferred, else in torch.

    bank: of a network of the same files, of which hf_config may ask for fewer layers. What it has in the same format is kept once.
    adapters: that its rows may have.
    Raises WeightError, UnsupportedModel where supports() is False, UnsupportedExecution for formats that would need the
    native executor. Weights are read one by one, and nothing of the files stays mapped.
    """
    program = network_program(hf_config, max_model_len, execution.dtype)
    tensors = text_tensors(read_tensors(files))
    if execution.as_stored:
        program = with_widths_of(tensors, program)
    if HEAD in tensors and EMBEDDING not in tensors and HEAD not in program.weights:
        # Of two equal tensors some savers keep the one whose name comes first.
        tensors = _NamedTensors(tensors, {EMBEDDING if name == HEAD else name: name for name in tensors})
    tensors = sliced(tensors, program.slices)
    shapes = tensors.without_numbers()
    for name in sorted(shapes.keys() - program.weights.keys()):
        if name.endswith(".bias") and not tensors[name].any():
            del shapes[name]  # GPTQ writes biases for layers that have none
    check_tensors(program, shapes if bank is None else {name: shapes[name] for name in program.weights if name in shapes})
    weights = _CheckedTensors(tensors, {name: shapes[name].nbytes for name in program.weights}, progress)
    if bank is not None:
        program = replace(program, shared=frozenset(program.weights))
    with returned_at_once():
        return bind_program(program, weights, execution, bank, adapters)


def bind_program(
    program: Program,
    weights: Mapping[str, Tensor],
    execution: Execution,
    bank: WeightBank | None = None,
    adapters: AdapterBank | None = None,
) -> Executor:
    """A network of these weights, run natively where that is possible and preferred, else in torch.

    bank: of another network, which holds the weights in program.shared; they may be missing among `weights`.
    adapters: that rows may have.
    Raises UnsupportedExecution for formats that would need the native executor, and where no executor can use what the bank has.
    """
    refusal = native.supports(program if adapters is None else adapted(program), execution)
    if refusal is None and (bank is None or native.has_weights(program, weights, bank)):
        return native.NativeExecutor(program, weights, execution, bank=bank, adapters=adapters)
    if execution.needs_native:
        narrow = "int8 needs" if execution.on_gpu else "int8 and int4 need"
        raise UnsupportedExecution(f"{narrow} the native executor: {refusal or _ELSEWHERE}")
    if bank is not None and not torch_executor.has_weights(program, weights, bank):
        raise UnsupportedExecution(f"the torch executor cannot use what the native one has packed, and {refusal or _ELSEWHERE}")
    has_fp8_cache = execution.kv_cache == "fp8"
    if not execution.on_gpu:
        return torch_executor.TorchExecutor(program, weights, execution.dtype, bank, None, None, has_fp8_cache, adapters)
    from .graphs import GraphExecutor
    from .triton_steps import TritonKernels  # Triton is there only where torch is built for GPUs

    kernels = TritonKernels(execution.batch_invariant, execution.quantization, execution.narrow_head)
    network = torch_executor.TorchExecutor(program, weights, execution.dtype, bank, execution.device, kernels, has_fp8_cache, adapters)
    return GraphExecutor(network)


_ELSEWHERE = "the weights that it shares belong to a network that is not native"


def read_tensors(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """All tensors of the safetensors files of a folder by name, or of a model's GGUF files, mapped into memory only when asked for.

    Those that are quantised, as the folder's config.json or the GGUF file says, are float32, made whenever they are asked for.
    Raises WeightError.
    """
    if files and files[0].suffix == ".gguf":
        try:
            return _GgufTensors(GgufWeights(files))
        except GgufError as error:
            raise WeightError(str(error)) from error
    tensors = _TensorFiles(files)
    try:
        quantisation = read_quantisation(files[0].parent) if files else None
    except UnsupportedQuantisation as error:
        raise WeightError(f"the checkpoint is {error}") from error
    return tensors if quantisation is None else _PlainTensors(tensors, quantisation)


def shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Of one of the tensors, whose numbers are not read."""
    return tuple(_without_numbers(tensors, name).shape)


def named(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Some of the tensors, under other names: new -> old."""
    return _NamedTensors(tensors, names)


def text_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those of a checkpoint's text model, as it calls them itself: nothing of what sees or hears. Of most checkpoints, all."""
    return _NamedTensors(tensors, text_names(tensors))


def sliced(tensors: Mapping[str, Tensor], slices: Mapping[str, RowsOf]) -> _SlicedTensors:
    """The same tensors, where those in `slices` that are there are known by their parts instead.

    Parts are views where their rows lie together. Asked for a part of a tensor of another shape, it raises WeightError.
    """
    return _SlicedTensors(tensors, slices)


def with_widths_of(tensors: Mapping[str, Tensor], program: Program) -> Program:
    """The same, whose weights that `tensors` have in plain numbers stay wide."""
    whole = {name: rows.tensor for name, rows in program.slices.items() if rows.tensor in tensors}
    return replace(program, wide=frozenset(name for name in program.weights if not _is_quantised(tensors, whole.get(name, name))))


def rows_of(tensor: Tensor, rows: RowsOf) -> Tensor:
    """[n, columns] the rows that are meant of a tensor with as many rows as rows.shape says, however many columns it has."""
    if rows.transposed:
        matrix, before = divmod(rows.start, tensor.shape[-1])
        return tensor[matrix, :, before : before + rows.stop - rows.start : rows.step].mT
    columns = (rows.columns,) if rows.columns else tensor.shape[-1:] if tensor.dim() > 1 else ()
    found = tensor.reshape(rows.runs, -1, *columns)[:, rows.start : rows.stop : rows.step]
    if rows.pairs:
        turned = found[:, : rows.pairs]
        found = torch.cat((turned[:, ::2], turned[:, 1::2], found[:, rows.pairs :]), 1)
    return (found.mT if rows.runs_transposed else found).flatten(0, 1)


def has_own_head(hf_config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is a head that config.json calls the embedding once more, but that is another: transformers uses it as well."""
    if not entry(hf_config, "tie_word_embeddings") or HEAD not in tensors or EMBEDDING not in tensors:
        return False
    if shape_of(tensors, EMBEDDING) != shape_of(tensors, HEAD):
        return True
    embedding = tensors[EMBEDDING]
    return not torch.equal(embedding, tensors[HEAD].to(embedding.dtype))


def check_tensors(program: Program, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError unless tensors are what the program names: all there, none unused, of its shapes, unquantised. Reads none.

    Draft layers behind those of the network (MTP) are nobody's business here.
    """
    tied = "lm_head.weight" not in program.weights  # then some checkpoints hold a copy of the embedding
    unused = set(tensors) - set(program.weights) - draft_layer_names(tensors) - program.unread
    unexpected = [name for name in sorted(unused) if not _is_redundant(name, tied)]
    absent = {name: program.slices.get(name) for name in set(program.weights) - set(tensors)}
    missing = sorted({rows.tensor if rows is not None and is_part_of(name, rows) else name for name, rows in absent.items()})
    complaints = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if complaints:
        raise WeightError(f"the checkpoint's tensors do not fit its config.json; {'; '.join(complaints)}")
    for name, shape in program.weights.items():
        tensor = _without_numbers(tensors, name)
        if tuple(tensor.shape) != shape:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but config.json asks for {shape}")
        if not tensor.is_floating_point():
            raise _quantised(name, tensor)


def is_part_of(name: str, rows: RowsOf) -> bool:
    """Whether only programs tell this weight apart: no checkpoint has it but in the whole after which it is named."""
    return name.startswith(rows.tensor.removesuffix("weight"))


def draft_layer_names(names: Iterable[str]) -> set[str]:
    """Tensors of a target's checkpoint that only guess: MTP layers, by their names or as layers that read two states; an Orthrus's."""
    names = set(names)
    doubled = tuple(name.removesuffix("eh_proj.weight") for name in names if _NUMBERED.fullmatch(name))
    return {name for name in names if name.startswith(doubled) or _OF_DRAFT_LAYERS.match(name)}.union(view_names(names).values())


_NUMBERED = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
_OF_DRAFT_LAYERS = re.compile(r"(model\.)?mtp(_\w+)?\.")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError for NaN and infinity: a damaged file still loads, and then every answer is nonsense."""
    for name, tensor in tensors.items():
        _require_finite(name, tensor)


def _require_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        raise _quantised(name, tensor)
    # The extremes in one pass over the mapped file; a sum in another dtype would copy the tensor first.
    if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise WeightError(f"{name} contains NaN or infinite values; the checkpoint is damaged")


def _quantised(name: str, tensor: Tensor) -> WeightError:
    kind = str(tensor.dtype).removeprefix("torch.")
    told = "the weights are quantised in a way that config.json and the tensors beside it do not tell"
    return WeightError(f"{name} holds {kind}: {told}; use the model's unquantised weights")


def _without_numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors.without_numbers_of(name) if isinstance(tensors, _Tensors) else _shape_alone(tensors[name])


def _shape_alone(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _matrix(tensors: Mapping[str, Tensor], name: str, index: int) -> Tensor:
    return tensors.matrix(name, index) if isinstance(tensors, _Tensors) else tensors[name][index]


def _is_quantised(tensors: Mapping[str, Tensor], name: str) -> bool:
    return isinstance(tensors, _Tensors) and tensors.is_quantised(name)


class _Tensors(Mapping[str, Tensor]):
    """Tensors by name. Which there are is told without reading one."""

    _names: dict[str, Any]

    def without_numbers_of(self, name: str) -> Tensor:
        """On the device `meta`: a shape and a dtype."""
        return _shape_alone(self[name])

    def is_quantised(self, name: str) -> bool:
        """Whether the files hold it in narrower numbers than these."""
        return False

    def matrix(self, name: str, index: int) -> Tensor:
        """One along the first dimension."""
        return self[name][index]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _CheckedTensors(_Tensors):
    """The tensors of `names`, each looked through for NaN and infinity when it is first asked for; says how far reading is.

    So a file is read once, and memory holds no more than the tensor in hand and what is made of it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, int], progress: Callable[[str], None]) -> None:
        """names: and the bytes of each."""
        self._tensors, self._names, self._progress = tensors, dict(names), progress
        self._unread = set(names)
        self._bytes_read, self._bytes = 0, sum(names.values())
        self._told = time.monotonic()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name in self._unread:
            _require_finite(name, tensor)
            self._unread.remove(name)
            self._tell(tensor.nbytes)
        return tensor

    def _tell(self, num_bytes: int) -> None:
        self._bytes_read += num_bytes
        now = time.monotonic()
        if now - self._told >= PROGRESS_INTERVAL_S:
            self._told = now
            self._progress(f"weights: {self._bytes_read / 1e9:.1f} of {self._bytes / 1e9:.1f} GB")


class _TensorFiles(_Tensors):
    """Tensor name -> tensor over several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._names = {}
        self._handles = {path: _open(path) for path in paths}
        for path, handle in self._handles.items():
            for name in handle.keys():
                if name in self._names:
                    raise WeightError(f"{name} is in both {self._names[name].name} and {path.name}")
                self._names[name] = path

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._names[name]].get_tensor(name)


class _PlainTensors(_Tensors):
    """Tensors of a quantised checkpoint in plain numbers; none is kept."""

    def __init__(self, tensors: Mapping[str, Tensor], quantisation: Quantisation) -> None:
        self._tensors, self._quantisation = tensors, quantisation
        self._latest: tuple[str, int, Tensor] | None = None  # name, index and numbers of a matrix: its parts are asked for in turn
        self._names: dict[str, dict[str, str]] = stored_parts(tensors)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return parts[""]
        shape = self._shape(name, parts)
        if len(shape) == 3:
            return torch.stack([self.matrix(name, index) for index in range(shape[0])])
        return self._plain(name, parts)

    def without_numbers_of(self, name: str) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return _shape_alone(parts[""])
        return torch.empty(self._shape(name, parts), dtype=torch.float32, device="meta")

    def matrix(self, name: str, index: int) -> Tensor:
        parts = self._parts(name)
        if not self.is_quantised(name):
            return parts[""][index]
        if self._latest is None or self._latest[:2] != (name, index):
            count = self._shape(name, parts)[0]
            alone = {part: t[index] if t.dim() and len(t) == count else t for part, t in parts.items()}
            self._latest = name, index, self._plain(name, alone)
        return self._latest[2]

    def is_quantised(self, name: str) -> bool:
        return name in self._names and [*self._names[name]] != [""]

    def _parts(self, name: str) -> dict[str, Tensor]:
        return {part: self._tensors[stored] for part, stored in self._names[name].items()}

    def _shape(self, name: str, parts: Mapping[str, Tensor]) -> tuple[int, ...]:
        try:
            shape = stored_shape(parts, self._quantisation)
            if min(shape, default=0) < 0:
                raise ValueError(f"shape {shape} is negative")
            return shape
        except _NONSENSE as error:
            raise _unreadable(name, error) from error

    def _plain(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        try:
            return plain(parts, self._quantisation)
        except _NONSENSE as error:
            raise _unreadable(name, error) from error


class _GgufTensors(_Tensors):
    """Those of a model in GGUF files; no plain numbers of what is quantised are kept."""

    def __init__(self, weights: GgufWeights) -> None:
        self._weights, self._names = weights, weights.stored

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.plain(name)

    def without_numbers_of(self, name: str) -> Tensor:
        return torch.empty(self._weights.shape(name), dtype=torch.float32, device="meta")

    def is_quantised(self, name: str) -> bool:
        return name in self._names and self._names[name][0].is_quantised


_NONSENSE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # what Python and torch say of parts that do not fit


def _unreadable(name: str, error: Exception) -> WeightError:
    return WeightError(f"{name} cannot be read as config.json says that it is quantised: {error}")


class _NamedTensors(_Tensors):
    """Some of the tensors, under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """names: new -> old."""
        self._tensors, self._names = tensors, dict(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def without_numbers_of(self, name: str) -> Tensor:
        return _without_numbers(self._tensors, self._names[name])

    def is_quantised(self, name: str) -> bool:
        return name in self._names and _is_quantised(self._tensors, self._names[name])

    def matrix(self, name: str, index: int) -> Tensor:
        return _matrix(self._tensors, self._names[name], index)


class _SlicedTensors(_Tensors):
    """Tensors of a checkpoint, of which some are known by the names of their slices."""

    def __init__(self, tensors: Mapping[str, Tensor], slices: Mapping[str, RowsOf]) -> None:
        self._tensors = tensors
        self._slices = {name: rows for name, rows in slices.items() if rows.tensor in tensors}
        cut = {rows.tensor for rows in self._slices.values()}
        self._names = dict.fromkeys([*(name for name in tensors if name not in cut), *self._slices])

    def __getitem__(self, name: str) -> Tensor:
        rows = self._slices.get(name)
        if rows is None:
            return self._tensors[name]
        if (shape := shape_of(self._tensors, rows.tensor)) != rows.shape:
            raise WeightError(f"{rows.tensor} has shape {shape}, but config.json asks for {rows.shape}")
        if _is_quantised(self._tensors, rows.tensor) and len(shape) == 3 and rows.runs == 1:
            height = shape[2 if rows.transposed else 1]
            index = rows.start // height  # only this matrix is made plain: parts do not cross their borders
            within = replace(rows, start=rows.start - index * height, stop=rows.stop - index * height)
            return rows_of(_matrix(self._tensors, rows.tensor, index)[None], within)
        return rows_of(self._tensors[rows.tensor], rows)

    def without_numbers(self) -> dict[str, Tensor]:
        """All of them as tensors that have shapes only: nothing is read, where a part whose rows lie apart would be copied."""
        shapes = _SlicedTensors({name: _without_numbers(self._tensors, name) for name in self._tensors}, self._slices)
        return {name: shapes[name] for name in shapes}


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is damaged or incomplete ({error}); fetch the file again") from error


def _is_redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
