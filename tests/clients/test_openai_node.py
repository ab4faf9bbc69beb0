"""OpenAI's client for Node: the calls of openai_node.mjs. Needs `node`, and npm's `openai` in .venv/node_modules or $NODE_PATH."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from running_server import RunningServer

pytestmark = pytest.mark.slow

MODULES = os.environ.get("NODE_PATH", str(Path(__file__).parents[2] / ".venv" / "node_modules"))


@pytest.mark.skipif(shutil.which("node") is None or not (Path(MODULES) / "openai").is_dir(), reason="needs node and its package openai")
def test_what_node_gets_is_what_python_gets(server: RunningServer, api_key: str, model_name: str, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("openai_node.mjs"), tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    told_to = {"FORETOKEN_URL": server.url, "FORETOKEN_KEY": api_key, "FORETOKEN_MODEL": model_name}
    command = ["node", str(tmp_path / "openai_node.mjs")]
    run = subprocess.run(command, env=os.environ | told_to, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["whole"] and told["whole"] == told["streamed"] == told["helper"]
    assert told["models"] == [model_name] and told["request_id"] and told["usage"]["completion_tokens"] > 0
    assert told["parsed"].keys() == told["call"].keys() == {"city"}
    assert told["response"] and told["response"] == told["response_streamed"]
    assert len(set(told["dimensions"])) == 1 and told["dimensions"][0] > 0
    assert told["error"] == ["BadRequestError", 400, "temperature"] and told["stopped"] == "chat.completion.chunk"
