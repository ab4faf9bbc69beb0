"""The native executor's threads: whoever asks, however many there are, and whatever happens to the process, results stay the same."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from native_only import native_only
from paged_batches import BLOCK_SIZE, Row, batch_of
from torch import Tensor

from foretoken.kernels import native
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import KVLayerSpec
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.ops import ArgMax, Attention, Embed, GatherRows, Linear, Op
from foretoken.kernels.program import Program

pytestmark = [native_only, pytest.mark.usefixtures("two_threads")]

VOCAB, WIDTH = 50, 32
SHAPES = {"embed": (VOCAB, WIDTH), "qkv": (3 * WIDTH, WIDTH), "square": (WIDTH, WIDTH), "head": (VOCAB, WIDTH)}
ATTENTION = (Linear(("x",), ("qkv",), ("qkv",)), Attention(("qkv",), ("y",), layer=0, num_heads=2, scale=0.25))


def a_network(*middle: Op, last: str = "x", scale: float = 1.0, max_model_len: int = 4096, vocab: int = VOCAB) -> NativeExecutor:
    """embed -> "x", the given ops, and the logits of buffer `last`."""
    best = ArgMax(("logits",), ("argmax", "top"))
    ops = (
        Embed((), ("x",), "embed", scale=scale), *middle, GatherRows((last,), ("rows",)), Linear(("rows",), ("logits",), ("head",)), best,
    )
    layers = (KVLayerSpec(num_kv_heads=2, k_dim=16, v_dim=16),)
    shapes = SHAPES | {"embed": (vocab, WIDTH), "head": (vocab, WIDTH)}
    program = Program(ops, shapes, layers, {}, vocab, max_model_len, ("x",), last, "logits", best, {})
    weights = {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) / 4 for i, (name, shape) in enumerate(shapes.items())}
    return NativeExecutor(program, weights, Execution(torch.float32))


def logits_of(executor: NativeExecutor, num_tokens: int) -> Tensor:
    blocks = -(-num_tokens // BLOCK_SIZE)
    batch = batch_of([Row([i * 7 % VOCAB for i in range(num_tokens)], 0, list(range(blocks)))])
    logits = executor.run(batch, executor.allocate(blocks, BLOCK_SIZE)).logits
    assert logits is not None
    return logits


def in_a_fork(act: Callable[[], bool]) -> bool:
    """Whether act returns true in a fork of this process, in time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads: that is the point
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        passed = False
        try:
            passed = act()
        finally:
            os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_number_of_threads_may_change_between_passes_of_others() -> None:
    executor = a_network(*ATTENTION, last="y")
    expected = logits_of(executor, 100)

    changed = threading.Event()

    def until_changed() -> bool:
        same = True
        while not changed.is_set():
            same &= torch.equal(logits_of(executor, 100), expected)
        return same

    with ThreadPoolExecutor(1) as pool:
        passes = pool.submit(until_changed)
        for number in range(100):
            native.set_threads(1 + number % 6)
        changed.set()
        assert passes.result()


def test_passes_from_several_threads_take_turns() -> None:
    """Of one network and of another."""
    one, other = (a_network(*ATTENTION, last="y") for _ in range(2))
    asked = [(one, 5), (one, 40), (other, 90)]
    expected = {length: logits_of(executor, length) for executor, length in asked}

    def many_times(executor: NativeExecutor, length: int) -> bool:
        return all(torch.equal(logits_of(executor, length), expected[length]) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(many_times, *zip(*asked, strict=True)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_forked_process_has_threads_of_its_own(threads: int) -> None:
    executor = a_network(*ATTENTION, last="y")
    expected = logits_of(executor, 40)
    time.sleep(0.02)  # the other thread is asleep

    def in_child() -> bool:
        native.set_threads(threads)
        return torch.equal(logits_of(executor, 40), expected) and native.threads() == threads

    assert all(in_a_fork(in_child) for _ in range(4))
    assert torch.equal(logits_of(executor, 40), expected)


def test_threads_of_unequal_speed_change_no_bit() -> None:
    """A head of many panels, divided by speed; one core is another's half the time."""
    executor = a_network(*ATTENTION, last="y", vocab=20_000)
    expected = logits_of(executor, 100)
    core = min(os.sched_getaffinity(0))
    work = "while 1:\n  t = time.time() + .05\n  while time.time() < t: pass\n  time.sleep(.05)"
    spin = f"import os, time; os.sched_setaffinity(0, [{core}])\n{work}"
    with subprocess.Popen([sys.executable, "-c", spin]) as other:
        try:
            assert all(torch.equal(logits_of(executor, 100), expected) for _ in range(300))
        finally:
            other.kill()


def test_the_number_of_threads_is_kept_within_bounds() -> None:
    native.set_threads(0)
    assert native.threads() == 1
    native.set_threads(1000)
    assert native.threads() == 256


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer itself ends a process that is refused memory")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_threads_that_the_system_refuses_are_done_without() -> None:
    executor = a_network(*ATTENTION, last="y")
    expected = logits_of(executor, 40)

    def in_child() -> bool:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, resource.RLIM_INFINITY))  # few stacks fit
        native.set_threads(250)
        return 1 <= native.threads() < 250 and torch.equal(logits_of(executor, 40), expected)

    assert in_a_fork(in_child)


def test_denormals_are_kept_whatever_the_caller_has_set() -> None:
    executor = a_network(scale=1e-39)  # embeddings and logits are denormal
    native.set_threads(1)  # the caller computes all
    expected = logits_of(executor, 3)
    assert expected.count_nonzero() and expected.abs().max() < torch.finfo(torch.float32).tiny
    assert torch.set_flush_denormal(True)
    try:
        flushing = logits_of(executor, 3)
        assert not (flushing * 1.0).count_nonzero()  # the caller's own setting is back
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushing, expected)


def test_a_pass_of_too_many_phases_is_refused() -> None:
    names = ["x", *(f"x{i}" for i in range(4100))]
    executor = a_network(*(Linear((a,), (b,), ("square",)) for a, b in pairwise(names)), last=names[-1])
    with pytest.raises(RuntimeError, match="phases"):
        logits_of(executor, 1)
    assert logits_of(a_network(), 1).isfinite().all()  # and harms nobody


EXIT_DURING_A_PASS = """
import threading, time
from test_native_threads import ATTENTION, a_network, logits_of
from foretoken.kernels import native

native.set_threads(2)
executor = a_network(*ATTENTION, last="y", max_model_len=40_000)
threading.Thread(target=logits_of, args=(executor, 40_000), daemon=True).start()
time.sleep(0.1)
"""


def test_a_process_may_end_during_a_pass() -> None:
    """As a server does on a second Ctrl-C: the network is not freed under the thread that is in it."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *(path for path in sys.path if path)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", EXIT_DURING_A_PASS], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
