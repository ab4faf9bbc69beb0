import ctypes
import os
import platform
import threading

import pytest

from foretoken.server.short_turns import TURN_NS, SchedAttr, take_short_turns

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())

if SCHED_GETATTR is None or not hasattr(os, "sched_getscheduler"):
    pytest.skip("this is no Linux whose system calls are known here", allow_module_level=True)


def place() -> SchedAttr:
    """Of the calling thread."""
    found = SchedAttr()
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found


def test_the_calling_thread_alone_takes_short_turns_and_keeps_its_rank():
    before = place()
    seen: list[tuple[SchedAttr, bool, SchedAttr]] = []
    thread = threading.Thread(target=lambda: seen.append((place(), take_short_turns(), place())))
    thread.start()
    thread.join()
    ((was, taken, now),) = seen
    if not taken:
        pytest.skip("the system does not take it")
    assert (now.policy, now.nice) == (was.policy, was.nice)
    assert now.runtime in (TURN_NS, 0)  # 0: a system before 6.12 keeps no turns
    after = place()
    assert (after.policy, after.nice, after.runtime) == (before.policy, before.nice, before.runtime)


def test_a_thread_with_a_place_of_its_own_keeps_it():
    seen: list[tuple[bool, int]] = []

    def stay() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        seen.append((take_short_turns(), os.sched_getscheduler(0)))

    thread = threading.Thread(target=stay)
    thread.start()
    thread.join()
    assert seen == [(False, os.SCHED_BATCH)]
