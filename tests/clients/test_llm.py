"""The command line tool `llm`, with our model in its list."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm")

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False,
}


@pytest.fixture
def home(tmp_path: Path, base_url: str, model_name: str) -> Path:
    entry = [
        "- model_id: foretoken", f"  model_name: {model_name}", f"  api_base: {base_url}", "  api_key_name: foretoken",
        "  supports_schema: true", "  supports_tools: true",
    ]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(entry) + "\n", encoding="utf-8")
    return tmp_path


def llm(home: Path, api_key: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), *arguments, "-m", "foretoken", "--key", api_key]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"LLM_USER_PATH": str(home)})
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_prompt_streamed_and_whole(home: Path, api_key: str) -> None:
    prompt = ("What is the capital of France?", "-o", "temperature", "0", "-o", "max_tokens", "20")
    assert llm(home, api_key, *prompt).strip() and llm(home, api_key, *prompt, "--no-stream") == llm(home, api_key, *prompt)


def test_a_schema(home: Path, api_key: str) -> None:
    said = llm(home, api_key, "What is the capital of France?", "--schema", json.dumps(SCHEMA), "-o", "temperature", "0")
    assert json.loads(said).keys() == {"city"}
