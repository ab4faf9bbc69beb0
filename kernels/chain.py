"""Chains of tokens for any executor: `Executor.run_chain` written over `Executor.run`, one pass a token.

Knows the ragged batch and nothing of the network. Executors that can stay inside one call for a whole chain have their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from .layout import ChainOutput, Draws, Executor, KVTensors, RaggedBatch, RowStates
from .noise import keys, sample


def run_chain_by_steps(
    executor: Executor,
    batch: RaggedBatch,
    kv: KVTensors,
    counts: Tensor,
    draws: Draws | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    advance: int = 1,
) -> ChainOutput:
    """Run the batch, then one-token batches of the chains that want more; see `Executor.run_chain` for the contract.

    A chain that has its tokens drops out of the batch. advance: places from token to token, 0 for a network that only reads its cache.
    """
    num_chains, wanted = len(counts), counts.tolist()
    steps = max(wanted, default=0)
    token_ids = torch.zeros(num_chains, steps, dtype=torch.int64)
    confidence = torch.zeros(num_chains, steps, dtype=torch.float32)
    logits = torch.zeros(num_chains, steps, executor.vocab_size, dtype=torch.float32) if draws is not None and draws.keep_logits else None
    every_row = torch.arange(num_chains)
    hidden = () if executor.recurrent is None else (executor.recurrent[1],)
    output = executor.run(dataclasses.replace(batch, full_logits=every_row), kv, hidden, inputs)
    if not num_chains:
        return ChainOutput(token_ids, confidence, logits)

    rows = torch.searchsorted(batch.query_start_loc, batch.logits_indices, right=True, out_int32=True).long() - 1
    positions = batch.positions[batch.logits_indices]
    places = batch.seq_lens[rows].long()  # of the first token behind the batch
    block_tables = batch.block_tables[rows]
    firsts = None if batch.first_places is None else batch.first_places[rows]
    columns = _Columns.of(executor, draws)
    alive, last = every_row, batch.logits_indices  # chains that want more; where their last tokens stood in the pass
    for step in range(steps):
        if step:
            before, alive = alive, every_row if step < min(wanted) else (counts > step).nonzero()[:, 0]
            follow_up = _one_token_each(
                token_ids[alive, step - 1],
                positions[alive] + advance * step,
                places[alive] + advance * step - 1,
                block_tables[alive],
                None if firsts is None else firsts[alive],
                batch.block_size,
                None if batch.states is None else _states(batch.states, rows[alive], step),
            )
            if executor.recurrent is not None:
                name, boundary = executor.recurrent
                inputs = {name: output.hidden[boundary][last[torch.searchsorted(before, alive)]].float()}
            output, last = executor.run(follow_up, kv, hidden, inputs), torch.arange(len(alive))
        assert output.logits is not None
        scores = output.logits.cpu()
        if logits is not None:
            logits[alive, step] = scores
        scores = columns.of_choosable(scores)
        chosen = scores.argmax(-1)  # a column
        likely = -scores.logsumexp(-1)
        tokens = columns.token_ids(chosen)
        if draws is not None:
            chosen, tokens = _draw(scores, draws, alive, step, chosen, tokens, columns)
        token_ids[alive, step] = tokens
        confidence[alive, step] = (scores.gather(1, chosen[:, None])[:, 0] + likely).exp()
    return ChainOutput(token_ids, confidence, logits)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Which columns of the logits may be chosen, and the token ids that they stand for."""

    width: int | None  # the first so many columns; None = all
    map: Tensor | None  # [V] token id of each column
    vocab_size: int  # token ids below it may be chosen

    @classmethod
    def of(cls, executor: Executor, draws: Draws | None) -> _Columns:
        if executor.token_ids is None:
            return cls(None if draws is None else draws.vocab_size, None, executor.vocab_size)
        most = int(executor.token_ids.max()) + 1
        return cls(None, executor.token_ids, most if draws is None else draws.vocab_size)

    def of_choosable(self, logits: Tensor) -> Tensor:
        """The scores that compete."""
        if self.map is not None and int(self.map.max()) >= self.vocab_size:
            return logits.masked_fill(self.map >= self.vocab_size, -torch.inf)
        return logits if self.width is None else logits[:, : self.width]

    def token_ids(self, columns: Tensor) -> Tensor:
        return columns if self.map is None else self.map[columns]

    def by_token(self, scores: Tensor) -> Tensor:
        """[n, vocab_size]: noise belongs to token ids, so that target and draft race under the same."""
        if self.map is None:
            return scores
        choosable = self.map < self.vocab_size
        spread = torch.full((len(scores), self.vocab_size), -torch.inf, dtype=torch.float32)
        spread[:, self.map[choosable]] = scores[:, choosable].float()
        return spread


def _draw(
    scores: Tensor, draws: Draws, alive: Tensor, step: int, chosen: Tensor, tokens: Tensor, columns: _Columns
) -> tuple[Tensor, Tensor]:
    """(columns [n], token ids [n]) of the n living chains; greedy ones keep their best."""
    temperatures = draws.temperatures[alive]
    sampled = (temperatures > 0).nonzero()[:, 0]
    if not len(sampled):
        return chosen, tokens
    chains = alive[sampled]
    under = keys(draws.streams[chains].tolist(), (draws.positions[chains] + step).tolist())
    drawn = sample(columns.by_token(scores[sampled] / temperatures[sampled, None].to(scores)), under)
    tokens[sampled] = drawn
    chosen[sampled] = drawn if columns.map is None else (columns.map == drawn[:, None]).int().argmax(-1)
    return chosen, tokens


def _one_token_each(
    token_ids: Tensor,
    positions: Tensor,
    places: Tensor,
    block_tables: Tensor,
    firsts: Tensor | None,
    block_size: int,
    states: RowStates | None,
) -> RaggedBatch:
    """n rows of one causal token each, at the given places of their block tables."""
    num_rows = len(token_ids)
    every_row = torch.arange(num_rows)
    blocks = block_tables[every_row, places // block_size].long()
    return RaggedBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * block_size + places % block_size,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=(places + 1).int(),
        block_tables=block_tables,
        num_causal=torch.ones(num_rows, dtype=torch.int32),
        tree_mask=torch.zeros(num_rows, dtype=torch.int64),
        logits_indices=every_row,
        full_logits=every_row,
        block_size=block_size,
        first_places=firsts,
        states=states,
    )


def _states(states: RowStates, rows: Tensor, step: int) -> RowStates:
    """Where the step's tokens of chains from these rows go on, and leave their states."""
    assert states.chain_slots is not None, "a recurrent network's chains need slots"
    turns, none = states.chain_slots[rows], torch.full_like(rows, -1, dtype=torch.int32)
    return RowStates(
        sources=states.targets[rows] if step == 1 else turns[:, step % 2].contiguous(),
        targets=turns[:, (step + 1) % 2].contiguous(),
        accepted=torch.zeros_like(rows),
        num_known=torch.ones_like(none),
        copy_places=none,
        copy_slots=none,
    )
