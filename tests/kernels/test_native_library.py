import platform
import tomllib
from pathlib import Path

import pytest

from foretoken.kernels import native_library, sampling
from foretoken.kernels.native_abi import SAMPLE_ROW_BYTES, fits, sources_digest
from foretoken.kernels.native_library import availability, load, usable_cores

SOURCES = Path(native_library.__file__).with_name("native")


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


def test_an_installed_library_comes_without_sources() -> None:
    """They would be read again at every start, to find that they are its own."""
    assert tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["include-package-data"] is False


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    class Older:
        """Without the check."""

    assert not fits(Older(), SOURCES)  # type: ignore[arg-type]
    assert SAMPLE_ROW_BYTES == sampling.ROW.itemsize
    if (library := load()) is None:
        return
    assert fits(library, SOURCES)
    assert fits(library, tmp_path / "native")  # a package has no sources: the two were installed together
    (tmp_path / "abi.cpp").write_bytes((SOURCES / "abi.cpp").read_bytes() + b"EXPORT int ft_newer() { return 1; }")
    assert sources_digest(tmp_path) != sources_digest(SOURCES)
    assert not fits(library, tmp_path)


def test_a_library_that_cannot_be_loaded_is_told_and_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("such a machine is told first")
    cut_off = tmp_path / "_native.so"
    cut_off.write_bytes(b"\x7fELF")
    monkeypatch.setattr(native_library, "_path", lambda: cut_off)
    for cached in (native_library._found, load, availability):  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(native_library, cached.__name__, cached.__wrapped__)
    assert native_library.load() is None
    assert f"cannot be loaded ({cut_off}: " in native_library.availability().reason
