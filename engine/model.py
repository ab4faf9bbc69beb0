"""From a model's folder to a network that runs: which executor, which number format, and what goes with it.

Everything that can be wrong with a folder is found before the weights are loaded and told in one sentence. Knows no requests.
Weights come from safetensors only, and no code from a model's folder is ever run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..kernels import native
from ..kernels.adapters import AdapterBank, AdapterRoom, adapter_bytes
from ..kernels.execution import Quantization
from ..kernels.footprint import cache_bytes, native_cache_bytes, torch_weight_bytes
from ..kernels.gguf_files import gguf_files
from ..kernels.layout import Executor
from ..kernels.model_config import config_class, read_model_config
from ..kernels.quantised_checkpoint import UnsupportedQuantisation, read_quantisation
from ..kernels.weight_bank import WeightBank
from .cache_size import MIN_TOKENS, free_bytes
from .chat_template import syntax_mistake
from .config import ModelConfig
from .errors import ConfigError, ModelLoadError
from .model_folder import TOKENIZER_FILES, TOKENIZERS, Progress, config_json, find_folder, one_line, read_json, require_files, weight_files
from .network_plan import NetworkPlan, plan_network


@dataclass(frozen=True)
class LoadedModel:
    """A network ready to run and what goes with it."""

    executor: Executor
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str  # as served
    path: Path
    hf_config: transformers.PretrainedConfig
    vocab_size: int  # width of the logits; may be padded past the tokenizer's
    tokenizer_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    plan: NetworkPlan  # how it runs
    adapters: AdapterBank | None = None  # that its rows may have

    @property
    def num_layers(self) -> int:
        return int(self.hf_config.get_text_config().num_hidden_layers)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{self.name}: {self.hf_config.model_type}, {self.num_layers} layers, vocabulary {self.vocab_size}, "
            f"context {self.max_model_len}, from {self.path}"
        )


def load_model(
    config: ModelConfig,
    progress: Progress,
    native_quantization: Quantization | None = None,
    num_layers: int | None = None,
    bank: WeightBank | None = None,
    room: AdapterRoom | None = None,
) -> LoadedModel:
    """Load what `config` names. Raises ModelLoadError or ConfigError, each with one sentence on what to change.

    native_quantization: see plan_network. num_layers: only the first so many. bank: of a network of the same folder. room: for adapters.
    """
    from ..kernels.decoder import text_half

    folder = find_folder(config.model, config.revision, progress)
    whole = read_config(folder)
    hf_config = whole if config.executor == "transformers" else text_half(whole)
    if num_layers is not None:
        _keep_layers(hf_config, num_layers, folder)
    tokenizer = _tokenizer(folder, config, whole, progress)
    if num_layers is not None and bank is None:
        bank = WeightBank()  # nothing to share, but then the layers left out are no surprise
    executor, plan, adapters = load_executor(folder, hf_config, config, progress, native_quantization, bank, room)
    return LoadedModel(
        executor=executor,
        tokenizer=tokenizer,
        name=config.served_model_name or config.model,
        path=folder,
        hf_config=hf_config,
        vocab_size=executor.vocab_size,
        tokenizer_size=len(tokenizer),
        max_model_len=config.max_model_len or executor.max_model_len,
        eos_token_ids=_eos_token_ids(folder, whole, tokenizer),
        plan=plan,
        adapters=adapters,
    )


def load_executor(
    folder: Path,
    hf_config: transformers.PretrainedConfig,
    config: ModelConfig,
    progress: Progress = lambda line: None,
    native_quantization: Quantization | None = None,
    bank: WeightBank | None = None,
    room: AdapterRoom | None = None,
) -> tuple[Executor, NetworkPlan, AdapterBank | None]:
    """The network of a local folder, target or draft model, how it runs, and the room that it has for adapters.

    Raises ModelLoadError and ConfigError.
    """
    from ..kernels.config_limits import is_recurrent, max_positions, refuse_layers
    from ..kernels.decoder import decoder_program, supports
    from ..kernels.families import FAMILIES
    from ..kernels.rope import UnsupportedModel
    from ..kernels.stored_tensors import WeightError, read_tensors, text_tensors
    from ..kernels.weights import check_finite, has_own_head, load_program_executor, with_widths_of

    limit = config.max_model_len
    try:
        is_program = config.executor != "transformers" and supports(hf_config)
        if config.executor != "transformers" and hf_config.model_type in FAMILIES and is_recurrent(hf_config):
            decoder_program(hf_config)  # if it has a setting that is not known this raises, and says which
        refuse_layers(hf_config, is_program)
        _check_length(limit, max_positions(hf_config), folder)
        tensors = read_tensors(weight_files(folder))
        if has_own_head(hf_config, text_tensors(tensors)):
            hf_config.tie_word_embeddings = False
        plan = plan_network(config, hf_config, native_quantization, read_quantisation(folder))
        if room is not None and plan.execution.batch_invariant:
            raise ConfigError("enable_lora and batch_invariant cannot be combined on a GPU, nor can the method uno: leave one of them away")
        if plan.program is not None and plan.execution.as_stored:
            plan = replace(plan, program=with_widths_of(text_tensors(tensors), plan.program))
        _require_memory(config, plan, tensors, room)
        wider = f"; quantization none keeps them {plan.dtype}" if plan.execution.as_stored and plan.execution.quantization else ""
        progress(f"loading {config.model}: {plan.describe()}{wider}")
        adapters = None
        if plan.program is not None:
            if room is not None:
                adapters = AdapterBank.of(plan.program, room, plan.execution.dtype, plan.execution.device)
            executor = load_program_executor(tensors, hf_config, plan.execution, limit, progress, bank, adapters)
        else:
            from ..kernels.transformers_model import TransformersExecutor, refuse_unsupported  # which takes seconds

            refuse_unsupported(hf_config)
            check_finite(tensors)
            executor = TransformersExecutor.load(folder, hf_config, plan.execution.dtype, room, tensors if plan.stored else None)
            adapters = executor.adapters
    except (UnsupportedModel, WeightError) as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    _check_length(limit, executor.max_model_len, folder)
    return executor, plan, adapters


def _keep_layers(hf_config: transformers.PretrainedConfig, num_layers: int, folder: Path) -> None:
    """Cut the config down to its first layers."""
    config: Any = hf_config.get_text_config()
    before = config.num_hidden_layers
    if num_layers > before:
        raise ConfigError(f"draft_layers {num_layers} is above the {before} layers of {folder}")
    if num_layers < before and getattr(config, "hidden_size_per_layer_input", None):
        raise ConfigError(f"draft_layers: the layers of {folder} have embeddings in one tensor")
    config.num_hidden_layers = num_layers
    for name in ("layer_types", "no_rope_layers", "layer_rope_theta"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) > num_layers:  # Bamba counts them anew
            setattr(config, name, kinds[:num_layers])
    if getattr(config, "scale_depth", None):  # MiniCPM3: divided by the root of their number
        config.scale_depth *= (num_layers / before) ** 0.5


def _check_length(max_model_len: int | None, limit: int, folder: Path) -> None:
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(f"max_model_len {max_model_len} is above the {limit} positions that the model in {folder} can be run with")


def _require_memory(config: ModelConfig, plan: NetworkPlan, tensors: Mapping[str, Tensor], room: AdapterRoom | None) -> None:
    """Refuse what would be killed, or swap for ever, long before its weights are loaded. Reads shapes only."""
    from ..kernels.stored_tensors import shape_of
    from ..kernels.weights import draft_layer_names

    cache, tokens = 0, 0
    if plan.program is None:
        names = tensors.keys() - draft_layer_names(tensors)
        weights = sum(math.prod(shape_of(tensors, name)) for name in names) * plan.execution.dtype.itemsize
    else:
        tokens = config.max_model_len or min(plan.program.max_model_len, MIN_TOKENS)
        is_native = plan.kind == "native"
        cache = (native_cache_bytes if is_native else cache_bytes)(plan.program, plan.execution, tokens)
        weights = (native.resident_bytes if is_native else torch_weight_bytes)(plan.program, plan.execution)
        if room is not None:
            weights += adapter_bytes(plan.program, room, plan.execution.dtype)
    free = free_bytes(plan.execution.device)
    if weights + cache > free:
        formats = plan.formats() + ("" if room is None else ", with room for adapters")
        with_cache = f" and {_size(cache)} for a cache of {tokens:,} tokens" if cache else ""
        raise ModelLoadError(
            f"{config.model} does not fit: it needs {_size(weights)} for its weights ({formats}){with_cache}, "
            f"but only {_size(free)} of {'the GPU' if plan.execution.on_gpu else 'memory'} are free; {_smaller(plan)}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _smaller(plan: NetworkPlan) -> str:
    if plan.execution.on_gpu and plan.execution.quantization is None:
        return "quantization fp8 or int4 makes the weights smaller"
    if plan.kind == "native" and plan.execution.quantization is None:
        return "quantization int8 or int4 makes the weights smaller"
    if plan.kind != "native" and plan.execution.dtype.itemsize > 2:
        return "dtype bfloat16 halves that"
    return "use a smaller model, or free memory"


_ORTHRUS = ("qwen3", "Qwen3ForCausalLM")
SAME_NETWORKS = {"mimo": ("qwen2", "Qwen2ForCausalLM"), "OrthrusLM": _ORTHRUS, "OrthrusForCausalLM": _ORTHRUS}
"""Model types or architectures that transformers lacks -> those of the same network. MiMo is a Qwen2 with draft layers, Orthrus a Qwen3
with a second set of attention weights."""


def read_config(folder: Path) -> transformers.PretrainedConfig:
    """config.json, if it is one that can be served without code of its own. Raises ModelLoadError."""
    raw = config_json(folder)
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    same = SAME_NETWORKS.get(str(model_type)) or SAME_NETWORKS.get(str(named))
    if same is not None:
        raw.pop("auto_map", None)
        model_type, architectures = same[0], [same[1]]
        raw.update(model_type=model_type, architectures=architectures)
    # Published names differ from transformers' in letters (PhiMoEForCausalLM), or where the network is another family's (Exaone: Llama).
    causal = {name.lower() for name in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), f"{model_type}ForCausalLM".replace("_", ""))}
    if "auto_map" in raw and (model_type not in CONFIG_MAPPING or causal.isdisjoint(str(name).lower() for name in architectures)):
        raise ModelLoadError(
            f"{folder} needs Python code of its own (auto_map in config.json), which is never run; "
            "use a version of the model that transformers knows by itself"
        )
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"{folder}: transformers {transformers.__version__} has no model type {model_type!r}")
    try:
        read_quantisation(folder)
    except UnsupportedQuantisation as error:
        raise ModelLoadError(f"{folder} is {error}") from error
    try:
        if same is not None:
            raw.pop("quantization_config", None)
            return config_class(same[0]).from_dict(raw)
        return read_model_config(folder, model_type)
    except Exception as error:  # every config class has checks of its own
        raise ModelLoadError(f"{folder}/config.json is not a valid {model_type} config: {one_line(error)}") from error


def _tokenizer(
    folder: Path, config: ModelConfig, hf_config: transformers.PretrainedConfig, progress: Progress
) -> transformers.PreTrainedTokenizerBase:
    """The folder's, or the one that the settings name, with its chat template or theirs. hf_config: of the whole model."""
    if config.tokenizer is not None:
        folder = find_folder(config.tokenizer, config.tokenizer_revision, progress, files=TOKENIZER_FILES)
        progress(f"loading the tokenizer in {folder}")
    tokenizer = _load_tokenizer(folder, hf_config)
    if config.tokenizer is not None and (last := max(tokenizer.get_vocab().values())) >= (size := hf_config.get_text_config().vocab_size):
        raise ConfigError(f"tokenizer {config.tokenizer} does not fit: it has token ids up to {last}, and the model's end at {size - 1}")
    if tokenizer.chat_template is None:  # models that can see may keep it with what reads their images
        tokenizer.chat_template = (read_json(folder, "chat_template.json") or {}).get("chat_template")
    if config.chat_template is not None:
        tokenizer.chat_template = _template(config.chat_template)
        if mistake := syntax_mistake(tokenizer):
            raise ConfigError(f"chat_template is broken at its {mistake}")
    return tokenizer


def _load_tokenizer(folder: Path, hf_config: transformers.PretrainedConfig) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, config=hf_config, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged tokenizer.json
        files = [file for name in TOKENIZERS for file in folder.glob(name)]
        if not files and gguf_files(folder):
            told = "its tokenizer is of a kind that is not read: name the original model's folder or hub id with the option tokenizer"
            raise ModelLoadError(f"{gguf_files(folder)[0]}: {told}") from error
        if not files:  # transformers asks for packages instead
            raise ModelLoadError(f"{folder} has no tokenizer: put the tokenizer.json there that belongs to the weights") from error
        require_files(files)
        if "auto_map" in (read_json(folder, "tokenizer_config.json") or {}):
            reason = "it needs Python code of its own (auto_map in tokenizer_config.json), which is never run"
            raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {reason}; use a version that transformers knows") from error
        if folder / "tokenizer.json" not in files:  # transformers names one of several packages, and not always the right one
            remedy = f"put tokenizer.json there, or install what reads {files[0].name}: pip install sentencepiece protobuf tiktoken"
            raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {remedy} ({one_line(error)})") from error
        raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {one_line(error)}") from error


def _template(given: str) -> str:
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in given:
            return given
        told = f"chat_template is a file with a Jinja template, or the template itself, not {given[:80]!r}: {one_line(error)}"
        raise ConfigError(told) from None


def _eos_token_ids(
    folder: Path, hf_config: transformers.PretrainedConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> frozenset[int]:
    """All ids that anything in the folder calls an end: chat models often list the end of turn in one place only.

    hf_config: of the whole model, which may name other ends than its text half.
    """
    generation = read_json(folder, "generation_config.json") or {}
    configs = (hf_config, hf_config.get_text_config())
    values: list[Any] = [generation.get("eos_token_id"), *(getattr(c, "eos_token_id", None) for c in configs), tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if hf_config.model_type == "gpt_oss":  # a copy without generation_config.json does not say that calls end a reply
        ids.update(token for token, entry in tokenizer.added_tokens_decoder.items() if str(entry) in ("<|return|>", "<|call|>"))
    return frozenset(ids)
