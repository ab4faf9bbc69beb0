"""How an engine speculates where nobody says so, and how it is told to people what it does."""

from pathlib import Path

from ..proposers.config import DraftModelConfig, MtpConfig, NgramCacheConfig, NgramConfig, OrthrusConfig, SpeculativeConfig
from ..proposers.detection import has_view, tensor_shapes
from ..proposers.mtp_checkpoint import brings_module
from .config import DEMO_MODEL, EngineConfig
from .controller import Controller
from .model import LoadedModel
from .policy.adaptive import AdaptivePolicy
from .policy.base import PREDICTION
from .policy.fixed import DEFAULT_THRESHOLD

DEMO_DRAFT = Path(__file__).parent / "demo_model" / "draft_model"
DEMO_CACHE = DEMO_DRAFT.with_name("ngram_cache")
LOOKUP = NgramConfig(8, prompt_lookup_min=2, prompt_lookup_max=4)  # short enough to match, long enough to mean it
OWN_LAYER_TOKENS = 3


def choose_speculation(config: EngineConfig, target: LoadedModel) -> tuple[SpeculativeConfig, str]:
    """The configured proposers, or the default, and why: prompt lookup, and drafters that the target brings along."""
    if config.speculative is not None:
        return config.speculative, "as configured"
    if config.model.model == DEMO_MODEL:
        # Sampling under the target's own noise doubles acceptance at temperature 1; greedy requests get the argmax anyway.
        drafter = DraftModelConfig(str(DEMO_DRAFT), draft_sample_method="probabilistic")
        counted = NgramCacheConfig(str(DEMO_CACHE), num_speculative_tokens=8)
        why = "the embedded model's own draft model and n-gram cache, and prompt lookup; --speculative-config changes it"
        return SpeculativeConfig((drafter, LOOKUP, counted)), why
    if target.plan.program is not None and brings_module(target.path, target.hf_config.get_text_config().model_type):
        layer = MtpConfig(num_speculative_tokens=OWN_LAYER_TOKENS, draft_sample_method="probabilistic")
        return SpeculativeConfig((layer, LOOKUP)), "the target's own MTP layer, and prompt lookup; --speculative-config changes it"
    if target.plan.program is not None and has_view(tensor_shapes(target.path)):
        view = OrthrusConfig(draft_sample_method="probabilistic")
        return SpeculativeConfig((view, LOOKUP)), "the target's own second view, and prompt lookup; --speculative-config changes it"
    return lookup_alone()


def lookup_alone() -> tuple[SpeculativeConfig, str]:
    return (
        SpeculativeConfig((LOOKUP,)),
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
