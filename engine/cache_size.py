"""How many blocks the KV cache gets: from the settings, from what could ever be used, and from the memory that is free."""

import dataclasses
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.cgroups import folders
from ..kernels.layout import StateRoom
from ..proposers.draft_states import SLOTS_PER_ROW
from .config import CacheConfig
from .errors import ConfigError

MIN_TOKENS = 2048
"""What the cache must hold of a sequence if no max_model_len is asked for: contexts of 128k are common, memory for them is not."""


STATE_SHARE = 0.5
"""Of the cache's memory, that recurrent states may have: a sequence needs one however short it is, and the rest is for keys and values."""


@dataclass(frozen=True)
class StateShare:
    """Rows that can run at once and prefixes that can be remembered, as far as states of recurrent networks go."""

    num_seats: int
    num_snapshots: int
    num_guesses: int  # of a row in a step, at most
    slot_bytes: int  # of the target's states; 0 = it is not recurrent
    draft_slot_bytes: int = 0  # of the recurrent drafts'

    @property
    def room(self) -> StateRoom:
        """In the target's cache."""
        return StateRoom(2 * self.num_seats + self.num_snapshots, self.num_guesses)

    @property
    def draft_room(self) -> StateRoom:
        """In that of each recurrent draft."""
        return StateRoom(SLOTS_PER_ROW * self.num_seats + self.num_snapshots, 0)

    @property
    def seat_bytes(self) -> int:
        return 2 * self.slot_bytes + SLOTS_PER_ROW * self.draft_slot_bytes

    @property
    def snapshot_bytes(self) -> int:
        return self.slot_bytes + self.draft_slot_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_seats * self.seat_bytes + self.num_snapshots * self.snapshot_bytes

    def describe(self) -> str:
        """For people."""
        one = f"{self.slot_bytes / 1e6:.1f} MB each with up to {self.num_guesses} guesses"
        own = f"two for each of {self.num_seats:,} requests at once, {self.num_snapshots:,} for known prefixes, {one}"
        drafts = f"in drafts {SLOTS_PER_ROW} a request and 1 a prefix, {self.draft_slot_bytes / 1e6:.1f} MB each"
        parts = [*[own] * bool(self.slot_bytes), *[drafts] * bool(self.draft_slot_bytes)]
        return f"{self.num_bytes / 1e9:.2f} GB: " + "; ".join(parts)


def state_share(
    config: CacheConfig,
    budget: float,
    slot_bytes: int,
    sequence_bytes: int,
    *,
    num_guesses: int,
    max_num_seqs: int,
    draft_slot_bytes: int = 0,
) -> StateShare:
    """States for each row that may run, and for a reader of texts; as many prefixes as rows. Fewer if memory is short.

    budget: bytes for all caches. sequence_bytes: of the keys and values of one sequence, which must fit beside the states of one row.
    Raises ConfigError if they do not.
    """
    # Without a prefix cache one all the same: costs are measured with it.
    snapshots = max_num_seqs if config.enable_prefix_caching else 1
    wanted = StateShare(max_num_seqs + 1, snapshots, num_guesses, slot_bytes, draft_slot_bytes)
    if wanted.num_bytes <= budget * STATE_SHARE:
        return wanted
    seat, snapshot = wanted.seat_bytes, wanted.snapshot_bytes
    least = seat + snapshot
    if config.num_blocks is None and least + sequence_bytes > budget:
        raise ConfigError(
            f"the caches get {_mib(budget)} MiB, but the recurrent states of one request need {_mib(least)} MiB, and its keys and values "
            f"{_mib(sequence_bytes)} MiB; set kv_cache_gb to at least {(least + sequence_bytes) / 2**30:.4g}, or lower max_model_len"
        )
    room = max(int(min(budget * STATE_SHARE, budget - sequence_bytes)), least)
    seats = min(wanted.num_seats, room // least if config.enable_prefix_caching else (room - snapshot) // seat)
    return dataclasses.replace(wanted, num_seats=seats, num_snapshots=min(snapshots, (room - seats * seat) // snapshot))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.4g}"


def cache_blocks(
    config: CacheConfig,
    bytes_per_block: int,
    free_bytes: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    wanted_len: int | None,
    state_bytes: int = 0,
) -> int:
    """The configured size, else a share of free memory; never more than max_num_seqs sequences of max_model_len could fill.

    wanted_len: the length that was asked for, None = nobody asked. state_bytes: what is taken from the size for recurrent states.
    Raises ConfigError if such a sequence would not fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = cache_budget(config, free_bytes) - state_bytes
    blocks = int(budget // bytes_per_block)
    length = min(max_model_len, MIN_TOKENS) if wanted_len is None else wanted_len
    needed = sequence_blocks(config, length)
    if blocks < needed:
        raise ConfigError(
            f"the KV cache gets {budget / 2**20:,.0f} MiB, but one sequence of {length:,} tokens needs "
            f"{needed * bytes_per_block / 2**20:,.0f} MiB; set kv_cache_gb to at least that, or lower max_model_len"
        )
    return min(blocks, max_num_seqs * sequence_blocks(config, max_model_len))


def cache_budget(config: CacheConfig, free_bytes: int) -> float:
    """Bytes for all caches: the configured size, else a share of free memory."""
    gib = 2**30
    if config.kv_cache_gb is not None:
        return config.kv_cache_gb * gib
    return min(free_bytes * config.memory_share, config.max_kv_cache_gb * gib)


def sequence_blocks(config: CacheConfig, length: int) -> int:
    """One more than the tokens need: guesses go behind them."""
    return -(-length // config.block_size) + 1


def free_bytes(device: str) -> int:
    """Memory that can be taken on `cpu` or a GPU, whoever asks for it."""
    return free_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping: the machine's, or what limits of the container, the service or the shell leave."""
    free = [_meminfo_available(root / "proc/meminfo"), _addresses_left(root / "proc/self/status")]
    for group in folders("memory", root):
        for limit_file, usage_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, usage = _read_int(group / limit_file), _read_int(group / usage_file)
            if limit is not None and usage is not None:
                cached = _read_entry(group / "memory.stat", "inactive_file") or 0  # given back on demand
                free.append(max(0, limit - usage + cached))
    known = [value for value in free if value is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _meminfo_available(file: Path) -> int | None:
    kibibytes = _read_entry(file, "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _addresses_left(file: Path) -> int | None:
    """What `ulimit -v` leaves, as the schedulers of clusters set it. None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    kibibytes = _read_entry(file, "VmSize:")
    return None if kibibytes is None or limit == resource.RLIM_INFINITY else max(0, limit - kibibytes * 1024)


def _read_entry(file: Path, name: str) -> int | None:
    """The number behind `name` in a file of lines "name number"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _read_int(file: Path) -> int | None:
    """None if the file is not there or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
