"""A whole chain of tokens with no word from the host in between: `Executor.run_chain` as one piece of work for a device.

Every chain runs as often as the longest; one that has its tokens goes on as padding, which writes nothing. So all shapes are
known beforehand and a graph can hold the loop. Knows the ragged batch and nothing of the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import device_noise
from .layout import Draws, RaggedBatch
from .noise import keys as noise_keys
from .torch_executor import Computed

Compute = Callable[[RaggedBatch, tuple[int, ...], Mapping[str, Tensor] | None, bool], Computed]
"""One pass: batch, boundary ids of the wanted states, inputs, whether it is to find the best of its scores."""


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
            is_free = vocab_size is None or vocab_size >= columns
            return cls(vocab_size or columns, None if is_free else vocab_size, None, None, is_free)
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


class Choices(Protocol):
    """Picks the tokens of N chains, step by step, and keeps what it picked."""

    wants_best: bool  # whether a pass has to find the best of its scores

    def add(self, computed: Computed) -> Tensor:
        """[N] int64: the tokens of the next step, from a pass with N scores."""
        ...

    def said(self) -> tuple[Tensor, Tensor]:
        """Token ids and confidence [N, k], as in ChainTensors."""
        ...


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
    advance: int = 1,
) -> ChainTensors:
    """N chains of `steps` tokens from logits_indices [N] of a batch on the device; see `Executor.run_chain`.

    counts [N] on the device: places that a chain does not want are not written. max_model_len: positions there are. advance: as in
    `chain.run_chain_by_steps`.
    """
    hidden = () if recurrent is None else (recurrent[1],)
    starts = batch.logits_indices
    ahead = follow_ups(batch, counts, steps, max_model_len, advance)
    choices = _choices(len(starts), starts.device, steps, choosing, draws)
    computed = compute(batch, hidden, inputs, choices.wants_best)
    tokens = starts
    kept: list[Tensor] = []
    for step in range(steps):
        if step:
            if recurrent is not None:
                name, boundary = recurrent
                states = computed.hidden[boundary]
                inputs = {name: states.index_select(0, starts) if step == 1 else states}
            computed = compute(dataclasses.replace(ahead[step - 1], token_ids=tokens), hidden, inputs, choices.wants_best)
        assert computed.logits is not None, "a chain needs scores"
        if keep_logits:
            kept.append(computed.logits.float())
        tokens = choices.add(computed)
    return ChainTensors(*choices.said(), kept)


def follow_ups(batch: RaggedBatch, counts: Tensor, steps: int, max_model_len: int, advance: int = 1) -> list[RaggedBatch]:
    """The passes behind the first one, each with one token for each of the N chains; which ones is not known yet."""
    if steps > 1 and counts.is_cuda:
        from .triton import chain as fused  # Triton is there only where torch is built for GPUs

        return fused.follow_ups(batch, counts, steps, max_model_len, advance)
    return laid_out(batch, counts, steps, max_model_len, advance)


def laid_out(batch: RaggedBatch, counts: Tensor, steps: int, max_model_len: int, advance: int = 1) -> list[RaggedBatch]:
    """The reference of `follow_ups`."""
    if steps <= 1:
        return []
    starts = batch.logits_indices
    rows = torch.searchsorted(batch.query_start_loc, starts.int(), right=True) - 1
    rows = rows.clamp(max=len(batch.seq_lens) - 1)  # padding
    positions, places = batch.positions[starts], batch.seq_lens[rows].long()
    tables, every = batch.block_tables[rows], torch.arange(len(starts), device=starts.device)
    first_places = None if batch.first_places is None else batch.first_places[rows]
    start_loc = torch.arange(len(starts) + 1, device=starts.device, dtype=torch.int32)
    ahead: list[RaggedBatch] = []
    for step in range(1, steps):
        wanted, place = counts > step, places + advance * step - 1
        block = tables.gather(1, (place // batch.block_size).clamp(0, tables.shape[1] - 1)[:, None])[:, 0].long()
        ahead.append(
            RaggedBatch(
                token_ids=every,
                positions=(positions + advance * step).clamp(max=max_model_len - 1),
                slot_mapping=torch.where(wanted, block * batch.block_size + place % batch.block_size, -1),
                query_start_loc=start_loc,
                seq_lens=torch.where(wanted, place + 1, 1).int(),
                block_tables=tables,
                num_causal=torch.ones_like(start_loc[1:]),
                tree_mask=torch.zeros_like(every),
                logits_indices=every,
                full_logits=every[:0],
                block_size=batch.block_size,
                first_places=None if first_places is None else torch.where(wanted, first_places, 0),
                scores_every_token=True,
            )
        )
    return ahead


def _choices(count: int, device: torch.device, steps: int, choosing: Choosing, draws: ChainDraws | None) -> Choices:
    if draws is None and device.type == "cuda":
        from .triton import chain as fused

        return fused.BestChoices(choosing, count, steps, device)
    return TorchChoices(choosing, draws)


class TorchChoices:
    """The best, or drawn by chance. Implements `Choices`; the reference of those that are one launch a step."""

    wants_best = True

    def __init__(self, choosing: Choosing, draws: ChainDraws | None = None) -> None:
        self._choosing, self._draws = choosing, draws
        self._found: list[Tensor] = []
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []  # of what was chosen, of the best, and what a softmax divides by

    def add(self, computed: Computed) -> Tensor:
        assert computed.logits is not None
        choosing, draws = self._choosing, self._draws
        scores = choosing.scores(computed.logits)
        tokens, best = choosing.best(computed, scores)
        total = torch.sub(scores, best[:, None]).exp_().sum(-1)  # sub makes float32 of both in the same launch
        chosen = best
        if draws is not None:
            scores = scores.float()
            temperatures = draws.temperatures[:, None]
            sampled = choosing.by_token(scores / torch.where(temperatures > 0, temperatures, 1.0))
            drawn = device_noise.draw(torch.softmax(sampled, -1), draws.keys[:, len(self._found)])
            drawn_score = choosing.by_token(scores).gather(1, drawn[:, None])[:, 0]
            draws_own = draws.temperatures > 0
            tokens, chosen = torch.where(draws_own, drawn, tokens), torch.where(draws_own, drawn_score, best)
        self._found.append(tokens)
        self._scores.append((chosen, best, total))
        return tokens

    def said(self) -> tuple[Tensor, Tensor]:
        chosen, best, total = (torch.stack(scores, 1) for scores in zip(*self._scores, strict=True))
        return torch.stack(self._found, 1), (chosen - best).exp() / total
