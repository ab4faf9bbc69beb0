"""UNO: the target guesses for itself, through an adapter (LoRA) that was taught to read noise as the text to come (IFM 2026).

The last known token goes without the adapter, which gives the target's own next token, and behind it noise tokens with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.batch_lists import BatchLists, BatchMemory
from ..kernels.layout import RaggedBatch
from ..kernels.noise import Purpose, key, keys
from .config import UnoConfig
from .config_entry import SpeculativeConfigError
from .drafting import Feed
from .guessing import Drawing
from .loading import LoadedProposer, Opening, Resources
from .target_guessing import TargetProposer


def load(config: UnoConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError, and what explains itself for an adapter that cannot be read or is of another model."""
    vocab_size = resources.target.vocab_size
    noise = Noise(config.noise_seed, config.noise_low, vocab_size if config.mask_token_id is None else config.mask_token_id)
    if noise.stop > vocab_size:
        raise SpeculativeConfigError(f"'uno_mask_token_id' {noise.stop} is not between 2 and {vocab_size}, the target's vocabulary")
    if noise.low >= noise.stop:
        raise SpeculativeConfigError(f"'uno_noise_low' {noise.low} must be below {noise.stop}, the end of the noise's token ids")
    if resources.load_adapter is None:
        raise SpeculativeConfigError("method 'uno' needs a target that adapters can be added to")
    target = resources.load_adapter(config.model, config.revision)

    def open(opening: Opening) -> TargetProposer:
        assert opening.target_kv is not None
        batches = BatchMemory()

        def batch(feeds: Sequence[Feed], block_size: int) -> RaggedBatch:
            return batches.batch(_lists(feeds, noise, target.slot, block_size))

        drawing = Drawing.asked(config.draft_sample_method, vocab_size, opening.return_probs)
        return TargetProposer(opening.name, config.num_speculative_tokens, target.executor, opening.target_kv, batch, drawing)

    found = f"the target itself, noise read through an adapter of rank {target.rank}, token ids {noise.low} to {noise.stop - 1}"
    return LoadedProposer("uno", open, found=(found,), is_learned=True)


@dataclass(frozen=True)
class Noise:
    """Token ids low:stop by chance. The same at a position of a request, whoever else is in the batch."""

    seed: int
    low: int
    stop: int

    def token_ids(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """For each feed count - 1 of them, behind its last known token."""
        streams = [key(feed.row.draw.seed, feed.row.draw.choice, self.seed, Purpose.FILL) for feed in feeds for _ in range(feed.count - 1)]
        positions = [feed.stop + i for feed in feeds for i in range(feed.count - 1)]
        drawn = keys(streams, positions).numpy().view(np.uint64) % np.uint64(self.stop - self.low)
        found = iter(drawn.tolist())
        return [[self.low + next(found) for _ in range(feed.count - 1)] for feed in feeds]


def _lists(feeds: Sequence[Feed], noise: Noise, slot: int, block_size: int) -> BatchLists:
    """Two rows over each feed's blocks, its known token and its noise: all entries of a pass are written before any is read.

    slot: of the adapter.
    """
    lists = BatchLists(block_size)
    for feed, drawn in zip(feeds, noise.token_ids(feeds), strict=True):
        known = [feed.row.token_ids[feed.start]]
        for token_ids, first, adapter in ((known, feed.start, feed.row.adapter), (drawn, feed.stop, slot)):
            if not token_ids:
                continue
            stop = first + len(token_ids)
            lists.token_ids += token_ids
            lists.positions += range(first, stop)
            lists.add_slots(feed.row.block_table, first, stop)
            lists.query_start_loc.append(len(lists.token_ids))
            lists.seq_lens.append(stop)
            lists.num_causal.append(len(token_ids))
            lists.tables.append(feed.row.block_table[: -(-stop // block_size)])
            lists.adapters.append(adapter)
    every = range(len(lists.token_ids))
    lists.tree_mask += [0] * len(every)
    lists.logits_indices += every
    lists.full_logits += every
    return lists
