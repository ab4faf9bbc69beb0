"""The app over a fake engine, for tests of shapes and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import save_tokenizer
from transformers import PreTrainedTokenizerBase

from foretoken.server.app import create_app
from foretoken.server.config import ServerConfig


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tiny-tokenizer")
    return save_tokenizer(folder)


@pytest.fixture
def fake(tiny_tokenizer: PreTrainedTokenizerBase) -> FakeEngine:
    return FakeEngine(tiny_tokenizer)


@pytest.fixture
def client(fake: FakeEngine) -> TestClient:
    return client_of(fake)


def client_of(fake: FakeEngine, **settings: Any) -> TestClient:
    return TestClient(create_app(fake.as_engine(), ServerConfig(**settings)))
