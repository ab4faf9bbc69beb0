"""Speed of each method through the real server against no speculation: two kinds of server side by side, asked the same in turn.

One server without speculation and one for each method run at once, and only one of them works at a time: whoever is measured has the
machine for itself. A request has the same seed everywhere, so everybody says the same text, and that is counted as well. Every turn
has a cache salt of its own: nothing is found in a prefix cache or a suffix tree that an earlier turn left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...engine.bench.checkpoints import Model
from ...engine.bench.interleaved import take_turns, timed
from ...engine.bench.measurement import Subject
from ...kernels.native_library import usable_cores
from ..bench.kernels_http import COMPLETIONS, ServerProcess
from ..bench.load_client import Answer, LoadClient
from .cells import Cells
from .members import OFF

TEMPERATURES = (0.0, 0.7, 1.0)
AT_LEAST = 4                         # requests of a turn; fewer at once than that go one after another

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Cell:
    """One case, for all methods."""

    domain: str
    temperature: float
    batch: int


@dataclass(frozen=True)
class Contest:
    """A method against no speculation."""

    method: str
    speculation: Mapping[str, Any]   # as `--speculative-config` takes it
    mark: str                        # fingerprint of all weights


@dataclass(frozen=True)
class SpeedEffort:
    """What every turn asks for, and how many turns count."""

    k: int
    max_tokens: int
    rounds: int
    threads: int | None


@dataclass
class Contestant:
    """A running server, and what it has said of one cell so far."""

    client: LoadClient
    model: str
    wish: Mapping[str, Any]          # `speculation` of its requests
    turns: count[int] = field(default_factory=count)
    texts: list[str] = field(default_factory=list)

    async def take(self, cell: Cell, prompts: Prompts, effort: SpeedEffort, salt: str) -> int:
        """Ask for one turn's answers, `batch` at a time. Returns their tokens. Raises ServerFailed."""
        size, tokens = max(cell.batch, AT_LEAST), 0
        first = next(self.turns) * size
        places = range(first, first + size)
        for start in range(0, size, cell.batch):
            asked = (self._ask(cell, prompts[i % len(prompts)], i, effort, salt) for i in places[start : start + cell.batch])
            answers: list[Answer] = await asyncio.gather(*asked)
            tokens += sum(answer.tokens for answer in answers)
            self.texts += [answer.text for answer in answers]
        return tokens

    async def _ask(self, cell: Cell, prompt: Sequence[int], seed: int, effort: SpeedEffort, salt: str) -> Answer:
        request = {
            "model": self.model, "prompt": list(prompt), "max_tokens": effort.max_tokens, "temperature": cell.temperature, "seed": seed,
            "cache_salt": salt, "speculation": self.wish,
        }
        return await self.client.complete(COMPLETIONS, request, stream=True)


def measure_speed(
    target: Path, contests: Sequence[Contest], wanted: Sequence[Cell], prompts: Mapping[str, Prompts], effort: SpeedEffort, cells: Cells
) -> list[dict[str, Any]]:
    """One row for each cell and method. Raises ServerFailed if a server does not come up or refuses."""

    def key(cell: Cell, contest: Contest) -> tuple[str | int | float, ...]:
        about = (cell.domain, cell.temperature, cell.batch, effort.k, effort.max_tokens, effort.rounds)
        return ("speed", contest.method, *about, contest.mark)

    missing = {cell: [contest for contest in contests if cells.get(*key(cell, contest)) is None] for cell in wanted}
    missing = {cell: some for cell, some in missing.items() if some}
    with ExitStack() as running:
        runner = running.enter_context(asyncio.Runner())
        subject = Subject(Model(target.name, str(target), target), "bf16", effort.threads or usable_cores())
        needed = {contest.method: contest for some in missing.values() for contest in some}
        started: dict[str, tuple[LoadClient, str, Mapping[str, Any]]] = {}
        for method, speculation in _servers(needed):
            process = running.enter_context(ServerProcess(subject, speculation))
            client = LoadClient(process.url)
            wish = {"method": method} if method == OFF else {"method": method, "num_speculative_tokens": effort.k}
            started[method] = client, runner.run(client.model()), wish
        turns = sum((effort.rounds + 1) * (1 + len(some)) for some in missing.values())
        bar = running.enter_context(tqdm(total=turns, unit="turn", dynamic_ncols=True, disable=not missing))
        salts = count()

        def shown() -> None:
            bar.update()

        for cell, some in missing.items():
            bar.set_description(f"{cell.domain}, temperature {cell.temperature:g}, batch {cell.batch}")
            names = [OFF, *(contest.method for contest in some)]
            contestants = {name: Contestant(*started[name]) for name in names}

            def turn(name: str, cell: Cell = cell, contestants: Mapping[str, Contestant] = contestants) -> float:
                """Tokens per second."""
                tokens: list[int] = []
                asked = contestants[name].take(cell, prompts[cell.domain], effort, f"turn-{next(salts)}")
                seconds = timed(lambda: tokens.append(runner.run(asked)))
                return tokens[0] / seconds

            rates = take_turns({name: lambda name=name: turn(name) for name in names}, effort.rounds, shown)
            plain = contestants[OFF].texts
            for contest in some:
                speedup = rates[contest.method].over(rates[OFF])
                texts = contestants[contest.method].texts
                cells.put(*key(cell, contest), result={
                    "method": contest.method, "domain": cell.domain, "temperature": cell.temperature, "batch": cell.batch, "k": effort.k,
                    "tokens_per_s": round(rates[contest.method].spread.median, 1),
                    "plain_tokens_per_s": round(rates[OFF].spread.median, 1),
                    "speedup": round(speedup.median, 3), "low": round(speedup.low, 3), "high": round(speedup.high, 3),
                    "answers": len(texts), "same_answers": sum(a == b for a, b in zip(texts, plain, strict=True)),
                })
    found = [cells.get(*key(cell, contest)) for contest in contests for cell in wanted]
    return [row for row in found if row is not None]


def _servers(needed: Mapping[str, Contest]) -> list[tuple[str, Mapping[str, Any]]]:
    """(method, speculative config) of every server to start; none if there is nobody to compare."""
    plain = [(OFF, {"method": OFF})] if needed else []
    return [*plain, *((method, contest.speculation) for method, contest in needed.items())]
