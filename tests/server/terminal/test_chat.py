"""The chat at a real terminal and over pipes, against a real server and one that knows nothing of ours."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, environment, start_server
from terminal import Terminal

BLUE = "\x1b[38;5;25m"  # of a draft model's tokens, in 256 colours


@pytest.fixture(scope="module")
def server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It drafts for itself: nearly all guesses are right."""
    log = tmp_path_factory.mktemp("chat-server") / "log"
    drafter = {"method": "draft_model", "model": str(tiny_target), "quantization": "none", "num_speculative_tokens": 3, "adaptive": False}
    running = start_server([str(tiny_target), "--served-model-name", "tiny", "--speculative-config", json.dumps(drafter)], log)
    yield running
    running.stop()


def argv(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "foretoken", "chat", "--url", url, *flags]


def piped(url: str, typed: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(url, *flags), input=typed, capture_output=True, text=True, env=environment(**variables), timeout=60)


def test_a_session_at_a_terminal(server: RunningServer, tmp_path: Path) -> None:
    saved = tmp_path / "chat.md"
    settings = environment(XDG_STATE_HOME=str(tmp_path / "state"))
    with Terminal(argv(server.url, "--max-tokens", "60", "--temperature", "0"), settings) as terminal:
        terminal.wait_for("> ")
        assert "tiny at http://" in terminal.plain and "temperature 0" in terminal.plain

        answer = terminal.enter("one two one two one two", "]\n> ")
        figures = r"\d+ tokens, [\d,]+ tokens/s; [234]\.\d\d a pass, \d+% of guesses accepted; target \d+%, draft_model \d+%\]"
        assert re.search(figures, answer) and BLUE in terminal.shown, "guessed tokens have a colour"

        assert "speculation: off" in terminal.enter("/speculation off")
        before = len(terminal.shown)
        again = terminal.enter("/regenerate", "]\n> ")
        assert "; 1.00 a pass]" in again and BLUE not in terminal.shown[before:], "nobody guesses any more"
        assert _said(again) == _said(answer), "speculation changes no answer"

        for line in ('"""', "first", "second"):
            terminal.enter(line, "\n. ")
        terminal.enter('"""', "]\n> ")
        assert "4 messages written" in terminal.enter(f"/save {saved}")
        assert "taken back: first second" in terminal.enter("/undo")
        terminal.type("/sys\t")
        terminal.wait_for("/system ")
        assert "system message: Be brief." in terminal.enter("Be brief.")
        assert "3 answers: " in terminal.enter("/stats")
        assert all(len(line) <= 80 for line in terminal.enter("/help").splitlines())
        terminal.type("\x04")
        assert terminal.end() == 0
    said = saved.read_text()
    assert said.startswith("**user**\n\none two one two one two\n") and "first\nsecond" in said and said.count("**assistant**") == 2

    with Terminal(argv(server.url), settings) as again:  # the history of earlier sessions
        again.wait_for("> ")
        again.type("\x1b[A")
        again.wait_for("/help")
        again.type("\x15/quit\n")
        assert again.end() == 0
    assert (tmp_path / "state/foretoken/chat_history").stat().st_mode & 0o077 == 0


def _said(shown: str) -> str:
    """An answer, without the line that asked for it and the line of figures."""
    return "\n".join(shown.split("\n")[1:]).rpartition("[")[0]


def test_over_pipes_there_are_no_colours_and_no_prompts(server: RunningServer) -> None:
    ended = piped(server.url, "one two one two\nand \\\nmore\n", "--max-tokens", "20", "--temperature", "0")
    assert ended.returncode == 0 and not ended.stderr
    assert "\x1b" not in ended.stdout and "> " not in ended.stdout and ended.stdout.count(" tokens/s") == 2
    coloured = piped(server.url, "one two one two\n", "--max-tokens", "20", "--temperature", "0", "--color", "always")
    assert BLUE in coloured.stdout


def test_bytes_that_are_no_text_of_the_terminal_are_no_end_of_the_chat(server: RunningServer) -> None:
    typed = b"broken \xff byte\n" + "a 😀 in a terminal of ASCII\n".encode()
    settings = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    ended = subprocess.run(argv(server.url, "--max-tokens", "2"), input=typed, capture_output=True, env=settings, timeout=60)
    assert ended.returncode == 0 and ended.stdout.count(b" tokens/s") == 2, ended.stderr


@pytest.mark.parametrize(("url", "key", "says"), [("http://a\tb", "", "no address"), ("http://a", "ké", "characters that no key has")])
def test_an_address_or_key_that_is_none(url: str, key: str, says: str) -> None:
    ended = piped(url, "hello\n", FORETOKEN_API_KEY=key)
    assert ended.returncode in (1, 69) and says in ended.stderr and ended.stderr.count("\n") == 1


def test_a_refusal_is_told_and_the_question_taken_back(server: RunningServer) -> None:
    typed = "/speculation nobody\nhello\n/speculation auto\nhello\n/speculation nobody\n/regenerate\n/save -\n"
    ended = piped(server.url, typed, "--max-tokens", "5")
    assert ended.returncode == 1 and "speculation.method is 'nobody', but this server has" in ended.stderr
    assert "5 tokens" in ended.stdout and "2 messages written" in ended.stdout, "what could not be answered again keeps its answer"
    Path("-").unlink()


def test_lines_that_are_pasted_together_are_one_message(tmp_path: Path) -> None:
    with other_server() as url, Terminal(argv(url), environment(XDG_STATE_HOME=str(tmp_path))) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~// one\nx = 2\x1b[201~")
        terminal.wait_for("x = 2")
        assert "You said // one\nx = 2" in terminal.enter("", "]\n> ")


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    with other_server() as url, Terminal(argv(url), environment(XDG_STATE_HOME=str(tmp_path))) as terminal:
        terminal.wait_for("> ")
        terminal.type("half a")
        terminal.wait_for("half a")
        terminal.interrupt("\n  (Ctrl-D or /quit ends)\n> ")  # below what was typed
        terminal.enter("slowly", "You said ")
        terminal.interrupt("[stopped]\n> ")
        assert SlowEnd.reached.wait(10), "the server was told"
        terminal.type("/quit\n")
        assert terminal.end() == 0 and "Traceback" not in terminal.shown


class SlowEnd:
    reached = threading.Event()


class OldServer(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of somebody else's, which refuses what OpenAI does not have."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": "gpt", "object": "model", "owned_by": "them"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["stream_options"] == {"include_usage": True} and "logprobs" not in body, body
        if body["messages"][-1]["content"] == "slowly":
            self._send("text/event-stream", f"data: {json.dumps(next(self.chunks(body)))}\n\n")
            with suppress(OSError):
                while True:
                    self.wfile.write(b": wait\n\n")
                    time.sleep(0.02)
            SlowEnd.reached.set()
            return
        self._send("text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks(body)) + "data: [DONE]\n\n")

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for text in ("You said ", body["messages"][-1]["content"], " \x1b]52;c;evil\x07"):
            yield {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
        yield {"choices": [], "usage": {"completion_tokens": 3}}

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def other_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OldServer) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_address[1]}/v1"
        other.shutdown()


def test_other_servers_work_and_cannot_command_the_terminal(tmp_path: Path) -> None:
    with other_server() as url, Terminal(argv(url), environment(XDG_STATE_HOME=str(tmp_path))) as terminal:
        terminal.wait_for("> ")
        terminal.enter("hi there", "]\n> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0
    assert "You said hi there \\x1b]52;c;evil\\x07" in terminal.shown and "\x1b]52" not in terminal.shown
    assert re.search(r"\[3 tokens, [\d,]+ tokens/s\]", terminal.plain)
