"""Chains that are begun while the host has not seen the end of the step before them: a device goes on by itself.

What the target says decides where they start; that is looked up on the device. Whether it was right to begin is told when they are asked
for: who is asked for something else guesses anew. Owns what was begun. Keeps no books of a cache and no states.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.continuation import Continuation, Continued, Ways, continued
from ..kernels.device_chain import ChainDraws, ChainTensors
from ..kernels.started import ChainStarter, Fetched
from ..kernels.upload import upload
from .base import ChainsAhead, RowUnderWay, UnderWay
from .drafting import Feed, OwnCache
from .guessing import ChainGuesser, Guesser, Guesses, feature_input

Chain = tuple[list[int], list[float]]
"""Token ids, and how likely each of them is."""


@dataclass(frozen=True)
class _Begun:
    """One pass of chains, on its way."""

    rows: dict[str, tuple[int, Continuation]]  # request id -> the chain's place in the tensors
    block_size: int
    tokens: Fetched  # [R, k]
    confidence: Fetched  # [R, k]
    said: Fetched  # as in Continued


class EarlyChains:
    """Of one drafter whose chains a device makes. The drafter's own network, cache and way to pick tokens."""

    def __init__(self, guesser: ChainGuesser, executor: ChainStarter, cache: OwnCache) -> None:
        """cache: the books, of which only what the drafter can read is looked at."""
        self.num_places = 2 * cache.max_tokens + 1  # a whole draft is accepted, and the next one guessed behind its extra token
        self._guesser = guesser
        self._executor = executor
        self._num_readable, self._max_model_len = cache.vocab_size, cache.max_model_len
        self._boundaries = () if cache.features is None else cache.features.boundaries
        self._begun: _Begun | None = None
        self.num_begun = 0  # chains so far, ...
        self.num_used = 0  # ... and those that were asked for then

    @classmethod
    def of(cls, guesser: Guesser, cache: OwnCache) -> EarlyChains | None:
        """None where chains come another way, the host has to be asked, or what they are drawn from is wanted."""
        if not isinstance(guesser, ChainGuesser) or cache.pairing.shift != 1 or guesser.drawing.return_probs:
            return None
        executor = guesser.network.executor
        if executor.state_layers:  # which guesses stand decides where a chain goes on: the host has to know
            return None
        return cls(guesser, executor, cache) if isinstance(executor, ChainStarter) else None

    def begin(self, rows: Sequence[tuple[RowUnderWay, Continuation]], step: UnderWay) -> ChainsAhead | None:
        """rows: those of the step that go on. Waits for nothing. Returns what it began; None = nothing."""
        self._begun = None
        ways = [way for _, way in rows]
        if not rows or not self._executor.takes_chains(sum(way.most_read for way in ways), len(rows)):
            return None
        with torch.inference_mode():
            moved = Ways.of(ways, step.answer.device, step.block_size, self._num_readable, self._max_model_len)
            there = continued(moved, step.answer)
            found = self._start([row for row, _ in rows], ways, there, step)
            tokens, confidence, said = Fetched.of(found.token_ids, found.confidence, there.said)
        places = {row.request_id: (place, way) for place, (row, way) in enumerate(rows)}
        self._begun = _Begun(places, step.block_size, tokens, confidence, said)
        self.num_begun += len(rows)
        return ChainsAhead({name: (place, way.count) for name, (place, way) in places.items()}, found.token_ids)

    def take(self, feeds: Sequence[Feed]) -> list[Chain | None]:
        """For each feed the chain that was begun for just that, as long as it is; what is not taken is given up."""
        begun, self._begun = self._begun, None
        if begun is None or not any(feed.row.request_id in begun.rows for feed in feeds):
            return [None] * len(feeds)
        said: list[list[int]] = begun.said.get().tolist()
        tokens: list[list[int]] = begun.tokens.get().tolist()
        confidence: list[list[float]] = begun.confidence.get().tolist()
        chains: list[Chain | None] = []
        for feed in feeds:
            chain = None
            if (known := begun.rows.get(feed.row.request_id)) is not None:
                place, way = known
                count = self._usable(feed, way, said[place], begun.block_size)
                chain = None if count is None else (tokens[place][:count], confidence[place][:count])
            chains.append(chain)
        self.num_used += sum(chain is not None for chain in chains)
        return chains

    def beside(self, late: Guesses, chains: Sequence[Chain | None]) -> Guesses:
        """All guesses, in the feeds' order: late ones where there is no chain."""
        every = Guesses.none(len(chains))
        assert every.confidence is not None and late.confidence is not None
        rest = zip(late.token_ids, late.confidence, late.in_place, strict=True)
        for i, chain in enumerate(chains):
            if chain is None:
                every.token_ids[i], every.confidence[i], every.in_place[i] = next(rest)
            else:
                self._guesser.take(every, i, *chain)
        return every

    def forget(self, request_id: str) -> None:
        if self._begun is not None:
            self._begun.rows.pop(request_id, None)

    def _start(self, rows: Sequence[RowUnderWay], ways: Sequence[Continuation], there: Continued, step: UnderWay) -> ChainTensors:
        guesser, executor = self._guesser, self._executor
        states = None
        if guesser.network.encode is not None:
            states = torch.cat([step.hidden[boundary].index_select(0, there.nodes) for boundary in self._boundaries], -1)
        steps = max(way.count for way in ways)
        draws = guesser.drawing.of(rows, executor, ahead=1)
        drawn = None
        if draws is not None and bool((draws.temperatures > 0).any()):
            most = max(way.num_drafted for way in ways)
            drawn = _from_here(ChainDraws.of(draws, most + steps), there.num_accepted, steps)
        return executor.start_chain(
            there.batch,
            guesser.network.kv,
            there.counts,
            steps,
            drawn,
            None if draws is None else draws.vocab_size,
            feature_input(guesser.network, states),
        )

    def _usable(self, feed: Feed, way: Continuation, said: list[int], block_size: int) -> int | None:
        """How many of the begun guesses stand where the feed's would; None if it would read something else, or elsewhere."""
        num_emitted, row = said[0], feed.row
        if not num_emitted or (feed.start, feed.stop) != way.read(num_emitted - 1) or feed.first != way.first:
            return None
        if list(row.token_ids[way.length : feed.stop]) != said[1 : 1 + num_emitted]:
            return None  # the step was computed once more, and said something else
        count = min(feed.count, way.room(num_emitted - 1, block_size, self._max_model_len))
        blocks = -(-(feed.stop + max(count - 1, 0)) // block_size)
        return count if array("i", row.block_table[:blocks]) == way.table[:blocks] else None


def _from_here(draws: ChainDraws, num_accepted: Tensor, steps: int) -> ChainDraws:
    """draws: from the first token that a row may go on from. On the device, from the one that it does go on from."""
    device = num_accepted.device
    ahead = num_accepted[:, None] + torch.arange(steps, device=device)
    return ChainDraws(upload(draws.temperatures, device), upload(draws.keys, device).gather(1, ahead))
