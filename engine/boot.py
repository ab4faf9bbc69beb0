"""Puts an engine together from its configuration: network, drafters, cache, core. The only file that knows all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..kernels import native
from ..kernels.layout import Executor, KVTensors
from ..proposers import LoadedDraft, Resources, build
from ..proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig, SpeculativeConfigError
from ..proposers.proposer_set import ProposerSet
from .cache_size import cache_blocks, free_memory_bytes
from .committer import Committer
from .config import DEMO_MODEL, EngineConfig, ModelConfig
from .controller import PREDICTION, Controller, ProposerInfo
from .core import EngineCore
from .detokenizer import Detokenizer
from .errors import ConfigError
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
DEMO_DRAFT = Path(__file__).parent / "demo_model" / "draft"


@dataclass(frozen=True)
class Engine:
    """A loaded engine, ready to step."""

    core: EngineCore
    model: LoadedModel
    intake: Intake
    config: EngineConfig
    speculative: SpeculativeConfig
    proposer_names: tuple[str, ...]  # in the order of TokenDelta.sources
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
    allocation = _Allocation(config, model)
    drafts: list[LoadedModel] = []
    proposers = _proposers(config, speculative, model, allocation, drafts, progress)
    infos = tuple(ProposerInfo(p.name, p.max_tokens) for p in proposers.proposers)

    controller = Controller(speculative, infos)
    kv = KVCache(allocation.num_blocks, config.cache.block_size, str(model.path), config.cache.enable_prefix_caching)
    runner = Runner(model.executor, allocation.target, proposers.needs.hidden, full_logits_wanted)
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
    verifier = Verifier(speculative.rejection_sample_method)
    core = EngineCore(scheduler, proposers, runner, verifier, committer, controller)
    capacity = allocation.num_blocks * config.cache.block_size
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
        f"speculation {_described(speculative)} ({why})",
        *(f"draft       {draft.path.name}: {draft.plan.describe()}" for draft in drafts),
        f"kv cache    {capacity:,} tokens in {allocation.num_blocks:,} blocks of {config.cache.block_size}"
        f" ({allocation.num_bytes / 1e9:.2f} GB), context {model.max_model_len:,}"
        + (": the cache limits a request; kv_cache_gb enlarges it" if capacity < model.max_model_len else ""),
    )
    return Engine(core, model, intake, config, speculative, proposers.names, banner)


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


class _Allocation:
    """The cache's size and tensors. Known once all drafters are: their layers lie behind the same block ids."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self._config = config
        self._model = model
        self.num_blocks = 0
        self.num_bytes = 0
        self.target: KVTensors

    def __call__(self, drafters: Sequence[Executor]) -> Sequence[KVTensors]:
        cache, model = self._config.cache, self._model
        block_bytes = sum(executor.kv_block_bytes(cache.block_size) for executor in (model.executor, *drafters))
        self.num_blocks = cache_blocks(
            cache,
            block_bytes,
            free_memory_bytes(),
            max_model_len=model.max_model_len,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            wanted_len=self._config.model.max_model_len,
        )
        self.num_bytes = self.num_blocks * block_bytes
        self.target = model.executor.allocate(self.num_blocks, cache.block_size)
        return [executor.allocate(self.num_blocks, cache.block_size) for executor in drafters]


def _proposers(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    model: LoadedModel,
    allocation: _Allocation,
    drafts: list[LoadedModel],
    progress: Callable[[str], None],
) -> ProposerSet:
    """drafts: the draft models that were loaded are added to it."""

    def load_draft(draft: DraftModelConfig) -> LoadedDraft:
        settings = ModelConfig(
            draft.model,
            dtype=config.model.dtype,
            revision=draft.revision,
            executor="auto" if config.model.executor == "native" else config.model.executor,
            quantization=draft.quantization or "none",
        )
        # A narrow draft is twice as fast and can only change what is accepted, never what is said.
        loaded = load_model(settings, progress, native_quantization="int8" if draft.quantization is None else None)
        drafts.append(loaded)
        return LoadedDraft(loaded.executor, loaded.tokenizer)

    resources = Resources(load_draft, allocation, model.tokenizer, model.vocab_size, model.path)
    try:
        return build(speculative, resources)
    except SpeculativeConfigError as error:
        raise ConfigError(f"speculative config: {error}") from error


def _described(config: SpeculativeConfig) -> str:
    if config.off:
        return "off"
    parts: list[str] = []
    for proposer in config.proposers:
        match proposer:
            case NgramConfig(num_speculative_tokens=k, prompt_lookup_min=low, prompt_lookup_max=high):
                parts.append(f"ngram, k={k}, lookup {low}-{high}")
            case DraftModelConfig(model=name, num_speculative_tokens=k):
                parts.append(f"draft_model {Path(name).name}, k={k}")
            case _:
                pass
    return f"{'; '.join(parts) or 'predictions only'}; off above {config.disable_by_batch_size} running requests"
