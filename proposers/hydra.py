"""Hydra: Medusa's heads, each of which knows the guesses before its own (Ankner et al. 2024, arXiv 2402.05109).

Reads folders as github.com/zankner/Hydra writes them. In Hydra++ a decoder layer of their own goes over the target's states first.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..kernels.decoder_builder import DecoderBuilder
from ..kernels.fuse import fuse
from ..kernels.layer_order import pre_norm
from ..kernels.layout import FINAL, Executor, KVTensors
from ..kernels.program import Program
from ..kernels.upload import upload
from .base import Proposer
from .checkpoint import Checkpoint
from .config import MedusaConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .draft_layers import layer_config, readable_length, settings_like
from .draft_tensors import DraftTensors, program_weights
from .drafting import Feed, OwnCache, Pairing, batch_lists
from .features import Features
from .guessing import FEATURE, Drawing, Guesses
from .last_state import Heads, LastStateProposer, RowNetwork
from .learned import LearnedProposer
from .loading import LoadedProposer, Opening, Resources, TargetView
from .medusa import num_heads_of
from .recurrent_heads import NetworkPerStep, RecurrentHeads, RecurrentTree

_PREFIX = "prefix_embeding_layer."  # as it is spelled there
_SUPPORTED = {"hydra_head_arch": ("mlp", "prefix-mlp"), "hidden_state_offset": (0,), "grounded_heads": (True,)}
_KNOWN = ("hydra_mlp.", "hydra_lm_head.", f"{_PREFIX}embed_tokens.", "input_embed_fn.")  # the last is the target's
_LAYER = re.compile(r"hydra_mlp\.(\d{1,4})\.(\d{1,4})\.linear\.weight")
_OUTPUT = re.compile(r"(hydra_lm_head\.(\d{1,4})(?:\.\d+)?)\.weight")


def load(config: MedusaConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no such heads, or heads of another target; UnsupportedModel."""
    target = resources.target
    assert config.model is not None
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    tensors, folder = DraftTensors(checkpoint, _spellings), checkpoint.folder
    for key, values in _SUPPORTED.items():
        if (value := checkpoint.config.get(key, values[0])) not in values:
            known = " or ".join(map(repr, values))
            raise SpeculativeConfigError(f"{folder} holds Hydra heads with {key!r} {value!r}, which are not supported: take {known}")
    layers, outputs = _layers(checkpoint), {int(m[2]): m[1] for m in map(_OUTPUT.fullmatch, checkpoint.names) if m}
    num_heads = num_heads_of(config, len(layers), folder, target.vocab_size)
    hf_config = layer_config("llama", settings_like(checkpoint.config, target.config), 1, target.hidden_size, folder)

    def bind(program: Program) -> Executor:
        return resources.bind(program, program_weights(program, tensors.has, tensors.take), config.quantization)

    networks: list[RowNetwork] = []
    for head in range(num_heads):
        output = outputs.get(head, f"hydra_lm_head.{head}") if outputs else ""
        networks.append(RowNetwork(bind(_head_program(hf_config, head, layers[head], output, tensors, target))))
    has_prefix = checkpoint.config.get("hydra_head_arch") == "prefix-mlp"
    max_model_len = readable_length(hf_config, target.max_model_len)
    prefix = bind(_prefix_program(hf_config, max_model_len)) if has_prefix else None
    checkpoint.refuse_unread_norms()
    checkpoint.ignore(*(name for name in checkpoint.names if name.startswith(_KNOWN)))

    def open(opening: Opening) -> Proposer:
        recurrence, num_tokens = NetworkPerStep(networks), len(config.tree.paths) if config.tree else num_heads
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        heads = RecurrentHeads(recurrence, drawing) if config.tree is None else RecurrentTree(recurrence, target.vocab_size, config.tree)
        if prefix is None:
            return LastStateProposer(opening.name, num_tokens, heads)
        features = Features((FINAL,), target.hidden_size, opening.num_blocks, opening.block_size)
        cache = OwnCache(max_model_len, num_tokens, target.vocab_size, Pairing(shift=0, first=0), features)
        return LearnedProposer(opening.name, prefix.kv_layers, cache, _PrefixGuesser(prefix, opening.caches[0], heads))

    read = "states, through a decoder layer (Hydra++)," if has_prefix else "state"
    found = (
        f"{num_heads} of {len(layers)} heads of {len(layers[0])} layers, read the target's last {read} and the guesses before their own",
        "embedding: the target's, output layers: " + ("their own" if outputs else "the target's"),
        *checkpoint.leftovers(),
    )
    executors, size = ((), 0) if prefix is None else ((prefix,), Features.bytes_per_block(target.hidden_size))
    return LoadedProposer("hydra", open, executors, size, found, is_learned=True)


def _spellings(name: str) -> list[str]:
    """What files call the tensor that programs call `name`."""
    return [_PREFIX + name.removeprefix("model.") if name.startswith(("model.layers.", "norm.")) else name]


def _layers(checkpoint: Checkpoint) -> list[list[str]]:
    """Names of each head's layers. Those behind the first are one and the same, of which a file may have copies."""
    places: dict[int, list[int]] = {}
    for match in filter(None, map(_LAYER.fullmatch, checkpoint.names)):
        places.setdefault(int(match[1]), []).append(int(match[2]))
    if not places:
        raise SpeculativeConfigError(f"{checkpoint.folder} holds no Hydra heads: no tensor is named like 'hydra_mlp.0.0.linear.weight'")
    depth = checkpoint.integer("hydra_num_layers", len(max(places.values(), key=len)))
    for head in range(1 + max(places)):
        if (count := len(places.get(head, []))) not in (depth, min(depth, 2)) or not 0 < depth <= MAX_NUM_SPECULATIVE_TOKENS:
            raise SpeculativeConfigError(f"head {head} in {checkpoint.folder} has {count} layers, but 'hydra_num_layers' is {depth}")
    named = [[f"hydra_mlp.{head}.{place}" for place in sorted(found)] for head, found in sorted(places.items())]
    return [[names[0], *names[1:2] * (depth - 1)] for names in named]


def _head_program(
    hf_config: PreTrainedConfig, head: int, names: Sequence[str], output: str, tensors: DraftTensors, target: TargetView
) -> Program:
    """x = [FEATURE; E(token)]; y = R x + SiLU(W x), then y = y + SiLU(W y) layer by layer; scores of y. output "": the target's.

    FEATURE is the state and the embeddings of all tokens behind it but the last: boundary 0, x, of the head before.
    """
    d = DecoderBuilder(hf_config, 1, torch.float32)
    feature = d.input(FEATURE, (1 + head) * d.hidden_size)
    x = y = d.concat((feature, d.embed(target.embed_scale, target.embedding, target.vocab_size, "embedded")), "x")

    def linear(x: str, name: str, result: str) -> str:
        biases = (d.weight(f"{name}.bias", d.hidden_size),) if tensors.has(f"{name}.bias") else ()
        return d.product(x, (d.weight(f"{name}.weight", d.hidden_size, d.width(x)),), result, biases)

    for i, name in enumerate(names):
        z = linear(y, f"{name}.linear", f"{i}.linear")
        y = d.add(y if i else linear(x, f"{name}.res_connection", "residual"), d.gate(z, z), f"{i}.y")  # SiLU(z) = sigmoid(z) z
    if output:
        logits = d.logits(y, f"{output}.weight", target.vocab_size, bias=f"{output}.bias" if tensors.has(f"{output}.bias") else "")
    else:
        logits = d.logits(y, target.head, target.vocab_size, target.logits_scale, target.logits_softcap)
    program = d.program(y, logits)
    return replace(program, boundaries=(x,), shared=frozenset({target.embedding, target.head}.intersection(program.weights)))


def _prefix_program(hf_config: PreTrainedConfig, max_model_len: int) -> Program:
    """A decoder layer and a norm over the target's states, that of position p in place p. FINAL is what heads read instead."""
    d = DecoderBuilder(hf_config, max_model_len, torch.float32)
    rope = d.rope(partial=True)
    final = d.norm("norm", pre_norm(d, d.input(FEATURE, d.hidden_size), lambda i, x: d.attend(i, d.qkv(i, x), rope), d.mlp))
    whole = d.program(final, final)
    return fuse(replace(whole, ops=whole.ops[:-1], vocab_size=0, logits="", best=None, boundaries=()))


class _PrefixGuesser:
    """Implements `Guesser`. Entries are made of committed states alone and never change; the heads go on from the last one."""

    scratch_slots = 0

    def __init__(self, prefix: Executor, kv: KVTensors, heads: Heads) -> None:
        self._prefix, self._kv, self._heads = prefix, kv, heads

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        assert states is not None
        batch = replace(batch_lists(feeds, block_size).batch(), logits_indices=torch.zeros(0, dtype=torch.int64))
        read = self._prefix.run(batch, self._kv, (FINAL,), {FEATURE: states.float().contiguous()}).hidden[FINAL]
        if not any(feed.count for feed in feeds):
            return Guesses.none(len(feeds))
        last = torch.tensor([*accumulate(feed.stop - feed.start for feed in feeds)]) - 1
        return self._heads.guess(feeds, read[upload(last, read.device)])
