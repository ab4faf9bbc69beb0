"""Orthrus: the target guesses for itself, through a second set of attention weights that fill in a block of masks (Nguyen et al. 2026).

https://arxiv.org/abs/2605.12825. One pass over the target's own cache: the last known token and the masks behind it see the text as the
target has read it, and each other. What the pass writes are uncommitted places, which the target's next pass writes over.
There is no state, and no weight is kept twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..kernels.layout import Executor, KVTensors
from ..kernels.text_names import text_names, view_names
from .base import Draft, DraftContext, Feedback, Needs
from .block_guessing import block_batch
from .checkpoint import Checkpoint
from .config import OrthrusConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .drafting import behind_the_target
from .guessing import Drawing, pick
from .loading import LoadedProposer, Opening, Resources, TargetView

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

    def open(opening: Opening) -> OrthrusProposer:
        assert opening.target_kv is not None
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        return OrthrusProposer(opening.name, executor, opening.target_kv, mask_token, drawing, config.num_speculative_tokens or most)

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


class OrthrusProposer:
    """Implements `Proposer`. A row is guessed for once all but its last known token are in the target's cache."""

    needs = Needs(hears="nothing", runs_target=True)

    def __init__(self, name: str, executor: Executor, kv: KVTensors, mask_token: int, drawing: Drawing, max_tokens: int) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self._executor = executor
        self._kv = kv
        self._mask_token = mask_token
        self._drawing = drawing

    def propose(self, context: DraftContext) -> Draft:
        feeds = behind_the_target(context, self.max_tokens)
        if not feeds:
            return Draft.empty(len(context.rows))
        batch = block_batch(feeds, context.block_size, self._mask_token, from_anchor=True, is_causal=False, spare=_SPARE)
        logits = self._executor.run(batch, self._kv).logits
        return pick(feeds, logits, self._drawing, None).draft(feeds, len(context.rows))

    def observe(self, feedback: Feedback) -> None:
        """What became of guesses changes none."""

    def forget(self, request_id: str) -> None:
        """There is nothing."""

    def check(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """Nothing outlives the process."""
