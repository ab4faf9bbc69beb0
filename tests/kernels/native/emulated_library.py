"""A pytest plugin: the native library of this process is the one that NATIVE_LIBRARY names."""

import os
from pathlib import Path

from foretoken.kernels import native_library

native_library._path = lambda: Path(os.environ["NATIVE_LIBRARY"])  # pyright: ignore[reportPrivateUsage]
