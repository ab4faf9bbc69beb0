"""Checkpoints: checks their tensors (stored_tensors.py) against a program, and binds the two to an executor.

Knows no model family: names and shapes come from the program.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from . import native, torch_executor
from .adapters import AdapterBank, adapted
from .config_limits import entry
from .decoder import decoder_program
from .execution import Execution, UnsupportedExecution
from .freed_memory import returned_at_once
from .fuse import fuse
from .layout import Executor
from .program import Program, RowsOf
from .stored_tensors import (
    Tensors,
    WeightError,
    is_quantised,
    named,
    shape_of,
    sliced,
    text_tensors,
    without_numbers,
)
from .text_names import view_names
from .weight_bank import WeightBank

PROGRESS_INTERVAL_S = 2.0
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def network_program(
    hf_config: PreTrainedConfig, max_model_len: int | None = None, dtype: torch.dtype = torch.float32
) -> Program:
    """The program that executors are given; dtype rounds the constants of some families.

    Raises UnsupportedModel where supports() is False.
    """
    return fuse(decoder_program(hf_config, max_model_len, dtype))


def load_program_executor(
    tensors: Mapping[str, Tensor],
    hf_config: PreTrainedConfig,
    execution: Execution,
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    bank: WeightBank | None = None,
    adapters: AdapterBank | None = None,
) -> Executor:
    """The network of a checkpoint, ready to run: natively where that is possible and preferred, else in torch.

    tensors: as `read_tensors` gives them. bank: of a network of the same files, of which hf_config may ask for fewer layers. What it has
    in the same format is kept once. adapters: that its rows may have.
    Raises WeightError, UnsupportedModel where supports() is False, UnsupportedExecution for formats that would need the
    native executor. Weights are read one by one, and the network keeps nothing of the files.
    """
    program = network_program(hf_config, max_model_len, execution.dtype)
    tensors = text_tensors(tensors)
    if execution.as_stored:
        program = with_widths_of(tensors, program)
    if HEAD in tensors and EMBEDDING not in tensors and HEAD not in program.weights:
        # Of two equal tensors some savers keep the one whose name comes first.
        tensors = named(tensors, {EMBEDDING if name == HEAD else name: name for name in tensors})
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


def with_widths_of(tensors: Mapping[str, Tensor], program: Program) -> Program:
    """The same, whose weights that `tensors` have in plain numbers stay wide."""
    whole = {name: rows.tensor for name, rows in program.slices.items() if rows.tensor in tensors}
    return replace(program, wide=frozenset(name for name in program.weights if not is_quantised(tensors, whole.get(name, name))))


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
        tensor = without_numbers(tensors, name)
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


class _CheckedTensors(Tensors):
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


def _is_redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
