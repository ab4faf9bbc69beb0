"""How an engine speculates where nobody says so, and how it is told to people what it does."""

from __future__ import annotations

from pathlib import Path

from ..proposers.config import DraftModelConfig, NgramCacheConfig, NgramConfig, SpeculativeConfig
from .config import DEMO_MODEL, EngineConfig
from .controller import Controller
from .policy.adaptive import AdaptivePolicy
from .policy.base import PREDICTION
from .policy.fixed import DEFAULT_THRESHOLD

DEMO_DRAFT = Path(__file__).parent / "demo_model" / "draft_model"
DEMO_CACHE = DEMO_DRAFT.with_name("ngram_cache")


def choose_speculation(config: EngineConfig) -> tuple[SpeculativeConfig, str]:
    """The configured proposers, or the default, and why: the embedded model has drafters of its own, others get prompt lookup."""
    if config.speculative is not None:
        return config.speculative, "as configured"
    lookup = NgramConfig(8, prompt_lookup_min=2, prompt_lookup_max=4)  # short enough to match, long enough to mean it
    if config.model.model == DEMO_MODEL:
        # Sampling under the target's own noise doubles acceptance at temperature 1; greedy requests get the argmax anyway.
        drafter = DraftModelConfig(str(DEMO_DRAFT), draft_sample_method="probabilistic")
        counted = NgramCacheConfig(str(DEMO_CACHE), num_speculative_tokens=8)
        why = "the embedded model's own draft model and n-gram cache, and prompt lookup; --speculative-config changes it"
        return SpeculativeConfig((drafter, lookup, counted)), why
    return (
        SpeculativeConfig((lookup,)),
        "the default for a model without a drafter; --speculative-config changes it, '{\"method\": \"off\"}' switches it off",
    )


def describe_speculation(config: SpeculativeConfig, controller: Controller, max_rows: int) -> str:
    """For the banner: the proposers, and up to how many of max_rows running requests they guess."""
    if config.off:
        return "off"
    parts = [f"{p.name}, k={p.max_tokens}" for p in controller.proposers if p.name != PREDICTION and p.max_tokens]
    lossy = f"; LOSSY: {config.lossy} acceptance" if config.lossy else ""
    policy, configured = controller.policy, config.disable_by_batch_size
    if not isinstance(policy, AdaptivePolicy):
        when = f"off above {DEFAULT_THRESHOLD if configured is None else configured} running requests"
    elif (found := policy.found_threshold(max_rows)) < (max_rows if configured is None else configured):
        when = f"adaptive, off above {found} running requests by the first estimate"
    elif configured is not None:
        when = f"adaptive, off above {configured} running requests"
    else:
        when = f"adaptive, on up to all {max_rows} running requests"
    return f"{'; '.join(parts) or 'predictions only'}; {when}{lossy}"
