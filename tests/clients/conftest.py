"""One real server with the embedded model, which all clients talk to, and where to find it."""

import gc
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, start_server
from young_heap import young_heap

KEY = "sk-of-the-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What clients deprecate among themselves is not ours to mend."""
    for item in items:
        if _is_here(item):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def _is_here(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Connections that clients leave to the garbage collector go before another test, or pytest's end, is blamed for them: there
    warnings are errors. Here the test's fixtures are let go, too. (pytest asks for all tests, wherever they are.)"""
    done = yield
    if not _is_here(item):
        return done
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    return done


@pytest.fixture(scope="module", autouse=True)
def none_but_theirs() -> Iterator[None]:
    """The collection behind every test has little to look through."""
    with young_heap():
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It wants a key, as one that is reachable from outside does, and has room for as many requests as a load generator sends."""
    running = start_server(["--api-key", KEY, "--max-queued-requests", "512"], tmp_path_factory.mktemp("clients") / "log")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.fixture(scope="session")
def base_url(server: RunningServer) -> str:
    """As OpenAI's clients want it."""
    return server.url + "/v1"


@pytest.fixture(scope="session")
def api_key() -> str:
    return KEY


@pytest.fixture(scope="session")
def model_name(base_url: str) -> str:
    answer = httpx.get(base_url + "/models", headers={"Authorization": f"Bearer {KEY}"})
    return answer.json()["data"][0]["id"]


@pytest.fixture
def openai_environment(base_url: str, model_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variables that everything built on OpenAI's client reads; the model's name."""
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_BASE", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return model_name

