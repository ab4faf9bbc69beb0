"""The keys of each method, read from one object of the speculative config into that method's type.

Knows which keys a method has; what those of trees mean stands in config_trees.py.
"""

from dataclasses import replace
from typing import Any

from .config import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    BlockConfig,
    CustomConfig,
    DraftModelConfig,
    EagleConfig,
    HiddenStatesConfig,
    LookaheadConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    NgramCacheConfig,
    NgramConfig,
    OrthrusConfig,
    PardConfig,
    PredictionConfig,
    ProposerConfig,
    SuffixConfig,
    SyntheticConfig,
    UnoConfig,
)
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, ConfigEntry, SpeculativeConfigError, given
from .config_trees import read_block_tree, read_static_tree, read_tree
from .detection import is_same_model

MAX_INT = 2**31 - 1


def read_proposer(method: str, entry: ConfigEntry, target: str | None) -> ProposerConfig:
    """method: one of config_reading.METHODS, "off" left out. target: the served model, as the user named it.

    Raises SpeculativeConfigError.
    """
    num_tokens = entry.integer("num_speculative_tokens", 1, MAX_NUM_SPECULATIVE_TOKENS)
    match method:
        case "ngram":
            return _ngram(entry, num_tokens)
        case "ngram_cache":
            revision = entry.text("revision")
            return NgramCacheConfig(entry.model(method, target), **given(num_speculative_tokens=num_tokens, revision=revision))
        case "suffix":
            return SuffixConfig(
                num_tokens,
                **given(
                    max_tree_depth=entry.integer("suffix_decoding_max_tree_depth", 1, 1024),
                    max_cached_requests=entry.integer("suffix_decoding_max_cached_requests", 0, MAX_INT),
                    max_spec_factor=entry.number("suffix_decoding_max_spec_factor", 0, 1000),
                    min_token_prob=entry.number("suffix_decoding_min_token_prob", 0, 1),
                    use_tree=entry.flag("use_tree"),
                ),
            )
        case "lookahead":
            return _lookahead(entry, num_tokens)
        case "draft_model":
            return DraftModelConfig(
                entry.model(method, target),
                **given(
                    num_speculative_tokens=num_tokens,
                    max_model_len=entry.integer("max_model_len", 1, MAX_INT),
                    draft_tensor_parallel_size=entry.integer("draft_tensor_parallel_size", 1, 1024),
                    confidence_threshold=entry.number("confidence_threshold", 0, 1),
                    vocabulary=_vocabulary(entry),
                    draft_layers=entry.integer("draft_layers", 1, 1024),
                ),
                **_sampling(entry),
                **_weights(entry),
            )
        case "pard":
            max_model_len = entry.integer("max_model_len", 1, MAX_INT)
            limits = given(num_speculative_tokens=num_tokens, max_model_len=max_model_len)
            return PardConfig(entry.model(method, target), **limits, **_sampling(entry), **_weights(entry))
        case "eagle" | "eagle3":
            return _eagle(method, entry, num_tokens, target)
        case "medusa":
            return MedusaConfig(entry.optional_model(method, target), **_heads(entry, num_tokens), **_weights(entry))
        case "hydra":
            settings = {**_heads(entry, num_tokens), **_sampling(entry), **_weights(entry)}
            return MedusaConfig(entry.model(method, target), method="hydra", **settings)
        case "redrafter":
            tree, num_tokens = read_static_tree(entry, num_tokens)
            settings = {**_sampling(entry), **_weights(entry)}
            return MedusaConfig(entry.model(method, target), num_tokens, tree=tree, method="redrafter", **settings)
        case "mtp":
            model = entry.optional_model(method, target)
            own = None if model is None or is_same_model(model, target) else model
            return MtpConfig(num_tokens, own, **_sampling(entry), **_weights(entry))
        case "mlp_speculator":
            return MlpSpeculatorConfig(entry.model(method, target), num_tokens, **_sampling(entry), **_weights(entry))
        case "dflash" | "dspark":
            entry.flag("parallel_drafting")  # they always do
            threshold = given(confidence_threshold=entry.number("confidence_threshold", 0, 1)) if method == "dspark" else {}
            tree, num_tokens = read_block_tree(entry, num_tokens)
            settings = {**threshold, **_sampling(entry), **_weights(entry)}
            return BlockConfig(entry.model(method, target), method, num_tokens, tree, **settings)
        case "orthrus":
            if (model := entry.text("model")) is not None and not is_same_model(model, target):
                raise SpeculativeConfigError(f"{entry.name('model')} {model!r} is not the target, which brings an Orthrus's weights along")
            return OrthrusConfig(num_tokens, **_sampling(entry))
        case "uno":
            return _uno(entry, num_tokens)
        case "custom_class":
            return CustomConfig(_class_name(entry), **given(num_speculative_tokens=num_tokens, options=entry.mapping("options")))
        case "extract_hidden_states":
            return _hidden_states(entry)
        case "synthetic":
            return SyntheticConfig(**given(num_speculative_tokens=num_tokens))
        case _:
            assert method == "prediction"
            return PredictionConfig(**given(num_speculative_tokens=num_tokens))


def _weights(entry: ConfigEntry) -> dict[str, Any]:
    return given(quantization=entry.choice("quantization", ("int8", "fp8", "int4", "none")), revision=entry.text("revision"))


def _sampling(entry: ConfigEntry) -> dict[str, Any]:
    return given(draft_sample_method=entry.choice("draft_sample_method", ("greedy", "probabilistic")))


def _ngram(entry: ConfigEntry, num_tokens: int | None) -> NgramConfig:
    entry.take("model")  # the literal '[ngram]'
    low, high = entry.integer("prompt_lookup_min", 1, 64), entry.integer("prompt_lookup_max", 1, 64)
    if low and high and low > high:
        raise SpeculativeConfigError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
    num_branches = entry.integer("num_branches", 1, MAX_NUM_SPECULATIVE_TOKENS)
    length = num_tokens or DEFAULT_NUM_SPECULATIVE_TOKENS
    if num_branches and num_branches * length > MAX_NUM_SPECULATIVE_TOKENS:
        raise SpeculativeConfigError(
            f"'num_branches' {num_branches} x 'num_speculative_tokens' {length} = {num_branches * length} guesses, "
            f"above {MAX_NUM_SPECULATIVE_TOKENS}: lower one of them"
        )
    return NgramConfig(
        **given(
            num_speculative_tokens=num_tokens,
            prompt_lookup_max=high or low,
            prompt_lookup_min=low or high,
            match=entry.choice("match", ("earliest", "latest")),
            num_branches=num_branches,
            shared_pool=entry.flag("shared_pool"),
        )
    )


def _lookahead(entry: ConfigEntry, num_tokens: int | None) -> LookaheadConfig:
    sizes = given(
        max_window_size=entry.integer("max_window_size", 1, MAX_NUM_SPECULATIVE_TOKENS),
        max_ngram_size=entry.integer("max_ngram_size", 2, MAX_NUM_SPECULATIVE_TOKENS),
        max_verification_set_size=entry.integer("max_verification_set_size", 1, MAX_NUM_SPECULATIVE_TOKENS),
    )
    config = LookaheadConfig(**sizes)
    if config.num_nodes > MAX_NUM_SPECULATIVE_TOKENS:
        raise SpeculativeConfigError(
            f"('max_window_size' {config.max_window_size} + 'max_verification_set_size' {config.max_verification_set_size}) x "
            f"('max_ngram_size' {config.max_ngram_size} - 1) - 1 = {config.num_nodes} guesses, above {MAX_NUM_SPECULATIVE_TOKENS}: "
            "lower one of them"
        )
    return replace(config, num_speculative_tokens=num_tokens)


def _vocabulary(entry: ConfigEntry) -> str | None:
    reading = entry.choice("heterogeneous_vocab", ("intersection", "retokenize"))
    asked = entry.flag("use_heterogeneous_vocab")
    if asked is False and reading is not None:
        raise SpeculativeConfigError(f"'use_heterogeneous_vocab' false contradicts 'heterogeneous_vocab' {reading!r}: leave one out")
    return reading or ("intersection" if asked else None)


def _eagle(method: Any, entry: ConfigEntry, num_tokens: int | None, target: str | None) -> EagleConfig:
    tree, num_tokens = read_tree(entry, num_tokens)
    layers: tuple[int, ...] | None = None
    if method == "eagle3":
        entry.flag("parallel_drafting")  # decided by the checkpoint: a P-EAGLE always drafts so
        name = entry.name("layers")
        layers = entry.integers("layers", 0, 1024)
        if layers is not None and (not layers or list(layers) != sorted(layers)):
            raise SpeculativeConfigError(f"{name} must name at least one layer, in ascending order, not {list(layers)}")
    return EagleConfig(
        entry.model(method, target),
        method,
        num_tokens,
        tree=tree,
        aux_layers=layers,
        **given(
            draft_tensor_parallel_size=entry.integer("draft_tensor_parallel_size", 1, 1024),
            max_model_len=entry.integer("max_model_len", 1, MAX_INT),
        ),
        **_sampling(entry),
        **_weights(entry),
    )


def _heads(entry: ConfigEntry, num_tokens: int | None) -> dict[str, Any]:
    """Of Medusa and Hydra. Without a tree every head guesses one token; with one, its nodes are the guesses and its depth the heads."""
    num_heads = entry.integer("num_heads", 1, MAX_NUM_SPECULATIVE_TOKENS)
    name = entry.name("speculative_token_tree")
    tree, num_tokens = read_static_tree(entry, num_tokens)
    depth = len(tree.paths[-1]) if tree else num_tokens
    if num_heads and depth and depth > num_heads:
        if tree:
            raise SpeculativeConfigError(f"{name} is {depth} levels deep, above num_heads {num_heads}: a head guesses one level")
        raise SpeculativeConfigError(f"num_speculative_tokens {depth} is above num_heads {num_heads}: every head guesses one token")
    return given(num_speculative_tokens=num_tokens or num_heads, num_heads=num_heads, tree=tree)


def _uno(entry: ConfigEntry, num_tokens: int | None) -> UnoConfig:
    if (model := entry.text("model")) is None:
        raise SpeculativeConfigError("method 'uno' needs a 'uno_lora_path': the folder or hub id of the adapter")
    settings = given(
        num_speculative_tokens=num_tokens,
        mask_token_id=entry.integer("uno_mask_token_id", 2, MAX_INT),
        noise_seed=entry.integer("uno_noise_seed", 0, MAX_INT),
        noise_low=entry.integer("uno_noise_low", 0, MAX_INT),
        revision=entry.text("revision"),
    )
    return UnoConfig(model, **settings, **_sampling(entry))


def _class_name(entry: ConfigEntry) -> str:
    """"module:Class" or "file.py:Class". vLLM names the class in `model`, as "module.Class"."""
    name = entry.name("custom_class" if entry.peek("custom_class") is not None else "model")
    path = entry.text("custom_class") or entry.text("model")
    if path is None:
        raise SpeculativeConfigError("method 'custom_class' needs a 'custom_class': 'module:Class' or 'path/to/file.py:Class'")
    place, _, class_name = path.rpartition(":" if ":" in path else ".")
    is_file = place.endswith(".py")
    if not class_name.isidentifier() or not (is_file or place and all(part.isidentifier() for part in place.split("."))):
        raise SpeculativeConfigError(f"{name} must be 'module:Class' or 'path/to/file.py:Class', not {path!r}")
    return f"{place}:{class_name}"


def _hidden_states(entry: ConfigEntry) -> HiddenStatesConfig:
    """vLLM hides the layers in `draft_model_config` and the directory in another option, --kv-transfer-config."""
    match entry.mapping("draft_model_config"):
        case {"hf_config": {"eagle_aux_hidden_state_layer_ids": nested}} if entry.peek("layers") is None:
            layers = ConfigEntry({"eagle_aux_hidden_state_layer_ids": nested}).integers("layers", -1, 1024)
        case _:
            layers = entry.integers("layers", -1, 1024)
    directory = entry.text("directory")
    if directory is None:
        raise SpeculativeConfigError("method 'extract_hidden_states' needs a 'directory' to write to (vLLM's 'shared_storage_path')")
    return HiddenStatesConfig(directory, **given(layers=layers, max_shard_tokens=entry.integer("max_shard_tokens", 1, MAX_INT)))
