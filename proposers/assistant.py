"""Gemma 4's assistants: small networks that guess token after token over the target's own keys and values (Google 2026).

Their layers have queries alone, which stand at the last known token's position whatever has been guessed since; what was guessed comes in
by the token and the state of the guess before. So an assistant has no cache, and nothing to catch up with. transformers calls it
`gemma4_assistant`, other servers frozen-KV MTP.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from ..kernels.batch_lists import BatchLists
from ..kernels.fuse import fuse
from . import assistant_program
from .checkpoint import Checkpoint
from .config import MtpConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .detection import nested, read_config
from .draft_layers import config_of
from .draft_tensors import DraftTensors, program_weights
from .drafting import Feed
from .guessing import ChainGuesser, Drawing, Guesses, Network, unchanged
from .last_state import LastStateProposer
from .loading import LoadedProposer, Opening, Resources, TargetView

DEFAULT_NUM_TOKENS = 4
"""Where generation_config.json does not say: as many as the published ones learned with."""
_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_one(folder: Path) -> bool:
    return read_config(folder).get("model_type") in _TYPES


def load(folder: Path, config: MtpConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError for an assistant of another target, UnsupportedModel."""
    target, checkpoint = resources.target, Checkpoint(folder)
    _require_gemma(target, folder)
    width = checkpoint.config.get("backbone_hidden_size")
    if width != target.hidden_size:
        raise SpeculativeConfigError(
            f"the assistant in {folder} was made for a target of hidden size {width}, this one has {target.hidden_size}: take the "
            "assistant of this target"
        )
    layers = _layers(folder, checkpoint.config)
    sources = [_source(kind, target, folder) for kind in layers.layer_types or ()]
    program = fuse(assistant_program.draft_program(layers, target, sources))
    tensors = DraftTensors(checkpoint, _spellings)
    weights = program_weights(program, tensors.has, tensors.take)
    # The head is small enough to look at all of it: what would choose some of it first is not needed.
    checkpoint.ignore(*(name for name in checkpoint.names if name.startswith("masked_embedding.")), *_spellings(assistant_program.HEAD))
    executor = resources.bind(program, weights, config.quantization)
    num_tokens = config.num_speculative_tokens or _num_tokens(folder)

    def open(opening: Opening) -> LastStateProposer:
        assert opening.target_kv is not None
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        guesser = ChainGuesser(Network(executor, opening.target_kv, unchanged), drawing, lists=batch_lists)
        return LastStateProposer(opening.name, num_tokens, _Chains(guesser, opening.block_size))

    return LoadedProposer("mtp", open, found=(*_found(layers, sources, target), *checkpoint.leftovers()), is_learned=True)


def batch_lists(feeds: Sequence[Feed], block_size: int) -> BatchLists:
    """One row a feed: its last known token at its position, which sees every place before its own. That is where the target's keys and
    values end, and nothing is written, so the row stands at the last of them."""
    lists = BatchLists(block_size)
    for feed in feeds:
        token_ids, table = feed.row.token_ids, feed.row.block_table
        length = len(token_ids) - 1
        lists.token_ids.append(token_ids[length])
        lists.positions.append(length)
        lists.add_slots(table, length - 1, length)
        lists.query_start_loc.append(len(lists.token_ids))
        lists.seq_lens.append(length)
        lists.num_causal.append(1)
        lists.tables.append(table[: -(-length // block_size)])
    lists.logits_indices += range(len(feeds))
    lists.tree_mask += [0] * len(feeds)
    return lists


class _Chains:
    """Implements `Heads`."""

    def __init__(self, guesser: ChainGuesser, block_size: int) -> None:
        self._guesser, self._block_size = guesser, block_size

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        return self._guesser.guess(feeds, states, self._block_size)


def _require_gemma(target: TargetView, folder: Path) -> None:
    model_type = str(target.config.get("model_type"))
    if not model_type.startswith("gemma4") or not target.kv_layers:
        where = "" if target.kv_layers else " that runs through transformers, where they cannot be read"
        raise SpeculativeConfigError(
            f"{folder} holds an assistant, which reads the keys and values of its Gemma 4: this target is a {model_type!r}{where}"
        )


def _layers(folder: Path, config: Mapping[str, Any]) -> PretrainedConfig:
    """The settings of its layers, as the target's family has them."""
    said = dict(nested(config, "text_config"))
    if said.pop("model_type", None) not in ("gemma4_text", "gemma4_unified_text"):
        raise SpeculativeConfigError(f"{folder}/config.json has no text_config of a Gemma 4")
    said |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}  # which those of the 12B leave out
    return config_of("gemma4_text", said, folder)


def _source(kind: str, target: TargetView, folder: Path) -> int:
    """The layer of the target's cache that layers of a kind look at: the last one of their kind."""
    slides = kind == "sliding_attention"
    layers = [i for i, layer in enumerate(target.kv_layers) if (layer.window is not None) == slides]
    if not layers:
        raise SpeculativeConfigError(f"the assistant in {folder} has {kind}, the target has none: take the assistant of this target")
    return layers[-1]


def _spellings(name: str) -> tuple[str, ...]:
    return (name, "model.embed_tokens.weight") if name == assistant_program.HEAD else (name,)


def _num_tokens(folder: Path) -> int:
    try:
        said = json.loads((folder / "generation_config.json").read_text()).get("num_assistant_tokens")
    except (OSError, ValueError, AttributeError, RecursionError):
        said = None
    return min(said, MAX_NUM_SPECULATIVE_TOKENS) if type(said) is int and said > 0 else DEFAULT_NUM_TOKENS


def _found(layers: PretrainedConfig, sources: Sequence[int], target: TargetView) -> tuple[str, ...]:
    """For people: a wrong reading of a checkpoint crashes nothing and only lowers what is accepted."""
    return (
        f"Gemma 4's assistant, {len(sources)} layers of width {layers.hidden_size} over the target's keys and values "
        f"(cache layers {', '.join(map(str, sources))} of {len(target.kv_layers)}), reads [embedding; state] with the target's last state",
        "guesses the target's vocabulary; embedding: the target's, head: its own; no cache of its own",
    )
