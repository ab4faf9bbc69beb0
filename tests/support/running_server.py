"""A real `foretoken serve` process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings of ours but the cache folder, with one thread, for many processes on few cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORETOKEN_") or name == "FORETOKEN_CACHE"}
    return inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | variables


@dataclass
class RunningServer:
    """A server that answers. Its output, stdout and stderr together, is in `log_path`."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def client(self, **settings: object) -> httpx.Client:
        if self.url.startswith("unix:"):
            settings["transport"] = httpx.HTTPTransport(uds=self.url[5:])
        url = "http://localhost" if "transport" in settings else self.url
        return httpx.Client(base_url=url, timeout=60.0, **settings)  # pyright: ignore[reportArgumentType]

    def complete(self, prompt: str = "The quick brown fox", **params: object) -> dict[str, object]:
        """POST /v1/completions, greedy unless told otherwise; the body of a 200."""
        with self.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0} | params
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self) -> int:
        """SIGTERM, then the exit status; SIGKILL for a process that stays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop within {STOP_TIMEOUT_S} s of SIGTERM\n{self.log}") from None


def start_server(arguments: Sequence[str], log_path: Path, **variables: str) -> RunningServer:
    """`foretoken serve` on a free port, once it is ready. Raises AssertionError with the log if it ends before."""
    command = [sys.executable, "-m", "foretoken", "serve", "--port", "0", *map(str, arguments)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(**variables))
    server = RunningServer("", process, log_path)
    deadline = time.monotonic() + READY_TIMEOUT_S
    try:
        while not server.url:
            assert process.poll() is None, f"the server ended with status {process.returncode}\n{server.log}"
            assert time.monotonic() < deadline, f"the server was not ready within {READY_TIMEOUT_S} s\n{server.log}"
            server.url = next((line.split()[1] for line in server.log.splitlines() if line.startswith("  listening ")), "")
            time.sleep(0.05)
        with server.client() as client:
            assert client.get("/health/ready").status_code == 200
    except BaseException:
        process.kill()
        process.wait()
        raise
    return server
