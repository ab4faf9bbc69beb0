"""Puts an engine together from its configuration: network, drafters, cache, core. The only file that knows all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..kernels import native
from ..kernels.graphs import CaptureReport, GraphExecutor
from ..kernels.layout import MAX_TREE_TOKENS
from ..kernels.rounds import RoundsExecutor
from ..kernels.state_slots import StateSlots
from ..proposers.config import MtpConfig, OrthrusConfig, SpeculativeConfig, UnoConfig
from ..proposers.proposer_set import ProposerSet
from .adapters import Adapters, room_for
from .committer import Committer
from .config import EngineConfig, ModelConfig
from .controller import Controller
from .core import EngineCore
from .default_speculation import choose_speculation, describe_speculation, lookup_alone
from .detokenizer import Detokenizer
from .drafters import Drafters, load_drafters
from .errors import ConfigError
from .intake import Intake
from .kv_cache import KVCache
from .model import LoadedModel, load_model
from .model_folder import Progress, weight_files
from .overlapped_runner import OverlappedRunner
from .policy.base import PREDICTION, ProposerInfo
from .policy.cost_file import CostFile, conditions
from .policy.cost_measurement import measure
from .policy.costs import CostTable
from .request import Request
from .rounds import Lookups, Rounds
from .runner import Runner
from .sampler import full_logits_wanted
from .sampling_defaults import sampling_defaults
from .scheduler import NetworkNeeds, Scheduler
from .shaped_steps import ShapedSteps
from .verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TORCH_THREADS = torch.get_num_threads()  # what torch, or OMP_NUM_THREADS, chose for this process
SMALL_NETWORK_BYTES = 32 * 2**20  # of weight files
WARM_CONTEXT = 32  # tokens that drafters read before their first guesses
WARM_STEPS = 2  # the first behind a prompt, and one behind a verification
MEASURED_TEXT = "The quick brown fox jumps over the lazy dog, and the lazy dog looks after the quick brown fox. "


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
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams for requests that leave them out
    adapters: Adapters | None = None  # None = none are served

    @property
    def num_spec_tokens(self) -> int:
        """The most that any proposer guesses for a request in a step, configured or as its checkpoint was made; predictions aside."""
        return self.core.controller.most_tokens

    @property
    def max_loras(self) -> int | None:
        """The most adapters at once; None = none are served."""
        return None if self.adapters is None else self.adapters.num_slots

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.model.tokenizer


def boot(config: EngineConfig, progress: Progress = lambda line: None) -> Engine:
    """Load everything that the configuration names. Raises ConfigError with what to change."""
    configured = () if config.speculative is None else config.speculative.proposers
    native.set_threads(config.model.threads or native.usable_cores())
    through_adapters = [drafter for drafter in configured if isinstance(drafter, UnoConfig)]
    model = load_model(config.model, progress, room=room_for(config.adapters, through_adapters, progress))
    sampling = sampling_defaults(model.path, config.model)
    adapters = _load_adapters(config, model, len(through_adapters), progress)
    torch.set_num_threads(_torch_threads(config.model, model))
    speculative, why, drafters = _choose_and_load(config, model, progress)
    states = drafters.target_states
    if states is not None and states.num_seats <= config.scheduler.max_num_seqs:
        rows = max(states.num_seats - 1, 1)  # one is for readers of texts
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=rows))
    proposers = drafters.proposers
    runner = open_runner(config, model, drafters, progress)
    _warm_up(config, speculative, model, runner, drafters, progress)
    costs, keep_costs = _costs(config, speculative, model, runner, drafters, progress)
    core = assemble(config, speculative, model, runner, proposers, costs, keep_costs)
    for network in _graph_networks(model, drafters):
        network.be_patient()
    capacity = drafters.num_blocks * config.cache.block_size
    intake = Intake(
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        tokenizer_size=model.tokenizer_size,
        max_model_len=model.max_model_len,
        cache_tokens=capacity,
        eos_token_ids=model.eos_token_ids,
        proposer_names=proposers.names,
        seed=config.model.seed,
    )
    banner = (
        f"model       {model.describe()}",
        f"executor    {model.plan.describe()}",
        f"speculation {describe_speculation(speculative, core.controller, config.scheduler.max_num_seqs)} ({why})",
        *drafters.found,
        f"kv cache    {capacity:,} tokens in {drafters.num_blocks:,} blocks of {config.cache.block_size}"
        f" ({drafters.num_bytes / 1e9:.2f} GB), context {model.max_model_len:,}"
        + (": the cache limits a request; kv_cache_gb enlarges it" if capacity < model.max_model_len else ""),
        *(() if drafters.states is None else (f"states      {drafters.states.describe()}",)),
        *(() if adapters is None else (f"adapters    {adapters.describe()}",)),
        *(() if not sampling else (f"sampling    {', '.join(f'{k} {v}' for k, v in sampling.items())} where requests do not say",)),
        *_gpu_lines(model, drafters),
    )
    return Engine(core, model, intake, config, speculative, proposers.names, drafters.learned, banner, sampling, adapters)


def _choose_and_load(config: EngineConfig, model: LoadedModel, progress: Progress) -> tuple[SpeculativeConfig, str, Drafters]:
    """What was asked for, or the default, and why. What the target brings along, for which nobody asked, may turn out to be of no use."""
    speculative, why = choose_speculation(config, model)
    if config.speculative is None and any(isinstance(entry, MtpConfig | OrthrusConfig) for entry in speculative.proposers):
        try:
            return speculative, why, load_drafters(config, speculative, model, progress)
        except ConfigError as error:
            progress(f"what the target brings along to guess with is left out: {error}")
        speculative, why = lookup_alone()
    return speculative, why, load_drafters(config, speculative, model, progress)


def _load_adapters(config: EngineConfig, model: LoadedModel, num_kept: int, progress: Progress) -> Adapters | None:
    """Those that the configuration names. num_kept: slots that are drafters'. Raises ModelLoadError."""
    if config.adapters is None or model.adapters is None:
        return None
    adapters = Adapters(model.adapters, num_kept)
    for module in config.adapters.modules:
        progress(f"loading adapter {module.name}")
        adapters.add(module.name, module.path, adapters.read(module.path, progress))
    return adapters


def assemble(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    model: LoadedModel,
    runner: Runner,
    proposers: ProposerSet,
    costs: CostTable | None = None,
    on_close: Callable[[EngineCore], None] = lambda core: None,
) -> EngineCore:
    """A core with books of its own over the given networks and caches. Without costs k is fixed."""
    lookups = Lookups.among(proposers.proposers)
    most_at_once = model.executor.most_at_once() if lookups.draft >= 0 and isinstance(model.executor, RoundsExecutor) else 1
    infos = tuple(
        ProposerInfo(p.name, p.max_tokens, scout, lookups.place(i), p.needs.is_whole, i == lookups.draft, most_at_once)
        for i, (p, scout) in enumerate(zip(proposers.proposers, proposers.scouts, strict=True))
    )
    verifier = Verifier(speculative.rejection_sample_method, speculative.typical, speculative.synthetic_rates)
    nobody_guesses = speculative.off or not proposers.proposers
    looks_up = costs is not None and max(lookups.text, lookups.table) >= 0
    has_rounds = looks_up or lookups.draft >= 0 or nobody_guesses
    rounds = _rounds(config, model, runner, proposers, lookups, verifier) if has_rounds else None
    controller = Controller(speculative, infos, costs, config.scheduler.longest_unseen_s)
    share, cache = runner.states, config.cache
    states = None if share is None else StateSlots(share.num_seats, share.num_snapshots, cache.block_size)
    kv = KVCache(runner.kv.num_blocks, cache.block_size, str(model.path), cache.enable_prefix_caching, states)
    needs = NetworkNeeds(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_ingesting=proposers.num_ingesting,
        scratch_slots=proposers.needs.scratch_slots,
        lookahead=runner.lookahead,
        guessing_lookahead=proposers.num_places_ahead if verifier.can_be_matched else 0,
        most_guesses=MAX_TREE_TOKENS if share is None else share.num_guesses,
    )
    scheduler = Scheduler(config.scheduler, kv, controller, needs, proposers.forget, rounds)

    def open_text(request: Request) -> Detokenizer | None:
        return Detokenizer(model.tokenizer, request.prompt_token_ids, request.params) if request.params.detokenize else None

    prediction = proposers.names.index(PREDICTION) if PREDICTION in proposers.names else None
    committer = Committer(kv, scheduler, runner.move_slots, open_text, prediction)
    runner.use_verifier(verifier)
    return EngineCore(scheduler, proposers, runner, verifier, committer, controller, on_close=on_close, rounds=rounds)


def _rounds(
    config: EngineConfig, model: LoadedModel, runner: Runner, proposers: ProposerSet, lookups: Lookups, verifier: Verifier
) -> Rounds | None:
    """What takes steps in rounds; None if others have to be asked, or told, in every step, or the network cannot."""
    executor = runner.executor
    if not isinstance(executor, RoundsExecutor) or executor.state_layers or not verifier.only_matches:
        return None
    if proposers.needs.hidden or proposers.hears_every_step:
        return None
    if any(scout is not None and not lookups.knows(i) for i, scout in enumerate(proposers.scouts)):
        return None
    return Rounds(executor, runner.kv, verifier.sampler, model.vocab_size, config.scheduler, lookups, proposers.works)


def open_runner(config: EngineConfig, model: LoadedModel, drafters: Drafters, progress: Progress) -> Runner:
    """Of the target. On a GPU its steps are captured now and overlap later."""
    executor, hidden = model.executor, drafters.proposers.needs.hidden
    if not isinstance(executor, GraphExecutor):
        return Runner(executor, drafters.target_kv, hidden, full_logits_wanted, drafters.target_states)
    drafted = max((p.max_tokens for p in drafters.proposers.proposers if p.name != PREDICTION), default=0)  # few requests bring one
    progress("capturing graphs")
    scheduler = config.scheduler
    executor.capture(drafters.target_kv, hidden, scheduler.max_num_seqs, 1 + drafted, scheduler.max_num_batched_tokens, progress)
    if drafters.target_states is not None:  # which guesses stand decides where a recurrent row goes on: the host has to know
        return Runner(executor, drafters.target_kv, hidden, full_logits_wanted, drafters.target_states)
    return OverlappedRunner(executor, drafters.target_kv, hidden, full_logits_wanted, model.max_model_len, drafters.proposers.needs.argmax)


def _warm_up(
    config: EngineConfig, speculative: SpeculativeConfig, model: LoadedModel, runner: Runner, drafters: Drafters, progress: Progress
) -> None:
    """Let the drafters of a GPU guess now: what is compiled and recorded for that would be taken for a drafter that hangs later on.

    For 1, 2, 4 ... rows and as many as there may be, because kernels are built anew for such sizes; each with all their guesses.
    """
    runs_target, size = drafters.proposers.needs.runs_target, config.cache.block_size
    networks = _graph_networks(model, drafters) if runs_target else drafters.networks
    if not any(network.has_graphs for network in networks):
        return
    progress("capturing graphs of drafters")
    context = min(-(-WARM_CONTEXT // size) * size, model.max_model_len // (2 * size) * size)
    text = (_text(model) * (context + 1))[: 8 * context + 64]
    draws = any(getattr(entry, "draft_sample_method", "") == "probabilistic" for entry in speculative.proposers)
    temperatures = (0.0, 1.0) if draws else (0.0,)  # a chain that draws is another one
    for proposer in drafters.proposers.proposers:
        if not proposer.max_tokens or not (proposer.needs.kv_layers or proposer.needs.hidden or proposer.needs.runs_target):
            continue  # without a network
        alone = ProposerSet([proposer], clock=lambda: 0.0)  # slow is what it may be here
        most = max(1, min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens // (1 + proposer.max_tokens)))
        for temperature in temperatures:
            steps = ShapedSteps(_shaped_core(config, model, runner, alone), text, lambda: None, temperature=temperature)
            steps.start(1, context)  # the others find the text in the cache
            for num_rows in sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True):
                steps.start(num_rows, context)
                for _ in range(WARM_STEPS):
                    steps.step([proposer.max_tokens] * num_rows)
            steps.stop()
    progress(f"drafters: {_captured(networks).describe()}")


def _graph_networks(model: LoadedModel, drafters: Drafters) -> tuple[GraphExecutor, ...]:
    return (*((model.executor,) if isinstance(model.executor, GraphExecutor) else ()), *drafters.networks)


def _captured(networks: Iterable[GraphExecutor]) -> CaptureReport:
    return sum((network.captured for network in networks), CaptureReport())


def _gpu_lines(model: LoadedModel, drafters: Drafters) -> list[str]:
    """How a GPU's memory is divided, what its graphs took and how its kernels are launched."""
    if not isinstance(model.executor, GraphExecutor) or not drafters.gpu_memory:
        return []
    lines = [f"memory      {drafters.gpu_memory}", f"graphs      {_captured(_graph_networks(model, drafters)).describe()}"]
    launches = model.executor.launches
    return lines if launches is None else [*lines, f"launches    {launches.describe()}"]


def _shaped_core(config: EngineConfig, model: LoadedModel, runner: Runner, alone: ProposerSet) -> EngineCore:
    """A core that takes steps of any shape, with guesses of this set."""
    scheduler = replace(config.scheduler, max_draft_tokens_per_step=config.scheduler.max_num_batched_tokens)
    shaped = replace(config, scheduler=scheduler, cache=replace(config.cache, enable_prefix_caching=True))
    return assemble(shaped, SpeculativeConfig(adaptive=False), model, runner, alone)


def _costs(
    config: EngineConfig, speculative: SpeculativeConfig, model: LoadedModel, runner: Runner, drafters: Drafters, progress: Progress
) -> tuple[CostTable | None, Callable[[EngineCore], None]]:
    """What steps cost, known from an earlier start or measured now, and what keeps them for the next one. None: k is fixed."""
    proposers = drafters.proposers
    if not speculative.adaptive or speculative.off or not any(p.max_tokens for p in proposers.proposers):
        return None, lambda core: None
    file = CostFile.of(conditions(config, speculative, model, drafters.found))
    figures = file.load(proposers.names)
    if figures is None:
        progress("measuring what steps cost")
        figures = measure(lambda alone: _shaped_core(config, model, runner, alone), proposers.proposers, _text(model))
        if figures is None:
            return None, lambda core: None
        file.save(figures)
    table = CostTable(figures, proposers.names, config.scheduler.max_num_batched_tokens)

    def keep(core: EngineCore) -> None:
        if core.num_steps:
            file.save(table.figures())

    return table, keep


def _text(model: LoadedModel) -> list[int]:
    """Something to read while costs are measured."""
    token_ids: list[int] = model.tokenizer.encode(MEASURED_TEXT, add_special_tokens=False)
    return [token for token in token_ids if token < model.vocab_size] or [0]


def _torch_threads(config: ModelConfig, model: LoadedModel) -> int:
    """One where the native executor computes: two pools that wait for work by spinning would fight for the cores.

    One, too, for a network that fits a core's cache: handing its small products around costs more than it saves.
    """
    if model.plan.kind == "native":
        return 1
    if config.threads is not None:
        return config.threads
    small = sum(file.stat().st_size for file in weight_files(model.path)) < SMALL_NETWORK_BYTES
    return 1 if small else TORCH_THREADS
