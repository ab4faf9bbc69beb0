"""A whole chain of tokens with no word from the host in between: `Executor.run_chain` as one piece of work for a device.

Every chain runs as often as the longest; one that has its tokens goes on as padding, which writes nothing. So all shapes are
known beforehand and a graph can hold the loop. Knows the ragged batch and nothing of the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import device_noise
from .layout import Draws, RaggedBatch
from .noise import keys as noise_keys
from .torch_executor import Computed

Compute = Callable[[RaggedBatch, tuple[int, ...], Mapping[str, Tensor] | None], Computed]
"""One pass: batch, boundary ids of the wanted states, inputs."""


@dataclass(frozen=True)
class Choosing:
    """Which columns of the logits stand for which tokens, and which of them may be chosen. Made once: reading a map waits."""

    vocab_size: int  # token ids below it may be chosen
    width: int | None  # only the first so many columns may; None = all, but for `barred`
    token_ids: Tensor | None  # [V] token id of each column; None = the column
    barred: Tensor | None  # [V] bool, columns of token ids that may not be chosen
    is_free: bool  # whether every column may be: then the best of a pass is the best there is

    @classmethod
    def of(cls, token_ids: Tensor | None, columns: int, vocab_size: int | None) -> Choosing:
        """vocab_size: of the draws; None = every column."""
        if token_ids is None:
            return cls(vocab_size or columns, vocab_size, None, None, vocab_size is None or vocab_size >= columns)
        limit = int(token_ids.max()) + 1 if vocab_size is None else vocab_size
        barred = token_ids >= limit
        has_barred = bool(barred.any())
        return cls(limit, None, token_ids, barred if has_barred else None, not has_barred)

    def scores(self, logits: Tensor) -> Tensor:
        """[N, n] in their own dtype, -inf where nothing may be chosen."""
        scores = logits[:, : self.width]
        return scores if self.barred is None else scores.masked_fill(self.barred, -torch.inf)

    def best(self, computed: Computed, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [N] int64 and scores [N] float32 of the best that may be chosen. A pass finds that of all columns by itself."""
        if self.is_free:
            return computed.argmax, computed.top
        best, columns = scores.max(-1)
        return columns if self.token_ids is None else self.token_ids[columns], best.float()

    def by_token(self, scores: Tensor) -> Tensor:
        """[N, vocab_size]: noise belongs to token ids, so that target and draft race under the same."""
        if self.token_ids is None:
            return scores
        spread = scores.new_full((len(scores), self.vocab_size + 1), -torch.inf)
        return spread.scatter_(1, self.token_ids.clamp(max=self.vocab_size).expand_as(scores), scores)[:, :-1]


@dataclass(frozen=True)
class ChainDraws:
    """How N chains draw, on the device."""

    temperatures: Tensor  # [N] float32, 0 = the best
    keys: Tensor  # [N, k] int64

    @classmethod
    def of(cls, draws: Draws, steps: int) -> ChainDraws:
        """On the host."""
        under = [noise_keys(draws.streams.tolist(), (draws.positions + step).tolist()) for step in range(steps)]
        return cls(draws.temperatures, torch.stack(under, 1) if under else draws.streams.new_zeros(len(draws.streams), 0))


@dataclass(frozen=True)
class ChainTensors:
    """As ChainOutput, still on the device. Entries past a chain's own count are meaningless."""

    token_ids: Tensor  # [N, k] int64
    confidence: Tensor  # [N, k] float32
    logits: list[Tensor]  # k of [N, V], empty unless they are kept


def chain(
    compute: Compute,
    batch: RaggedBatch,
    counts: Tensor,
    steps: int,
    choosing: Choosing,
    max_model_len: int,
    recurrent: tuple[str, int] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    draws: ChainDraws | None = None,
    keep_logits: bool = False,
) -> ChainTensors:
    """N chains of `steps` tokens from logits_indices [N] of a batch on the device; see `Executor.run_chain`.

    counts [N] on the device: places that a chain does not want are not written. max_model_len: positions there are.
    """
    hidden = () if recurrent is None else (recurrent[1],)
    starts = batch.logits_indices
    rows = torch.searchsorted(batch.query_start_loc, starts.int(), right=True) - 1
    rows = rows.clamp(max=len(batch.seq_lens) - 1)  # padding
    positions, places = batch.positions[starts], batch.seq_lens[rows].long()
    tables, every = batch.block_tables[rows], torch.arange(len(starts), device=starts.device)
    follow_up = RaggedBatch(
        token_ids=starts,
        positions=positions,
        slot_mapping=starts,
        query_start_loc=torch.arange(len(starts) + 1, device=starts.device, dtype=torch.int32),
        seq_lens=batch.seq_lens[rows],
        block_tables=tables,
        num_causal=torch.ones_like(batch.seq_lens[rows]),
        tree_mask=torch.zeros_like(starts),
        logits_indices=every,
        full_logits=every[:0],
        block_size=batch.block_size,
        first_places=None if batch.first_places is None else batch.first_places[rows],
    )
    computed = compute(batch, hidden, inputs)
    last = starts  # where the chains' last tokens stood in the pass
    found: list[Tensor] = []
    said: list[tuple[Tensor, Tensor, Tensor]] = []  # scores of what was chosen and of the best, and what a softmax divides by
    kept: list[Tensor] = []
    for step in range(steps):
        if step:
            wanted = counts > step
            place = places + step - 1
            block = tables.gather(1, (place // batch.block_size).clamp(max=tables.shape[1] - 1)[:, None])[:, 0].long()
            ahead = dataclasses.replace(
                follow_up,
                token_ids=found[-1],
                positions=(positions + step).clamp(max=max_model_len - 1),
                slot_mapping=torch.where(wanted, block * batch.block_size + place % batch.block_size, -1),
                seq_lens=torch.where(wanted, place + 1, 1).int(),
            )
            if follow_up.first_places is not None:
                ahead = dataclasses.replace(ahead, first_places=torch.where(wanted, follow_up.first_places, 0))
            if recurrent is not None:
                name, boundary = recurrent
                inputs = {name: computed.hidden[boundary].index_select(0, last)}
            computed, last = compute(ahead, hidden, inputs), every
        assert computed.logits is not None, "a chain needs scores"
        if keep_logits:
            kept.append(computed.logits.float())
        scores = choosing.scores(computed.logits)
        tokens, best = choosing.best(computed, scores)
        total = torch.sub(scores, best[:, None]).exp_().sum(-1)  # sub makes float32 of both in the same launch
        chosen = best
        if draws is not None:
            scores = scores.float()
            temperatures = draws.temperatures[:, None]
            sampled = choosing.by_token(scores / torch.where(temperatures > 0, temperatures, 1.0))
            drawn = device_noise.draw(torch.softmax(sampled, -1), draws.keys[:, step])
            drawn_score = choosing.by_token(scores).gather(1, drawn[:, None])[:, 0]
            draws_own = draws.temperatures > 0
            tokens, chosen = torch.where(draws_own, drawn, tokens), torch.where(draws_own, drawn_score, best)
        found.append(tokens)
        said.append((chosen, best, total))
    chosen, best, total = (torch.stack(scores, 1) for scores in zip(*said, strict=True))
    return ChainTensors(torch.stack(found, 1), (chosen - best).exp() / total, kept)
