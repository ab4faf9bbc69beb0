"""What the garbage collector does while something loads, and what a start does not load. (What is shown then: test_banner.py.)"""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from foretoken.server.loading import kept


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_what_loads_is_collected_once_however_much_it_is() -> None:
    loaded: list[list[int]] = []
    before = collections()
    with kept():
        loaded += [[i] for i in range(100_000)]
        assert collections() == before
    assert collections() == before + 1
    assert gc.isenabled() and gc.get_freeze_count() > len(loaded)


START = """
import gc, socket
from foretoken.server import launch
from foretoken.server.config import ServerConfig

def load(config, progress):
    print(gc.get_freeze_count() > len(gc.get_objects()))
    raise SystemExit

launch.load = load
launch.serve(ServerConfig.from_cli([]), socket.create_server(("127.0.0.1", 0)))
"""


def test_no_collection_looks_at_what_a_start_imports() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", START], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "True\n", ended.stderr


COMPILERS = """
import sys
import transformers.models.auto.tokenization_auto  # brings in older versions what is not needed, too
known = set(sys.modules)
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server import app, launch
from foretoken.server.config import ServerConfig
config = ServerConfig.from_cli(["--device", "cpu"])
app.create_app(AsyncEngine(launch.load(config, print)), config)
print(sorted({"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "sympy"} & sys.modules.keys() - known))
"""


def test_a_start_on_the_cpu_imports_no_compiler() -> None:
    """Nor what transformers and torch import with one: that takes as long as torch itself."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILERS], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1:] == ["[]"], ended.stderr


def test_garbage_of_loading_does_not_stay() -> None:
    class Node:
        pass

    with kept():
        node = Node()
        node.__dict__["itself"], seen = node, weakref.ref(node)
        del node
    assert seen() is None


def test_what_could_not_be_loaded_leaves_the_collector_on() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError), kept():
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() == frozen
