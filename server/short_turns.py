"""The place of an event loop among the threads of its core: soon, and never for long.

While the engine computes, its threads want every core. A loop that wakes up for a request would wait until one of them has had its turn,
some milliseconds, before it even reads it.
"""

import ctypes
import os
import platform

TURN_NS = 100_000
"""The least that Linux takes."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call, for which older C libraries have no function
_SCHED_OTHER = 0


class SchedAttr(ctypes.Structure):
    """`struct sched_attr` of the kernel in its first version; runtime: nanoseconds of a turn."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def take_short_turns() -> bool:
    """From now on the calling thread, and those it starts, want short turns. Since Linux 6.12 whoever wants less goes before those who want
    more; nobody gets less time for it.

    Whether the system has taken it. Where it knows no such thing, or the thread has a place of its own already, nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    wanted = SchedAttr(size=ctypes.sizeof(SchedAttr), policy=_SCHED_OTHER, nice=os.getpriority(os.PRIO_PROCESS, 0), runtime=TURN_NS)
    return ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0) == 0
