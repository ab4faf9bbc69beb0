"""A drafter with a network and a cache of its own, whatever its method: read, guess, keep books.

Methods differ in the program, in what an entry is made of (`Pairing`) and in how guesses come (`Guesser`).
"""

from __future__ import annotations

import dataclasses

from ..kernels.layout import KVLayerSpec
from .base import Draft, DraftContext, Feedback, Needs
from .drafting import OwnCache
from .guessing import Guesser


class LearnedProposer:
    """Implements `Proposer`. Owns the books of the drafter's cache; the guesser runs the network."""

    def __init__(self, name: str, kv_layers: tuple[KVLayerSpec, ...], cache: OwnCache, guesser: Guesser) -> None:
        self.name = name
        self.max_tokens = cache.max_tokens
        hidden = () if cache.features is None else cache.features.boundaries
        self.needs = Needs(tuple(sorted(set(hidden))), kv_layers, guesser.scratch_slots, every_step=bool(hidden))
        self._cache = cache
        self._guesser = guesser

    def propose(self, context: DraftContext) -> Draft:
        feeds = self._cache.plan(context)
        if not feeds:
            return dataclasses.replace(Draft.empty(len(context.rows)), filled=self._cache.filled(context))
        states = None if self._cache.features is None else self._cache.states(feeds)
        guesses = self._guesser.guess(feeds, states, context.block_size)
        self._cache.fed(feeds, guesses.in_place or [[] for _ in feeds])

        chains: list[list[int]] = [[] for _ in context.rows]
        parents: list[list[int]] = [[] for _ in context.rows]
        for i, feed in enumerate(feeds):
            chains[feed.index] = guesses.token_ids[i]
            if guesses.parents is not None:
                parents[feed.index] = guesses.parents[i]
        draft = Draft.chains(chains)
        return Draft(
            draft.token_ids,
            draft.start_loc,
            draft.parents if guesses.parents is None else [parent for row in parents for parent in row],
            draft.source,
            None if guesses.confidence is None else [p for row in guesses.confidence for p in row],
            guesses.probs,
            self._cache.filled(context),
        )

    def observe(self, feedback: Feedback) -> None:
        self._cache.observe(feedback)

    def forget(self, request_id: str) -> None:
        self._cache.forget(request_id)

    def check(self) -> None:
        self._cache.check()

    def close(self) -> None:
        """Nothing outlives the process."""
