"""Chains of tokens for any executor: `Executor.run_chain` written over `Executor.run`, one pass a token.

Knows the ragged batch and nothing of the network. Executors that can stay inside one call for a whole chain have their own.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .layout import ChainOutput, Draws, Executor, KVTensors, RaggedBatch
from .noise import keys, sample


def run_chain_by_steps(
    executor: Executor, batch: RaggedBatch, kv: KVTensors, counts: Tensor, draws: Draws | None = None
) -> ChainOutput:
    """Run the batch, then one-token batches of the chains that want more; see `Executor.run_chain` for the contract.

    A chain that has its tokens drops out of the batch.
    """
    num_chains, wanted = len(counts), counts.tolist()
    steps = max(wanted, default=0)
    token_ids = torch.zeros(num_chains, steps, dtype=torch.int64)
    confidence = torch.zeros(num_chains, steps)
    logits = torch.zeros(num_chains, steps, executor.vocab_size) if draws is not None and draws.keep_logits else None
    every_row = torch.arange(num_chains)
    output = executor.run(dataclasses.replace(batch, full_logits=every_row), kv)
    if not num_chains:
        return ChainOutput(token_ids, confidence, logits)

    rows = torch.searchsorted(batch.query_start_loc, batch.logits_indices, right=True, out_int32=True).long() - 1
    positions = batch.positions[batch.logits_indices]
    places = batch.seq_lens[rows].long()  # of the first token behind the batch
    block_tables = batch.block_tables[rows]
    alive = every_row
    for step in range(steps):
        if step:
            alive = every_row if step < min(wanted) else (counts > step).nonzero()[:, 0]
            follow_up = _one_token_each(
                token_ids[alive, step - 1], positions[alive] + step, places[alive] + step - 1, block_tables[alive], batch.block_size
            )
            output = executor.run(follow_up, kv)
        assert output.logits is not None
        if logits is not None:
            logits[alive, step] = output.logits
        scores = output.logits if draws is None else output.logits[:, : draws.vocab_size]
        chosen = scores.argmax(-1) if draws is None else _draw(scores, draws, alive, step)
        token_ids[alive, step] = chosen
        confidence[alive, step] = (scores.gather(1, chosen[:, None])[:, 0] - scores.logsumexp(-1)).exp()
    return ChainOutput(token_ids, confidence, logits)


def _draw(scores: Tensor, draws: Draws, alive: Tensor, step: int) -> Tensor:
    """Token ids [n] of the n living chains."""
    chosen = scores.argmax(-1)
    temperatures = draws.temperatures[alive]
    sampled = (temperatures > 0).nonzero()[:, 0]
    if len(sampled):
        chains = alive[sampled]
        under = keys(draws.streams[chains].tolist(), (draws.positions[chains] + step).tolist())
        chosen[sampled] = sample(scores[sampled] / temperatures[sampled, None].to(scores), under)
    return chosen


def _one_token_each(token_ids: Tensor, positions: Tensor, places: Tensor, block_tables: Tensor, block_size: int) -> RaggedBatch:
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
    )
