"""How many blocks the KV cache gets: from the settings, from what could ever be used, and from the memory that is free."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.cgroups import folders
from ..kernels.layout import StateRoom
from .config import CacheConfig
from .errors import ConfigError

MIN_TOKENS = 2048
"""What the cache must hold of a sequence if no max_model_len is asked for: contexts of 128k are common, memory for them is not."""


STATE_SHARE = 0.5
"""Of the cache's memory, that recurrent states may have: a sequence needs one however short it is, and the rest is for keys and values."""


LEAST_STATES = 3  # two of a row, and a known prefix


@dataclass(frozen=True)
class StateShare:
    """Rows that can run at once and prefixes that can be remembered, as far as a target's recurrent states go."""

    num_seats: int
    num_snapshots: int
    num_guesses: int  # of a row in a step, at most
    slot_bytes: int

    @property
    def room(self) -> StateRoom:
        return StateRoom(2 * self.num_seats + self.num_snapshots, self.num_guesses)

    @property
    def num_bytes(self) -> int:
        return self.room.num_slots * self.slot_bytes

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.num_bytes / 1e9:.2f} GB: two for each of {self.num_seats:,} requests at once, {self.num_snapshots:,} for known "
            f"prefixes, {self.slot_bytes / 1e6:.1f} MB each with up to {self.num_guesses} guesses"
        )


def state_share(
    config: CacheConfig, budget: float, slot_bytes: int, sequence_bytes: int, *, num_guesses: int, max_num_seqs: int
) -> StateShare:
    """Two states for each row that may run, and one for a reader of texts; as many prefixes as rows. Fewer if memory is short.

    budget: bytes for all caches. sequence_bytes: of the keys and values of one sequence, which must fit beside the states of one row.
    Raises ConfigError if they do not.
    """
    # Without a prefix cache one all the same: costs are measured with it.
    wanted = StateShare(max_num_seqs + 1, max_num_seqs if config.enable_prefix_caching else 1, num_guesses, slot_bytes)
    if wanted.num_bytes <= budget * STATE_SHARE:
        return wanted
    least = LEAST_STATES * slot_bytes
    if config.num_blocks is None and least + sequence_bytes > budget:
        raise ConfigError(
            f"the caches get {_mib(budget)} MiB, but the recurrent states of one request need {_mib(least)} MiB, and its keys and values "
            f"{_mib(sequence_bytes)} MiB; set kv_cache_gb to at least {(least + sequence_bytes) / 2**30:.4g}, or lower max_model_len"
        )
    slots = max(int(min(budget * STATE_SHARE, budget - sequence_bytes) // slot_bytes), LEAST_STATES)
    seats = min(wanted.num_seats, slots // 3 if config.enable_prefix_caching else (slots - 1) // 2)
    return StateShare(seats, min(wanted.num_snapshots, slots - 2 * seats), num_guesses, slot_bytes)


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
