"""What requests that do not say get: of the model's file, of another, of who serves it."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ConfigError
from foretoken.engine.sampling_defaults import sampling_defaults

SAID = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 64, "do_sample": True, "eos_token_id": 2}
READ = {"temperature": 0.6, "top_k": 20, "max_tokens": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "generation_config.json").write_text(json.dumps(SAID))
    (tmp_path / "other" / "generation_config.json").write_text('{"min_p": 0.1}')
    return tmp_path


@pytest.mark.parametrize(
    "source, override, expected",
    [
        ("auto", {}, READ),
        ("auto", {"temperature": 0, "top_p": 0.9}, READ | {"temperature": 0, "top_p": 0.9}),
        ("vllm", {}, {}),
        ("vllm", {"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ("other", {}, {"min_p": 0.1}),
    ],
)
def test_where_they_come_from(folder: Path, source: str, override: dict[str, Any], expected: dict[str, Any]) -> None:
    source = str(folder / source) if source == "other" else source
    assert sampling_defaults(folder, ModelConfig(generation_config=source, override_generation_config=override)) == expected
    assert sampling_defaults(folder / "none", ModelConfig()) == {}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"generation_config": "openai"}, "auto, vllm or a folder with generation_config.json, not 'openai'"),
        ({"override_generation_config": {"temprature": 1}}, "has temperature, top_p, .*, not 'temprature'"),
        ({"override_generation_config": {"temperature": "hot"}}, "temperature must be .*; generation_config vllm leaves out"),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1, not 0"),
    ],
)
def test_mistakes_are_told(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampling_defaults(folder, ModelConfig(**settings))
