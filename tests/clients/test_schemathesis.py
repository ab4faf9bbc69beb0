"""Schemathesis on our own OpenAPI document: thousands of requests made from it, and every answer held against it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer

pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# That all data that fit the document are accepted is more than a document can say: which roles may follow each other, which fields
# exclude each other, what fits into the context. Those requests get a 400 that the document does describe.
LEFT_OUT = "positive_data_acceptance"


def test_no_answer_is_a_500_or_other_than_documented(server: RunningServer, api_key: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(Path(sys.executable).parent / "st", "run", server.url + "/openapi.json"),
            *("--header", f"Authorization: Bearer {api_key}", "--phases", "coverage,fuzzing,stateful", "--exclude-checks", LEFT_OUT),
            *("--max-examples", "10", "--request-timeout", "60", "--continue-on-failure", "--no-color", "--seed", "1"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert httpx.get(server.url + "/health/ready").status_code == 200
    assert "Traceback" not in server.log
