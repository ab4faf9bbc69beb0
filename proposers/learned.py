"""A drafter with a network and a cache of its own, whatever its method: read, guess, keep books.

Methods differ in the program, in what an entry is made of (`Pairing`) and in how guesses come (`Guesser`).
"""

import dataclasses
from collections.abc import Sequence

from ..kernels.layout import KVLayerSpec
from ..kernels.rounds import Drafter, RoundsExecutor
from .base import ChainsAhead, Draft, DraftContext, Feedback, Needs, UnderWay
from .drafting import Feed, OwnCache
from .early import Chain, EarlyChains
from .guessing import ChainGuesser, Guesser, Guesses


class LearnedProposer:
    """Implements `Proposer`, and `EarlyProposer` where chains can be begun early. Owns the books of the drafter's cache; the guesser
    runs the network."""

    def __init__(self, name: str, kv_layers: tuple[KVLayerSpec, ...], cache: OwnCache, guesser: Guesser) -> None:
        self.name = name
        self.max_tokens = cache.max_tokens
        hidden = () if cache.features is None else cache.features.boundaries
        self.needs = Needs(tuple(sorted(set(hidden))), kv_layers, guesser.scratch_slots, hears="every step" if hidden else "own steps")
        self.early = EarlyChains.of(guesser, cache)
        self.drafter = _drafter(guesser, cache)  # for rounds that guess just as `propose` does; None = they cannot
        self._cache = cache
        self._guesser = guesser
        self._asked: dict[str, int] = {}  # guesses that rows were asked for in the latest step, and probably are in the next

    @property
    def num_places_ahead(self) -> int:
        return 0 if self.early is None else self.early.num_places

    def propose(self, context: DraftContext) -> Draft:
        feeds = self._cache.plan(context)
        chains = [None] * len(feeds) if self.early is None else self.early.take(feeds)
        # Who has more to read than a step brings has just come, or comes back for one guess: he will hardly be asked again at once.
        most = self.max_tokens + 1
        self._asked = {feed.row.request_id: feed.count for feed in feeds if feed.count and feed.stop - feed.start <= most}
        if not feeds:
            return dataclasses.replace(Draft.empty(len(context.rows)), filled=self._cache.filled(context))
        guesses = self._guesses(feeds, chains, context.block_size)
        self._cache.fed(feeds, guesses.in_place or [[] for _ in feeds])
        return guesses.draft(feeds, len(context.rows), self._cache.filled(context))

    def begin(self, step: UnderWay) -> ChainsAhead | None:
        if self.early is None or not self._asked:
            return None
        return self.early.begin(self._cache.continuations(step, self._asked), step)

    def observe(self, feedback: Feedback) -> None:
        self._cache.observe(feedback)

    def num_read(self, request_id: str, length: int) -> int | None:
        """Tokens of a text of this length that its drafter has read, if what it lacks is no more than a step brings; else None."""
        known = self._cache.num_known(request_id)
        return known if known is not None and length - known <= self.max_tokens + 1 else None

    def went_on(self, request_id: str, num_read: int) -> None:
        """Rounds have guessed for the request, and have read so many of its committed tokens."""
        self._cache.went_on(request_id, num_read)

    def forget(self, request_id: str) -> None:
        self._cache.forget(request_id)
        if self.early is not None:
            self.early.forget(request_id)

    def check(self) -> None:
        self._cache.check()

    def close(self) -> None:
        """Nothing outlives the process."""

    def _guesses(self, feeds: list[Feed], chains: Sequence[Chain | None], block_size: int) -> Guesses:
        """What was begun early is taken as it is, the rest is guessed now."""
        late = [feed for feed, chain in zip(feeds, chains, strict=True) if chain is None]
        states = self._cache.states(late) if late and self._cache.features is not None else None
        guesses = self._guesser.guess(late, states, block_size) if late else Guesses.none(0)
        if len(late) < len(feeds) and self.early is not None:
            return self.early.beside(guesses, chains)
        return guesses


def _drafter(guesser: Guesser, cache: OwnCache) -> Drafter | None:
    """None where guesses come another way than token by token from what was said alone, or what they are drawn from is wanted."""
    if not isinstance(guesser, ChainGuesser) or cache.features is not None or guesser.drawing.return_probs:
        return None
    executor, drawing = guesser.network.executor, guesser.drawing
    if not isinstance(executor, RoundsExecutor) or executor.token_ids is not None:
        return None
    if executor.recurrent is not None or executor.state_layers:
        return None
    choosable = min(drawing.vocab_size, executor.vocab_size)
    return Drafter(
        executor, guesser.network.kv, choosable, cache.vocab_size, cache.max_model_len, drawing.samples, guesser.confidence_threshold
    )
