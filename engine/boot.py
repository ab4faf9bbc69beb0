"""Puts an engine together from its configuration: network, drafters, cache, core. The only file that knows all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..kernels import native
from ..proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig
from ..proposers.proposer_set import ProposerSet
from .committer import Committer
from .config import DEMO_MODEL, EngineConfig, ModelConfig
from .controller import PREDICTION, Controller, ProposerInfo
from .core import EngineCore
from .detokenizer import Detokenizer
from .drafters import load_drafters
from .fixed_policy import DEFAULT_THRESHOLD
from .intake import Intake
from .kv_cache import KVCache
from .model import LoadedModel, load_model
from .request import Request
from .runner import Runner
from .sampler import full_logits_wanted
from .scheduler import Scheduler
from .verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TORCH_THREADS = torch.get_num_threads()  # what torch, or OMP_NUM_THREADS, chose for this process
SMALL_NETWORK_BYTES = 32 * 2**20  # of weight files
DEMO_DRAFT = Path(__file__).parent / "demo_model" / "draft_model"


@dataclass(frozen=True)
class Engine:
    """A loaded engine, ready to step."""

    core: EngineCore
    model: LoadedModel
    intake: Intake
    config: EngineConfig
    speculative: SpeculativeConfig
    proposer_names: tuple[str, ...]  # in the order of TokenDelta.sources
    learned: tuple[str, ...]  # those whose guesses depend on weights from a folder
    banner: tuple[str, ...]  # lines for people: what is served, by what means, and why

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.model.tokenizer


def boot(config: EngineConfig, progress: Callable[[str], None] = lambda line: None) -> Engine:
    """Load everything that the configuration names. Raises ConfigError with what to change."""
    speculative, why = choose_speculation(config)
    native.set_threads(config.model.threads or native.usable_cores())
    model = load_model(config.model, progress)
    torch.set_num_threads(_torch_threads(config.model, model))
    drafters = load_drafters(config, speculative, model, progress)
    proposers = drafters.proposers
    runner = Runner(model.executor, drafters.target_kv, proposers.needs.hidden, full_logits_wanted)
    core = assemble(config, speculative, model, runner, proposers)
    capacity = drafters.num_blocks * config.cache.block_size
    intake = Intake(
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        tokenizer_size=model.tokenizer_size,
        max_model_len=model.max_model_len,
        max_prompt_tokens=capacity,
        eos_token_ids=model.eos_token_ids,
        proposer_names=proposers.names,
    )
    banner = (
        f"model       {model.describe()}",
        f"executor    {model.plan.describe()}",
        f"speculation {_described(speculative, core.controller.proposers)} ({why})",
        *drafters.found,
        f"kv cache    {capacity:,} tokens in {drafters.num_blocks:,} blocks of {config.cache.block_size}"
        f" ({drafters.num_bytes / 1e9:.2f} GB), context {model.max_model_len:,}"
        + (": the cache limits a request; kv_cache_gb enlarges it" if capacity < model.max_model_len else ""),
    )
    return Engine(core, model, intake, config, speculative, proposers.names, drafters.learned, banner)


def assemble(
    config: EngineConfig, speculative: SpeculativeConfig, model: LoadedModel, runner: Runner, proposers: ProposerSet
) -> EngineCore:
    """A core with books of its own over the given networks and caches."""
    infos = tuple(ProposerInfo(p.name, p.max_tokens) for p in proposers.proposers)
    controller = Controller(speculative, infos)
    kv = KVCache(runner.kv.num_blocks, config.cache.block_size, str(model.path), config.cache.enable_prefix_caching)
    scheduler = Scheduler(
        config.scheduler,
        kv,
        controller,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_ingesting=proposers.num_ingesting,
        scratch_slots=proposers.needs.scratch_slots,
        on_preempt=proposers.forget,
    )

    def open_text(request: Request) -> Detokenizer | None:
        return Detokenizer(model.tokenizer, request.prompt_token_ids, request.params) if request.params.detokenize else None

    prediction = proposers.names.index(PREDICTION) if PREDICTION in proposers.names else None
    committer = Committer(kv, scheduler, runner.move_slots, open_text, prediction)
    verifier = Verifier(speculative.rejection_sample_method, speculative.typical, speculative.synthetic_rates)
    return EngineCore(scheduler, proposers, runner, verifier, committer, controller)


def _torch_threads(config: ModelConfig, model: LoadedModel) -> int:
    """One where the native executor computes: two pools that wait for work by spinning would fight for the cores.

    One, too, for a network that fits a core's cache: handing its small products around costs more than it saves.
    """
    if model.plan.kind == "native":
        return 1
    if config.threads is not None:
        return config.threads
    small = sum(file.stat().st_size for file in model.path.glob("*.safetensors")) < SMALL_NETWORK_BYTES
    return 1 if small else TORCH_THREADS


def choose_speculation(config: EngineConfig) -> tuple[SpeculativeConfig, str]:
    """The configured proposers, or the default, and why: the embedded model has its own drafter, others get prompt lookup."""
    if config.speculative is not None:
        return config.speculative, "as configured"
    if config.model.model == DEMO_MODEL:
        # Sampling under the target's own noise doubles acceptance at temperature 1; greedy requests get the argmax anyway.
        draft = DraftModelConfig(str(DEMO_DRAFT), num_speculative_tokens=3, draft_sample_method="probabilistic")
        return SpeculativeConfig((draft,)), "the embedded model's own drafter; --speculative-config changes it"
    return (
        SpeculativeConfig((NgramConfig(prompt_lookup_min=2, prompt_lookup_max=4),)),  # short enough to match, long enough to mean it
        "the default for a model without a drafter; --speculative-config changes it, '{\"method\": \"off\"}' switches it off",
    )


def _described(config: SpeculativeConfig, proposers: Sequence[ProposerInfo]) -> str:
    if config.off:
        return "off"
    parts = [f"{p.name}, k={p.max_tokens}" for p in proposers if p.name != PREDICTION and p.max_tokens]
    lossy = f"; LOSSY: {config.lossy} acceptance" if config.lossy else ""
    threshold = DEFAULT_THRESHOLD if config.disable_by_batch_size is None else config.disable_by_batch_size
    return f"{'; '.join(parts) or 'predictions only'}; off above {threshold} running requests{lossy}"
