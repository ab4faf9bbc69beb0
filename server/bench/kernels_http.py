"""The HTTP part of `foretoken bench kernels`: a real server process beside `LLM.generate`, asked for the same things in turn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.bench.generation import Generator, Prompts
from ...engine.bench.interleaved import Series, take_turns, timed
from ...engine.bench.measurement import GENERATE, SERVER, STREAMED, Announce, Effort, Measurement, Subject
from ...engine.bench.network import READ_PASSES
from ...engine.llm import LLM
from ...kernels import limits
from .load_client import Answer, LoadClient, ServerFailed

READY_TIMEOUT_S = 600.0
COMPLETIONS = "/v1/completions"
OFF: Mapping[str, Any] = {"method": "off"}


class ServerProcess:
    """`foretoken serve` on a free port of this machine. Use it as a context; raises ServerFailed on entry if it does not come up."""

    def __init__(self, subject: Subject, speculation: Mapping[str, Any] = OFF) -> None:
        options = {"port": 0, "speculative-config": json.dumps(speculation), **subject.options}
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", "foretoken", "serve", str(subject.model.folder), *flags]
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FORETOKEN_")}
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def event_loop_seconds(self) -> float:
        """CPU time of the process's first thread, which is its event loop; the engine computes in others."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            log = Path(self._log.name).read_text(encoding="utf-8")
            if found := re.search(r"^  listening +(\S+)", log, re.MULTILINE):
                return found[1]
            if self._process.poll() is not None:
                raise ServerFailed(f"the server to measure ended: {(log.strip().splitlines() or ['without a word'])[-1]}")
            time.sleep(0.05)
        raise ServerFailed(f"the server to measure was not ready within {READY_TIMEOUT_S:g} s")


class Load:
    """Requests to one server, all of a list at once."""

    def __init__(self, url: str, new_tokens: int) -> None:
        self._client = LoadClient(url)
        self._runner = asyncio.Runner()
        self._model = self._runner.run(self._client.model())
        self._new_tokens = new_tokens
        self.chunks = self.tokens = 0

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def seconds(self, prompts: list[list[int]], stream: bool) -> float:
        """Until the last answer is there."""
        return timed(lambda: self._runner.run(self._all(prompts, stream)))

    async def _all(self, prompts: list[list[int]], stream: bool) -> None:
        answers: list[Answer] = await asyncio.gather(*(self._one(prompt, stream) for prompt in prompts))
        assert all(answer.tokens == self._new_tokens for answer in answers), "a generation ended early"
        self.chunks += sum(answer.chunks for answer in answers)
        self.tokens += sum(answer.tokens for answer in answers)

    async def _one(self, prompt: list[int], stream: bool) -> Answer:
        request = {"model": self._model, "prompt": prompt, "max_tokens": self._new_tokens, "temperature": 0, "ignore_eos": True}
        return await self._client.complete(COMPLETIONS, request, stream)


def measure_server(subject: Subject, num_bytes: int, effort: Effort, announce: Announce) -> list[Measurement]:
    """Decoding and load through HTTP, beside the limit and `LLM.generate`. Raises ConfigError, ServerFailed."""
    announce("starting the server")
    with LLM(subject.model.folder, {"method": "off"}, **subject.options) as llm, ServerProcess(subject) as server:
        generator = Generator(llm)
        with Load(server.url, effort.decode_tokens) as load:
            return [
                *_decode(subject, load, generator.prompts, num_bytes, effort, announce),
                *_under_load(subject, load, generator, server, effort, announce),
            ]


def _decode(subject: Subject, load: Load, prompts: Prompts, num_bytes: int, effort: Effort, announce: Announce) -> list[Measurement]:
    announce("decode through HTTP")
    new = effort.decode_tokens
    with limits.ReadBuffer(num_bytes) as buffer:
        cases = {("limit", 0): lambda: num_bytes / buffer.read_rate(subject.threads, READ_PASSES)}
        for context in effort.decode_contexts:
            known = prompts.around(context, new)
            cases |= {(level, context): partial(load.seconds, known, level == STREAMED) for level in (SERVER, STREAMED)}
        seconds = take_turns(cases, effort.rounds)
    limit = seconds.pop(("limit", 0)).rate()
    return [subject.measurement(level, "decode", n, "tokens/s", s.rate(new), limit, "limit") for (level, n), s in seconds.items()]


def _under_load(
    subject: Subject, load: Load, generator: Generator, server: ServerProcess, effort: Effort, announce: Announce
) -> list[Measurement]:
    """As many requests at once as there are streams; each turn has prompts of its own, so that none is in a cache."""
    found: list[Measurement] = []
    new = effort.decode_tokens
    for streams in effort.rows:
        announce(f"{streams} streams through HTTP")
        per_chunk: list[float] = []
        per_token: list[float] = []

        def streamed(prompts: list[list[int]], us: list[float] = per_chunk, chunks: list[float] = per_token) -> float:
            cpu, before = server.event_loop_seconds(), load.chunks
            seconds = load.seconds(prompts, stream=True)
            num_chunks = load.chunks - before
            us.append((server.event_loop_seconds() - cpu) / num_chunks * 1e6)
            chunks.append(num_chunks / (len(prompts) * new))
            return seconds

        runs = {
            GENERATE: lambda prompts: generator.seconds(prompts, new),
            SERVER: lambda prompts: load.seconds(prompts, stream=False),
            STREAMED: streamed,
        }

        def turn(level: str, streams: int = streams, runs: dict = runs) -> float:
            return runs[level](generator.prompts.fresh(streams, effort.load_prompt_tokens))

        rates = {level: s.rate(streams * new) for level, s in take_turns({n: partial(turn, n) for n in runs}, effort.rounds).items()}
        for level, rate in rates.items():
            found.append(subject.measurement(level, "load", streams, "tokens/s", rate, rates[GENERATE], GENERATE))
        found.append(subject.measurement(STREAMED, "server CPU", streams, "us/chunk", Series(tuple(per_chunk[1:]))))  # without the warm-up
        found.append(subject.measurement(STREAMED, "chunks", streams, "chunks/token", Series(tuple(per_token[1:]))))
    return found
