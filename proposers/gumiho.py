"""Gumiho: EAGLE's layers guess two tokens one after the other, small heads all further ones at once (Li et al. 2025, arXiv 2503.10135).

Reads what github.com/AMD-AIG-AIMA/Gumiho writes: an EAGLE (eagle_checkpoint.py) of mostly two layers, and the heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.batch_lists import BatchLists, BatchMemory
from ..kernels.ops import Concat, Embed, Linear, Op, Scale
from ..kernels.program import Program, row_program
from ..kernels.upload import upload
from .draft_tensors import DraftTensors, program_weights
from .drafting import Feed, batch_lists
from .eagle_checkpoint import EagleDraft
from .guessing import FEATURE, Drawing, Guesses, Network, feature_input, pick
from .head_programs import residual_layer, scores_program, silu_layer
from .last_state import RowNetwork
from .loading import Resources

NUM_SERIAL = 2
"""Tokens that the layers guess."""


class GumihoGuesser:
    """Implements `Guesser`. Entries of guesses are made of the network's own states and are worthless afterwards."""

    scratch_slots = 0

    def __init__(self, network: Network, drawing: Drawing, fuse: RowNetwork, heads: RowNetwork, scores: RowNetwork) -> None:
        """fuse: [R, H] states and tokens -> what layers read for them. heads: [R, 2 H] of both tokens -> boundary h of each head h."""
        assert network.executor.recurrent is not None
        self._network, self._drawing = network, drawing
        self._state = network.executor.recurrent[1]
        self._fuse, self._heads, self._scores = fuse, heads, scores
        self._batches = BatchMemory()

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        logits, state = self._pass(batch_lists(feeds, block_size), feature_input(self._network, states))
        guessing = [feed for feed in feeds if feed.count]
        longer = [n for n, feed in enumerate(guessing) if feed.count > 1]
        parts = [*logits.split(1)]  # [tokens, V] of each that guesses
        if longer:
            rows = [guessing[n] for n in longer]
            there = upload(torch.tensor(longer), state.device)
            first, before = self._chosen(rows, logits[there], ahead=0), state[there]
            behind = _behind(rows, first, block_size)
            second_logits, after = self._pass(behind, {FEATURE: before.float().contiguous()})
            second = self._chosen(rows, second_logits, ahead=1)
            for place, n in enumerate(longer):
                parts[n] = torch.cat([parts[n], second_logits[place, None]])
            num_heads = max(feed.count for feed in rows) - NUM_SERIAL
            if num_heads > 0:
                further = self._further(torch.cat([before, after]), [*first, *second], num_heads)
                for place, n in enumerate(longer):
                    parts[n] = torch.cat([parts[n], further[place, : guessing[n].count - NUM_SERIAL]])
        return pick(feeds, torch.cat(parts) if parts else None, self._drawing, self._network.executor.token_ids)

    def _pass(self, lists: BatchLists, inputs: dict[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Scores [n, V] and states [n, H] of the tokens that scores are wanted of."""
        lists.full_logits += range(len(lists.logits_indices))
        batch = self._batches.batch(lists)
        output = self._network.executor.run(batch, self._network.kv, (self._state,), inputs=inputs)
        hidden = output.hidden[self._state]
        logits = hidden[:0] if output.logits is None else output.logits
        return logits, hidden[upload(torch.tensor(lists.logits_indices, dtype=torch.int64), hidden.device)]

    def _chosen(self, feeds: Sequence[Feed], logits: Tensor, ahead: int) -> list[int]:
        """The tokens that `pick` will take from the same scores."""
        rows = [feed.row for feed in feeds]
        scores = self._drawing.by_token(logits, self._network.executor.token_ids)
        return self._drawing.choose(scores, rows, [len(row.token_ids) + ahead for row in rows]).tolist()

    def _further(self, states: Tensor, token_ids: Sequence[int], num_heads: int) -> Tensor:
        """[R, num_heads, V] from the states [2 R, H] that the first and second tokens [2 R] came from."""
        read = self._fuse.final(states, token_ids)
        num_rows = len(read) // 2
        hidden = self._heads.run(torch.cat([read[:num_rows], read[num_rows:]], -1), boundaries=tuple(range(num_heads))).hidden
        stacked = torch.stack([hidden[head] for head in range(num_heads)], 1)
        return self._scores.logits(stacked.flatten(0, 1)).view(num_rows, num_heads, -1)


def _behind(feeds: Sequence[Feed], tokens: Sequence[int], block_size: int) -> BatchLists:
    """One token more for each row: its own guess, which nobody has committed."""
    lists = BatchLists(block_size)
    for n, (feed, token) in enumerate(zip(feeds, tokens, strict=True)):
        lists.token_ids.append(token)
        lists.positions.append(feed.stop)
        lists.add_slots(feed.row.block_table, feed.stop, feed.stop + 1)
        lists.logits_indices.append(n)
        lists.query_start_loc.append(n + 1)
        lists.seq_lens.append(feed.stop + 1)
        lists.num_causal.append(1)
        lists.tables.append(feed.row.block_table[: feed.stop // block_size + 1])
        lists.first_places.append(feed.first)
        lists.tree_mask.append(0)
    return lists


def row_networks(
    draft: EagleDraft, tensors: DraftTensors, resources: Resources, quantization: str | None
) -> tuple[RowNetwork, RowNetwork, RowNetwork]:
    """What `GumihoGuesser` runs behind the layers: (fuse, heads, scores)."""
    programs = (
        _fuse_program(draft, tensors),
        _heads_program(draft, tensors),
        scores_program(draft.head, int(draft.hf_config.hidden_size)),
    )
    bound = [resources.bind(program, program_weights(program, tensors.has, tensors.take), quantization) for program in programs]
    fuse, heads, scores = map(RowNetwork, bound)
    return fuse, heads, scores


def _fuse_program(draft: EagleDraft, tensors: DraftTensors) -> Program:
    """FINAL is fc([E; f])."""
    table, width = draft.embedding, int(draft.hf_config.hidden_size)
    ops: list[Op] = [Embed((), ("embedded",), table.weight)]
    embedded = "embedded"
    if table.scale != 1.0:
        ops.append(Scale((embedded,), ("scaled",), table.scale))
        embedded = "scaled"
    biases = ("fc.bias",) if tensors.has("fc.bias") else ()
    ops += [Concat((embedded, FEATURE), ("pair",)), Linear(("pair",), ("fused",), ("fc.weight",), biases)]
    weights: dict[str, tuple[int, ...]] = {table.weight: (table.rows, width), "fc.weight": (width, 2 * width)}
    weights |= dict.fromkeys(biases, (width,))
    shared = frozenset({table.weight} if table.is_shared else ())
    return row_program(ops, weights, {FEATURE: width}, final="fused", shared=shared)


def _heads_program(draft: EagleDraft, tensors: DraftTensors) -> Program:
    """y = SiLU(W x + b), then y = y + SiLU(W y + b) layer by layer. Boundary h is the last y of head h."""
    width = int(draft.hf_config.hidden_size)
    ops: list[Op] = []
    weights: dict[str, tuple[int, ...]] = {}
    last: list[str] = []
    for names in draft.further_heads:
        y = FEATURE
        for place, name in enumerate(names):
            weight, bias = f"{name}.weight", f"{name}.bias"
            weights[weight] = (width, width if place else 2 * width)
            if tensors.has(bias):
                weights[bias] = (width,)
            layer = residual_layer if place else silu_layer
            ops += layer(y, name, weight, bias if bias in weights else "")
            y = name
        last.append(y)
    return row_program(ops, weights, {FEATURE: 2 * width}, boundaries=tuple(last))
