"""Who has which recurrent state: seats of running rows, and snapshots of known prefixes. No tensor is touched here.

A network with recurrent layers keeps one state of a sequence where attention keeps keys and values of every token. So a row's past cannot
be shared block by block: a prefix is only found again where somebody kept the state behind it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

NOWHERE = -1


@dataclass(slots=True)
class RowState:
    """Where a row's next pass finds its state and leaves it; see RowStates."""

    source: int
    target: int
    accepted: int  # bits
    copy_place: int = NOWHERE
    copy_slot: int = NOWHERE


@dataclass(slots=True)
class _Seat:
    slots: tuple[int, ...]  # by turns target, and source of the next pass
    source: int = NOWHERE  # one of them, or a snapshot, before the first pass
    accepted: int = 0
    turn: int = 0  # which of the slots is the next target
    branch: int = 0  # leading places whose blocks are known, but not the state behind them; 0 = none
    pending: tuple[int, int, bool] | None = None  # the copy that the next pass makes: place, slot, whether the row's next replaces it
    latest: bytes = b""  # digest of the copy that the row's next replaces


class StateSlots:
    """The first slots are rows', two or more each: a pass reads one and writes another, so that it may be run again.

    Those behind are snapshots by the digest of the blocks that they stand behind, the least recently used first to go.
    """

    def __init__(self, num_seats: int, num_snapshots: int, block_size: int, slots_per_seat: int = 2, most_at_once: int = 1) -> None:
        """most_at_once: known tokens of an answer that a pass may bring; more are a prompt's."""
        self.num_seats = num_seats
        self.num_snapshots = num_snapshots
        self._block_size = block_size
        self._slots_per_seat = n = slots_per_seat
        self._most_at_once = most_at_once
        self._free_seats = [tuple(range(n * seat, n * seat + n)) for seat in reversed(range(num_seats))]
        self._free_slots = [*range(n * num_seats, self.num_slots)]
        self._seats: dict[str, _Seat] = {}
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    @property
    def num_slots(self) -> int:
        return self._slots_per_seat * self.num_seats + self.num_snapshots

    @property
    def has_seat(self) -> bool:
        return bool(self._free_seats)

    def open(self, name: str, digests: Sequence[bytes], most: int | None = None) -> int:
        """Take a seat, on the longest prefix with a snapshot; how many of the blocks with these digests it covers. There must be a seat.

        digests: of known blocks. most: it covers no more of them than this.
        """
        seat = self._seats[name] = _Seat(self._free_seats.pop())
        for depth in range(len(digests) if most is None else min(most, len(digests)), 0, -1):
            slot = self._snapshots.get(digests[depth - 1])
            if slot is not None:
                self._snapshots.move_to_end(digests[depth - 1])
                seat.source = slot
                break
        else:
            depth = 0
        seat.branch = len(digests) * self._block_size if len(digests) > depth else 0
        return depth

    def row(self, name: str, num_computed: int, num_known: int, is_last: bool, keeps: bool) -> RowState:
        """For a pass over places num_computed to num_known - 1, and guesses behind; the same again until `passed`.

        is_last: whether these are the last known tokens. keeps: whether the pass shall leave a snapshot if it comes past a place that is
        worth one.
        """
        seat = self._seats[name]
        if seat.pending is None and keeps:
            seat.pending = self._copy(seat, num_computed, num_known, is_last)
        place, slot, _ = seat.pending or (NOWHERE, NOWHERE, False)
        return RowState(seat.source, seat.slots[seat.turn], seat.accepted, place, slot)

    def others(self, name: str) -> tuple[int, ...]:
        """The row's slots that its next pass does not write. All that is in them has been read when it ends."""
        seat = self._seats[name]
        return (*seat.slots[seat.turn + 1 :], *seat.slots[: seat.turn])

    def passed(self, name: str, accepted: int, digests: Sequence[bytes]) -> None:
        """The pass counts: the row has its target's state now. accepted: bits of the guesses that stood; digests: of committed blocks."""
        seat = self._seats[name]
        seat.source, seat.turn, seat.accepted = seat.slots[seat.turn], (seat.turn + 1) % len(seat.slots), accepted
        if seat.pending is None:
            return
        (place, slot, is_replaced), seat.pending = seat.pending, None
        digest = digests[place // self._block_size - 1]
        is_new = digest not in self._snapshots
        if is_new:
            self._snapshots[digest] = slot
        else:  # somebody else's, who may want to keep it
            self._snapshots.move_to_end(digest)
            self._free_slots.append(slot)
        if is_replaced:
            seat.latest = digest if is_new else b""
        else:  # to be kept, whoever made it
            for other in self._seats.values():
                other.latest = b"" if other.latest == digest else other.latest
        if seat.branch and place >= seat.branch:
            seat.branch = 0

    def rename(self, old: bytes, new: bytes) -> None:
        """The snapshot behind one block counts as the one behind another from now on, unless that has one."""
        if old in self._snapshots and new not in self._snapshots:
            self._snapshots[new] = self._snapshots.pop(old)

    def free(self, name: str) -> None:
        seat = self._seats.pop(name)
        self._free_seats.append(seat.slots)
        if seat.pending is not None:
            self._free_slots.append(seat.pending[1])

    def forget_prefixes(self) -> None:
        """No snapshot will be found any more; those that rows begin with stay until they are replaced."""
        read = {seat.source for seat in self._seats.values()}
        self._free_slots += [slot for slot in self._snapshots.values() if slot not in read]
        # Kept under names that no digest has.
        self._snapshots = OrderedDict((b"%d" % slot, slot) for slot in self._snapshots.values() if slot in read)

    def check(self, names: set[str]) -> None:
        """Raise if a slot is lost or has two owners. names: who must have a seat."""
        assert self._seats.keys() == names, "seats and tables differ"
        pending = [seat.pending[1] for seat in self._seats.values() if seat.pending is not None]
        owned = (*self._free_seats, *(seat.slots for seat in self._seats.values()))
        seats = [slot for slots in owned for slot in slots]
        assert sorted(seats + self._free_slots + pending + [*self._snapshots.values()]) == [*range(self.num_slots)], "a state is lost"
        for name, seat in self._seats.items():
            known = (NOWHERE, *seat.slots, *self._snapshots.values())
            assert seat.source in known and seat.source != seat.slots[seat.turn], f"{name} reads a state that is not its own"

    def _copy(self, seat: _Seat, num_computed: int, num_known: int, is_last: bool) -> tuple[int, int, bool] | None:
        """Where two prompts part, else behind the last full block of a chunk or of the text so far."""
        size = self._block_size
        held = num_computed - seat.accepted.bit_count()
        is_decoding = is_last and num_known - num_computed <= self._most_at_once
        # A prompt's last token is computed even if all of it is known.
        place = (num_known - 1) // size * size if is_last and not is_decoding else num_known // size * size
        if held < seat.branch <= num_known:
            place, is_decoding = seat.branch, False
        if not held < place <= num_known:
            return None
        slot = self._take(seat.latest if is_decoding else b"")
        return None if slot is None else (place, slot, is_decoding)

    def _take(self, replaced: bytes) -> int | None:
        """replaced: digest of a snapshot that is wanted no more."""
        slot = self._snapshots.get(replaced)
        if slot is not None and not self._is_read(slot):
            return self._snapshots.pop(replaced)
        if self._free_slots:
            return self._free_slots.pop()
        for digest, slot in self._snapshots.items():
            if not self._is_read(slot):
                del self._snapshots[digest]
                return slot
        return None

    def _is_read(self, slot: int) -> bool:
        return any(seat.source == slot for seat in self._seats.values())
