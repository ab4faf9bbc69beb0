"""Where files are kept that can be made again."""

import os
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
