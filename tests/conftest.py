"""What many tests share: tiny checkpoints, made once, and real server processes."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path

import pytest
from running_server import RunningServer, start_server

# Before anything imports torch: its threads spin, and on a busy machine with few cores two of them wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

if importlib.util.find_spec("triton") is not None:
    import triton_interpreter  # noqa: F401  before any library imports Triton


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines keep between starts goes to a temporary folder, those of server processes too: never into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETOKEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def limit_of_a_slow_call() -> Iterator[float]:
    """Machines halt for seconds, and no test fails for that: proposers may be slow here, and compiling a grammar too.

    Yields what a proposer is granted elsewhere, for tests that have a clock of their own.
    """
    from foretoken.engine.grammar_compiler import GrammarCompiler
    from foretoken.proposers import proposer_set

    limit = proposer_set.SLOW_CALL_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer_set, "SLOW_CALL_S", 600.0)
        patch.setattr(GrammarCompiler, "__init__", partialmethod(GrammarCompiler.__init__, deadline_s=60.0))
        yield limit


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Whatever a command set for a process of its own, in a test or in a fixture of many: sums are rounded by how many there are."""
    _take_one_thread()
    yield
    _take_one_thread()


def _take_one_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None:  # not imported for its own sake: many tests do without
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 2 layers of 64, 300 tokens, context 512."""
    from tiny_models import save_llama

    return save_llama(tmp_path_factory.mktemp("tiny-target"), hidden_size=64, num_layers=2, seed=0)


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_target with 8 layers."""
    from tiny_models import save_llama

    return save_llama(tmp_path_factory.mktemp("deep-target"), hidden_size=64, num_layers=8, seed=0)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 1 layer of 32 and the tokenizer of tiny_target."""
    from tiny_models import save_llama

    return save_llama(tmp_path_factory.mktemp("tiny-draft"), hidden_size=32, num_layers=1, seed=1)


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """`server_process("MODEL", "--flag", ..., FORETOKEN_X="...")` starts a server and waits until it is ready."""
    servers: list[RunningServer] = []

    def start(*arguments: str | Path, **variables: str) -> RunningServer:
        log_path = tmp_path / f"server-{len(servers)}.log"
        servers.append(start_server([str(argument) for argument in arguments], log_path, **variables))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()
