"""What is said while a server starts and once it is ready."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_server import environment
from terminal import Terminal

from foretoken.engine.boot import Engine, boot
from foretoken.engine.llm_options import engine_config
from foretoken.server.banner import banner
from foretoken.server.config import ServerConfig
from foretoken.server.loading import Loading

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Engine:
    return boot(engine_config(tiny_target, None, {"kv_cache_gb": 0.01, "max_num_seqs": 8, "served_model_name": "tiny"}))


def told(lines: list[str]) -> dict[str, str]:
    """By label; what is wrapped is joined."""
    entries: dict[str, str] = {}
    label = ""
    for line in lines[1:]:
        if line:
            label = line[2:14].strip() or label
            entries[label] = f"{entries.get(label, '')} {line[14:].strip()}".strip()
    return entries


def test_it_names_everything_one_needs(engine: Engine) -> None:
    lines = banner(ServerConfig(engine=engine.config), engine, URL, made_key=False)
    found = told(lines)
    assert lines[0].startswith("Foretoken ") and not any("\x1b" in line for line in lines)
    assert found["model"].startswith("tiny: llama") and "ngram" in found["speculation"] and "tokens in" in found["kv cache"]
    assert found["limits"] == "8 rows at once, 1,024 more may wait; context 512; 2,048 tokens a step, 512 of them guessed"
    assert found["listening"] == URL and found["page"].startswith(URL + "/ ") and found["metrics"] == URL + "/metrics"
    assert found["API"].startswith(URL + "/v1") and found["chat"] == f"foretoken chat --url {URL}"
    assert found["memory"].endswith("fills") and "Authorization" not in found["curl"]


@pytest.mark.parametrize(
    ("template", "flags", "said"),
    [
        ("{% if tools %}{{ tools }}<tool_call>{% endif %}<think></think>", {}, "tool calls as hermes; reasoning as qwen3"),
        ("{{ tools }}<|tool_calls_section_begin|><think></think>", {}, "tool calls as kimi_k2; reasoning as kimi_k2"),
        ("{{ messages }}", {}, "tool calls none: its chat template takes no tools; reasoning none"),
        ("{{ tools }}", {}, "tool calls not read: --tool-call-parser names a format; reasoning none"),
        ("{{ tools }}<tool_call>", {"tool_call_parser": "none"}, "tool calls not read: --tool-call-parser names a format; reasoning none"),
        ("{{ tools }}", {"tool_call_parser": "granite", "reasoning_parser": "olmo3"}, "tool calls as granite; reasoning as deepseek_r1"),
    ],
)
def test_it_says_how_replies_are_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, template: str, flags: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    assert told(banner(ServerConfig(engine=engine.config, **flags), engine, URL, made_key=False))["replies"] == said


def test_lines_fit_the_terminal_but_those_to_be_copied(engine: Engine) -> None:
    lines = banner(ServerConfig(engine=engine.config, api_keys=("ft-made",)), engine, URL, made_key=True, columns=80)
    assert all(len(line) < 80 for line in lines if not line.startswith(("  curl", "  SDK", "  chat")))
    assert all(line.startswith(("  ", "Foretoken")) for line in lines if line)
    whole = told(banner(ServerConfig(engine=engine.config, api_keys=("ft-made",)), engine, URL, made_key=True))
    assert {name: text for name, text in told(lines).items() if name != "memory"} == {n: t for n, t in whole.items() if n != "memory"}
    assert "ft-made  (made now" in whole["api key"] and "Bearer ft-made" in whole["curl"] and "--api-key ft-made" in whole["chat"]


def test_a_model_without_a_chat_template_is_shown_what_it_can_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    found = told(banner(ServerConfig(engine=engine.config), engine, URL, made_key=False))
    assert f"{URL}/v1/completions -H" in found["curl"] and '"prompt": ' in found["curl"] and "no chat template" in found["chat"]


def test_the_curl_command_is_one_for_a_shell(engine: Engine) -> None:
    """A key that we did not make is not shown: the shell puts it in."""
    found = told(banner(ServerConfig(engine=engine.config, api_keys=("mine",)), engine, URL, made_key=False))
    show = f"{sys.executable} -c 'import sys, json; print(json.dumps(sys.argv))' " + found["curl"].removeprefix("curl ")
    variables = {"PATH": os.environ["PATH"], "FORETOKEN_API_KEY": "mine"}
    words = json.loads(subprocess.run(["sh", "-c", show], capture_output=True, env=variables, check=True).stdout)
    assert "Authorization: Bearer mine" in words and json.loads(words[-1])["model"] == "tiny"


def test_loading_writes_whole_lines_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with Loading() as loading:
        loading("one")
        loading("two")
    loading("three")
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert [line[-6:].strip() for line in lines] == ["] one", "] two", "three"] and all("\r" not in line for line in lines)


@pytest.mark.parametrize("brief", [False, True])
def test_the_clock_runs_on_a_terminal(brief: bool, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"""
import os, time
from foretoken.server.loading import Loading
with Loading({brief}) as loading:
    loading("one")
    while not os.path.exists({str(seen)!r}):
        time.sleep(0.01)
    loading("two")
print("end")
"""
    with Terminal([sys.executable, "-c", code], environment()) as terminal:
        for _ in range(3):  # every half second
            terminal.wait_for("] one")
        seen.touch()
        assert terminal.end() == 0
    shown = terminal.plain
    kept = [line.rpartition("\r")[2].strip() for line in shown.replace("\r\n", "\n").split("\n") if line.strip()]
    assert kept[-1] == "end" and sum("] one" in line for line in kept) == (0 if brief else 1), kept


@pytest.mark.parametrize("log", ["a full disk", "a pipe that nobody reads"])
def test_a_log_that_takes_nothing_stops_nothing(log: str) -> None:
    code = "from foretoken.server.loading import Loading\nwith Loading() as loading:\n    loading('one')\nloading('two')\nprint('end')"
    if log == "a full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, env=environment())
    os.close(stderr)
    assert (ended.returncode, ended.stdout) == (0, b"end\n")
