"""Memory in large pages."""

import mmap
from pathlib import Path

import pytest

from foretoken.kernels.large_pages import LARGE_PAGE, in_large_pages
from foretoken.kernels.native_weights import WeightMemory

SMAPS = Path("/proc/self/smaps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_bytes", [0, 1, 64, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 100])
def test_memory_is_aligned_and_as_long_as_asked_for(num_bytes: int) -> None:
    memory = in_large_pages(num_bytes)
    memory.fill_(7)
    assert len(memory) == num_bytes
    assert num_bytes == 0 or memory.data_ptr() % (LARGE_PAGE if num_bytes >= LARGE_PAGE else 64) == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.exists(), reason="Linux tells")
def test_the_system_is_asked_for_large_pages_and_gives_nothing_before_it_is_written() -> None:
    before = _resident_bytes()
    memory = in_large_pages(8 * LARGE_PAGE)
    assert _resident_bytes() - before < LARGE_PAGE
    assert "hg" in _mapping_of(memory.data_ptr())["VmFlags"].split()


@pytest.mark.skipif(not (SMAPS.exists() and SETTING.exists()), reason="large pages as Linux has them")
def test_weights_lie_in_memory_that_may_have_large_pages() -> None:
    taken = WeightMemory().take(5_000_000)
    taken.fill_(1)
    area = _mapping_of(taken.data_ptr())
    assert area["permissions"].endswith("p"), "shared memory has no large pages as a rule"
    if "[never]" not in SETTING.read_text():
        assert "hg" in area["VmFlags"].split(), "nobody asked for large pages"


def _resident_bytes() -> int:
    """Of the whole process: a mapping of its own may be one with its neighbour, which holds something."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _mapping_of(address: int) -> dict[str, str]:
    """What the system says of the mapping that holds an address."""
    fields: dict[str, str] = {}
    for line in SMAPS.read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            fields = {"permissions": line.split()[1]} if start <= address < end else {}
        elif fields:
            fields[name] = value.strip()
            if name == "VmFlags":
                return fields
    raise AssertionError("no mapping holds it")
