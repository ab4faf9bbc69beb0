"""The paged cache's bookkeeping: blocks, who holds them, which hold a known prefix. No tensor is touched here.

A request's table maps places to blocks. Places up to `num_committed` are part of the sequence; those behind are
*uncommitted*: written by forward passes, worthless after a rejection, never hashed and never shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..kernels.state_slots import RowState, StateSlots


@dataclass(slots=True)
class _Prefix:
    """What a cached block holds: its tokens are compared on a hit, so a digest alone proves nothing."""

    digest: bytes
    parent: bytes
    tokens: bytes  # 4 of each: as numbers of their own they would take nine times as much, in every block that is known
    filled: int = 0  # bit i: drafter i has filled its own layers of this block


class BlockPool:
    """Blocks, their reference counts, and the prefixes that free and used ones still hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # Free blocks in the order they are taken: those without a prefix first, then the least recently used.
        self.free_blocks: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        self.prefixes: dict[int, _Prefix] = {}
        self.by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def take(self) -> int:
        """A free block, its old prefix evicted. The caller has checked num_free."""
        block, _ = self.free_blocks.popitem(last=False)
        if (old := self.prefixes.pop(block, None)) is not None:
            del self.by_digest[old.digest]
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            del self.free_blocks[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks[block] = None
            if block not in self.prefixes:
                self.free_blocks.move_to_end(block, last=False)

    def find(self, digest: bytes, parent: bytes, tokens: bytes) -> int | None:
        """The block that holds exactly this prefix."""
        block = self.by_digest.get(digest)
        if block is None:
            return None
        known = self.prefixes[block]
        return block if known.parent == parent and known.tokens == tokens else None

    def remember(self, block: int, prefix: _Prefix) -> None:
        """Register a full committed block; if the same prefix is known already, this copy stays anonymous."""
        if prefix.digest not in self.by_digest:
            self.by_digest[prefix.digest] = block
            self.prefixes[block] = prefix


@dataclass(slots=True)
class _Table:
    root: bytes  # digest that stands for "no tokens yet": model, adapter and salt
    blocks: array[int] = field(default_factory=lambda: array("i"))
    digests: list[bytes] = field(default_factory=list)  # of the full committed blocks
    num_committed: int = 0
    lookahead: int = 0  # places behind the committed ones that are kept for the next step
    num_marked: dict[int, int] = field(default_factory=dict)  # drafter -> leading blocks that `mark_filled` has been through


class KVCache:
    """Block tables of all requests. `reserve`, `commit`, `roll_back` and `free` are the only ways to change one.

    With states, of a recurrent target, each has a seat among them too, and a prefix is one only as far as its state is known.
    """

    def __init__(
        self, num_blocks: int, block_size: int, model: str = "", prefix_caching: bool = True, states: StateSlots | None = None
    ) -> None:
        self.block_size = block_size
        self.states = states
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, _Table] = {}
        self.scratch: set[str] = set()  # tables of no request
        self.prefix_caching = prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._model = model.encode()

    @property
    def has_seat(self) -> bool:
        """Whether one more table can be opened."""
        return self.states is None or self.states.has_seat

    def admit(self, request_id: str, token_ids: Sequence[int], salt: str = "", adapter: int = 0) -> int:
        """Open a table on the longest cached prefix; how many tokens it covers (at most len - 1: one must be computed).

        adapter: the number of the one that the target has for it, 0 = none; under others a text has other entries.
        """
        assert request_id not in self.tables, f"{request_id} has a table already"
        root = hashlib.sha256(b"%d:%s:%d:%s" % (len(self._model), self._model, adapter, salt.encode())).digest()
        table = self.tables[request_id] = _Table(root)
        if self.prefix_caching:
            self._find(table, token_ids)
        if self.states is not None:
            self._cut(table, self.states.open(request_id, table.digests))
        table.num_committed = len(table.blocks) * self.block_size
        if self.prefix_caching:
            self.num_queried_tokens += len(token_ids)
            self.num_hit_tokens += table.num_committed
        return table.num_committed

    def _find(self, table: _Table, token_ids: Sequence[int]) -> None:
        """Let the table share the blocks of the longest known prefix."""
        size, parent = self.block_size, table.root
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            tokens = _packed(token_ids[start : start + size])
            digest = _digest(parent, tokens)
            block = self.pool.find(digest, parent, tokens)
            if block is None:
                break
            self.pool.share(block)
            table.blocks.append(block)
            table.digests.append(digest)
            parent = digest

    def _cut(self, table: _Table, num_blocks: int) -> None:
        while len(table.blocks) > num_blocks:
            self.pool.release(table.blocks.pop())
            table.digests.pop()

    def open_scratch(self, name: str, num_places: int) -> bool:
        """Open a table of no request, with so many places from free blocks. False, and nothing opened, if there are too few.

        Nothing of it is looked up or found again; `free` closes it.
        """
        assert name not in self.tables, f"{name} has a table already"
        if not self.has_seat:
            return False
        self.tables[name] = _Table(b"")
        if not self.reserve(name, num_places):
            del self.tables[name]
            return False
        if self.states is not None:
            self.states.open(name, ())
        self.scratch.add(name)
        return True

    def row_state(self, request_id: str, num_computed: int, num_known: int, is_last: bool = True) -> RowState | None:
        """For a pass over places num_computed to num_known - 1, the last known ones or not, and guesses behind; None = the target is not
        recurrent."""
        if self.states is None:
            return None
        return self.states.row(request_id, num_computed, num_known, is_last, self.prefix_caching and request_id not in self.scratch)

    def carry_state(self, request_id: str, num_tokens: int) -> None:
        """The state behind the first num_tokens, a known prefix, counts as the one behind all that is committed: for measuring only."""
        digests = self.tables[request_id].digests
        if self.states is not None and num_tokens // self.block_size < len(digests):
            self.states.rename(digests[num_tokens // self.block_size - 1], digests[-1])

    def scratch_passed(self, name: str) -> None:
        """A pass over a table of no request is done."""
        if self.states is not None:
            self.states.passed(name, 0, ())

    def num_filled(self, request_id: str, drafter: int) -> int:
        """Leading tokens whose cached blocks this drafter has filled too."""
        table = self.tables[request_id]
        count = 0
        for block in table.blocks[: len(table.digests)]:
            prefix = self.pool.prefixes.get(block)
            if prefix is None or not prefix.filled >> drafter & 1:
                break
            count += 1
        return count * self.block_size

    def mark_filled(self, request_id: str, drafter: int, num_tokens: int) -> None:
        """Drafter's own layers hold the first num_tokens committed tokens."""
        table = self.tables[request_id]
        num_full = min(num_tokens // self.block_size, len(table.digests))
        for index in range(table.num_marked.get(drafter, 0), num_full):
            prefix = self.pool.prefixes.get(table.blocks[index])
            if prefix is not None:
                prefix.filled |= 1 << drafter
        table.num_marked[drafter] = num_full

    def block_table(self, request_id: str) -> array[int]:
        """Live view: block of each run of block_size places."""
        return self.tables[request_id].blocks

    def blocks_for(self, num_places: int) -> int:
        return -(-num_places // self.block_size)

    def reserve(self, request_id: str, num_places: int) -> bool:
        """Make the table hold num_places, from free blocks only. False, and nothing changed, if there are too few."""
        blocks = self.tables[request_id].blocks
        missing = -(-num_places // self.block_size) - len(blocks)
        if missing > len(self.pool.free_blocks):
            return False
        for _ in range(missing):
            blocks.append(self.pool.take())
        return True

    def reserve_up_to(self, request_id: str, num_places: int) -> int:
        """As many of num_places as the free blocks allow; how many places the table holds now, num_places at most."""
        blocks = self.tables[request_id].blocks
        missing = -(-num_places // self.block_size) - len(blocks)
        for _ in range(min(missing, len(self.pool.free_blocks))):
            blocks.append(self.pool.take())
        return min(len(blocks) * self.block_size, num_places)

    def look_ahead(self, request_id: str, num_known: int, num_places: int) -> None:
        """Reserve so many places behind the known ones, as far as free blocks allow, and keep as many behind the committed ones until
        this is called again."""
        self.tables[request_id].lookahead = num_places
        if num_places:
            self.reserve_up_to(request_id, num_known + num_places)

    def commit(self, request_id: str, token_ids: Sequence[int], num_tokens: int, accepted: int = 0) -> None:
        """The first num_tokens of the sequence are computed and final; everything behind is rolled back.

        accepted: bits of the guesses of the row's pass that are among them.
        """
        table = self.tables[request_id]
        assert table.num_committed <= num_tokens <= len(table.blocks) * self.block_size, "commit outside reserved places"
        table.num_committed = num_tokens
        if self.prefix_caching:
            size = self.block_size
            for index in range(len(table.digests), num_tokens // size):
                parent = table.digests[-1] if table.digests else table.root
                tokens = _packed(token_ids[index * size : (index + 1) * size])
                digest = _digest(parent, tokens)
                table.digests.append(digest)
                self.pool.remember(table.blocks[index], _Prefix(digest, parent, tokens))
        if self.states is not None:
            self.states.passed(request_id, accepted, table.digests)
        self.roll_back(request_id)

    def roll_back(self, request_id: str, keep: int = 0) -> None:
        """Give back every block behind the committed places and the row's lookahead (and behind `keep` places, if that is more)."""
        table = self.tables[request_id]
        needed = -(-max(table.num_committed + table.lookahead, keep) // self.block_size)
        while len(table.blocks) > needed:
            self.pool.release(table.blocks.pop())

    def free(self, request_id: str) -> None:
        """Close the table. Blocks with a prefix stay findable until they are taken; the tail goes first."""
        for block in reversed(self.tables.pop(request_id).blocks):
            self.pool.release(block)
        self.scratch.discard(request_id)
        if self.states is not None:
            self.states.free(request_id)

    def forget_prefixes(self) -> None:
        """What is computed will be found no more."""
        self.pool.prefixes.clear()
        self.pool.by_digest.clear()
        if self.states is not None:
            self.states.forget_prefixes()

    def check(self) -> None:
        """Raise if a block is lost, shared by mistake, both free and in use, or remembered under a wrong name."""
        pool = self.pool
        if self.states is not None:
            self.states.check(set(self.tables))
        used = Counter(b for table in self.tables.values() for b in table.blocks)
        assert used == Counter({b: n for b, n in enumerate(pool.ref_counts) if n}), "reference counts drifted from block tables"
        assert set(used).isdisjoint(pool.free_blocks), "a block is both free and in use"
        assert len(used) + len(pool.free_blocks) == pool.num_blocks, "a block is lost"
        assert {p.digest: b for b, p in pool.prefixes.items()} == pool.by_digest, "prefix index drifted"
        for prefix in pool.prefixes.values():
            assert prefix.digest == _digest(prefix.parent, prefix.tokens), "a prefix stands under a wrong digest"
            assert len(prefix.tokens) == 4 * self.block_size, "a block is remembered that was not full"
        for request_id, table in self.tables.items():
            full = table.num_committed // self.block_size
            assert len(table.blocks) * self.block_size >= table.num_committed, f"{request_id}: committed places without a block"
            assert not self.prefix_caching or len(table.digests) == full, f"{request_id}: hashes differ from committed blocks"
            for block in table.blocks[full:]:
                assert pool.ref_counts[block] == 1 and block not in pool.prefixes, f"{request_id}: an uncommitted block is shared"


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _digest(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(parent + tokens).digest()
