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
        self.needs = Needs(tuple(sorted(set(hidden))), kv_layers, guesser.scratch_slots, hears="every step" if hidden else "own steps")
        self._cache = cache
        self._guesser = guesser

    def propose(self, context: DraftContext) -> Draft:
        feeds = self._cache.plan(context)
        if not feeds:
            return dataclasses.replace(Draft.empty(len(context.rows)), filled=self._cache.filled(context))
        states = None if self._cache.features is None else self._cache.states(feeds)
        guesses = self._guesser.guess(feeds, states, context.block_size)
        self._cache.fed(feeds, guesses.in_place or [[] for _ in feeds])
        return guesses.draft(feeds, len(context.rows), self._cache.filled(context))

    def observe(self, feedback: Feedback) -> None:
        self._cache.observe(feedback)

    def forget(self, request_id: str) -> None:
        self._cache.forget(request_id)

    def check(self) -> None:
        self._cache.check()

    def close(self) -> None:
        """Nothing outlives the process."""
