"""Chains of tokens for any executor: `Executor.run_chain` written over `Executor.run`, one pass a token.

Knows the ragged batch and nothing of the network. Executors that can stay inside one call for a whole chain have their own.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .layout import ChainOutput, Chooser, Executor, ForwardOutput, KVTensors, RaggedBatch


def run_chain_by_steps(
    executor: Executor, batch: RaggedBatch, kv: KVTensors, counts: Tensor, choose: Chooser | None = None
) -> ChainOutput:
    """Run the batch, then one-token batches of the chains that want more; see `Executor.run_chain` for the contract.

    A chain that has its tokens drops out of the batch; a chooser goes on seeing all N rows, with zeros for such chains.
    """
    num_chains, wanted = len(counts), counts.tolist()
    steps = max(wanted, default=0)
    token_ids = torch.zeros(num_chains, steps, dtype=torch.int64)
    confidence = torch.zeros(num_chains, steps)
    logits = torch.zeros(num_chains, steps, executor.vocab_size) if choose is not None else None
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
        chosen = _choose(output, alive, step, logits, choose)
        token_ids[alive, step] = chosen
        confidence[alive, step] = _probability(output, chosen)
    return ChainOutput(token_ids, confidence, logits)


def _choose(output: ForwardOutput, alive: Tensor, step: int, logits: Tensor | None, choose: Chooser | None) -> Tensor:
    """Token ids [n] of the n living chains. With a chooser their logits are kept on the way."""
    if choose is None or logits is None:
        return output.argmax
    assert output.logits is not None
    logits[alive, step] = output.logits
    return choose(logits[:, step], step)[alive]


def _probability(output: ForwardOutput, chosen: Tensor) -> Tensor:
    """softmax(logits)[chosen], [n] float32."""
    assert output.logits is not None
    return (output.logits.gather(1, chosen[:, None])[:, 0] - output.logits.logsumexp(-1)).exp()


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
