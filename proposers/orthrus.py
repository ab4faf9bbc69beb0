"""Orthrus: the target guesses for itself, through a second set of attention weights that fill in a block of masks (Nguyen et al. 2026).

https://arxiv.org/abs/2605.12825. The last known token and the masks behind it see the text as the target has read it, and each other. No
weight is kept twice.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..kernels.layout import RaggedBatch
from ..kernels.text_names import text_names, view_names
from .block_guessing import block_batch
from .checkpoint import Checkpoint
from .config import OrthrusConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .drafting import Feed
from .guessing import Drawing
from .loading import LoadedProposer, Opening, Resources, TargetView
from .target_guessing import TargetProposer

_SPARE = 1  # the last mask of a block is there for the others to see, and guesses nothing


def load(config: OrthrusConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the target has no such weights for all its layers, or is not run as a program."""
    target = resources.target
    checkpoint = Checkpoint(target.folder)
    names, weights = _view(checkpoint, target)
    if resources.exchange is None:
        raise SpeculativeConfigError("method 'orthrus' needs a target that runs as a program without recurrent layers: choose another one")
    mask_token, block_size = checkpoint.integer("mask_token_id"), checkpoint.integer("block_size")
    if not 0 <= mask_token < target.vocab_size:
        raise SpeculativeConfigError(f"{target.folder}/config.json: 'mask_token_id' must be below {target.vocab_size}, not {mask_token}")
    if block_size <= _SPARE:
        raise SpeculativeConfigError(f"{target.folder}/config.json: 'block_size' must be above {_SPARE}, not {block_size}")
    most = min(block_size, MAX_NUM_SPECULATIVE_TOKENS) - _SPARE
    if config.num_speculative_tokens is not None and config.num_speculative_tokens > most:
        raise SpeculativeConfigError(
            f"'num_speculative_tokens' is {config.num_speculative_tokens}, but the blocks of {target.folder} have {most}: lower it"
        )
    executor = resources.exchange(names, weights)

    def batch(feeds: Sequence[Feed], block_size: int) -> RaggedBatch:
        return block_batch(feeds, block_size, mask_token, from_anchor=True, is_causal=False, spare=_SPARE)

    def open(opening: Opening) -> TargetProposer:
        assert opening.target_kv is not None
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        return TargetProposer(opening.name, config.num_speculative_tokens or most, executor, opening.target_kv, batch, drawing)

    found = f"the target itself, {len(names)} attention weights exchanged, blocks of {most + _SPARE}, mask token {mask_token}"
    return LoadedProposer("orthrus", open, found=(found,), is_learned=True)


def _view(checkpoint: Checkpoint, target: TargetView) -> tuple[dict[str, str], Mapping[str, Tensor]]:
    """Names of the target's weights -> those in their place, and these."""
    in_file = text_names(checkpoint.names)
    names = view_names(in_file)
    if not names:
        raise SpeculativeConfigError(f"{target.folder} has no second set of attention weights (q_proj_diff, ...): it is no Orthrus")
    if alone := sorted(set(names) - in_file.keys()):
        raise SpeculativeConfigError(f"{target.folder} has {names[alone[0]]!r}, but no {alone[0]!r} that it could take the place of")
    parts = {name.split(".", 3)[3] for name in names}
    every = {f"model.layers.{layer}.{part}" for layer in range(target.num_layers) for part in parts}
    if missing := sorted(every - names.keys()):
        raise SpeculativeConfigError(f"{target.folder} has no second {missing[0]!r}, but one of another layer: its view is incomplete")
    weights = {name: checkpoint.take(in_file[name], *checkpoint.shape(in_file[own])) for own, name in names.items()}
    if narrow := next((name for name, weight in weights.items() if not weight.is_floating_point()), None):
        raise SpeculativeConfigError(f"{target.folder}: {narrow!r} holds {weights[narrow].dtype}, not floating point numbers")
    return names, weights
