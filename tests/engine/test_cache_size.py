import resource
from pathlib import Path

import pytest

from foretoken.engine.cache_size import StateShare, cache_blocks, cache_budget, free_memory_bytes, state_share
from foretoken.engine.config import CacheConfig
from foretoken.engine.errors import ConfigError
from foretoken.kernels.layout import StateRoom

MIB = 2**20


def blocks(config: CacheConfig, free_bytes: int = 0, *, context: int = 10**6, rows: int = 100, wanted: int | None = 1000) -> int:
    return cache_blocks(config, MIB, free_bytes, max_model_len=context, max_num_seqs=rows, wanted_len=wanted)


def test_configured_size():
    assert blocks(CacheConfig(kv_cache_gb=1.0)) == 1024
    assert blocks(CacheConfig(num_blocks=3)) == 3


def test_share_of_free_memory_up_to_a_ceiling():
    assert blocks(CacheConfig(memory_share=0.5), 2**30) == 512
    assert blocks(CacheConfig(memory_share=0.5, max_kv_cache_gb=0.25), 2**30) == 256


def test_one_sequence_of_the_length_that_was_asked_for_must_fit():
    assert blocks(CacheConfig(kv_cache_gb=9 / 1024), wanted=128) == 9  # 8 blocks and one more
    with pytest.raises(ConfigError, match="gets 512 MiB.*8,200 tokens needs 514 MiB"):
        blocks(CacheConfig(kv_cache_gb=0.5), wanted=8200)


def test_a_context_that_nobody_asked_for_need_not_fit():
    assert blocks(CacheConfig(kv_cache_gb=0.5), context=131_072, wanted=None) == 512
    assert blocks(CacheConfig(kv_cache_gb=5 / 1024), context=64, wanted=None) == 5
    with pytest.raises(ConfigError, match="gets 100 MiB.*2,048 tokens needs 129 MiB"):
        blocks(CacheConfig(kv_cache_gb=100 / 1024), context=131_072, wanted=None)


def test_never_more_than_is_useful():
    assert blocks(CacheConfig(kv_cache_gb=1.0), context=160, rows=2, wanted=None) == 22


class TestFreeMemory:
    @staticmethod
    def write(root: Path, path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    def test_of_the_machine(self, tmp_path: Path):
        self.write(tmp_path, "proc/meminfo", "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:   4000 kB\n")
        assert free_memory_bytes(tmp_path) == 4000 * 1024

    def test_of_a_container(self, tmp_path: Path):
        self.write(tmp_path, "proc/meminfo", "MemAvailable:   4000 kB\n")
        self.write(tmp_path, "sys/fs/cgroup/memory.max", "1000000\n")
        self.write(tmp_path, "sys/fs/cgroup/memory.current", "700000\n")
        self.write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 500000\ninactive_file 100000\n")
        assert free_memory_bytes(tmp_path) == 400000
        self.write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
        assert free_memory_bytes(tmp_path) == 4000 * 1024

    def test_of_a_service(self, tmp_path: Path):
        self.write(tmp_path, "proc/meminfo", "MemAvailable:   4000 kB\n")
        self.write(tmp_path, "proc/self/cgroup", "0::/system.slice/our.service\n")
        for group, limit in (("system.slice", "2000000\n"), ("system.slice/our.service", "max\n")):
            self.write(tmp_path, f"sys/fs/cgroup/{group}/memory.max", limit)
            self.write(tmp_path, f"sys/fs/cgroup/{group}/memory.current", "500000\n")
        assert free_memory_bytes(tmp_path) == 1500000

    def test_of_a_shell(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.write(tmp_path, "proc/meminfo", "MemAvailable:   4000 kB\n")
        self.write(tmp_path, "proc/self/status", "Name:\tpython3\nVmPeak:\t     900 kB\nVmSize:\t     300 kB\n")
        assert free_memory_bytes(tmp_path) == 4000 * 1024
        for limit, free in ((1000 * 1024, 700 * 1024), (200 * 1024, 0)):
            monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (limit, resource.RLIM_INFINITY)}.__getitem__)
            assert free_memory_bytes(tmp_path) == free

    def test_of_this_machine_and_of_one_without_proc(self, tmp_path: Path):
        assert free_memory_bytes() > 2**20
        assert free_memory_bytes(tmp_path) > 2**20


def share(config: CacheConfig, *, slot: int = MIB, sequence: int = 10 * MIB, rows: int = 8) -> StateShare:
    return state_share(config, cache_budget(config, 0), slot, sequence, num_guesses=4, max_num_seqs=rows)


def test_states_have_at_most_half_of_the_cache_and_leave_room_for_a_sequence():
    plenty, little = share(CacheConfig(kv_cache_gb=1.0)), share(CacheConfig(kv_cache_gb=24 / 1024))
    assert (plenty.num_seats, plenty.num_snapshots, plenty.room) == (9, 8, StateRoom(26, 4))
    assert (little.num_seats, little.num_snapshots, little.num_bytes) == (4, 4, 12 * MIB)
    tight = share(CacheConfig(kv_cache_gb=14 / 1024))  # half would be 7 slots
    assert (tight.num_seats, tight.num_snapshots) == (1, 2)
    without = share(CacheConfig(kv_cache_gb=24 / 1024, enable_prefix_caching=False))
    assert (without.num_seats, without.num_snapshots) == (5, 1)  # costs are measured with a known prefix
    assert share(CacheConfig(kv_cache_gb=24 / 1024, num_blocks=1000)) == little
    with pytest.raises(ConfigError, match=r"get 12 MiB, but the recurrent states of one request need 3 MiB.*10 MiB.*at least 0.0127"):
        share(CacheConfig(kv_cache_gb=12 / 1024))
