"""What `--speculative-config` may say, as types: one per method, and the settings that hold for all of them.

Keys and defaults are vLLM's. Knows what is a legal setting, not which methods can run: that is `load` in proposers/__init__.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EMBEDDED_MODEL = "foretoken-demo"
"""Name of the model inside the package; its drafters are NAME/METHOD."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_PARALLEL_TOKENS = 8


@dataclass(frozen=True)
class StaticTree:
    """The same tree in every step. A node is the path of ranks from the root: (0, 2) is the third best child of the best child.

    Parents stand before their children; at most 64 nodes.
    """

    paths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024): the most likely nodes of a wider tree that is expanded level by level."""

    top_k: int  # nodes expanded on each level, and children of each
    depth: int  # levels: longest path
    num_nodes: int  # kept for verification, the root not counted


@dataclass(frozen=True)
class BlockTree:
    """DDTree (Ringel and Romano 2026): the likeliest paths through the places of a block."""

    top_k: int  # tokens of a place that are looked at
    num_nodes: int  # kept for verification, the root not counted
    depth: int  # places that are filled in: longest path


Tree = StaticTree | DynamicTree  # beside a tree, num_speculative_tokens counts its nodes
Quantization = Literal["none", "int8", "fp8", "int4"]
SampleMethod = Literal["greedy", "probabilistic"]


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup. Defaults as in vLLM: both 5; if one is given the other equals it."""

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    match: Literal["earliest", "latest"] = "earliest"
    num_branches: int = 1  # different continuations guessed at once; 1 = a chain
    shared_pool: bool = False  # look in the texts of earlier requests of the same corpus too


@dataclass(frozen=True)
class NgramCacheConfig:
    """What followed short runs of tokens in earlier answers, counted once (`foretoken train ngram-cache`)."""

    model: str
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    revision: str | None = None


@dataclass(frozen=True)
class DraftModelConfig:
    """A smaller causal language model."""

    model: str
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    max_model_len: int | None = None
    draft_sample_method: SampleMethod = "greedy"
    quantization: Quantization | None = None  # of the weights; None = int8 where it runs natively, fp8 on a GPU
    revision: str | None = None
    draft_tensor_parallel_size: int = 1
    confidence_threshold: float = 0.0  # the first guess less likely than this is the last of its chain
    vocabulary: Literal["same", "intersection", "retokenize"] = "same"  # how a draft of another vocabulary is read
    draft_layers: int | None = None  # only so many of its first layers, then its head (self-speculation)


@dataclass(frozen=True)
class PardConfig:
    """PARD and PARD-2: a draft model that fills mask tokens, all guesses in one pass."""

    model: str
    num_speculative_tokens: int = DEFAULT_PARALLEL_TOKENS
    max_model_len: int | None = None
    draft_sample_method: SampleMethod = "greedy"
    quantization: Quantization | None = None
    revision: str | None = None


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads, or Hydra's and ReDrafter, which know the guesses before them. No model: Medusa's lie in the target's folder."""

    model: str | None = None
    num_speculative_tokens: int | None = None
    num_heads: int | None = None
    tree: StaticTree | None = None
    quantization: Quantization | None = None
    revision: str | None = None
    method: Literal["medusa", "hydra", "redrafter"] = "medusa"
    draft_sample_method: SampleMethod = "greedy"  # not of Medusa


@dataclass(frozen=True)
class EagleConfig:
    """EAGLE 1 and 3 heads, P-EAGLE among the latter."""

    model: str
    method: Literal["eagle", "eagle3"] = "eagle"
    num_speculative_tokens: int | None = None  # None = the checkpoint's own, else 5
    draft_tensor_parallel_size: int = 1
    max_model_len: int | None = None
    draft_sample_method: SampleMethod = "greedy"
    quantization: Quantization | None = None
    revision: str | None = None
    tree: Tree | None = None  # None = a chain
    aux_layers: tuple[int, ...] | None = None  # boundary ids to tap instead of what the checkpoint says


@dataclass(frozen=True)
class SuffixConfig:
    """Suffix decoding. num_speculative_tokens None = the tree depth."""

    num_speculative_tokens: int | None = None
    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    use_tree: bool = False  # the likeliest nodes in any branch instead of one path


@dataclass(frozen=True)
class LookaheadConfig:
    """Lookahead decoding. Defaults and names as in TensorRT-LLM, the papers' W, N and G."""

    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4
    num_speculative_tokens: int | None = None  # most nodes; None = all that these make

    @property
    def num_nodes(self) -> int:
        """Of the whole tree: the window's but for the last known token, and those of the n-grams."""
        whole = (self.max_window_size + self.max_verification_set_size) * (self.max_ngram_size - 1) - 1
        return min(whole, self.num_speculative_tokens or whole)


@dataclass(frozen=True)
class MtpConfig:
    """Draft layers inside the target's checkpoint. num_speculative_tokens None = what it was trained for."""

    num_speculative_tokens: int | None = None
    model: str | None = None  # a checkpoint of its own (speculators), None = the target's
    draft_sample_method: SampleMethod = "greedy"
    quantization: Quantization | None = None
    revision: str | None = None


@dataclass(frozen=True)
class MlpSpeculatorConfig:
    """MLP speculators: IBM's, and Arctic's recurrent ones. num_speculative_tokens None = all of the checkpoint's."""

    model: str
    num_speculative_tokens: int | None = None
    draft_sample_method: SampleMethod = "greedy"
    quantization: Quantization | None = None
    revision: str | None = None


@dataclass(frozen=True)
class BlockConfig:
    """Block-parallel drafters: DFlash, DSpark and others that grew out of DFlash. num_speculative_tokens None = the checkpoint's block."""

    model: str
    method: Literal["dflash", "dspark"]
    num_speculative_tokens: int | None = None
    tree: BlockTree | None = None  # None = a chain
    draft_sample_method: SampleMethod = "greedy"
    confidence_threshold: float = 0.0  # DSpark's confidence head: the block is cut at the first guess below
    quantization: Quantization | None = None
    revision: str | None = None


@dataclass(frozen=True)
class OrthrusConfig:
    """The target's second set of attention weights. num_speculative_tokens None = the checkpoint's block."""

    num_speculative_tokens: int | None = None
    draft_sample_method: SampleMethod = "greedy"


@dataclass(frozen=True)
class UnoConfig:
    """The target itself, through an adapter that reads noise as the text to come. Keys are vLLM's; there `model` is `uno_lora_path`."""

    model: str
    num_speculative_tokens: int = DEFAULT_PARALLEL_TOKENS
    mask_token_id: int | None = None  # noise tokens are those below; None = all of the target's vocabulary
    noise_seed: int = 0
    noise_low: int = 1
    draft_sample_method: SampleMethod = "probabilistic"  # then the first guess is the target's own choice, at any temperature
    revision: str | None = None


@dataclass(frozen=True)
class PredictionConfig:
    """Predicted Outputs: on for every request that brings a prediction."""

    num_speculative_tokens: int = 16


@dataclass(frozen=True)
class CustomConfig:
    """A proposer from the user's own code."""

    custom_class: str  # "module:Class" or "path/to/file.py:Class"
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    options: Mapping[str, Any] = field(default_factory=dict)  # handed to the class


@dataclass(frozen=True)
class HiddenStatesConfig:
    """Guesses nothing; writes states and tokens to safetensors shards, for training drafters."""

    directory: str
    layers: tuple[int, ...] = ()  # boundary ids, -1 = after the final norm; () = what EAGLE-3 taps, and the last
    max_shard_tokens: int = 65_536


@dataclass(frozen=True)
class SyntheticConfig:
    """Guesses without a network, for measuring: which of them count as accepted is decided by SpeculativeConfig.synthetic_rates."""

    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS


ProposerConfig = (
    NgramConfig
    | NgramCacheConfig
    | DraftModelConfig
    | PardConfig
    | MedusaConfig
    | EagleConfig
    | SuffixConfig
    | LookaheadConfig
    | MtpConfig
    | MlpSpeculatorConfig
    | BlockConfig
    | OrthrusConfig
    | UnoConfig
    | PredictionConfig
    | CustomConfig
    | HiddenStatesConfig
    | SyntheticConfig
)


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (Cai et al. 2024), lossy: a guess passes if p > min(threshold, alpha * exp(-H(p)))."""

    threshold: float = 0.09
    alpha: float = 0.3


@dataclass(frozen=True)
class SpeculativeConfig:
    """All proposers, in order of preference, and the limits that hold for all of them."""

    proposers: tuple[ProposerConfig, ...] = ()
    adaptive: bool = True  # as many guesses as pay; else always as many as may be
    disable_by_batch_size: int | None = None  # running requests above which nobody is guessed for; None = not given
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (first, last, k), k may be 0
    rejection_sample_method: Literal["match", "standard", "block"] = "match"
    typical: Typical | None = None  # lossy
    synthetic_rates: tuple[float, ...] | None = None  # lossy: chance of guess i, given those before; the last holds for all behind
    off: bool = False  # method "off": not even predictions
    warnings: tuple[str, ...] = ()  # what was given and is ignored, one sentence each

    @property
    def lossy(self) -> str | None:
        """The name of the lossy acceptance rule that is on; None = outputs are exactly the target's."""
        return "synthetic" if self.synthetic_rates is not None else "typical" if self.typical is not None else None
