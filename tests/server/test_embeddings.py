"""POST /v1/embeddings through the real app, around a tiny network."""

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_app import app_of

from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.proposers.config import SpeculativeConfig

TEXTS = ["The quick brown fox", "jumps over the lazy dog.", "def add(a, b):"]
SIZE = 64
LONG = [[5] * 500] * 100


@pytest.fixture(scope="module")
def loaded(tiny_target: Path) -> Engine:
    model = ModelConfig(str(tiny_target), served_model_name="tiny", dtype="float32")
    return boot(EngineConfig(model, CacheConfig(num_blocks=64), speculative=SpeculativeConfig(off=True), max_queued_requests=1))


Ask = Callable[..., Any]


@contextmanager
def asking(loaded: Engine, **settings: Any) -> Iterator[Ask]:
    with app_of(loaded, **settings) as client:
        yield lambda **body: client.post("/v1/embeddings", json=body)
    loaded.core.check()


@pytest.fixture
def ask(loaded: Engine) -> Iterator[Ask]:
    with asking(loaded) as ask:
        yield ask


def vectors(ask: Ask, **body: Any) -> np.ndarray:
    answer = ask(**body)
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


def test_the_shape_is_openais(ask: Ask, loaded: Engine) -> None:
    body = ask(model="tiny", input=TEXTS, user="somebody").json()
    assert body["object"] == "list" and body["model"] == "tiny"
    assert [(entry["object"], entry["index"], len(entry["embedding"])) for entry in body["data"]] == [
        ("embedding", index, SIZE) for index in range(len(TEXTS))
    ]
    num_tokens = sum(len(loaded.tokenizer.encode(text)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_texts_alone_together_and_as_tokens_are_the_same(ask: Ask, loaded: Engine) -> None:
    together = vectors(ask, input=TEXTS)
    ids = [loaded.tokenizer.encode(text) for text in TEXTS]
    assert np.array_equal(together, vectors(ask, input=ids))
    for text, tokens, expected in zip(TEXTS, ids, together, strict=True):
        assert np.array_equal(vectors(ask, input=text), [expected])
        assert np.array_equal(vectors(ask, input=tokens), [expected])
    assert np.allclose(np.linalg.norm(together, axis=1), 1)
    assert not np.allclose(together, vectors(ask, input=TEXTS, pooling="mean"), atol=0.01)


def test_base64_is_little_endian_float32(ask: Ask) -> None:
    plain = vectors(ask, input=TEXTS, encoding_format="float")
    body = ask(input=TEXTS, encoding_format="base64").json()
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in body["data"]]
    assert np.array_equal(plain.astype(np.float32), decoded)


def test_dimensions_are_the_first_ones_at_length_one(ask: Ask) -> None:
    whole, short = vectors(ask, input=TEXTS), vectors(ask, input=TEXTS, dimensions=8)
    first = whole[:, :8]
    assert np.allclose(short, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": ""}, "input", "empty string"),
        ({"input": []}, "input", "must be a string"),
        ({"input": [""]}, "input", "empty string"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a", 1]}, "input", "must be a string"),
        ({"input": [300]}, "input", "token id 300"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a " * 700}, "input", "shorten it"),
        ({"input": [[5] * 500] * 601}, "input", "300,000 tokens"),
        ({}, "input", "required"),
        ({"input": LONG, "dimensions": 65}, "dimensions", "from 1 to 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 64"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "pooling": "max"}, "pooling", "last"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
def test_refusals_say_what_to_change(loaded: Engine, fields: dict[str, Any], param: str, says: str) -> None:
    with asking(loaded, request_timeout_s=0.02) as ask:  # less than the longest takes to compute: a mistake is told before
        answer = ask(**fields)
        error = answer.json()["error"]
        assert answer.status_code == (404 if param == "model" else 400), answer.text
        assert error["param"] == param and says in error["message"]


def test_lost_time_is_told(loaded: Engine) -> None:
    with asking(loaded, request_timeout_s=0.02) as ask:
        answer = ask(input=LONG)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


def test_a_full_queue_is_told(ask: Ask) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: ask(input=LONG), range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 503, 503]
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "server_is_overloaded"
