"""`foretoken bench serve`: load any OpenAI-compatible server, and measure latency, throughput and accepted drafts."""

import asyncio
import math
import random
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import cycle, islice
from typing import Any

from tqdm import tqdm

from ..config import variable
from ..exit_status import INTERRUPTED, UNAVAILABLE, USAGE, failed
from ..short_turns import take_short_turns
from . import serve_acceptance as acceptance
from . import serve_options as options
from .load_client import LoadClient, ServerFailed
from .prompt_sets import RANDOM, Prompt, PromptSetError, load, random_words
from .serve_files import plot, write_csv, write_each, write_json
from .serve_load import Load, Player, RequestTemplate, Run
from .serve_options import Options
from .serve_results import failures, table

SOME_FAILED = 1  # exit status
NUM_RANDOM = 64
BUSY_CLIENT = 0.7
"""Share of a core above which this client may be what is measured."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 only if every request of every run was answered."""
    wanted = options.read(argv)
    try:
        prompts = _prompts(wanted)
    except PromptSetError as error:
        return failed(error, USAGE)
    bench = _Bench(wanted, prompts)
    status = 0
    try:
        bench.measure()
    except ServerFailed as error:
        status = failed(_advice(error), UNAVAILABLE)
    except KeyboardInterrupt:
        status = INTERRUPTED
    runs = [run for run in bench.runs if run.outcomes]
    if not runs:
        return status
    found = [bench.fields(run) for run in runs]
    print(table(found, wanted.report))
    for run, one in zip(runs, found, strict=True):
        for line in (*failures(run), *_doubts(one)):
            print(f"{'' if len(runs) == 1 else f'{_name(run.load)}: '}{line}")
    try:
        _write(wanted, shlex.join(["foretoken", "bench", "serve", *argv]), runs, found)
    except OSError as error:
        return failed(f"the results cannot be written: {error}", USAGE)
    if not any(one["completed"] for one in found):
        return status or UNAVAILABLE
    return status or (SOME_FAILED if any(one["failed"] for one in found) else 0)


class _Bench:
    """One server, and the runs against it as far as they came."""

    def __init__(self, wanted: Options, prompts: Sequence[Prompt]) -> None:
        self._wanted, self._prompts = wanted, prompts
        self.runs: list[Run] = []
        self._speculation: dict[int, Mapping[str, Any]] = {}  # of a run, by its place in `runs`
        self._model = ""
        self._date = datetime.now().strftime("%Y%m%d-%H%M%S")

    def measure(self) -> None:
        """One load after the other, until one gets no answer at all. Raises ServerFailed if not even a warm-up request does."""
        wanted, args = self._wanted, self._wanted.args
        take_short_turns()  # a server on this machine computes on all cores: the wait for one would count as its latency
        key = args.api_key or variable("FORETOKEN_API_KEY") or variable("OPENAI_API_KEY")
        client = LoadClient(wanted.base_url, key, args.timeout)
        with asyncio.Runner() as runner:
            self._model = runner.run(_model(client, args.served_model_name or args.model))
            template = RequestTemplate(self._model, wanted.endpoint, wanted.settings, args.prediction)
            for place in wanted.loads:
                before = runner.run(self._begin(client, template))
                run = Run(place)
                self.runs.append(run)
                total = sum(map(template.requests, self._prompts))
                with tqdm(total=total, desc=_name(place), unit="request", leave=False, disable=args.disable_tqdm or None) as bar:
                    runner.run(Player(client, template, bar.update).play(self._prompts, run, args.seed))
                after = runner.run(acceptance.read(client))
                if before is not None and after is not None:
                    self._speculation[len(self.runs) - 1] = after.since(before).fields()
                if not run.answers or run.not_sent:
                    return

    async def _begin(self, client: LoadClient, template: RequestTemplate) -> acceptance.Speculation | None:
        await Player(client, template).warm_up(self._prompts[: self._wanted.args.num_warmups])
        return await acceptance.read(client)

    def fields(self, run: Run) -> dict[str, Any]:
        """All that a result file says of a run, by the names of `vllm bench serve`."""
        place, args = run.load, self._wanted.args
        return {
            "date": self._date,
            "backend": "openai-chat" if self._wanted.endpoint == "chat" else "openai",
            "label": args.label,
            "model_id": self._model,
            "dataset": str(args.dataset_path or args.dataset),
            "num_prompts": len(self._prompts),
            "request_rate": "inf" if math.isinf(place.request_rate) else place.request_rate,
            "burstiness": place.burstiness,
            "max_concurrency": place.concurrency,
            **self._wanted.report.fields(run),
            **self._speculation.get(self.runs.index(run), {}),
        }


def _prompts(wanted: Options) -> list[Prompt]:
    """As many as are asked for, in a random but repeatable order: files tend to be sorted by kind."""
    args = wanted.args
    if args.dataset == RANDOM and args.dataset_path is None:
        return random_words(args.num_prompts or NUM_RANDOM, args.random_input_len, args.seed)
    found = load(args.dataset, args.dataset_path)
    random.Random(args.seed).shuffle(found)
    return list(islice(cycle(found), args.num_prompts or len(found)))


async def _model(client: LoadClient, name: str | None) -> str:
    """The name to ask for. Raises ServerFailed, also for a name that the server does not list."""
    try:
        listed = await client.models()
    except ServerFailed as error:
        if name and error.status in (404, 405, 501):  # it lists none, but may well serve one
            return name
        raise
    if name and name not in listed:
        raise ServerFailed(f"{client.url} has no model {name!r}, only {', '.join(map(repr, listed))}: correct --model, or leave it out")
    return name or listed[0]


def _advice(error: ServerFailed) -> str:
    match error.status:
        case 401 | 403:
            return f"{error}. Give the server's key with --api-key, or in OPENAI_API_KEY"
        case 429 | 503:
            wait = f" in {error.retry_after_s:g} s" if error.retry_after_s is not None else " later"
            return f"{error}. It turns requests away already before a run: try again{wait}"
    return str(error)


def _doubts(fields: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the figures."""
    found: list[str] = []
    if fields["rate_limited"]:
        wait = f"; it asked for a pause of up to {fields['max_retry_after_s']:g} s" if "max_retry_after_s" in fields else ""
        found.append(f"the server turned away {fields['rate_limited']} requests as too many (status 429 or 503){wait}")
    if fields["client_cpu_share"] > BUSY_CLIENT:
        found.append(f"this client was busy {fields['client_cpu_share']:.0%} of the time: its own speed may be part of the figures")
    return found


def _name(place: Load) -> str:
    rate = "" if math.isinf(place.request_rate) else f"{place.request_rate:g} requests/s"
    places = f"concurrency {place.concurrency}" if place.concurrency else ""
    return ", ".join(part for part in (rate, places) if part) or "all at once"


def _write(wanted: Options, command: str, runs: Sequence[Run], found: Sequence[Mapping[str, Any]]) -> None:
    args = wanted.args
    if args.json:
        write_json(args.json, command, found)
    if args.csv:
        write_csv(args.csv, found)
    if args.plot:
        plot(args.plot, runs, found)
    if args.save_result:
        for path in write_each(args.result_dir, args.result_filename, found):
            print(f"saved {path}")
