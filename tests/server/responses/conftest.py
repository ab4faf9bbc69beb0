"""A Responses API over the fake engine."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from hermes import THINKING
from starlette.testclient import TestClient


@pytest.fixture
def serve(fake: FakeEngine) -> Iterator[Callable[..., TestClient]]:
    """`serve(response_store="none", ...)`: a client of the app, whose event loop goes on between requests."""
    fake.tokenizer.chat_template = THINKING
    clients: list[TestClient] = []

    def start(**settings: Any) -> TestClient:
        clients.append(fake.client(**settings))
        return clients[-1].__enter__()

    yield start
    for client in clients:
        client.__exit__()


@pytest.fixture
def api(serve: Callable[..., TestClient]) -> TestClient:
    return serve()
