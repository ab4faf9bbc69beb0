"""The app over a real engine in this process, for requests whose answers depend on what the model says."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.boot import boot
from foretoken.engine.llm_options import engine_config
from foretoken.server.app import create_app
from foretoken.server.config import ServerConfig


@contextmanager
def app_of(engine: Any, **settings: Any) -> Iterator[TestClient]:
    """A client of a server around what boot returns. settings: ServerConfig's."""
    driver = AsyncEngine(engine)
    with TestClient(create_app(driver, ServerConfig(**settings))) as client:
        assert client.portal is not None
        client.portal.call(driver.start)
        try:
            yield client
        finally:
            client.portal.call(driver.stop)


@contextmanager
def real_app(
    model: str | os.PathLike[str] | None = None, speculative_config: Any = None, options: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[TestClient]:
    """A client of a server of this model. options: as LLM takes them; settings: ServerConfig's. Small and without guesses by default."""
    chosen = {"kv_cache_gb": 0.01, "max_num_seqs": 8} | dict(options or {})
    with app_of(boot(engine_config(model, speculative_config or {"method": "off"}, chosen)), **settings) as client:
        yield client
