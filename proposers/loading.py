"""What the engine gives a method while its proposer is loaded, and what the method gives back.

Two steps, because nobody knows how many cache blocks there can be before every network is loaded: `load` makes a
`LoadedProposer`, its `open` makes the proposer once the caches are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels.layout import Executor, KVLayerSpec, KVTensors
from ..kernels.program import Program
from .base import Proposer
from .corpus import Corpora
from .draft_states import StateSeats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .config import DraftModelConfig, PardConfig


@dataclass(frozen=True)
class TargetView:
    """What a drafter may know of the target and share with it."""

    folder: Path
    config: Mapping[str, Any]  # the text model's config.json with transformers' defaults filled in
    tokenizer: PreTrainedTokenizerBase
    num_layers: int
    hidden_size: int
    vocab_size: int  # width of its logits
    max_model_len: int
    embedding: str  # weight names, which a drafter's program may list in Program.shared
    head: str  # the embedding's name if they are tied
    embed_scale: float  # the target multiplies its embeddings by this (Gemma)
    logits_scale: float  # and its logits by this (Granite)
    logits_softcap: float | None
    kv_layers: tuple[KVLayerSpec, ...] = ()  # of its cache, for drafters that read it; () = none can


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model in memory, its cache not yet allocated."""

    executor: Executor
    tokenizer: PreTrainedTokenizerBase
    config: Mapping[str, Any]  # as TargetView.config
    folder: Path


@dataclass(frozen=True)
class AdaptedTarget:
    """The target, with an adapter in a slot that nobody else uses."""

    executor: Executor
    slot: int  # of RaggedBatch.adapters
    rank: int


@dataclass(frozen=True)
class Opening:
    """What is known when the caches are there."""

    name: str  # of the proposer: requests choose by it
    caches: Sequence[KVTensors]  # of LoadedProposer.executors, in order
    num_blocks: int
    block_size: int
    return_probs: bool  # Draft.probs are wanted where guesses are drawn (p/q rules)
    target_kv: KVTensors | None = None  # the target's own, for those who read it, or run it (`Needs.runs_target`)
    states: StateSeats | None = None  # in the caches of recurrent executors
    places_ahead: int = 0  # of the target's cache, where steps are begun before the one before them has ended; 0 = they are not


@dataclass(frozen=True)
class LoadedProposer:
    """A method with its weights in memory."""

    name: str  # of the method
    open: Callable[[Opening], Proposer]
    executors: tuple[Executor, ...] = ()  # networks with caches of their own behind the target's block ids
    bytes_per_block: int = 0  # that the proposer keeps for each cache block besides
    found: tuple[str, ...] = ()  # what the checkpoint turned out to be, for people: method, layers tapped, what is shared
    is_learned: bool = False  # whether weights from a folder decide the guesses: then a self-test is worth its time


@dataclass(frozen=True)
class Resources:
    """What the engine does for methods."""

    target: TargetView
    find_folder: Callable[[str, str | None], Path]
    """(folder or hub id, revision) -> folder on this machine. Raises what explains itself."""
    bind: Callable[[Program, Mapping[str, Tensor], str | None], Executor]
    """(program, its weights, quantization: "int8", "fp8", "int4", "none", None = int8 natively, int4 on a GPU) -> a network
    that runs as the target does. Weights in program.shared come from the target and need not be among the weights."""
    load_draft: Callable[[DraftModelConfig | PardConfig], LoadedDraft]
    """A whole causal language model with a config and a tokenizer of its own. "model" may be the target's: layers that both
    have in the same format are kept once."""
    corpora: Corpora | None = None  # what earlier requests have said, for methods that look there
    progress: Callable[[str], None] = lambda line: None
    exchange: Callable[[Mapping[str, str], Mapping[str, Tensor]], Executor] | None = None
    """(names of the target's weights -> those in their place, these weights) -> a network that runs over the target's own cache and
    shares all its other weights. Raises what explains itself. None: the target is no program, or has recurrent layers."""
    load_adapter: Callable[[str, str | None], AdaptedTarget] | None = None
    """(folder or hub id of an adapter, revision) -> the target with it. Raises what explains itself. None: it has no room for one."""
