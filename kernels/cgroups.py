"""The control groups that this process runs in, as folders: where the system keeps limits of memory and processor time."""

from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Those whose limits hold here, the nearest first: of version 2, then of `controller` in version 1. None where there are none.

    A container sees its own group as the uppermost one; a service of systemd (MemoryMax=, CPUQuota=) is some folders below that.
    """
    paths = {"": "/", controller: "/"}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    except (OSError, ValueError):  # not Linux, or hidden
        pass
    top = root / "sys/fs/cgroup"
    found: list[Path] = []
    for base, path in ((top, paths[""]), (top / controller, paths[controller])):
        own = base if ".." in path else base / path.lstrip("/")  # outside of what this container sees
        found += [folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return found
