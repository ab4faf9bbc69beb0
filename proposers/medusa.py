"""Medusa: further heads on the target's last state, each of which guesses one token more ahead (Cai et al. 2024).

Owns the heads' networks and how their lists of tokens become a chain or a tree. What a folder holds: medusa_checkpoint.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.ops import Op
from ..kernels.program import Program, row_program
from ..kernels.started import to_lists
from ..kernels.upload import upload
from .config import MedusaConfig, StaticTree
from .config_entry import SpeculativeConfigError
from .draft_tables import Table
from .drafting import Feed
from .guessing import FEATURE, Drawing, Guesses, pick
from .head_programs import residual_layer, scores_program
from .last_state import LastStateProposer, RowNetwork
from .loading import LoadedProposer, Opening, Resources, TargetView
from .medusa_checkpoint import MedusaHeads, read_heads

TOKEN_MAP = "token_map"


def load(config: MedusaConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no such heads, or heads of another target."""
    target = resources.target
    found = read_heads(target.folder if config.model is None else resources.find_folder(config.model, config.revision), target)
    num_heads = num_heads_of(config, found.num_heads, found.checkpoint.folder, found.vocab_size)

    blocks = found.blocks(num_heads)
    networks = [resources.bind(_blocks_program(found, blocks, num_heads), blocks, config.quantization)]
    for head in range(1 if found.has_one_output else num_heads):
        output = found.output(head)
        program = _output_program(found, target)
        weights = {} if output is None else {"output": output}
        if found.token_ids is not None:
            weights[TOKEN_MAP] = found.token_ids
        networks.append(resources.bind(program, weights, config.quantization))
    found.ignore_rest(num_heads)

    def open(opening: Opening) -> LastStateProposer:
        scores = _Scores(RowNetwork(networks[0]), [RowNetwork(executor) for executor in networks[1:]])
        if config.tree is None:
            return LastStateProposer(opening.name, num_heads, _Chain(scores, target.vocab_size))
        return LastStateProposer(opening.name, len(config.tree.paths), _Tree(scores, target.vocab_size, config.tree))

    described = (found.describe(num_heads), *found.checkpoint.leftovers())
    return LoadedProposer("medusa", open, found=described, is_learned=True)


def num_heads_of(config: MedusaConfig, there: int, folder: Path, vocab_size: int) -> int:
    """How many of the heads that are there guess: as many as the tree has levels, or a chain tokens. Raises SpeculativeConfigError."""
    kind, limit = config.method.capitalize(), there if config.num_heads is None else config.num_heads
    if limit > there:
        raise SpeculativeConfigError(f"'num_heads' is {limit}, but {folder} has {there} {kind} heads: lower it or leave it out")
    if config.tree is None:
        wanted = config.num_speculative_tokens or limit
        if wanted > limit:
            raise SpeculativeConfigError(
                f"'num_speculative_tokens' is {wanted}, but there are {limit} {kind} heads in {folder}, each for one token: lower it"
            )
        return wanted
    depth, widest = max(map(len, config.tree.paths)), 1 + max(map(max, config.tree.paths))
    if depth > limit:
        raise SpeculativeConfigError(f"the tree is {depth} levels deep, but there are {limit} {kind} heads in {folder}, each for one level")
    if widest > vocab_size:
        raise SpeculativeConfigError(f"the tree has a rank {widest - 1}, but the {kind} heads in {folder} know {vocab_size} tokens")
    return depth


def _blocks_program(found: MedusaHeads, weights: dict[str, Tensor], num_heads: int) -> Program:
    """What stands before the output layers: y = x + SiLU(W x + b), layer by layer. Boundary id h is the last y of head h."""
    ops: list[Op] = []
    last: list[str] = []
    for head, layers in enumerate(found.layers[:num_heads]):
        x = FEATURE
        for i, (weight, bias) in enumerate(layers):
            ops += residual_layer(x, y := f"{head}.{i}", weight, bias)
            x = y
        last.append(x)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return row_program(ops, shapes, {FEATURE: found.width}, boundaries=tuple(last))


def _output_program(found: MedusaHeads, target: TargetView) -> Program:
    """An output layer from y to logits."""
    table = Table(target.head, found.vocab_size, True, target.logits_scale, target.logits_softcap)
    head = Table("output", found.vocab_size, False) if found.outputs else table
    return scores_program(head, found.width, "" if found.token_ids is None else TOKEN_MAP)


@dataclass(frozen=True)
class _Scores:
    """What the heads say."""

    blocks: RowNetwork
    outputs: Sequence[RowNetwork]  # one for each head, or one for all

    @property
    def token_ids(self) -> Tensor | None:
        """Token id of each column of the scores; None = the column itself."""
        return self.outputs[0].executor.token_ids

    def of(self, states: Tensor, num_heads: int) -> Tensor:
        """[R, num_heads, V] float32 from states [R, H], where the heads compute."""
        hidden = self.blocks.run(states, boundaries=tuple(range(num_heads))).hidden
        last = [hidden[head] for head in range(num_heads)]
        if len(self.outputs) == 1:  # one pass over a large matrix instead of one for each head
            return self.outputs[0].logits(torch.stack(last, 1).flatten(0, 1)).view(len(states), num_heads, -1)
        return torch.stack([output.logits(y) for output, y in zip(self.outputs, last, strict=False)], 1)


class _Chain:
    """The best token of each head."""

    def __init__(self, scores: _Scores, vocab_size: int) -> None:
        self._scores, self._drawing = scores, Drawing(vocab_size)

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        num_heads = max(feed.count for feed in feeds)
        scores = self._scores.of(states, num_heads).flatten(0, 1)
        wanted = [row * num_heads + head for row, feed in enumerate(feeds) for head in range(feed.count)]
        if len(wanted) < len(scores):
            scores = scores[upload(torch.tensor(wanted), scores.device)]
        return pick(feeds, scores, self._drawing, self._scores.token_ids)


class _Tree:
    """Nodes as paths of ranks: entry d of a path is a rank in the list of head d, whatever stands before it.

    So all nodes of one depth come from one list, and a node's probability does not depend on its parent.
    """

    def __init__(self, scores: _Scores, vocab_size: int, tree: StaticTree) -> None:
        self._scores, self._vocab_size = scores, vocab_size
        index = {path: node for node, path in enumerate(tree.paths)}
        self._depths = [len(path) - 1 for path in tree.paths]
        self._ranks = [path[-1] for path in tree.paths]
        self._parents = [index.get(path[:-1], -1) for path in tree.paths]

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        most = max(feed.count for feed in feeds)
        columns = self._scores.token_ids
        scores = self._scores.of(states, 1 + max(self._depths[:most]))
        if columns is None:
            scores = scores[..., : self._vocab_size]
        depths, ranks = torch.tensor(self._depths[:most]), torch.tensor(self._ranks[:most])
        depths, ranks = upload(depths, scores.device), upload(ranks, scores.device)
        best, ids = torch.softmax(scores, -1).topk(1 + max(self._ranks[:most]), -1)  # [R, num_heads, widest]
        tokens, likely = to_lists(ids[:, depths, ranks], best[:, depths, ranks])
        if columns is not None:
            tokens = columns[torch.tensor(tokens)].tolist()
        guesses = Guesses([], [], [])
        assert guesses.parents is not None and guesses.confidence is not None
        for feed, nodes, likely_nodes in zip(feeds, tokens, likely, strict=True):
            guesses.token_ids.append(nodes[: feed.count])
            guesses.parents.append(self._parents[: feed.count])
            guesses.confidence.append(likely_nodes[: feed.count])
        return guesses
