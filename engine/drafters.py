"""The engine's side of loading proposers: what they may know of the target, networks bound as the target is, caches for all.

Knows no method. One object for one boot: networks are loaded, then caches are allocated once, then proposers are opened.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..kernels.adapters import AdapterBank
from ..kernels.execution import UnsupportedExecution
from ..kernels.graphs import GraphExecutor
from ..kernels.layout import MAX_TREE_TOKENS, Executor, KVTensors, StateRoom
from ..kernels.native import NotLowered
from ..kernels.program import Program
from ..kernels.quantised_checkpoint import read_quantisation
from ..kernels.rope import UnsupportedModel
from ..kernels.stored_tensors import WeightError, read_tensors, text_tensors
from ..kernels.weights import bind_program
from ..proposers import load, open_all
from ..proposers.config import (
    DraftModelConfig,
    HiddenStatesConfig,
    LookaheadConfig,
    NgramConfig,
    PardConfig,
    ProposerConfig,
    SpeculativeConfig,
    SuffixConfig,
)
from ..proposers.config_entry import SpeculativeConfigError
from ..proposers.corpus import open_corpora
from ..proposers.draft_states import StateSeats
from ..proposers.loading import AdaptedTarget, LoadedDraft, LoadedProposer, Opening, Resources
from ..proposers.misnamed import misnamed
from ..proposers.pickles import conversion
from ..proposers.proposer_set import ProposerSet
from . import gpu_memory
from .adapter_folder import read_adapter
from .cache_size import MIN_TOKENS, StateShare, cache_blocks, cache_budget, free_memory_bytes, sequence_blocks, state_share
from .config import EngineConfig, ModelConfig
from .errors import ConfigError, ModelLoadError
from .model import LoadedModel, load_model
from .model_folder import Progress, find_adapter, find_folder, weight_files
from .network_plan import multiplies_fp8
from .target_view import target_view

KEPT_GUESSES = 16
"""Of a row, beside a recurrent state, at least: checkpoints that say themselves how much they guess seldom say more."""


@dataclass(frozen=True)
class Drafters:
    """All proposers, the target's cache beside theirs, and what people should know of it."""

    proposers: ProposerSet
    target_kv: KVTensors
    num_blocks: int
    num_bytes: int  # of all caches
    found: tuple[str, ...]  # lines for the banner
    learned: tuple[str, ...]  # names of proposers whose guesses depend on weights from a folder
    gpu_memory: str = ""  # how a GPU's memory is divided, for people
    networks: tuple[GraphExecutor, ...] = ()  # of all proposers, those that run on a GPU
    states: StateShare | None = None  # of recurrent networks

    @property
    def target_states(self) -> StateShare | None:
        """None if the target is not recurrent."""
        return self.states if self.states is not None and self.states.slot_bytes else None


def load_drafters(config: EngineConfig, speculative: SpeculativeConfig, target: LoadedModel, progress: Progress) -> Drafters:
    """Raises ConfigError with what to change."""
    loading = _Loading(config, target, progress)
    resources = Resources(
        target=target_view(target),
        find_folder=loading.find_folder,
        bind=loading.bind,
        load_draft=loading.load_draft,
        progress=progress,
        exchange=None if target.plan.program is None or target.executor.state_layers else partial(loading.exchange, target.plan.program),
        load_adapter=None if target.adapters is None else partial(loading.load_adapter, target.adapters),
    )
    try:
        corpora = open_corpora(speculative.proposers, config.speculation_corpus_dir, target.tokenizer, target.vocab_size)
        loaded = load(speculative, replace(resources, corpora=corpora))
    except (SpeculativeConfigError, UnsupportedModel, UnsupportedExecution, WeightError, NotLowered, ModelLoadError) as error:
        mistake = loading.mistake(speculative)
        if mistake is None and isinstance(error, ModelLoadError):
            raise
        raise ConfigError(f"speculative config: {mistake or error}") from error

    size, room = config.cache.block_size, _divide(config, target, loaded, _most_guesses(speculative))
    num_blocks, states = room.num_blocks, room.states
    target_kv = _allocated(target.executor, num_blocks, size, None if states is None else states.room)
    draft_room = None if states is None else states.draft_room
    caches = [[_allocated(executor, num_blocks, size, draft_room) for executor in part.executors] for part in loaded]
    seats = None if states is None else StateSeats(states.num_seats, states.num_snapshots if config.cache.enable_prefix_caching else 0)
    return_probs = speculative.rejection_sample_method in ("standard", "block")
    begins_ahead = isinstance(target.executor, GraphExecutor) and not target.executor.state_layers
    ahead = num_blocks * size if begins_ahead else 0
    opened = open_all(loaded, lambda name, i: Opening(name, caches[i], num_blocks, size, return_probs, target_kv, seats, ahead))
    proposers = ProposerSet(opened, vocab_size=target.vocab_size, corpora=corpora, is_weighed=speculative.adaptive)
    if target.plan.program is None:
        _check_hidden(target.executor, proposers.needs.hidden)
    learned = tuple(p.name for p, part in zip(proposers.proposers, loaded, strict=True) if part.is_learned)
    found, networks = (*loading.found, *_found(loaded)), tuple(loading.networks)
    return Drafters(proposers, target_kv, num_blocks, room.block_bytes * num_blocks, found, learned, room.gpu_memory, networks, states)


def _allocated(executor: Executor, num_blocks: int, block_size: int, states: StateRoom | None) -> KVTensors:
    return executor.allocate(num_blocks, block_size, states if executor.state_layers else None)


@dataclass(frozen=True)
class _Room:
    """How the memory for caches is divided."""

    num_blocks: int
    block_bytes: int  # of all caches
    states: StateShare | None  # as in Drafters
    gpu_memory: str  # as in Drafters


def _divide(config: EngineConfig, target: LoadedModel, loaded: Sequence[LoadedProposer], num_guesses: int) -> _Room:
    """First the states of recurrent networks, then blocks of what is left. Raises ConfigError if not even one sequence fits."""
    cache, size, rows = config.cache, config.cache.block_size, config.scheduler.max_num_seqs
    executors = (target.executor, *(executor for part in loaded for executor in part.executors))
    own_bytes = sum(executor.kv_block_bytes(size) for executor in executors)
    block_bytes = own_bytes + sum(part.bytes_per_block for part in loaded)
    on_gpu, free_bytes = target.plan.execution.on_gpu, free_memory_bytes()
    length = config.model.max_model_len or min(target.max_model_len, MIN_TOKENS)
    sequence_bytes = sequence_blocks(cache, length) * (own_bytes if on_gpu else block_bytes)  # drafters keep some on the host
    is_measured = on_gpu and cache.num_blocks is None and cache.kv_cache_gb is None
    budget, gpu_line, states, state_bytes = cache_budget(cache, free_bytes), "", None, 0
    if on_gpu:
        memory = _gpu_memory(config, target, executors)
        gpu_line = f"{memory.describe()}: {memory.for_cache / 1e9:.1f} GB for caches"
        budget = memory.require(sequence_bytes, length) if is_measured else budget
    slot_bytes = target.executor.state_slot_bytes(num_guesses)
    draft_slot_bytes = sum(executor.state_slot_bytes(0) for executor in executors[1:])
    if slot_bytes or draft_slot_bytes:
        states = state_share(
            cache,
            budget,
            slot_bytes,
            sequence_bytes,
            num_guesses=num_guesses,
            max_num_seqs=rows,
            draft_slot_bytes=draft_slot_bytes,
        )
        state_bytes = states.num_bytes
    if is_measured:
        cache, state_bytes = replace(cache, kv_cache_gb=(budget - state_bytes) / own_bytes * block_bytes / 2**30), 0
    num_blocks = cache_blocks(
        cache,
        block_bytes,
        free_bytes,
        max_model_len=target.max_model_len,
        max_num_seqs=rows,
        wanted_len=config.model.max_model_len,
        state_bytes=state_bytes,
    )
    return _Room(num_blocks, block_bytes, states, gpu_line)


def _most_guesses(speculative: SpeculativeConfig) -> int:
    """Guesses of a row that are kept beside a recurrent state: as many as are configured, and enough where a checkpoint decides."""
    if speculative.off:
        return 0
    return min(max([KEPT_GUESSES, *map(_guesses_of, speculative.proposers)]), MAX_TREE_TOKENS)


def _guesses_of(entry: ProposerConfig) -> int:
    match entry:
        case NgramConfig():
            return entry.num_speculative_tokens * entry.num_branches
        case SuffixConfig():
            return entry.num_speculative_tokens or entry.max_tree_depth
        case LookaheadConfig():
            return entry.num_nodes
        case HiddenStatesConfig():
            return 0
        case _:
            return entry.num_speculative_tokens or 0


def _check_hidden(executor: Executor, hidden: tuple[int, ...]) -> None:
    """Raises ConfigError if a model that is no program does not give them."""
    from ..kernels.transformers_model import TransformersExecutor  # which takes seconds

    assert isinstance(executor, TransformersExecutor)
    try:
        executor.check_hidden(hidden)
    except UnsupportedModel as error:
        raise ConfigError(f"speculative config: {error}") from error


def _gpu_memory(config: EngineConfig, target: LoadedModel, executors: Sequence[Executor]) -> gpu_memory.GpuMemory:
    """What the GPU leaves for the caches."""
    on_device = [executor for executor in executors if isinstance(executor, GraphExecutor)]
    return gpu_memory.measure(
        torch.device(target.plan.execution.device),
        config.cache.gpu_memory_utilization,
        lambda: gpu_memory.run_largest_step(on_device, config.scheduler, config.cache.block_size),
        gpu_memory.graph_bytes(on_device, config.scheduler),
    )


class _Loading:
    """What proposers ask for while they are loaded."""

    def __init__(self, config: EngineConfig, target: LoadedModel, progress: Progress) -> None:
        self._config = config
        self._target = target
        self._progress = progress
        self._last_found: tuple[str, Path] | None = None  # a name and its folder
        self.found: list[str] = []
        self.networks: list[GraphExecutor] = []
        self._num_adapters = 0

    def find_folder(self, name: str, revision: str | None, converting: Callable[[str], str] | None = conversion) -> Path:
        """converting: as in model_folder; usually of a head, which is no whole model."""
        folder = find_folder(name, revision, self._progress, converting)
        self._last_found = name, folder
        return folder

    def mistake(self, speculative: SpeculativeConfig) -> str | None:
        """After a failure: whether what was loaded last is another method's, in a sentence."""
        if self._last_found is None or self._last_found[1].samefile(self._target.path):
            return None
        return misnamed(speculative.proposers, *self._last_found)

    def bind(self, program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
        plan = self._target.plan
        native = plan.kind == "native"
        # Narrow weights make a drafter twice as fast and can only change what is accepted, never what is said.
        narrowest = "int8" if native else "int4" if plan.execution.on_gpu else None
        wanted: Any = narrowest if quantization is None else None if quantization == "none" else quantization
        if (wanted == "int8" or wanted == "int4" and not plan.execution.on_gpu) and not native:
            raise ConfigError(f"speculative config: quantization {wanted} needs the native executor, which cannot be used: {plan.why}")
        if wanted == "fp8" and not (plan.execution.on_gpu and multiplies_fp8(plan.execution.device)):
            raise ConfigError("speculative config: quantization fp8 needs a GPU that multiplies 8-bit floats: use int8 or int4")
        kv_cache = plan.execution.kv_cache if program.is_frozen else None  # that of the cache that it reads
        execution = replace(plan.execution, quantization=wanted, kv_cache=kv_cache, narrow_head=True)
        return self._noted(bind_program(program, weights, execution, self._target.executor.bank))

    def exchange(self, program: Program, names: Mapping[str, str], weights: Mapping[str, Tensor]) -> Executor:
        """program: the target's."""
        own = program.exchanged(names)
        own = replace(own, shared=frozenset(own.weights).difference(weights))
        stored = text_tensors(read_tensors(weight_files(self._target.path)))  # a bank has no norms
        every = ChainMap(dict(weights), cast(Any, stored))
        return self._noted(bind_program(own, every, self._target.plan.execution, self._target.executor.bank))

    def load_draft(self, draft: DraftModelConfig | PardConfig) -> LoadedDraft:
        config, target = self._config.model, self._target
        folder = self.find_folder(draft.model, draft.revision, None)
        num_layers = draft.draft_layers if isinstance(draft, DraftModelConfig) else None
        # The target's own first layers are kept once if they are taken as they are; everything else is narrow where it can be.
        own = folder.samefile(target.path)
        as_target = own and num_layers is not None and draft.quantization is None
        settings = ModelConfig(
            draft.model,
            dtype=config.dtype,
            revision=draft.revision,
            executor="auto" if config.executor == "native" else config.executor,
            device=target.plan.execution.device,
            batch_invariant=config.batch_invariant,
            quantization=config.quantization if as_target else draft.quantization or self._draft_quantization(folder),
        )
        narrow = None if as_target else "int8"
        bank = target.executor.bank if own and target.plan.kind != "transformers" else None
        loaded = load_model(settings, self._progress, narrow, num_layers, bank)
        self.found.append(f"draft       {loaded.path.name}: {loaded.plan.describe()}")
        return LoadedDraft(self._noted(loaded.executor), loaded.tokenizer, loaded.hf_config.get_text_config().to_dict(), loaded.path)

    def _draft_quantization(self, folder: Path) -> str:
        """Of a whole model where nobody says: as it is stored, or 8 bits where the GPU multiplies those. 4 cost it more guesses than they
        cost heads."""
        execution = self._target.plan.execution
        is_plain = execution.on_gpu and not execution.batch_invariant and read_quantisation(folder) is None
        return "fp8" if is_plain and multiplies_fp8(execution.device) else "auto"

    def load_adapter(self, bank: AdapterBank, name: str, revision: str | None) -> AdaptedTarget:
        """Into the last slot that no drafter has."""
        if self._target.executor.state_layers:
            raise SpeculativeConfigError(
                "method 'uno' runs the target once more over places that it takes back, which a target with recurrent layers cannot: "
                "choose another method"
            )
        slot = bank.num_slots - self._num_adapters
        folder = find_adapter(name, self._progress, revision)
        weights = read_adapter(folder, bank.shapes, bank.rank, bank.slices)
        bank.put(slot, weights.pairs)
        self._num_adapters += 1
        return AdaptedTarget(self._target.executor, slot, weights.rank)

    def _noted(self, executor: Executor) -> Executor:
        if isinstance(executor, GraphExecutor):
            self.networks.append(executor)
        return executor


def _found(loaded: list[LoadedProposer]) -> list[str]:
    return [f"{part.name:<11} {line}" for part in loaded for line in part.found]
