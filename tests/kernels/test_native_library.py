from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.kernels import sampling
from foretoken.kernels.native_abi import SAMPLE_ROW_BYTES, fits
from foretoken.kernels.native_library import availability, load, usable_cores


@pytest.mark.parametrize(("text", "most"), [("max 100000", 10**6), ("100000 100000", 1), ("50000 100000", 1), ("garbage", 10**6)])
def test_a_quota_bounds_the_cores(tmp_path: Path, text: str, most: int) -> None:
    unlimited = usable_cores(tmp_path)
    assert unlimited >= 1
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/our.service\n")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "system.slice/our.service").mkdir(parents=True)
    for folder in ("", "system.slice/our.service"):  # a container's own, and a service's
        (groups / folder / "cpu.max").write_text(text)
        assert usable_cores(tmp_path) == min(unlimited, most)
        (groups / folder / "cpu.max").unlink()


def test_without_a_library_the_reason_says_what_to_do() -> None:
    available = availability()
    assert (available.isa is None) == bool(available.reason)
    if load() is None:
        assert "install" in available.reason or "machine" in available.reason


def test_a_library_of_other_sources_is_not_used() -> None:
    class Older:
        """Without the check, or with structs of other sizes."""

    older = Older()
    assert not fits(older)  # type: ignore[arg-type]
    older.ft_abi_bytes = lambda: 1  # type: ignore[attr-defined]
    assert not fits(older)  # type: ignore[arg-type]
    if (library := load()) is not None:
        assert fits(library)
    assert SAMPLE_ROW_BYTES == sampling.ROW.itemsize
