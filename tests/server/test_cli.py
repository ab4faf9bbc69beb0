import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, environment

from foretoken import __version__
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.model import load_model
from foretoken.server.config import ServerConfig
from foretoken.server.exit_status import CONFIG, INTERRUPTED, UNAVAILABLE, USAGE
from foretoken.server.launch import require_model_folder, with_key
from foretoken.server.listener import ListenError, listen, reachable_from_outside, url


def foretoken(*argv: object, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foretoken", *map(str, argv)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment(**variables), timeout=60)


def one_line_error(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("foretoken: [", "import time: "))]  # without progress
    assert len(lines) == 1 and lines[0].startswith("foretoken: error: "), ended.stderr
    return lines[0]


def test_the_command_line_does_not_import_torch() -> None:
    """A mistake, or a port in use, is known in a fraction of a second only while this holds."""
    modules = ", ".join(
        f"foretoken.server.{name}"
        for name in (
            *("cli", "config", "listener", "launch", "banner", "terminal.chat", "generate_command", "run_batch", "completion"),
            *("bench.tune", "bench.speculation", "bench.workloads", "bench.overhead"),
        )
    )
    code = f"import sys, {modules}; print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_help_and_version() -> None:
    assert foretoken("version").stdout == foretoken("--version").stdout == f"foretoken {__version__}\n"
    for argv in [(), ("--help",), ("bench", "--help"), *((name, "--help") for name in ("serve", "chat", "generate", "run-batch"))]:
        ended = foretoken(*argv)
        assert ended.returncode == 0 and "examples:" in ended.stdout and not ended.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_was_closed_by_who_started_us_is_the_null_device(closed: str) -> None:
    code = """import os, sys
from foretoken.server.cli import main
try:
    main(["version"])
finally:
    os._exit(64 + sum(stream is None or stream.fileno() != n for n, stream in enumerate([sys.stdin, sys.stdout, sys.stderr])))"""
    assert subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], timeout=60).returncode == 64


def test_mistakes_in_the_command_line() -> None:
    ended = foretoken("sevre")
    assert ended.returncode == USAGE and "did you mean serve?" in one_line_error(ended)
    ended = foretoken("serve", "--modle", "T")
    assert ended.returncode == USAGE and "did you mean --model?" in one_line_error(ended)
    ended = foretoken("bench", "kernals")
    assert ended.returncode == USAGE and "did you mean kernels?" in one_line_error(ended)
    assert foretoken("version", "--help").stdout == foretoken("version").stdout
    assert foretoken("help", "bench").stdout == foretoken("bench", "--help").stdout
    assert "did you mean serve?" in one_line_error(foretoken("help", "sevre"))


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_an_import_would_swallow_ends_the_process(sig: signal.Signals) -> None:
    code = f"""import contextlib, os, signal
from foretoken.server.launch import signals_end_at_once
signal.signal({sig:d}, signal.default_int_handler)  # a shell's job in the background is begun without SIGINT
with signals_end_at_once(), contextlib.suppress(BaseException):
    os.kill(os.getpid(), {sig:d})"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 128 + sig


@pytest.mark.parametrize("words", ["bench serve", "bench compare", "bench workloads", "tune", "train evaluate", "chat", "completion"])
def test_a_wrong_flag_is_one_line_without_all_others(words: str) -> None:
    ended = foretoken(*words.split(), "--nonsense")
    assert ended.returncode == USAGE and f"see foretoken {words} --help" in one_line_error(ended)


@pytest.mark.parametrize("words", ["bench overhead", "bench quality"])
def test_results_that_could_not_be_written_are_not_measured(words: str, tmp_path: Path) -> None:
    ended = foretoken(*words.split(), "--json", tmp_path / "nowhere" / "result.json")
    assert ended.returncode == USAGE and "there is no folder" in one_line_error(ended)


def test_an_address_that_cannot_be_had_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = foretoken("serve", "--port", port, PYTHONPROFILEIMPORTTIME="1")
    loaded = set(re.findall(r"^import time: .* (\S+)$", ended.stderr, re.MULTILINE))
    assert "foretoken.server.listener" in loaded and "torch" not in loaded, "that would take seconds"
    assert ended.returncode == UNAVAILABLE and f"port {port} on 127.0.0.1 is in use" in one_line_error(ended)
    ended = foretoken("serve", "--host", "192.0.2.1", "--port", 0)
    assert ended.returncode == UNAVAILABLE and "--host 192.0.2.1 is no address of this machine" in one_line_error(ended)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ListenError, match="--host no-such-host.invalid cannot be resolved"):
        listen("no-such-host.invalid", 0)


@pytest.mark.parametrize(("host", "shown", "reachable"), [("127.0.0.1", "127.0.0.1", False), ("0.0.0.0", "127.0.0.1", True)])
def test_listening_takes_the_port_at_once(host: str, shown: str, reachable: bool) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url(listener) == f"http://{shown}:{port}" and reachable_from_outside(listener) == reachable
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        with pytest.raises(ListenError, match="is in use"):
            listen(host, port)
        socket.create_connection(("127.0.0.1", port), timeout=1).close()  # waits in the queue until the server accepts


def test_a_key_is_made_only_where_strangers_could_come() -> None:
    config, made = with_key(ServerConfig(), reachable=True)
    assert made and len(config.api_keys[0]) >= 32 and with_key(ServerConfig(), reachable=True)[0].api_keys != config.api_keys
    for kept, reachable in [(ServerConfig(), False), (ServerConfig(insecure_no_auth=True), True), (ServerConfig(api_keys=("k",)), True)]:
        assert with_key(kept, reachable) == (kept, False)


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, tiny_target: Path) -> None:
    empty, no_weights, truncated = tmp_path / "empty", tmp_path / "no-weights", tmp_path / "truncated"
    for folder in (empty, no_weights, truncated):
        folder.mkdir()
    (no_weights / "config.json").write_text("{}")
    for file in tiny_target.iterdir():
        (truncated / file.name).write_bytes(file.read_bytes())
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for folder, message in [
        (tmp_path / "missing", "there is no folder"),
        (empty, "has no config.json"),
        (no_weights, "has no model.safetensors"),
        (weights, "is a file"),
        (truncated, "model.safetensors"),
    ]:
        ended = foretoken("serve", folder, "--port", 0)
        assert message in one_line_error(ended) and ended.returncode == CONFIG


def test_what_the_folder_shows_needs_no_loader(tmp_path: Path, tiny_target: Path) -> None:
    pickled, backwards = tmp_path / "pickled", tmp_path / "backwards"
    for folder in (pickled, backwards):
        shutil.copytree(tiny_target, folder)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="save_pretrained"):
        require_model_folder(str(pickled))
    config = json.loads((backwards / "config.json").read_text())
    (backwards / "config.json").write_text(json.dumps(config | {"max_position_embeddings": -1}))
    require_model_folder(str(backwards))
    with pytest.raises(ModelLoadError, match="max_position_embeddings -1"):
        load_model(ModelConfig(str(backwards)), lambda line: None)


def test_chat_without_a_server() -> None:
    with socket.socket() as silent:  # keeps the port from others, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        ended = foretoken("chat", "--url", f"http://127.0.0.1:{port}")
    assert ended.returncode == UNAVAILABLE and "start one with `foretoken serve`" in one_line_error(ended)
    ended = foretoken("chat", "--url", f"127.0.0.1:{port}")  # there may well be one: the address is what is wrong
    assert ended.returncode == UNAVAILABLE and "write it as http://HOST:PORT" in one_line_error(ended)


def test_life_of_a_server(server_process: Callable[..., RunningServer], tiny_target: Path) -> None:
    """A reachable server makes a key, tells how to use it, talks to `foretoken chat` and drains on SIGTERM."""
    server = server_process(tiny_target, "--host", "0.0.0.0", "--served-model-name", "tiny", "--log-level", "info")

    # 1. The banner says everything one needs.
    found = re.search(r"^  api key     (\S+)  \(made now", server.log, re.MULTILINE)
    assert found, server.log
    key = found[1]
    assert "/v1/chat/completions" in server.log and f"Bearer {key}" in server.log and "/metrics" in server.log
    assert "ngram" in server.log and "foretoken: [" in server.log

    # 2. The key is needed, and enough.
    with server.client() as stranger:
        assert stranger.get("/v1/models").status_code == 401
    with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"

        # 3. `foretoken chat` streams an answer and says how fast it came.
        said = foretoken("chat", "--url", server.url, "--api-key", key, "--max-tokens", 8, stdin="Hello\n\n")
        assert said.returncode == 0 and re.search(r"\d+ tokens, [\d,]+ tokens/s; ", said.stdout), said.stderr
        refused = foretoken("chat", "--url", server.url, "--api-key", "wrong", stdin="Hello\n\n")
        assert refused.returncode == 1 and "foretoken: error: " in refused.stderr

        # 4. SIGTERM: new requests are turned away while the one in flight comes to its proper end.
        # With logprobs each token takes a step: without, all of them are there before anybody could be turned away.
        body = {"model": "tiny", "prompt": "The quick", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        body["logprobs"] = 1
        late_client = server.client(headers={"Authorization": f"Bearer {key}"})  # made now, since the answer does not wait for it
        with late_client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line.startswith("data:"))
            server.process.send_signal(signal.SIGTERM)
            answers: list[httpx.Response] = []
            late = threading.Thread(target=_ask_while_draining, args=(late_client, answers))
            late.start()
            chunks = [first, *(line for line in lines if line.startswith("data:"))]
            late.join()
    assert chunks[-1] == "data: [DONE]"
    reasons = [choice["finish_reason"] for line in chunks[:-1] for choice in json.loads(line[5:])["choices"]]
    assert reasons[-1] == "length"
    assert answers and answers[-1].status_code == 503 and answers[-1].json()["error"]["code"] == "server_shutdown", answers
    assert answers[-1].headers["retry-after"] and answers[-1].headers["connection"] == "close"
    assert server.process.wait(20) == 0
    assert "Traceback" not in server.log and "SIGTERM: 1 requests in flight" in server.log
    assert "nanobind" not in server.log, "what stays behind at the end is reported by extensions"


def _ask_while_draining(client: httpx.Client, answers: list[httpx.Response]) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (answers and answers[-1].status_code == 503):
        try:
            answers.append(client.post("/v1/completions", json=body))
        except httpx.TransportError:  # it has already gone
            return


def test_a_second_signal_ends_requests_with_an_error(server_process: Callable[..., RunningServer], tiny_target: Path) -> None:
    server = server_process(tiny_target, "--drain-timeout", 60)
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 16, "speculation": {"method": "off"}}
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        with client.stream("POST", "/v1/completions", json=body | {"model": model}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            _wait_for(lambda: "SIGTERM: 16 requests in flight" in server.log)
            server.process.send_signal(signal.SIGHUP)  # of a terminal that closes, which is no second signal
            next(lines)
            server.process.send_signal(signal.SIGINT)
            errors = [line for line in lines if line.startswith('data: {"error"')]
    assert errors and json.loads(errors[-1][5:])["error"]["code"] == "server_shutdown"
    while server.process.poll() is None:  # more of them, at any moment of the end
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert server.process.wait(20) == INTERRUPTED
    assert "Traceback" not in server.log and "SIGHUP" not in server.log


def _wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
