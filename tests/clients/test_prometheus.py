"""Prometheus itself scrapes the server: every sample arrives, and promtool has nothing to say about the text."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from running_server import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")]

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: foretoken
    static_configs: [{{targets: ["{target}"]}}]
"""
DEADLINE_S = 60.0


@pytest.fixture
def prometheus(server: RunningServer, tmp_path: Path) -> Iterator[str]:
    """The address of one that scrapes the server."""
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(target=server.url.removeprefix("http://")), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    yield f"http://{address}"
    process.terminate()
    process.wait(20)


def query(prometheus: str, expression: str) -> list[Any]:
    """The values of an instant query, once there are some."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(prometheus + "/api/v1/query", params={"query": expression}).json()
            if answer["data"]["result"]:
                return answer["data"]["result"]
        except (httpx.TransportError, ValueError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"{expression} has no value within {DEADLINE_S} s")


def test_a_scrape_brings_what_the_server_says(
    prometheus: str, server: RunningServer, base_url: str, api_key: str, model_name: str
) -> None:
    assert query(prometheus, 'up{job="foretoken"} == 1')
    before = float(query(prometheus, "vllm:generation_tokens_total")[0]["value"][1])
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.completions.create(model=model_name, prompt="The sky is", max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
    assert query(prometheus, f"vllm:generation_tokens_total >= {before + 8}")
    (answered,) = query(prometheus, "vllm:e2e_request_latency_seconds_count > 0")
    assert answered["metric"]["model_name"] == model_name
    assert query(prometheus, "histogram_quantile(0.5, vllm:e2e_request_latency_seconds_bucket)")
    sent = {line.split("{")[0].split(" ")[0] for line in httpx.get(server.url + "/metrics").text.splitlines() if not line.startswith("#")}
    names = set(httpx.get(prometheus + "/api/v1/label/__name__/values").json()["data"])
    assert sent <= names


def test_promtool_accepts_the_text(server: RunningServer) -> None:
    """Its advice on names is about vLLM's, which we keep."""
    text = httpx.get(server.url + "/metrics").content
    checked = subprocess.run(["promtool", "check", "metrics", "--extended"], input=text, capture_output=True, timeout=30)
    assert b"error" not in checked.stderr.lower(), checked.stderr.decode()
