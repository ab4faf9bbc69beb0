"""Settings of the engine, one frozen object per owner. "auto" values are settled once, by the owner that can know."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..kernels.native_abi import MAX_THREADS
from ..proposers.config import EMBEDDED_MODEL, SpeculativeConfig
from .errors import ConfigError

DEMO_MODEL = EMBEDDED_MODEL  # as a model path it means the folder inside the package
EXECUTORS = ("auto", "native", "torch", "transformers")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8")
STORED_NAMES = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "modelopt", "modelopt_fp4", "gguf")
"""How a checkpoint may be stored: as in vLLM, naming that says no more than the checkpoint does."""
FP8_NAMES = ("fp8", "fp8_e4m3")
MOST_ADAPTERS, MOST_RANK = 256, 1024
KV_CACHE_DTYPES = ("auto", "int8", *FP8_NAMES, "bfloat16", "float32")


@dataclass(frozen=True)
class AdapterModule:
    """An adapter to load: the name that requests ask for it by, and its folder or hub id."""

    name: str
    path: str


@dataclass(frozen=True)
class ModelConfig:
    """Which network to serve and how."""

    model: str = DEMO_MODEL  # a folder, a hub id, or foretoken-demo
    served_model_name: str | None = None  # None = the model's own name
    dtype: str = "auto"  # auto, float32, bfloat16
    max_model_len: int | None = None  # None = what the model was made for
    revision: str | None = None
    tokenizer: str | None = None  # a folder or hub id; None = the model's
    tokenizer_revision: str | None = None
    executor: str = "auto"  # native, torch, transformers; auto = the first of them that can run the network
    device: str = "auto"  # cpu, cuda, cuda:N; auto = a GPU if there is one that can run the network
    batch_invariant: bool = False  # on a GPU: a row's scores are the same bits in any batch, at some cost
    quantization: str = "auto"  # of the weights: int8 (CPU), int4, fp8 (GPU), none; auto = about as wide as the checkpoint has them
    kv_cache_dtype: str = "auto"  # auto = dtype; int8 (CPU); fp8 (GPU); float32 and bfloat16 only say what dtype says
    threads: int | None = None  # None = the cores this process may use
    seed: int | None = None  # of the seeds of requests without one; None = random ones
    chat_template: str | None = None  # a file, or the template itself; None = the model's
    generation_config: str = "auto"  # whose file recommends how tokens are chosen: auto = the model's, a folder's, vllm = nobody's
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)  # goes before the file's

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise ConfigError(f"executor {self.executor!r} is not one of {', '.join(EXECUTORS)}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device {self.device!r} is not one of auto, cpu, cuda, cuda:N")
        if self.quantization not in (*QUANTIZATIONS, *STORED_NAMES):
            raise ConfigError(
                f"quantization {self.quantization!r} is not available: there are int8 and int4 on CPUs, int4 and fp8 on GPUs, "
                "made at loading, and none; how a quantised checkpoint is stored needs no name: leave quantization away"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            narrow = "; narrow caches are int8 on CPUs and fp8 (e4m3) on GPUs" if self.kv_cache_dtype.startswith("fp8") else ""
            raise ConfigError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}{narrow}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads {self.threads} is not between 1 and {MAX_THREADS}")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    kv_cache_gb: float | None = None  # None = memory_share of free memory
    memory_share: float = 0.3  # of memory free after the weights are loaded
    max_kv_cache_gb: float = 4.0  # ceiling of the share: memory taken that nobody uses is taken from others
    gpu_memory_utilization: float = 0.9  # of a GPU's whole memory: for weights, steps and caches together
    num_blocks: int | None = None  # exact size, for tests
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step may do."""

    max_num_batched_tokens: int = 2048  # the token budget
    max_num_seqs: int = 128
    max_draft_tokens_per_step: int = 512
    longest_unseen_s: float = 0.0  # of a step of several passes that nobody guesses in: its tokens are seen at its end

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError("max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs one token a step; raise the first or lower the second"
            )


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters of the target (LoRA) that requests may ask for by name."""

    modules: tuple[AdapterModule, ...] = ()  # to be loaded at the start; others may come and go
    max_loras: int | None = None  # loaded at once; None = 4, or as many as modules
    max_lora_rank: int | None = None  # None = 16, or the greatest of the modules'

    def __post_init__(self) -> None:
        names = [module.name for module in self.modules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two adapters are named {twice[0]!r}: give each a name of its own")
        if self.max_loras is not None and not max(len(names), 1) <= self.max_loras <= MOST_ADAPTERS:
            raise ConfigError(f"max_loras {self.max_loras} is not between {max(len(names), 1)} and {MOST_ADAPTERS}")
        if self.max_lora_rank is not None and not 1 <= self.max_lora_rank <= MOST_RANK:
            raise ConfigError(f"max_lora_rank {self.max_lora_rank} is not between 1 and {MOST_RANK}")


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine needs to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None  # None = the default: n-gram; the embedded model's own drafters too if no model is named
    adapters: AdapterConfig | None = None  # None = none are served
    max_queued_requests: int = 1024
    allow_synthetic_acceptance: bool = False  # acceptance by given rates, which makes outputs nonsense: for benchmarks
    speculation_corpus_dir: str | None = None  # texts that suffix and n-gram look in are kept here across restarts

    def __post_init__(self) -> None:
        if self.speculative and self.speculative.synthetic_rates is not None and not self.allow_synthetic_acceptance:
            raise ConfigError(
                "synthetic acceptance keeps guesses that the model would not have made, so outputs would be nonsense; "
                "for benchmarks say --allow-synthetic-acceptance (allow_synthetic_acceptance=True in LLM)"
            )
