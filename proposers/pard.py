"""PARD (An et al. 2025): a causal language model that fills mask tokens, all guesses in one pass. PARD-2 adds the target's states.

Knows what a PARD checkpoint is. One pass reads what is new and the masks behind it; the masks' entries are overwritten next time.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import FINAL, Executor
from ..kernels.ops import Add, Embed, Op
from ..kernels.program import Program
from ..kernels.weights import check_tensors, network_program
from .checkpoint import Checkpoint
from .config import PardConfig
from .config_entry import SpeculativeConfigError
from .drafting import OwnCache, Pairing
from .features import Features
from .guessing import FEATURE, Drawing, Network, ParallelGuesser
from .learned import LearnedProposer
from .loading import LoadedProposer, Opening, Resources
from .vocabularies import check_vocabularies, read_tokenizer

STATE_SCALE = 0.02
"""What PARD-2 multiplies the projected states by before it adds them to the embedding."""
MASK_TOKENS = ("pard_token", "ptd_token_id")
"""Where config.json names the mask token: AMD's key, and the one that vLLM reads after it."""
PROJECTIONS = ("target_proj", "model.target_proj")


def load(config: PardConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if it is no PARD checkpoint, or reads text as other ids than the target."""
    folder = resources.find_folder(config.model, config.revision)
    checkpoint = Checkpoint(folder)
    mask_token = next((checkpoint.config[key] for key in MASK_TOKENS if checkpoint.config.get(key) is not None), None)
    if type(mask_token) is not int:
        raise SpeculativeConfigError(
            f"{folder}/config.json has no 'pard_token', so this is no PARD checkpoint; for an ordinary draft model say method draft_model"
        )
    if "pard2_target_layers" in checkpoint.config or _has_projection(checkpoint):
        return _load_with_states(config, resources, checkpoint, mask_token)
    draft = resources.load_draft(config)
    if draft.executor.state_layers:
        raise SpeculativeConfigError(f"{folder} has recurrent layers, which would read the masks into their states: choose another draft")
    check_vocabularies(resources.target.tokenizer, draft.tokenizer)
    _check_mask(mask_token, draft.executor, folder)

    def open(opening: Opening) -> LearnedProposer:
        network = Network(draft.executor, opening.caches[0])
        return _proposer(config, resources, opening, network, mask_token, Pairing(), None)

    found = (f"PARD, all guesses in one pass by mask token {mask_token}",)
    return LoadedProposer("pard", open, (draft.executor,), found=found, is_learned=True)


def _load_with_states(config: PardConfig, resources: Resources, checkpoint: Checkpoint, mask_token: int) -> LoadedProposer:
    target, folder = resources.target, checkpoint.folder
    if not _has_projection(checkpoint):
        pickles = [path.name for path in folder.glob("warp_model.*") if path.suffix != ".safetensors"]
        raise SpeculativeConfigError(
            f"{folder} is PARD-2, but its target_proj.weight is not among the safetensors"
            + (f": it is in {pickles[0]}, a pickle; save what is in it as warp_model.safetensors" if pickles else "")
        )
    layers = checkpoint.config.get("pard2_target_layers", [-1, -8, -16, -24])
    boundaries = _boundaries(layers, target.num_layers, folder)
    program = network_program(checkpoint.model_config())
    width = program.buffers[program.boundaries[0]]
    prefix = next(name for name in PROJECTIONS if checkpoint.has(f"{name}.weight"))
    projection = checkpoint.take(f"{prefix}.weight", width, len(boundaries) * target.hidden_size).float().t().contiguous() * STATE_SCALE
    bias = checkpoint.optional(f"{prefix}.bias", width)
    shift = torch.zeros(width, dtype=torch.float32) if bias is None else bias.float() * STATE_SCALE

    own = {name: name for name in checkpoint.names if not name.startswith(PROJECTIONS)}
    tensors = _Only(checkpoint, own)
    check_tensors(program, tensors)
    executor = resources.bind(with_states(program), tensors, config.quantization)
    check_vocabularies(target.tokenizer, read_tokenizer(folder))
    _check_mask(mask_token, executor, folder)
    size = len(boundaries) * target.hidden_size
    encode = _Projection(projection, shift)

    def open(opening: Opening) -> LearnedProposer:
        features = Features(boundaries, size, opening.num_blocks, opening.block_size)
        network = Network(executor, opening.caches[0], encode)
        # The state of a token is that of the position before it; the first has none, which counts as zeros.
        return _proposer(config, resources, opening, network, mask_token, Pairing(shift=1, first=0), features)

    taps = ", ".join("the last, normed" if b == FINAL else f"before layer {b}" for b in boundaries)
    found = (f"PARD-2, mask token {mask_token}, reads the target's states: {taps}",)
    return LoadedProposer("pard", open, (executor,), Features.bytes_per_block(size), found, is_learned=True)


class _Projection:
    """[T, states of all layers] -> [T, width of the drafter]."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, states: Tensor) -> Tensor:
        if self._weight.device != states.device:  # nobody knows before the first of them comes
            self._weight, self._bias = self._weight.to(states.device), self._bias.to(states.device)
        return torch.addmm(self._bias, states, self._weight)


def with_states(program: Program) -> Program:
    """The program with FEATURE added to its embedding."""
    ops: list[Op] = []
    width = program.buffers[program.boundaries[0]]
    for op in program.ops:
        if isinstance(op, Embed):
            (output,) = op.outputs
            ops += [dataclasses.replace(op, outputs=("tokens",)), Add(("tokens", FEATURE), (output,))]
        else:
            ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops), inputs={FEATURE: width})


def _proposer(
    config: PardConfig,
    resources: Resources,
    opening: Opening,
    network: Network,
    mask_token: int,
    pairing: Pairing,
    features: Features | None,
) -> LearnedProposer:
    executor = network.executor
    drawing = Drawing.asked(config.draft_sample_method, resources.target.vocab_size, opening.return_probs)
    limit = min(executor.max_model_len, config.max_model_len or executor.max_model_len)
    cache = OwnCache(limit, config.num_speculative_tokens, executor.vocab_size, pairing, features)
    return LearnedProposer(opening.name, executor.kv_layers, cache, ParallelGuesser(network, drawing, mask_token))


def _boundaries(layers: Any, num_layers: int, folder: Path) -> tuple[int, ...]:
    """Boundary ids of indices into transformers' hidden_states: one for each layer's input, then the normed last."""
    if not isinstance(layers, list) or not layers or any(type(i) is not int or not -num_layers - 1 <= i <= num_layers for i in layers):
        raise SpeculativeConfigError(
            f"{folder}/config.json: 'pard2_target_layers' {layers!r} are not states of a target of {num_layers} layers; "
            "is this checkpoint made for another target?"
        )
    return tuple(FINAL if i in (-1, num_layers) else i % (num_layers + 1) for i in layers)


def _check_mask(mask_token: int, executor: Executor, folder: Path) -> None:
    if not 0 <= mask_token < executor.vocab_size:
        raise SpeculativeConfigError(f"{folder}/config.json: 'pard_token' {mask_token} is outside its {executor.vocab_size} embeddings")


def _has_projection(checkpoint: Checkpoint) -> bool:
    return any(checkpoint.has(f"{name}.weight") for name in PROJECTIONS)


class _Only(Mapping[str, Tensor]):
    """Some of a checkpoint's tensors, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.take(name)

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
