"""Where files are kept that can be made again."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """$FORETOKEN_CACHE, else $XDG_CACHE_HOME/foretoken, else ~/.cache/foretoken."""
    if own := os.environ.get("FORETOKEN_CACHE"):
        return Path(os.path.expanduser(own))
    try:
        home = Path.home()
    except RuntimeError:  # a user whom the system does not know, as in containers
        home = Path("/")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "foretoken"


def written_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Make the folder in one go: one who was interrupted leaves no half of it, and of two at once the first is kept. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        write(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
