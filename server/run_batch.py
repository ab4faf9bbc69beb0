"""`foretoken run-batch`: a file of requests through the real app, in this process and without a port.

Owns the order of things, how many requests are under way and what is told. The files are run_batch_files.py's.
"""

from __future__ import annotations

import asyncio
import logging.config
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
from tqdm import tqdm

from .config import ServerConfig
from .exit_status import DATA, INTERRUPTED, SOFTWARE, failed
from .launch import ending_signals, require_folders
from .loading import Loading, imported, kept
from .logs import log_config
from .run_batch_files import OK, Answers, BatchError, Line, read_lines
from .run_batch_options import BatchParser

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine
    from ..engine.boot import Engine

NO_TIMEOUT_S = 10 * 365 * 86400.0
TOLD_FAILURES = 10
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} lines, {remaining} left{postfix}"
HEADERS = {"Content-Type": "application/json"}
OVERLOADED, ENDING = "server_is_overloaded", ("server_shutdown", "engine_dead")


def run_batch(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises ForetokenError."""
    parser = BatchParser()
    config, values = ServerConfig.of_command(argv, parser)
    for name in ("input", "output"):
        if name not in values:
            parser.error(f"--{name} is missing: foretoken run-batch --input requests.jsonl --output answers.jsonl")
    # Only this process asks: it needs no key, and waits for a seat as long as it takes.
    config = replace(config, api_keys=(), key_priorities=(), request_timeout_s=values.get("request_timeout_s", NO_TIMEOUT_S))
    try:
        return _run(config, Path(values["input"]), Path(values["output"]), values)
    except BatchError as error:
        return failed(error, DATA)


def _run(config: ServerConfig, source: Path, target: Path, values: dict[str, Any]) -> int:
    if target.exists() and source.exists() and target.samefile(source):
        raise BatchError("--input and --output are the same file")
    require_folders(config.engine)
    num_lines = sum(1 for _ in read_lines(source))  # that it can be read is known before a file is made
    answers = Answers(target)
    report = Report(answers, num_lines)
    try:
        _refuse_faulty(source, answers, report)
        status = 0
        if answers.num_lines < num_lines:
            status = _answer(config, source, answers, report, values)
        return report.close() or status
    finally:
        answers.close()


def _refuse_faulty(source: Path, answers: Answers, report: Report) -> None:
    """What no model needs to see is answered at once. Raises BatchError if the output is that of another input."""
    ids: set[str] = set()
    faulty: set[int] = set()
    for line in read_lines(source):
        if line.fault is None:
            assert line.custom_id is not None
            ids.add(line.custom_id)
            answers.forget_fault(line)
        else:
            faulty.add(line.number)
    if (other := answers.others(ids, faulty)) is not None:  # nothing may be added to it
        raise BatchError(f"--output {answers.path} answers another input ({other} is not in this one); name another file")
    for line in read_lines(source):
        if line.fault is not None and not answers.has(line):
            answers.add(line.refusal)
            report.failed(line, line.fault)


def _answer(config: ServerConfig, source: Path, answers: Answers, report: Report, values: dict[str, Any]) -> int:
    """Load the model and have the rest answered. Returns the exit status."""
    logging.config.dictConfig(log_config(values.get("log_level", "warning")))
    with Loading() as progress:
        progress("loading PyTorch")
        with imported():
            from ..engine.boot import boot
        with kept():
            engine = boot(config.engine, progress)
    rows = config.engine.scheduler.max_num_seqs
    concurrency = min(values.get("concurrency", 2 * rows), rows + config.max_queued_requests)
    waiting = (line for line in read_lines(source) if line.fault is None and not answers.has(line))
    try:
        asyncio.run(_answer_all(engine, config, waiting, concurrency, answers, report))
    except asyncio.CancelledError:
        report.stopped = "stopped"
        return INTERRUPTED
    except EngineEnded as error:
        report.stopped = str(error)
        return SOFTWARE
    return 0


class EngineEnded(Exception):
    """The engine answers no more. What is not in the output has no answer yet."""


async def _answer_all(
    engine: Engine, config: ServerConfig, waiting: Iterator[Line], concurrency: int, answers: Answers, report: Report
) -> None:
    """Raises CancelledError on a signal, EngineEnded, BatchError; then the requests under way are given up."""
    from ..engine.async_engine import AsyncEngine
    from .app import create_app

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    ending = ending_signals()
    for sig in ending:
        loop.add_signal_handler(sig, task.cancel)
    driver = AsyncEngine(engine)
    app = create_app(driver, config)
    await driver.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        report.begin(driver)
        client = httpx.AsyncClient(transport=transport, base_url="http://batch", headers=HEADERS, timeout=None)
        async with app.router.lifespan_context(app), client:

            async def work() -> None:
                for line in waiting:  # shared: each takes the next one
                    status, request_id, body = await _ask(client, line)
                    answers.add(line.answer(status, request_id, body))
                    report.answered(line, status, body)

            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(work())
    except ExceptionGroup as group:  # the first to fail ends them all
        raise group.exceptions[0] from None
    finally:
        for sig in ending:
            loop.remove_signal_handler(sig)
        await driver.stop()


async def _ask(client: httpx.AsyncClient, line: Line) -> tuple[int, str, Any]:
    """Status, request id and body of the app's answer; waits while the queue is full. Raises EngineEnded."""
    while True:
        response = await client.post(line.url, content=line.body)
        body = response.json()
        code = (body.get("error") or {}).get("code") if response.status_code != OK else None
        if code in ENDING:
            raise EngineEnded("the engine has stopped")
        if code != OVERLOADED:
            return response.status_code, response.headers["x-request-id"], body
        await asyncio.sleep(float(response.headers.get("retry-after", 1)))


@dataclass
class Report:
    """The bar while it runs, the failures as they come, and the figures at the end."""

    answers: Answers
    num_lines: int
    stopped: str = ""  # why, if not all was answered

    def __post_init__(self) -> None:
        self._told = self._tokens = 0
        self._start: float | None = None
        self._driver: AsyncEngine | None = None
        self._bar: tqdm[NoReturn] | None = None
        self._earlier = self.answers.num_lines

    def begin(self, driver: AsyncEngine) -> None:
        self._driver, self._start = driver, time.monotonic()
        self._bar = tqdm(
            total=self.num_lines, initial=self.answers.num_lines, leave=False, dynamic_ncols=True, disable=None, bar_format=BAR
        )

    def answered(self, line: Line, status: int, body: Any) -> None:
        if status == OK:
            usage = body.get("usage") or {}
            self._tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        else:
            self.failed(line, f"status {status}: {(body.get('error') or {}).get('message', 'no message')}")
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update()

    def failed(self, line: Line, why: str) -> None:
        """The first ones are told; the output has them all."""
        self._told += 1
        name = f"line {line.number}" + (f" ({line.custom_id[:60]})" if line.custom_id is not None else "")
        if self._told <= TOLD_FAILURES:
            tqdm.write(f"foretoken: {name}: {' '.join(why.split())[:300]}", file=sys.stderr)
        elif self._told == TOLD_FAILURES + 1:
            tqdm.write(f"foretoken: more lines failed; {self.answers.path} has every error", file=sys.stderr)

    def close(self) -> int:
        """Tells how it went. Returns the exit status as far as the lines decide it."""
        if self._bar is not None:
            self._bar.close()
        answers = self.answers
        left = self.num_lines - answers.num_lines
        print(f"{answers.path}: {answers.num_ok:,} answered, {answers.num_failed:,} failed, {left:,} left of {self.num_lines:,} lines")
        if self._earlier:
            print(f"{self._earlier:,} of them were there before")
        if self._start is not None:
            print(f"{self._tokens:,} tokens in {time.monotonic() - self._start:,.1f} s: {self._speed()}")
        if self.stopped:
            print(f"foretoken: {self.stopped}; the same command goes on with the lines that are left", file=sys.stderr)
            return 0
        return DATA if answers.num_failed else 0

    def _speed(self) -> str:
        """`1,234 tokens/s, 61% of guesses kept`."""
        assert self._driver is not None and self._start is not None
        stats = self._driver.stats()
        parts = [f"{self._tokens / max(time.monotonic() - self._start, 1e-9):,.0f} tokens/s"]
        if stats.num_draft_tokens:
            parts.append(f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%} of guesses kept")
        return ", ".join(parts)
