"""What crosses the border to a network: the ragged batch in, scores out, and the opaque cache beside them.

Knows nothing of requests, drafts or sampling. Everything that runs a network (an executor) speaks these types.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .native_abi import BatchView, RowStatesView
from .record import record
from .weight_bank import WeightBank

FINAL = -1
"""Boundary id of the hidden state after the target's final norm. Boundary id k >= 0 is the input of layer k."""

MAX_TREE_TOKENS = 64
"""Most tree tokens of one row: a row of the ancestor mask is one int64."""


@dataclass(frozen=True)
class RowStates:
    """Where R rows have their recurrent states: what layers without keys and values keep of all tokens before.

    A pass goes on from the row's source and leaves it as it was: it may be run again. A state that holds n places is what the sequence's
    first n tokens make of it; a source holds as many as there are before the row's first new token, but for the accepted guesses, which
    are computed anew from what was kept of them.
    """

    sources: Tensor  # [R] int32, slot of the state to go on from, -1 = there is none: the row begins at place 0
    targets: Tensor  # [R] int32, slot for the state behind the row's known tokens, and for its guesses. No row's source. -1 = none
    accepted: Tensor  # [R] int64, bit i: guess i that is kept in the source became part of the sequence, in this order
    num_known: Tensor  # [R] int32, new tokens, the first ones, that are the sequence's for sure; those behind are guesses, at most 64
    copy_places: Tensor  # [R] int32, once the state holds so many places, guesses not counted, ...
    copy_slots: Tensor  # [R] int32, ... it is written to this slot too, which nobody else uses; -1 = none
    chain_slots: Tensor | None = None  # [R, 2] int32, for the states of a chain's own tokens, by turns; one may be the source

    @cached_property
    def in_c(self) -> RowStatesView:
        """Where the arrays lie, for executors in C."""
        wide, narrow = torch.int64, torch.int32
        return RowStatesView(
            address(self.sources, narrow),
            address(self.targets, narrow),
            address(self.accepted, wide),
            address(self.num_known, narrow),
            address(self.copy_places, narrow),
            address(self.copy_slots, narrow),
            None if self.chain_slots is None else address(self.chain_slots, narrow),
        )


@dataclass(frozen=True)
class RaggedBatch:
    """R rows, T tokens in one flat run, padded to nothing.

    Row r owns the flat tokens query_start_loc[r]:query_start_loc[r + 1]: first num_causal[r] causal tokens, then at most 64
    tree tokens. A row's tokens occupy the last of its seq_lens[r] cache places, in order; place i of row r is slot
    block_tables[r, i // block_size] * block_size + i % block_size. Causal tokens see every earlier place of the row and
    themselves. Tree token i sees every committed and causal place and the tree tokens whose bits stand in tree_mask[i]
    (its own bit included; bits may point ahead). Padding: tokens with slot -1 are computed and written nowhere, rows
    may be empty.

    Windows count places between causal tokens, and positions where a tree token is one of the two: a token sees another only if
    these differ by less than the window. Every place before the tree holds the token of that position; only a token of a network
    that writes nothing (`Program.is_frozen`) stands elsewhere, at the last place that it sees. Nobody sees a place before the
    row's first_places: a drafter may have no entries there.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64; of a tree token: position of the row's root + its depth
    slot_mapping: Tensor  # [T] int64, -1 = written nowhere
    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, places in use with this step's tokens
    block_tables: Tensor  # [R, B] int32, unused entries are 0
    num_causal: Tensor  # [R] int32
    tree_mask: Tensor  # [T] int64, 0 for causal tokens
    logits_indices: Tensor  # [N] int64, flat positions that need scores
    full_logits: Tensor  # [M] int64, ascending indices into logits_indices whose whole logits row is wanted
    block_size: int
    first_places: Tensor | None = None  # [R] int32, at most the row's first place in this batch; None = all 0
    adapters: Tensor | None = None  # [R] int32, slot of the row's adapter in the network's AdapterBank, 0 = none; None = all 0
    states: RowStates | None = None  # None = every row begins at place 0, and nothing is kept
    scores_every_token: bool = False  # the host knows that logits_indices are all tokens in order: none need be picked out

    @property
    def rows_of_tokens(self) -> Tensor:
        """[T] int64; padding counts to the last row. Not waited for, and not kept: a batch's memory may be written anew."""
        tokens = torch.arange(self.token_ids.shape[0], device=self.token_ids.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.query_start_loc[1:-1], right=True)

    @cached_property
    def in_c(self) -> BatchView:
        """Where the arrays lie, for executors in C."""
        wide, narrow = torch.int64, torch.int32
        return BatchView(
            self.token_ids.shape[0],
            self.seq_lens.shape[0],
            self.block_tables.shape[1],
            self.logits_indices.shape[0],
            address(self.token_ids, wide),
            address(self.positions, wide),
            address(self.slot_mapping, wide),
            address(self.query_start_loc, narrow),
            address(self.seq_lens, narrow),
            address(self.block_tables, narrow),
            address(self.num_causal, narrow),
            address(self.tree_mask, wide),
            address(self.logits_indices, wide),
            None if self.first_places is None else address(self.first_places, narrow),
            None if self.adapters is None else address(self.adapters, narrow),
            None if self.states is None else ctypes.pointer(self.states.in_c),
        )


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Where a tensor's values lie, one behind the other. Raises AssertionError for one whose values C would misread."""
    assert tensor.dtype == dtype and tensor.is_contiguous(), f"needs contiguous {dtype}, not {tensor.dtype}"
    return tensor.data_ptr()


@record
class ForwardOutput:
    """What one pass gives back. Columns of logits are token ids unless the executor has `token_ids`."""

    argmax: Tensor  # [N] int64, the best token id at each of logits_indices (the first column among equals)
    top: Tensor  # [N] float32, its logit; NaN or infinite if the row is not finite
    logits: Tensor | None  # [M, V] float32 rows of batch.full_logits, None if M == 0 or all choices are in `matched`
    hidden: dict[int, Tensor] = field(default_factory=dict)  # boundary id -> [T, H], for all T tokens
    matched: Tensor | None = None  # what each row emits, where that was found on the device (matching.py): there argmax and top stay


@dataclass(frozen=True)
class KVLayerSpec:
    """One attention layer's share of the cache."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None  # positions a token sees, itself included; None = all
    values_in_keys: bool = False  # a place's values are the last v_dim numbers of its keys

    @property
    def stored(self) -> int:
        """Numbers of a place, where its values are not stored twice."""
        return self.num_kv_heads * (self.k_dim + (0 if self.values_in_keys else self.v_dim))


@dataclass(frozen=True)
class StateLayerSpec:
    """What one recurrent layer keeps of a sequence, in numbers: its state (float32), and of a guess that may be taken back."""

    state: int
    guess: int


@dataclass(frozen=True)
class StateRoom:
    """How many states a cache has room for, and how many guesses of a row it keeps with each."""

    num_slots: int
    num_guesses: int


class KVTensors(Protocol):
    """The cache of one network. Its memory layout belongs to its executor: only block ids and slots are shared."""

    num_blocks: int
    block_size: int

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim], v [T, kv_heads, v_dim] at slots [T]; slot -1 is written nowhere."""
        ...

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at slots [n]."""
        ...

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [n] to dst [n] in all layers, as if all were read before any is written."""
        ...


@record
class Draws:
    """How N chains pick their tokens: the best where the temperature is 0, else by chance under the noise of noise.py."""

    temperatures: Tensor  # [N] float32
    streams: Tensor  # [N] int64, `noise.stream` of each chain
    positions: Tensor  # [N] int64, absolute position of each chain's first token
    vocab_size: int  # ids below it may be chosen
    keep_logits: bool = False  # whether the output holds what was drawn from


@record
class ChainOutput:
    """N chains of at most k tokens. Entries past a chain's own count are meaningless."""

    token_ids: Tensor  # [N, k] int64
    confidence: Tensor  # [N, k] float32, softmax probability (temperature 1) of each chosen token among those that may be
    logits: Tensor | None  # [N, k, V] float32, V columns as in ForwardOutput, only if the draws keep them


class Executor(Protocol):
    """A network that runs. `KVTensors` passed to `run` must come from this executor's own `allocate`."""

    kv_layers: tuple[KVLayerSpec, ...]
    state_layers: tuple[StateLayerSpec, ...]  # () = it is not recurrent
    vocab_size: int  # width of the logits
    max_model_len: int  # positions the network was made for
    is_batch_invariant: bool  # a token's scores are the same bits in any batch, chunk, chain or tree
    weight_bytes: int  # that a pass reads whole, as they are packed: what decoding one token cannot be faster than
    token_ids: Tensor | None  # [vocab_size] int64, token id of each column of the logits; None = the column itself
    bank: WeightBank  # its prepared weights, for networks that share some
    recurrent: tuple[str, int] | None  # (input, boundary id): a chain feeds a token's boundary state to the next token's input

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> KVTensors:
        """states: for a recurrent network; None = none are kept."""
        ...

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes that one block of an allocated cache takes over all layers."""
        ...

    def state_slot_bytes(self, num_guesses: int) -> int:
        """Bytes of one state of an allocated cache over all recurrent layers, with so many guesses."""
        ...

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass: writes the batch's slots, returns scores at logits_indices and the wanted boundary states.

        inputs: [T, width] float32 for each buffer that the network wants filled by the caller (target states, for drafters).
        A network without attention has no kv_layers and looks at no places; one without logits wants N = 0.
        """
        ...

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        """Run the batch, then feed each chain its own last token back until it has counts[n] tokens (counts [N] >= 1).

        Chain n starts from logits_indices[n], which must be the last token of its row; rows without one only ingest.
        Token j of a chain (j >= 1) is computed at the place and position behind token j - 1, in the row's own blocks;
        the last token of a chain is never fed, so counts[n] - 1 places past the batch are written. draws None = argmax. Of a network that
        only reads its cache (`Program.is_frozen`) every token of a chain is computed at the place and position of the first.
        inputs are those of the batch; a `recurrent` network gets the later tokens' input from itself. Where there are state_layers the
        batch's states have chain_slots for each row that a chain goes on from; its target stays what the batch left there.
        """
        ...


class HasNoStates:
    """The part of an executor that says that its network has no recurrent layers."""

    state_layers: tuple[StateLayerSpec, ...] = ()

    def state_slot_bytes(self, num_guesses: int) -> int:
        return 0


@runtime_checkable
class ShortensChains(Protocol):
    """A network whose chains can be made from a shortlist; its other passes stay as they are."""

    def shorten_chains(self) -> None:
        """From now on scores of a chain may be near what they are where they are not among the best, if that is quicker."""
        ...


def state_bytes(layers: tuple[StateLayerSpec, ...], num_guesses: int, dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers, guesses kept in dtype."""
    return sum(4 * layer.state + num_guesses * layer.guess * dtype.itemsize for layer in layers)


def kv_bytes_per_block(layers: tuple[KVLayerSpec, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of block_size slots over all layers, stored as they are in dtype."""
    return sum(layer.stored for layer in layers) * block_size * dtype.itemsize
