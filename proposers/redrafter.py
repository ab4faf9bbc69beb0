"""ReDrafter: a recurrent network beside the target's last state guesses token after token (Zhang et al. 2024, arXiv 2403.09919).

Reads folders as github.com/apple/ml-recurrent-drafter writes them. All steps have the same weights, so a chain may be as long as one likes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops import Activation, Add, ArgMax, Embed, GatherRows, Linear, Op
from ..kernels.program import Program, row_program
from .checkpoint import Checkpoint
from .config import DEFAULT_NUM_SPECULATIVE_TOKENS, MedusaConfig
from .config_entry import SpeculativeConfigError
from .guessing import FEATURE, Drawing
from .head_programs import residual_layer
from .last_state import LastStateProposer, RowNetwork
from .loading import LoadedProposer, Opening, Resources, TargetView
from .recurrent_heads import Carried, RecurrentHeads, RecurrentTree

_BLOCK = re.compile(r"lm_head\.(\d{1,4})\.linear\.weight")


def load(config: MedusaConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no such network, or one of another target."""
    target = resources.target
    assert config.model is not None
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    num_blocks = sum(bool(_BLOCK.fullmatch(name)) for name in checkpoint.names)
    head = f"lm_head.{num_blocks}.weight"
    if not checkpoint.has(head):
        raise SpeculativeConfigError(f"{checkpoint.folder} holds no ReDrafter: it has no tensor {head!r} behind {num_blocks} blocks")
    if len(checkpoint.shape(head)) != 2 or not checkpoint.shape(head)[1]:
        raise SpeculativeConfigError(f"{head!r} in {checkpoint.folder} must be a matrix of {target.vocab_size} rows")
    is_learned = checkpoint.flag("rnn", any(name.startswith("rnn_") for name in checkpoint.names))

    def bind(program: Program) -> RowNetwork:
        weights = {name: checkpoint.take(name, *shape) for name, shape in program.weights.items() if name not in program.shared}
        return RowNetwork(resources.bind(program, weights, config.quantization))

    recurrence = _Recurrence(bind(_state_program(target, is_learned)), bind(_scores_program(checkpoint, num_blocks, target)))
    num_tokens = len(config.tree.paths) if config.tree else config.num_speculative_tokens or DEFAULT_NUM_SPECULATIVE_TOKENS

    def open(opening: Opening) -> LastStateProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        heads = RecurrentHeads(recurrence, drawing) if config.tree is None else RecurrentTree(recurrence, target.vocab_size, config.tree)
        return LastStateProposer(opening.name, num_tokens, heads)

    kept = "a recurrent network" if is_learned else "the sum of the embeddings so far"
    blocks = "1 block" if num_blocks == 1 else f"{num_blocks} blocks"
    found = (f"{kept} beside the target's last state, {blocks}; embedding: the target's, head: its own", *checkpoint.leftovers())
    return LoadedProposer("redrafter", open, found=found, is_learned=True)


@dataclass(frozen=True)
class _Recurrence:
    """Implements `Recurrence`. Carried are the target's state c, which stays, and the network's own s."""

    state: RowNetwork
    scores: RowNetwork

    def begin(self, states: Tensor) -> Carried:
        return states, torch.zeros_like(states)

    def step(self, step: int, carried: Carried, token_ids: Sequence[int]) -> tuple[Tensor, Carried]:
        context, before = carried
        state = self.state.final(before, token_ids)
        return self.scores.logits(torch.cat([context, state], -1)), (context, state)


def _state_program(target: TargetView, is_learned: bool) -> Program:
    """FINAL is s' = SiLU(W e + U s + b) of the last token's embedding e; s' = e + s where there is no W."""
    width, embedded = target.hidden_size, "embedded"
    ops: list[Op] = [Embed((), (embedded,), target.embedding, target.embed_scale)]
    weights: dict[str, tuple[int, ...]] = {target.embedding: (target.vocab_size, width)}
    if is_learned:
        weights |= {"rnn_w.weight": (width, width), "rnn_u.weight": (width, width), "rnn_u.bias": (width,)}
        ops += [
            Linear((FEATURE,), ("kept",), ("rnn_u.weight",), ("rnn_u.bias",)),
            Linear((embedded, "kept"), ("mixed",), ("rnn_w.weight",)),
            Activation(("mixed",), ("state",), "silu", gated=False),
        ]
    else:
        ops.append(Add((embedded, FEATURE), ("state",)))
    return row_program(ops, weights, {FEATURE: width}, final="state", shared=frozenset({target.embedding}))


def _scores_program(checkpoint: Checkpoint, num_blocks: int, target: TargetView) -> Program:
    """Scores of y, where y = P [c; s] + p if there is a projection, else [c; s], then y = y + SiLU(B y + b) block by block."""
    read, y = 2 * target.hidden_size, FEATURE
    head = f"lm_head.{num_blocks}.weight"
    inner = checkpoint.shape(head)[-1]
    ops: list[Op] = []
    weights: dict[str, tuple[int, ...]] = {}
    if checkpoint.has("input_proj.weight") or inner != read:
        weights |= {"input_proj.weight": (inner, read), "input_proj.bias": (inner,)}
        ops.append(Linear((y,), ("projected",), ("input_proj.weight",), ("input_proj.bias",)))
        y = "projected"
    for i in range(num_blocks):
        weight, bias = f"lm_head.{i}.linear.weight", f"lm_head.{i}.linear.bias"
        weights |= {weight: (inner, inner), bias: (inner,)}
        ops += residual_layer(y, z := f"block {i}", weight, bias)
        y = z
    best = ArgMax(("logits",), ("best", "top"))
    ops += [GatherRows((y,), ("rows",)), Linear(("rows",), ("logits",), (head,)), best]
    return row_program(ops, {**weights, head: (target.vocab_size, inner)}, {FEATURE: read}, best=best)
