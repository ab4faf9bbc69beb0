"""GuideLLM, a load generator, measures the server: by completions and by chat, two streams at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import RunningServer

pytest.importorskip("guidellm")

from foretoken.engine.config import DEMO_MODEL
from foretoken.engine.model_folder import find_folder

pytestmark = pytest.mark.slow

NUM_REQUESTS = 6


@pytest.mark.parametrize("request_format", ["/v1/completions", "/v1/chat/completions"])
def test_a_benchmark_runs_without_errors(server: RunningServer, api_key: str, model_name: str, tmp_path: Path, request_format: str) -> None:
    tokenizer = find_folder(DEMO_MODEL, None, lambda line: None)
    backend = f"kind=openai_http,target={server.url},model={model_name},api_key={api_key},request_format={request_format}"
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", backend, "--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    ]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    (report,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    assert report["metrics"]["request_totals"]["successful"] == NUM_REQUESTS and report["metrics"]["request_totals"]["errored"] == 0
    assert report["metrics"]["output_token_count"]["successful"]["mean"] == 16
