"""MTP: draft layers that were trained with the target and lie in its own checkpoint (DeepSeek-AI 2024; Xiaomi 2025).

Reads the state that the target has behind its final norm beside each token; embedding and head are the target's.
"""

from collections.abc import Callable

from torch import Tensor
from transformers import PretrainedConfig

from ..kernels.decoder_builder import layer
from ..kernels.fuse import fuse
from ..kernels.layout import FINAL
from ..kernels.program import Program
from . import assistant
from .config import MtpConfig
from .config_entry import SpeculativeConfigError
from .draft_layers import config_of
from .draft_tensors import program_weights
from .drafting import OwnCache, Pairing
from .features import Features
from .guessing import ChainGuesser, Drawing, Network, unchanged
from .learned import LearnedProposer
from .loading import LoadedProposer, Opening, Resources, TargetView
from .mtp_checkpoint import ERNIE, EXAONE, GATED, NEMOTRON, NUMBERED, MtpModule, find_module
from .mtp_program import (
    draft_program,
    ernie_draft_program,
    exaone_draft_program,
    gated_draft_program,
    nemotron_draft_program,
    numbered_draft_program,
    published,
    published_by_ernie,
    published_by_speculators,
    published_with_layer,
)

_DENSE = ("qwen2", "qwen3", "llama")


def load(config: MtpConfig, resources: Resources) -> LoadedProposer:
    """Guesses come from the first module in a loop, however many there are. Raises SpeculativeConfigError, UnsupportedModel."""
    target = resources.target
    folder = target.folder if config.model is None else resources.find_folder(config.model, config.revision)
    if assistant.is_one(folder):
        return assistant.load(folder, config, resources)
    module = find_module(folder, target)
    program, published = _network(module, target)
    program = fuse(program)
    executor = resources.bind(program, _weights(module, program, published), config.quantization)
    num_tokens = config.num_speculative_tokens or module.checkpoint.num_speculative_tokens or module.num_modules

    def open(opening: Opening) -> LearnedProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        guesser = ChainGuesser(Network(executor, opening.caches[0], unchanged), drawing)
        features = Features((FINAL,), target.hidden_size, opening.num_blocks, opening.block_size)
        max_model_len = min(executor.max_model_len, target.max_model_len)
        cache = OwnCache(max_model_len, num_tokens, target.vocab_size, Pairing(shift=1, first=1), features)
        return LearnedProposer(opening.name, executor.kv_layers, cache, guesser)

    return LoadedProposer(
        name="mtp",
        open=open,
        executors=(executor,),
        bytes_per_block=Features.bytes_per_block(target.hidden_size),
        found=_found(module),
        is_learned=True,
    )


def _network(module: MtpModule, target: TargetView) -> tuple[Program, Callable[[str], str]]:
    """Its program, and what the module calls a weight."""
    match module.kind:
        case "MiMo" | "speculators":
            hf_config = _layer_config(module, target, _DENSE)
            return draft_program(hf_config, target, module.has, module.reads_state_first), published
        case "Qwen3-Next" | "Qwen3.5" | "K-EXAONE":
            return _gated(module, target)
        case "ERNIE-4.5":
            return ernie_draft_program(_layer_config(module, target, (ERNIE,)), target), published_by_ernie
        case "Nemotron 3":
            return nemotron_draft_program(_layer_config(module, target, (NEMOTRON,)), target), published_with_layer
        case _:
            return numbered_draft_program(_layer_config(module, target, tuple(NUMBERED)), target), published


def _gated(module: MtpModule, target: TargetView) -> tuple[Program, Callable[[str], str]]:
    if target.config.get("mtp_use_dedicated_embeddings"):
        raise SpeculativeConfigError(
            f"the MTP layer in {module.checkpoint.folder} has embeddings of its own (mtp_use_dedicated_embeddings), which is not supported"
        )
    hf_config = _layer_config(module, target, tuple(GATED))

    def of_speculators(name: str) -> str:
        """Its first folders have the family's own names."""
        own = published_by_speculators(name)
        return own if module.has(own) else published(name)

    named = of_speculators if module.is_of_speculators else published_with_layer
    if module.kind == "K-EXAONE":
        return exaone_draft_program(hf_config, target), named
    return gated_draft_program(hf_config, target, module.has(named(f"{layer(0)}.mlp.gate.weight"))), named


def _weights(module: MtpModule, program: Program, published: Callable[[str], str]) -> dict[str, Tensor]:
    """published: what the module calls a weight."""

    def take(name: str, *shape: int) -> Tensor:
        return module.take(published(name), *shape)

    return program_weights(program, lambda name: module.has(published(name)), take)


def _layer_config(module: MtpModule, target: TargetView, types: tuple[str, ...]) -> PretrainedConfig:
    """Of one layer: the target's, or what a folder of its own says. What it leaves out is as transformers has it.

    types: model types that can be run.
    """
    folder, own = module.checkpoint.folder, module.layer_config
    # A layer of the target's own kind was taken from the target: what a converter did not write down is as the target has it.
    given = dict(own) if own and module.kind == "speculators" else {**target.config, **own}
    model_type = given.get("model_type")
    if model_type not in types:
        raise SpeculativeConfigError(f"{folder} has an MTP layer of model type {model_type!r}, but only {', '.join(types)} can be run")
    given.pop("mlp_layer_types", None)  # of the target's layers
    kinds = given.pop("layer_types", None) or ["full_attention"]
    if model_type == NEMOTRON:
        given.pop("layers_block_type", None)
        kinds = given["mtp_layers_block_type"]
    elif model_type == EXAONE:
        kinds = (given.get("mtp_layer_types") or kinds)[:1]
    else:
        kinds = kinds[-1:] if model_type in _DENSE else ["full_attention"]
    hf_config = config_of(model_type, {**given, "num_hidden_layers": 1, "layer_types": kinds}, folder)
    if hf_config.hidden_size != target.hidden_size:
        raise SpeculativeConfigError(
            f"{folder} was trained for a target of hidden size {hf_config.hidden_size}, this one has {target.hidden_size}: "
            "take the MTP layer that was trained for this target"
        )
    return hf_config


def _found(module: MtpModule) -> tuple[str, ...]:
    """For people: a wrong reading of a checkpoint crashes nothing and only lowers what is accepted."""
    count = module.num_modules
    modules = "1 module" if count == 1 else f"{count} modules, of which the first guesses in a loop"
    fed_back = "its own state" if module.kind == "ERNIE-4.5" else "the state behind the norm"
    order = "[state; embedding]" if module.reads_state_first else "[embedding; state]"
    lines = [
        f"{module.kind}, {modules} ({module.prefix}*), reads {order} with the target's last state",
        f"guesses the target's vocabulary; embedding: the target's, head: the target's; fed back: {fed_back}",
    ]
    return (*lines, *module.checkpoint.leftovers())
