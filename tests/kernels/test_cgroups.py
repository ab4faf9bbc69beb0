"""Control groups of both versions, as Linux describes them in files."""

from pathlib import Path

import pytest

from foretoken.kernels.cgroups import folders

V2 = "0::/system.slice/foretoken.service\n"
V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/elsewhere\n0::/\n"


@pytest.mark.parametrize(
    ("told", "there", "found"),
    [
        (V2, "system.slice/foretoken.service", ["system.slice/foretoken.service", "system.slice", ""]),
        (V1, "memory/docker/abc", ["", "memory/docker/abc", "memory/docker", "memory"]),
        (V1, "memory", ["", "memory"]),  # a container: the path is the host's
        ("0::/../../other\n", "", [""]),
        ("no such lines", "memory", ["", "memory"]),
        (None, "", [""]),
    ],
)
def test_a_process_has_the_limits_of_all_its_groups(told: str | None, there: str, found: list[str], tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup"
    (top / there).mkdir(parents=True)
    if told is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(told)
    assert folders("memory", tmp_path) == [top / name for name in found]


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert folders("memory", tmp_path) == []
