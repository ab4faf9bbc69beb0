"""Runs a program in torch: on machines without a native executor, and on GPUs.

Knows no checkpoint. What ops mean is in torch_ops.py; on a GPU they are bound to Triton kernels where triton_steps.py has one.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .adapters import AdapterBank, adapted
from .chain import run_chain_by_steps
from .execution import Quantization
from .footprint import product_bytes
from .fp8 import FP8
from .fuse import gated_products
from .layout import (
    ChainOutput,
    Draws,
    ForwardOutput,
    KVLayerSpec,
    KVTensors,
    RaggedBatch,
    RowStates,
    StateLayerSpec,
    StateRoom,
    kv_bytes_per_block,
    state_bytes,
)
from .ops import Activation, Embed, Linear, Op
from .program import Program, matrices_of
from .rope_values import rope_table_values
from .torch_kv import TorchKV
from .torch_ops import MATRIX, ROWS, Binder, Pass, Step
from .upload import upload_packed
from .weight_bank import NetworkWeights, WeightBank


@dataclass(frozen=True)
class Computed:
    """What one pass left on its device. Nothing was waited for; `TorchExecutor.output` makes a ForwardOutput of it."""

    argmax: Tensor  # [N] int64, token ids; [0] where nobody wants the best
    top: Tensor  # [N] float32; likewise
    logits: Tensor | None  # [N, V] in the executor's dtype; None without logits
    hidden: dict[int, Tensor]  # boundary id -> [T, H]


class Kernels(Protocol):
    """Faster forms of some ops. Each takes and leaves the same buffers as the reference does."""

    is_batch_invariant: bool  # a token's scores are the same bits in any batch
    quantization: Quantization | None  # of the weights of products

    def step(self, op: Op, bind: Binder) -> Step | None:
        """The op bound to its weights; None: this one is left to the reference."""
        ...

    def gated_step(self, op: Linear, activation: Activation, bind: Binder) -> Step | None:
        """Both ops in one, of which the first leaves nothing; None: each is bound by itself."""
        ...


@dataclass(frozen=True)
class BoundStep:
    """A step, with the buffers that the ops it stands for read and leave."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    step: Step


def _bound(program: Program, bind: Binder, kernels: Kernels | None) -> list[BoundStep]:
    """The program's ops in order, each as kernels have it, or else as the reference does."""
    gated = {} if kernels is None else gated_products(program)
    steps: list[BoundStep] = []
    done: set[Op] = set()
    for op in program.ops:
        if op in done:
            continue
        if kernels is not None and isinstance(op, Linear) and op in gated:
            activation = gated[op]
            both = kernels.gated_step(op, activation, bind)
            if both is not None:
                steps.append(BoundStep(op.inputs, activation.outputs, both))
                done.add(activation)
                continue
        fast = None if kernels is None else kernels.step(op, bind)
        steps.append(BoundStep(op.inputs, op.outputs, bind(op) if fast is None else fast))
    return steps


def full_logits(computed: Computed, wanted: Tensor) -> Tensor | None:
    """[M, V] float32 rows of the pass's logits, None if none are wanted."""
    return computed.logits.index_select(0, wanted).float() if len(wanted) and computed.logits is not None else None


def on_device(batch: RaggedBatch, device: torch.device) -> RaggedBatch:
    """The batch where a network computes, without waiting for it; the same object if it is there."""
    if batch.token_ids.device == device or device.type == "cpu":
        return batch
    tensors = _tensors_of(batch) | ({} if batch.states is None else _tensors_of(batch.states))
    moved = dict(zip(tensors, upload_packed([*tensors.values()], device), strict=True))
    states = None if batch.states is None else RowStates(**{name: moved.pop(name) for name in _tensors_of(batch.states)})
    return dataclasses.replace(batch, **moved, states=states)


def _tensors_of(part: RaggedBatch | RowStates) -> dict[str, Tensor]:
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def has_weights(program: Program, weights: Mapping[str, Tensor], bank: WeightBank) -> bool:
    """Whether the tensors, and what the bank has for a torch executor, are all that the program shares."""
    matrices = [names for op in program.ops for names in matrices_of(op)]
    rows = [(op.weight,) for op in program.ops if isinstance(op, Embed)]
    return bank.completes(matrices, MATRIX, program.shared, weights) and bank.completes(rows, ROWS, program.shared, weights)


class TorchExecutor:
    """A program bound to its weights. Implements `Executor`; results are inference tensors.

    weights: the program's names -> tensors of its shapes, in any dtype; those in program.shared may be missing if `bank` has
    them. A weight that is both embedding and output layer is kept once, but for float32 on CPUs, where products with [in, out]
    weights are up to three times as fast. device: where it computes; None = where the smallest weight lies.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        bank: WeightBank | None = None,
        device: torch.device | str | None = None,
        kernels: Kernels | None = None,
        has_fp8_cache: bool = False,
        adapters: AdapterBank | None = None,
    ) -> None:
        """kernels: how ops are computed where they have a kernel; None = on a GPU the Triton ones, else the reference for all.

        has_fp8_cache: keys and values are kept as e4m3, whatever dtype is. adapters: on the device; rows may have them."""
        self.adapters = adapters
        if adapters is not None:
            program = adapted(program)
        self.program = program
        self.kv_layers: tuple[KVLayerSpec, ...] = program.kv_layers
        self.state_layers: tuple[StateLayerSpec, ...] = program.state_layers
        self.vocab_size = program.vocab_size
        self.max_model_len = program.max_model_len
        self.dtype = dtype
        self.has_fp8_cache = has_fp8_cache
        self.is_batch_invariant = False
        self.weight_bytes = product_bytes(program, dtype, None if kernels is None else kernels.quantization)
        self.recurrent = program.recurrent
        held = NetworkWeights(weights, program.shared, bank)
        self.bank = held.bank
        bind = Binder(program, held, dtype, None if device is None else torch.device(device), adapters)
        self.device = bind.device
        self.token_ids: Tensor | None = weights[program.token_map].to(self.device).long() if program.token_map else None
        if kernels is None and self.device.type == "cuda":
            from .triton_steps import TritonKernels  # Triton is only there where torch is built for GPUs

            kernels = TritonKernels()
        if kernels is not None:
            self.is_batch_invariant = kernels.is_batch_invariant
        self._steps = _bound(program, bind, kernels)
        self._tables = {name: rope_table_values(table, program.max_model_len, dtype, bind.device) for name, table in program.ropes.items()}
        self._schedules: dict[tuple[tuple[int, ...], bool], list[tuple[Step, tuple[str, ...]]]] = {}

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> TorchKV:
        """See `Executor.allocate`."""
        layers = self.kv_layers, num_blocks, block_size
        return TorchKV(*layers, self.dtype, self.device, self.has_fp8_cache, self.state_layers, states)

    def kv_block_bytes(self, block_size: int) -> int:
        return kv_bytes_per_block(self.kv_layers, block_size, FP8 if self.has_fp8_cache else self.dtype)

    def state_slot_bytes(self, num_guesses: int) -> int:
        return state_bytes(self.state_layers, num_guesses, self.dtype)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass; see `Executor.run`. inputs: the buffers [T, width] that program.inputs names. Logits and states stay on the device."""
        batch = on_device(batch, self.device)
        computed = self.compute(batch, kv, hidden, inputs)
        with torch.inference_mode():
            return ForwardOutput(computed.argmax.cpu(), computed.top.cpu(), full_logits(computed, batch.full_logits), computed.hidden)

    def compute(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
        wants_best: bool = True,
    ) -> Computed:
        """The pass over a batch that lies on this device. With kernels for all its ops nothing in it waits for the device.

        wants_best: whether it finds the best of its scores."""
        assert isinstance(kv, TorchKV)
        with torch.inference_mode():
            given = {name: tensor.to(self.device, self.dtype) for name, tensor in (inputs or {}).items()}
            state = Pass(given, batch, kv, self._tables)
            buffers = state.buffers
            for step, dead in self._schedule(hidden, wants_best):
                state.last_reads = dead
                step(state)
                for name in dead:
                    del buffers[name]
            states = {boundary: buffers[self.program.boundary(boundary)] for boundary in hidden}
            if self.program.best is None or not wants_best:
                logits = buffers.get(self.program.logits)
                return Computed(batch.logits_indices.new_zeros(0), torch.zeros(0, device=self.device, dtype=torch.float32), logits, states)
            argmax, top = (buffers[name] for name in self.program.best.outputs)
            if self.token_ids is not None:
                argmax = self.token_ids[argmax]
            return Computed(argmax, top.float(), buffers[self.program.logits], states)

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        """See `Executor.run_chain`."""
        with torch.inference_mode():
            return run_chain_by_steps(self, batch, kv, counts, draws, inputs, advance=int(not self.program.is_frozen))

    def _schedule(self, hidden: tuple[int, ...], wants_best: bool) -> list[tuple[Step, tuple[str, ...]]]:
        """Each step with the buffers that nobody reads after it: a pass holds no more than it needs."""
        key = hidden, wants_best
        if key not in self._schedules:
            best = self.program.best
            steps = [bound for bound in self._steps if wants_best or best is None or bound.outputs != best.outputs]
            kept = {self.program.logits, *(self.program.boundary(boundary) for boundary in hidden)}
            kept.update(best.outputs if best is not None else ())
            last_use = {name: i for i, bound in enumerate(steps) for name in (*bound.inputs, *bound.outputs)}
            dead: list[list[str]] = [[] for _ in steps]
            for name in last_use.keys() - kept:
                dead[last_use[name]].append(name)
            self._schedules[key] = [(bound.step, tuple(names)) for bound, names in zip(steps, dead, strict=True)]
        return self._schedules[key]
