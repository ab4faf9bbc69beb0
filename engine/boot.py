"""Puts an engine together from its configuration: network, drafters, cache, core. The only file that knows all parts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.layout import KVTensors, kv_bytes_per_block
from ..proposers import LoadedDraft, Resources, build
from ..proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig, SpeculativeConfigError
from ..proposers.proposer_set import ProposerSet
from .committer import Committer
from .config import DEMO_MODEL, EngineConfig, ModelConfig
from .controller import PREDICTION, Controller, ProposerInfo
from .core import EngineCore
from .detokenizer import Detokenizer
from .errors import ConfigError
from .intake import Intake
from .kv_cache import KVCache
from .model import LoadedModel, cache_blocks, free_memory_bytes, load_model
from .request import Request
from .runner import Runner
from .sampler import full_logits_wanted
from .scheduler import Scheduler
from .verifier import Verifier

DEMO_DRAFT = Path(__file__).parent / "demo_model" / "draft"


@dataclass(frozen=True)
class Engine:
    """A loaded engine, ready to step."""

    core: EngineCore
    model: LoadedModel
    intake: Intake
    config: EngineConfig
    speculative: SpeculativeConfig
    proposer_names: tuple[str, ...]
    banner: tuple[str, ...]  # lines for people: what is served, by what means, and why

    @property
    def tokenizer(self):
        return self.model.tokenizer


def boot(config: EngineConfig, progress: Callable[[str], None] = lambda line: None) -> Engine:
    """Load everything that the configuration names. Raises ConfigError with what to change."""
    torch.set_num_threads(_num_cores())
    speculative, why = _speculation(config)
    model = load_model(config.model, progress)
    drafts: list[LoadedModel] = []

    def load_draft(draft: DraftModelConfig) -> LoadedDraft:
        progress(f"loading the draft model {draft.model}")
        loaded = load_model(ModelConfig(model=draft.model, dtype=config.model.dtype, revision=draft.revision), progress)
        drafts.append(loaded)
        return LoadedDraft(loaded.executor, loaded.tokenizer, loaded.max_model_len)

    kv, tensors, proposers = _cache_and_proposers(config, speculative, model, drafts, load_draft)
    names = tuple(p.name for p in proposers.proposers)
    controller = Controller(speculative, tuple(ProposerInfo(p.name, p.max_tokens) for p in proposers.proposers))
    runner = Runner(model.executor, tensors, proposers.needs.hidden, full_logits_wanted)
    scheduler = Scheduler(
        config.scheduler,
        kv,
        controller,
        vocab_size=model.tokenizer_size,
        max_model_len=model.max_model_len,
        num_ingesting=sum(p.needs.ingests for p in proposers.proposers),
        scratch_slots=proposers.needs.scratch_slots,
        on_preempt=proposers.forget,
    )
