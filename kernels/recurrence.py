"""Recurrent layers in torch: owns what `RowStates` means for them, whatever the network. Knows no weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .layout import RaggedBatch, RowStates
from .torch_kv import TorchKV

NOTHING = -1

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of n tokens, float32: q, k [n, heads, k_dim], v [n, heads, v_dim], decay and strength [n, heads]."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""States [n, heads, k_dim, v_dim] and the Parts of a token for each -> the new states, and what the tokens read [n, heads, v_dim]."""


@dataclass(frozen=True)
class _Row:
    """Entries of a row in the order of its sequence. An entry is a new token's flat index, or T + the number of an accepted guess."""

    sure: list[int]  # accepted guesses, then known tokens
    guesses: list[int]  # flat indices
    parents: list[int]  # of each guess: among the guesses, -1 = the last known token
    source: int
    target: int
    copy_after: int  # entries of `sure` behind which the state is copied, -1 = never
    copy_slot: int


class RecurrencePlan:
    """Everything about a ragged batch that all recurrent layers share, built once per pass. Reads the batch on the host."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch
        self.num_tokens = batch.token_ids.shape[0]
        self.device = batch.token_ids.device
        starts: list[int] = batch.query_start_loc.tolist()
        states = states_of(batch)
        kept = [tensor.tolist() for tensor in (states.sources, states.targets, states.accepted, states.num_known)]
        copies = [tensor.tolist() for tensor in (states.copy_places, states.copy_slots)]
        causal, ends, masks = batch.num_causal.tolist(), batch.seq_lens.tolist(), batch.tree_mask.tolist()
        self._replayed: list[tuple[int, int]] = []  # (slot, guess) of each accepted guess of all rows
        self.rows: list[_Row] = []  # the longest first
        for row, (source, target, accepted, known, copy_place, copy_slot) in enumerate(zip(*kept, *copies, strict=True)):
            start, end = starts[row], starts[row + 1]
            if start == end:
                continue
            known = min(known, end - start)
            first = self.num_tokens + len(self._replayed)
            self._replayed += [(source, guess) for guess in range(64) if accepted >> guess & 1]
            again = range(first, self.num_tokens + len(self._replayed))
            held = ends[row] - (end - start) - len(again)  # places that the source holds
            copied = copy_place - held if copy_slot >= 0 else NOTHING
            self.rows.append(
                _Row(
                    sure=[*again, *range(start, start + known)],
                    guesses=[*range(start + known, end)],
                    parents=[_parent(i, causal[row], masks[start + i]) - known for i in range(known, end - start)],
                    source=source,
                    target=target,
                    copy_after=copied if 0 < copied <= len(again) + known else NOTHING,
                    copy_slot=copy_slot,
                )
            )
        self.rows.sort(key=lambda row: -len(row.sure))
        self._tails: dict[int, Tensor] = {}

    def kept_guesses(self, kv: TorchKV, layer: int) -> Tensor:
        """[P, width] what the layer kept of the accepted guesses."""
        slots, guesses = self._replay_indices
        return kv.guesses[layer][slots, guesses]

    def keep_guesses(self, kv: TorchKV, layer: int, inputs: Tensor) -> None:
        """inputs [T, width]: of the rows' new tokens."""
        slots, guesses, tokens = self._guess_indices
        kv.guesses[layer][slots, guesses] = inputs[tokens].to(kv.guesses[layer].dtype)

    def convolved(self, kv: TorchKV, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A causal convolution of x [T, width] by weight [width, taps]; the state's numbers are [taps - 1, width], oldest first."""
        taps, (_, width) = weight.shape[1], x.shape
        if taps == 1:
            return x * weight[:, 0] if bias is None else torch.addcmul(bias, x, weight[:, 0])
        self._check_room(kv)
        tails = x.new_zeros(len(self.rows), taps - 1, width)
        rows, slots = self._sources
        tails[rows] = kv.states[layer][slots].view(-1, taps - 1, width).to(x.dtype)
        # New tokens, accepted guesses, and of each row what came before, newest first.
        entries = torch.cat([x, self.kept_guesses(kv, layer).to(x.dtype), tails.flip(1).flatten(0, 1)])
        before = self._before(taps - 1)
        tokens = torch.arange(len(x), device=self.device)
        out = entries[tokens] * weight[:, taps - 1]
        at = tokens
        for tap in range(taps - 2, -1, -1):
            at = before[at]
            out = out + entries[at] * weight[:, tap]
        for slots, last in (self._at_end, self._at_copy):
            at, newest_first = last, [entries[last]]
            for _ in range(taps - 2):
                at = before[at]
                newest_first.append(entries[at])
            kv.states[layer][slots] = torch.stack(newest_first[::-1], 1).flatten(1).float()
        self.keep_guesses(kv, layer, x)
        return out if bias is None else out + bias

    def scanned(
        self, kv: TorchKV, layer: int, shape: tuple[int, int, int], kept: Tensor, split: Callable[[Tensor], Parts], rule: Rule
    ) -> Tensor:
        """[T, heads, v_dim] float32: what is read from the states by each new token.

        shape: heads, k_dim, v_dim of the state. kept [T, width]: what is kept of guesses. split: from those to what the rule wants.
        """
        self._check_room(kv)
        entries = split(torch.cat([kept, self.kept_guesses(kv, layer).to(kept.dtype)]))
        state = torch.zeros(len(self.rows), *shape, dtype=torch.float32, device=self.device)
        rows, slots = self._sources
        state[rows] = kv.states[layer][slots].view(-1, *shape)
        out = torch.zeros(len(kept) + len(self._replayed), shape[0], shape[2], dtype=torch.float32, device=self.device)
        for at, copied, copies in self._steps:
            state[: len(at)], out[at] = rule(state[: len(at)], *(part[at] for part in entries))
            if len(copied):
                kv.states[layer][copies] = state[copied].flatten(1)
        rows, slots = self._targets
        kv.states[layer][slots] = state[rows].flatten(1)
        for at, parents in self._levels:
            state, out[at] = rule(state[parents], *(part[at] for part in entries))
        self.keep_guesses(kv, layer, kept)
        return out[: len(kept)]

    def _check_room(self, kv: TorchKV) -> None:
        for row in self.rows:
            assert row.target < 0 or len(row.guesses) <= kv.num_guesses, "more guesses than the cache keeps"

    @cached_property
    def _sources(self) -> tuple[Tensor, Tensor]:
        """Rows that go on from a state, and its slot."""
        return self._pairs([(i, row.source) for i, row in enumerate(self.rows) if row.source >= 0])

    @cached_property
    def _targets(self) -> tuple[Tensor, Tensor]:
        """Rows whose state is kept, and its slot."""
        return self._pairs([(i, row.target) for i, row in enumerate(self.rows) if row.target >= 0])

    @cached_property
    def _steps(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each step over what is sure: entries of the first rows, which have so many; rows whose state is copied then, and where to."""
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(len(self.rows[0].sure) if self.rows else 0):
            at = [row.sure[step] for row in self.rows if len(row.sure) > step]
            copied = [(i, row.copy_slot) for i, row in enumerate(self.rows) if row.copy_after == step + 1]
            steps.append((self._indices(at), *self._pairs(copied)))
        return steps

    @cached_property
    def _levels(self) -> list[tuple[Tensor, Tensor]]:
        """Guesses by how deep they stand: all of one depth, and where their parents stand among those of the depth before."""
        levels: list[tuple[Tensor, Tensor]] = []
        places = {(i, NOTHING): i for i in range(len(self.rows))}  # (row, guess) -> its place in its level
        while nodes := [(i, guess) for i, row in enumerate(self.rows) for guess, parent in enumerate(row.parents) if (i, parent) in places]:
            parents = [places[i, self.rows[i].parents[guess]] for i, guess in nodes]
            levels.append((self._indices([self.rows[i].guesses[guess] for i, guess in nodes]), self._indices(parents)))
            places = {node: place for place, node in enumerate(nodes)}
        return levels

    @cached_property
    def _replay_indices(self) -> tuple[Tensor, Tensor]:
        return self._pairs(self._replayed)

    @cached_property
    def _guess_indices(self) -> tuple[Tensor, Tensor, Tensor]:
        kept = [(row.target, i, token) for row in self.rows if row.target >= 0 for i, token in enumerate(row.guesses)]
        slots, guesses = self._pairs([entry[:2] for entry in kept])
        return slots, guesses, self._indices([token for _, _, token in kept])

    @cached_property
    def _at_end(self) -> tuple[Tensor, Tensor]:
        """Slots for states behind the known tokens, and the entries they stand behind."""
        return self._pairs([(row.target, row.sure[-1]) for row in self.rows if row.target >= 0])

    @cached_property
    def _at_copy(self) -> tuple[Tensor, Tensor]:
        return self._pairs([(row.copy_slot, row.sure[row.copy_after - 1]) for row in self.rows if row.copy_after > 0])

    def _before(self, num_tail: int) -> Tensor:
        """[entries] the entry before each, where those of a row's past follow behind all others, newest first."""
        if num_tail in self._tails:
            return self._tails[num_tail]
        total = self.num_tokens + len(self._replayed)
        before = [0] * total
        for i, row in enumerate(self.rows):
            last = total + i * num_tail
            for entry in row.sure:
                before[entry] = last
                last = entry
            for guess, parent in zip(row.guesses, row.parents, strict=True):
                before[guess] = row.guesses[parent] if parent >= 0 else last
        tails = [total + i * num_tail + min(age + 1, num_tail - 1) for i in range(len(self.rows)) for age in range(num_tail)]
        self._tails[num_tail] = self._indices(before + tails)
        return self._tails[num_tail]

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        return self._indices([first for first, _ in pairs]), self._indices([second for _, second in pairs])

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def correct(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule: what k recalls is moved towards v, as far as `strength` says."""
    state = state * decay[..., None, None]
    wrong = (v - (k[..., None, :] @ state)[..., 0, :]) * strength[..., None]
    state = state.addcmul_(k[..., None], wrong[..., None, :])
    return state, (q[..., None, :] @ state)[..., 0, :]


def add(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """The rule of a state space: v is added to what k recalls, `strength` times."""
    state = (state * decay[..., None, None]).addcmul_(k[..., None], (v * strength[..., None])[..., None, :])
    return state, (q[..., None, :] @ state)[..., 0, :]


def _parent(token: int, num_causal: int, mask: int) -> int:
    """Which of the row's new tokens comes before this one in the text; -1 = none of them."""
    if token < num_causal:
        return token - 1
    ancestors = mask & ((1 << (token - num_causal)) - 1)
    return num_causal + ancestors.bit_length() - 1


def states_of(batch: RaggedBatch) -> RowStates:
    """The batch's; or those of rows that begin here, of which nothing is kept. Not waited for."""
    if batch.states is not None:
        return batch.states
    lengths = batch.query_start_loc.diff()
    none = torch.full_like(batch.seq_lens, NOTHING)
    return RowStates(none, none, torch.zeros_like(none, dtype=torch.int64), lengths, none, none)


def to_length_one(heads: Tensor) -> Tensor:
    """Keys and queries as the gated delta rule has them."""
    return heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
