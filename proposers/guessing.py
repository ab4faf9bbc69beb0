"""How a network turns what it has read into guesses: token after token, all at once by mask tokens, or as a growing tree.

Shared by all learned drafters with a cache of their own. Knows networks, not what they are; books are kept in drafting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import device_noise
from ..kernels.batch_lists import BatchLists, BatchMemory
from ..kernels.layout import Draws, Executor, KVTensors, ShortensChains
from ..kernels.noise import Purpose, keys, sample, step_stream, stream
from ..kernels.record import record
from ..kernels.started import to_lists
from ..kernels.upload import upload
from .base import Draft, DraftRow, Draw
from .config import SampleMethod
from .drafting import Feed, batch_lists

FEATURE = "feature"
"""The input buffer of drafters' programs that takes what `Network.encode` makes of the target's states, or their own."""

_AT_ONCE = 1 << 19
"""Most scores that a CPU is given to look at: it looks several times, and its caches should hold them. Affects speed only."""


@dataclass(frozen=True)
class Network:
    """A drafter's network with its cache."""

    executor: Executor
    kv: KVTensors
    encode: Callable[[Tensor], Tensor] | None = None  # [T, width] the target's states -> [T, n] its FEATURE input; None = no input


class DrawingRow(Protocol):
    """What of a row decides how its guesses are picked."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def draw(self) -> Draw: ...


@dataclass(frozen=True)
class Drawing:
    """How guesses are picked from scores."""

    vocab_size: int  # the target's; other ids are never guessed
    samples: bool = False  # at the row's temperature, under the target's own noise; else the best
    return_probs: bool = False  # p/q rules: independent noise, and the distributions that were drawn from

    @classmethod
    def asked(cls, method: SampleMethod, vocab_size: int, return_probs: bool) -> Drawing:
        """As a config asks for it. return_probs: as in `Opening`; there are none where nothing is drawn."""
        samples = method == "probabilistic"
        return cls(vocab_size, samples, return_probs and samples)

    def of(self, rows: Sequence[DrawingRow], executor: Executor, ahead: int = 0) -> Draws | None:
        """For one chain of each row. None where the executor's own argmax will do: nothing to sample, nothing to leave out.

        ahead: tokens that will have come by then.
        """
        temperatures = [self.temperature(row) for row in rows]
        if not any(temperatures) and executor.vocab_size <= self.vocab_size:
            return None
        return Draws(
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            streams=torch.tensor([self.stream(row) for row in rows]),
            positions=torch.tensor([len(row.token_ids) + ahead for row in rows]),
            vocab_size=self.vocab_size if executor.token_ids is not None else min(self.vocab_size, executor.vocab_size),
            keep_logits=self.return_probs,
        )

    def stream(self, row: DrawingRow) -> int:
        """The noise that a row's guesses of this step are drawn under, by absolute position."""
        draw = row.draw
        if self.return_probs:
            return step_stream(draw.seed, draw.choice, len(row.token_ids), Purpose.DRAFT)
        return stream(draw.seed, draw.choice, Purpose.TARGET)

    def temperature(self, row: DrawingRow) -> float:
        return row.draw.temperature if self.samples else 0.0

    def probs(self, row: DrawingRow, token_ids: Tensor, logits: Tensor | None, columns: Tensor | None) -> Tensor:
        """[n, vocab_size] float32, what a row's token_ids [n] were drawn from by logits [n, V]: one-hot if it is greedy."""
        if not (temperature := self.temperature(row)):
            return torch.nn.functional.one_hot(token_ids, self.vocab_size).float()
        assert logits is not None
        return torch.softmax(self.by_token(logits, columns) / temperature, -1)

    def by_token(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """[n, vocab_size] float32: scores by token id, -inf where the drafter has none. columns: `Executor.token_ids`."""
        if columns is None and logits.shape[1] >= self.vocab_size:
            return logits[:, : self.vocab_size].float()
        scores = torch.full((len(logits), self.vocab_size), -torch.inf, device=logits.device, dtype=torch.float32)
        if columns is None:
            scores[:, : logits.shape[1]] = logits
        else:
            scores[:, _moved(columns, logits.device)] = logits.float()
        return scores

    def choose(self, scores: Tensor, rows: Sequence[DraftRow], positions: Sequence[int]) -> Tensor:
        """[n] a token from each of scores [n, vocab_size], which go to these positions of rows [n]: the best, or drawn as the row's
        target draws. Not waited for."""
        tokens = scores.argmax(-1)
        drawn = [n for n, row in enumerate(rows) if row.draw.temperature] if self.samples else []
        if not drawn:
            return tokens
        temperatures = upload(torch.tensor([rows[n].draw.temperature for n in drawn], dtype=torch.float32)[:, None], scores.device)
        under = keys([self.stream(rows[n]) for n in drawn], [positions[n] for n in drawn])
        if len(drawn) == len(rows):
            return _sample(scores / temperatures, under)
        some = upload(torch.tensor(drawn), scores.device)
        return tokens.index_copy_(0, some, _sample(scores[some] / temperatures, under))


def _sample(logits: Tensor, under: Tensor) -> Tensor:
    """`noise.sample` by the noise of a device where the logits are on one."""
    if logits.device.type == "cpu":
        return sample(logits, under)
    return device_noise.draw(torch.softmax(logits, -1), upload(under, logits.device))


@lru_cache(8)
def _moved(columns: Tensor, device: torch.device) -> Tensor:
    """`Executor.token_ids` where the scores are: there are few maps, and they never change."""
    return columns.to(device)


@record
class Guesses:
    """What a pass brought forth for each of its feeds, which are in the rows' order. Feeds with count 0 have none."""

    token_ids: list[list[int]]
    parents: list[list[int]] | None = None  # within the feed's own guesses, -1 = the last known token; None = chains
    confidence: list[list[float]] | None = None
    probs: Tensor | None = None  # [all guesses, vocab_size]
    in_place: list[list[int]] = field(default_factory=list)  # `OwnCache.fed`; empty = none for nobody

    @classmethod
    def none(cls, num_feeds: int) -> Guesses:
        """Chains that are still to be taken in."""
        every = range(num_feeds)
        return cls([[] for _ in every], confidence=[[] for _ in every], in_place=[[] for _ in every])

    def draft(self, feeds: Sequence[Feed], num_rows: int, filled: Mapping[tuple[int, str], int] | None = None) -> Draft:
        """Of all rows of the context that the feeds are from. filled: as in `Draft`."""
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        for feed, token_ids in zip(feeds, self.token_ids, strict=True):
            rows[feed.index] = token_ids
        chains = Draft.chains(rows)
        return Draft(
            chains.token_ids,
            chains.start_loc,
            chains.parents if self.parents is None else [parent for row in self.parents for parent in row],
            chains.source,
            None if self.confidence is None else [likely for row in self.confidence for likely in row],
            self.probs,
            filled or {},
        )


class Guesser(Protocol):
    """Runs the passes of one step over all feeds, at least one; those with count 0 are read and nothing else."""

    scratch_slots: int  # places it needs behind a row's known tokens beyond `count`

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        """states: `OwnCache.states` of the feeds; None for a drafter that reads tokens only."""
        ...


class ChainGuesser:
    """One token after the other, all rows in one call (Leviathan et al. 2023; EAGLE: Li et al. 2024).

    confidence_threshold: the first guess less likely than this is the last of its chain. Nothing drawn is dropped for its own
    probability, so the p/q rules stay exact.
    """

    scratch_slots = 0

    def __init__(
        self,
        network: Network,
        drawing: Drawing,
        confidence_threshold: float = 0.0,
        lists: Callable[[Sequence[Feed], int], BatchLists] = batch_lists,
    ) -> None:
        """lists: (feeds, block size) -> the pass over all of them, one row each."""
        self.network = network
        self.drawing = drawing
        self.confidence_threshold = confidence_threshold
        self._lists = lists
        self._batches = BatchMemory()
        if isinstance(network.executor, ShortensChains):
            network.executor.shorten_chains()

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        network, drawing = self.network, self.drawing
        executor = network.executor
        batch = self._batches.batch(self._lists(feeds, block_size))
        if batch.states is not None:
            slots = torch.tensor([feed.state.chain_slots for feed in feeds if feed.state is not None], dtype=torch.int32)
            batch = replace(batch, states=replace(batch.states, chain_slots=slots))
        inputs = feature_input(network, states)
        guesses = Guesses.none(len(feeds))
        chains = [i for i, feed in enumerate(feeds) if feed.count]
        if not chains:
            executor.run(batch, network.kv, inputs=inputs)
            return guesses
        counts = _counts(tuple([feeds[i].count for i in chains]))
        output = executor.run_chain(batch, network.kv, counts, drawing.of([feeds[i].row for i in chains], executor), inputs)
        probs: list[Tensor] = []
        for n, (i, tokens, likely) in enumerate(zip(chains, output.token_ids.tolist(), output.confidence.tolist(), strict=True)):
            count = self.take(guesses, i, tokens[: feeds[i].count], likely[: feeds[i].count])
            if drawing.return_probs:
                logits = None if output.logits is None else output.logits[n, :count]
                probs.append(drawing.probs(feeds[i].row, output.token_ids[n, :count], logits, executor.token_ids))
        return replace(guesses, probs=torch.cat(probs)) if probs else guesses

    def take(self, guesses: Guesses, i: int, tokens: list[int], likely: list[float]) -> int:
        """Let a chain be the guesses of the feed i, as far as the drafter is sure; how many that are."""
        assert guesses.confidence is not None
        if self.network.encode is None and not self.network.executor.state_layers:  # what a guessed state went into does not hold
            guesses.in_place[i] = tokens[:-1]
        if self.confidence_threshold:
            count = length_of_chain(likely, self.confidence_threshold)
            tokens, likely, guesses.in_place[i] = tokens[:count], likely[:count], guesses.in_place[i][:count]
        guesses.token_ids[i], guesses.confidence[i] = tokens, [min(p, 1.0) for p in likely]
        return len(tokens)


@lru_cache(256)
def _counts(counts: tuple[int, ...]) -> Tensor:
    """[N] int64. Hardly any two steps have others, and making a tensor takes longer than all the rest of a chain's books."""
    return torch.tensor(counts)


class ParallelGuesser:
    """All tokens in one pass: mask tokens stand where guesses will be (PARD: An et al. 2025; P-EAGLE).

    Entries of mask tokens are overwritten: they are read again as what they turned out to be.
    """

    def __init__(self, network: Network, drawing: Drawing, mask_token: int, mask_state: Tensor | None = None) -> None:
        """mask_state: [width] the target's state that a mask token is paired with; None = its row's last one."""
        self.scratch_slots = 0
        self._network = network
        self._drawing = drawing
        self._mask_token = mask_token
        self._mask_state = mask_state
        self._batches = BatchMemory()

    def guess(self, feeds: Sequence[Feed], states: Tensor | None, block_size: int) -> Guesses:
        network = self._network
        lists = batch_lists(feeds, block_size, tail=self._mask_token)
        lists.full_logits += range(len(lists.logits_indices))
        inputs = feature_input(network, self._with_masks(feeds, states))
        output = network.executor.run(self._batches.batch(lists), network.kv, inputs=inputs)
        return pick(feeds, output.logits, self._drawing, network.executor.token_ids)

    def _with_masks(self, feeds: Sequence[Feed], states: Tensor | None) -> Tensor | None:
        if states is None:
            return None
        if self._mask_state is not None:
            self._mask_state = self._mask_state.to(states)  # it is moved once
        parts: list[Tensor] = []
        start = 0
        for feed in feeds:
            own = states[start : start + feed.stop - feed.start]
            parts.append(own)
            if feed.count > 1:
                parts.append((own[-1] if self._mask_state is None else self._mask_state).expand(feed.count - 1, -1))
            start += len(own)
        return torch.cat(parts)


def pick(feeds: Sequence[Feed], logits: Tensor | None, drawing: Drawing, columns: Tensor | None) -> Guesses:
    """Independent guesses of each feed's places from logits [sum of counts, V], of which only what is guessed comes to the host."""
    guesses = Guesses.none(len(feeds))
    able = [i for i, feed in enumerate(feeds) if feed.count]
    if not able:
        return guesses
    assert logits is not None and guesses.confidence is not None
    at_once = len(able)
    if logits.device.type == "cpu":
        at_once = max(1, _AT_ONCE // (logits.shape[1] * max(feeds[i].count for i in able)))
    probs: list[Tensor] = []
    start = 0
    for first in range(0, len(able), at_once):
        some = able[first : first + at_once]
        rows = [feeds[i].row for i in some for _ in range(feeds[i].count)]
        positions = [len(feeds[i].row.token_ids) + ahead for i in some for ahead in range(feeds[i].count)]
        scores = drawing.by_token(logits[start : start + len(rows)], columns)
        chosen = drawing.choose(scores, rows, positions)
        token_ids, confidence = to_lists(chosen, share_of(scores, chosen))
        begin = 0
        for i in some:
            end = begin + feeds[i].count
            guesses.token_ids[i], guesses.confidence[i] = token_ids[begin:end], confidence[begin:end]
            if drawing.return_probs:
                probs.append(drawing.probs(feeds[i].row, chosen[begin:end], scores[begin:end], None))
            begin = end
        start += len(rows)
    return replace(guesses, probs=torch.cat(probs).cpu()) if probs else guesses


def share_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """[n] float32, the probability of tokens [n] at temperature 1 by scores [n, V]."""
    return torch.softmax(scores, -1).gather(1, tokens[:, None])[:, 0].clamp(max=1.0)


def length_of_chain(confidence: Sequence[float], threshold: float) -> int:
    """Guesses up to the first one less likely than the threshold, that one included: what was drawn stays."""
    return next((i + 1 for i, likely in enumerate(confidence) if likely < threshold), len(confidence))


def unchanged(states: Tensor) -> Tensor:
    """`Network.encode` of a drafter that reads the target's states as they are."""
    return states


def feature_input(network: Network, states: Tensor | None) -> dict[str, Tensor] | None:
    if network.encode is None:
        return None
    assert states is not None
    feature = network.encode(states)
    return {FEATURE: feature if feature.is_cuda else feature.float().contiguous()}  # graphs take it as it is


def single_tokens(token_ids: Sequence[int], has_logits: bool = True) -> BatchLists:
    """R rows of one token each for networks without a cache; scores wanted for all, or for none."""
    count = len(token_ids)
    every, ones, zeros = [*range(count)], [1] * count, [0] * count
    wanted = every if has_logits else []
    return BatchLists(16, [*token_ids], zeros, [-1] * count, zeros, wanted, wanted, [*every, count], ones, ones, [], [(0,)] * count)
