"""The app over a fake engine, for tests of shapes and refusals."""

from copy import copy
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import save_tokenizer
from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tiny-tokenizer")
    return save_tokenizer(folder)


@pytest.fixture
def fake(tiny_tokenizer: PreTrainedTokenizerBase) -> FakeEngine:
    """Its tokenizer is its own: tests give it other templates."""
    return FakeEngine(copy(tiny_tokenizer))


@pytest.fixture
def client(fake: FakeEngine) -> TestClient:
    return fake.client()
