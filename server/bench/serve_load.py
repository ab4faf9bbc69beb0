"""Plays conversations to a server at a chosen concurrency or rate of arrivals, and writes down what became of each request.

Knows no statistics: what is made of the times is for `serve_results`.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .contestants import PATHS
from .load_client import Answer, LoadClient, ServerFailed, Unreachable
from .prompt_sets import Prompt


@dataclass(frozen=True)
class Load:
    """How requests come: conversations a second, and how many of them at once."""

    concurrency: int | None = None  # None: no limit
    request_rate: float = math.inf  # conversations a second; inf: all at once, as far as there are places
    burstiness: float = 1.0  # 1: a Poisson process; below, in bursts; above, more evenly

    def arrivals(self, number: int, seed: int) -> list[float]:
        """Seconds from the beginning, ascending; gaps follow a gamma distribution with the mean 1 / request_rate."""
        if math.isinf(self.request_rate):
            return [0.0] * number
        draw = random.Random(seed)
        scale = 1 / (self.request_rate * self.burstiness)
        return [0.0, *accumulate(draw.gammavariate(self.burstiness, scale) for _ in range(number - 1))][:number]


@dataclass(frozen=True)
class Outcome:
    """What became of one request: an answer or a failure."""

    started_s: float  # from the beginning of the run
    answer: Answer | None = None
    failure: ServerFailed | None = None


@dataclass
class Run:
    """One load as it went. Grows while it is played, so that an interrupted one can be reported."""

    load: Load
    outcomes: list[Outcome] = field(default_factory=list)
    not_sent: int = 0  # since the server had gone
    seconds: float = 0.0  # from the first request to the last answer
    client_cpu_s: float = 0.0
    most_at_once: int = 0

    @property
    def answers(self) -> list[Answer]:
        return [outcome.answer for outcome in self.outcomes if outcome.answer is not None]

    @property
    def failures(self) -> list[ServerFailed]:
        return [outcome.failure for outcome in self.outcomes if outcome.failure is not None]


@dataclass(frozen=True)
class RequestTemplate:
    """What every request asks for beside its text."""

    model: str
    endpoint: str  # a key of PATHS
    settings: Mapping[str, Any]  # max_tokens, temperature, ...
    send_prediction: bool = False

    def body(self, prompt: Prompt, said: Sequence[str]) -> dict[str, Any]:
        """said: what the user and the model said so far, in turn; the last is the user's."""
        body: dict[str, Any] = {"model": self.model, **self.settings}
        if self.endpoint == "completions":
            body["prompt"] = said[-1]
        else:
            opening = [{"role": "system", "content": prompt.system}] if prompt.system else []
            body["messages"] = opening + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        if self.send_prediction and prompt.prediction:
            body["prediction"] = {"type": "content", "content": prompt.prediction}
        return body

    def requests(self, prompt: Prompt) -> int:
        """Of a conversation. Plain completions have no turns: only the first is asked for."""
        return 1 if self.endpoint == "completions" else len(prompt.turns)


class Player:
    """Conversations with one server."""

    def __init__(self, client: LoadClient, template: RequestTemplate, answered: Callable[[], object] = lambda: None) -> None:
        """answered() is called after each request, whatever came of it."""
        self._client, self._template, self._answered = client, template, answered
        self._at_once = 0

    async def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """First turns, all at once. Raises the first failure: it would be everybody's."""
        await asyncio.gather(*(self._ask(prompt, [prompt.turns[0]]) for prompt in prompts))

    async def play(self, prompts: Sequence[Prompt], run: Run, seed: int = 0) -> None:
        """All conversations. Failed requests end theirs and no other; once the server has gone, no more are sent."""
        places = asyncio.Semaphore(run.load.concurrency or len(prompts))
        gone = asyncio.Event()
        began, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for prompt, arrival in zip(prompts, run.load.arrivals(len(prompts), seed), strict=True):
                    if (wait := began + arrival - time.perf_counter()) > 0 and not gone.is_set():
                        await asyncio.sleep(wait)
                    group.create_task(self._converse(prompt, run, places, gone, began))
        finally:
            run.seconds, run.client_cpu_s = time.perf_counter() - began, time.process_time() - cpu

    async def _converse(self, prompt: Prompt, run: Run, places: asyncio.Semaphore, gone: asyncio.Event, began: float) -> None:
        async with places:
            said: list[str] = []
            turns = prompt.turns[: self._template.requests(prompt)]
            for number, turn in enumerate(turns):
                if gone.is_set():
                    run.not_sent += len(turns) - number
                    return
                started = time.perf_counter() - began
                self._at_once += 1
                run.most_at_once = max(run.most_at_once, self._at_once)
                try:
                    answer = await self._ask(prompt, [*said, turn])
                except ServerFailed as failure:
                    run.outcomes.append(Outcome(started, failure=failure))
                    if isinstance(failure, Unreachable):
                        gone.set()
                    run.not_sent += len(turns) - number - 1
                    return
                finally:
                    self._at_once -= 1
                    self._answered()
                run.outcomes.append(Outcome(started, answer))
                said += [turn, answer.text]

    async def _ask(self, prompt: Prompt, said: Sequence[str]) -> Answer:
        return await self._client.complete(PATHS[self._template.endpoint], self._template.body(prompt, said), stream=True)
