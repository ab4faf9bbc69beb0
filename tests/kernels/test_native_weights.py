"""Where packed weights lie."""

import re
from pathlib import Path

import pytest

from foretoken.kernels.native_weights import WeightMemory

SMAPS = Path("/proc/self/smaps")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not (SMAPS.exists() and LARGE_PAGES.exists()), reason="large pages as Linux has them")
def test_weights_lie_in_memory_that_may_have_large_pages() -> None:
    taken = WeightMemory().take(5_000_000)
    taken.fill_(1)
    area = _area(taken.data_ptr())
    assert area["permissions"].endswith("p"), "shared memory has no large pages as a rule"
    if "[never]" not in LARGE_PAGES.read_text():
        assert "hg" in area["VmFlags"].split(), "nobody asked for large pages"


def _area(address: int) -> dict[str, str]:
    """What the system says of the mapping that an address is in."""
    found: dict[str, str] = {}
    for line in SMAPS.read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line):
            found = {"permissions": head[3]} if int(head[1], 16) <= address < int(head[2], 16) else {}
        elif found and ":" in line:
            name, value = line.split(":", 1)
            found[name] = value.strip()
            if name == "VmFlags":
                return found
    raise AssertionError("the address is in no mapping")
