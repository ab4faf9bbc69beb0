"""Processes that are forked while an engine is there, as multiprocessing does on Linux before Python 3.14. Knows nothing of engines."""

import ctypes
import os
from functools import cache

HARD = 2  # omp_pause_hard


@cache
def let_forks_compute() -> None:
    """From now on the threads of OpenMP end before a fork, and come again where there is work.

    A fork has none of them, but GNU's OpenMP, which is torch's, would wait there for those of the thread that forked: for ever.
    The native executor sees to its own.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        os.register_at_fork(before=lambda: pause(HARD))
