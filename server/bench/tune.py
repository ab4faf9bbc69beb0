"""`foretoken tune`: finds the speculation that is fastest for the user's own prompts, and writes it where `serve --config` reads it.

Many settings are tried shortly, the better half of them longer, and the last few in as many turns as figures take (successive halving,
Jamieson & Talwalkar 2016). Every turn has one without speculation beside it.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from ...engine.bench.advice import advice, recommended
from ...engine.bench.choice import by_setting, choose, scores, survivors
from ...engine.bench.machine import this_machine
from ...engine.bench.speculation import Bench, Conversation, Effort, Method
from ...engine.bench.speculation_figures import OFF, Figures, Setting
from ...engine.config import DEMO_MODEL
from ...engine.errors import ConfigError, ForetokenError
from ..exit_status import CONFIG, failed
from ..help_format import CommandParser
from .speculation_flags import add_flags, conversations_of, engine_options, evenly, methods_of

EXAMPLES = """\
examples:
  foretoken tune ./my-model --dataset my-prompts.jsonl
  foretoken tune ./my-model --dataset my-prompts.jsonl --concurrency 1,8,32 --temperature 0.7 --out server.yaml
  foretoken tune ./my-model --dataset my-prompts.jsonl --speculative-config '{"method": "draft_model", "model": "./my-draft"}'
  foretoken serve --config foretoken.yaml

The prompts and the length of the answers should be those of your traffic. Let the machine do nothing else meanwhile.
"""
MARK = "# Written by `foretoken tune`"
FINALISTS = 3
FIRST_PROMPTS, FIRST_ROUNDS = 2, 1  # of the shortest runs; every further heat has twice as many


@dataclass(frozen=True)
class Heat:
    """How long the settings that are left are run."""

    num_prompts: int
    rounds: int


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, also if speculation does not pay; 78 if something cannot be loaded, measured or written."""
    args = _parser().parse_args(argv)
    command = shlex.join(["foretoken", "tune", *argv])
    try:
        _require_ours(args.out)
        methods, conversations = {method.name: method for method in methods_of(args)}, conversations_of(args)
        with tqdm(unit="answer", leave=False, dynamic_ncols=True, disable=None) as bar:
            found = _Tuning(args, methods, conversations, bar).run()
        page = settings_file(args.model, found, methods, engine_options(args), _about(args, command, len(conversations), found))
        args.out.write_text(page, encoding="utf-8")
    except (ForetokenError, OSError) as error:
        return failed(error, CONFIG)
    print(_table(found))
    print(_verdict(found))
    print(f"Wrote {args.out}; serve it with: foretoken serve --config {shlex.quote(str(args.out))}")
    return 0


def heats(num_settings: int, num_prompts: int, rounds: int) -> list[Heat]:
    """Twice the prompts, then twice the rounds, from heat to heat; the last one, for at most FINALISTS settings, has all of them."""
    found: list[Heat] = []
    left, heat = num_settings, Heat(min(FIRST_PROMPTS, num_prompts), min(FIRST_ROUNDS, rounds))
    while left > FINALISTS:
        found.append(heat)
        left = max(FINALISTS, math.ceil(left / 2))
        more = min(2 * heat.num_prompts, num_prompts)
        heat = Heat(more, heat.rounds if more > heat.num_prompts else min(2 * heat.rounds, rounds))
    return [*found, Heat(num_prompts, rounds)]


class _Tuning:
    """One run: who is left, and the bar."""

    def __init__(
        self, args: argparse.Namespace, methods: Mapping[str, Method], conversations: Sequence[Conversation], bar: tqdm[Any]
    ) -> None:
        self._args, self._methods, self._conversations, self._bar = args, methods, conversations, bar
        self._effort = Effort(args.max_tokens, args.rounds, args.temperature, args.ignore_eos)

    def run(self) -> list[Figures]:
        """Figures of the finalists. Raises ForetokenError."""
        num_settings = len(self._methods) * (len(self._args.k) + 1)  # at most: a checkpoint may know fewer lengths
        plan = heats(num_settings, len(self._conversations), self._args.rounds)
        self._expect(plan, num_settings)
        found = self._heat(plan.pop(0), None)
        while plan:
            left = survivors(scores(found), FINALISTS)
            if len(left) <= FINALISTS:
                plan = plan[-1:]
            self._expect(plan, len(left))
            found = self._heat(plan.pop(0), left)
        return found

    def _heat(self, heat: Heat, left: Sequence[Setting] | None) -> list[Figures]:
        """Every setting that is left; None = all that each method has."""
        args = self._args
        found: list[Figures] = []
        effort = replace(self._effort, rounds=heat.rounds)
        for name, method in self._methods.items():
            if left is not None and not any(setting.method == name for setting in left):
                continue
            self._bar.set_description(f"loading {name}")
            with Bench(args.model, method, args.k, max(args.concurrency), engine_options(args)) as bench:
                prompts = evenly(bench.read(self._conversations, effort.max_tokens), heat.num_prompts)
                settings = [setting for setting in bench.settings if left is None or setting in left]
                for concurrency in args.concurrency:
                    self._bar.set_description(f"{name}, {concurrency} at a time, {heat.rounds} rounds")
                    answers = max(len(prompts), concurrency)
                    found += bench.measure(settings, prompts, concurrency, effort, partial(self._answered, answers))
                if bench.fault:
                    tqdm.write(f"foretoken: warning: {bench.fault}", file=sys.stderr)
        return found

    def _answered(self, count: int) -> None:
        self._bar.update(count)

    def _expect(self, plan: Sequence[Heat], num_settings: int) -> None:
        """How many answers are still to come, for the time left."""
        total = self._bar.n
        for heat in plan:
            turns = (num_settings + min(num_settings, len(self._methods))) * (heat.rounds + 1)
            total += turns * sum(max(heat.num_prompts, n) for n in self._args.concurrency)
            num_settings = max(min(FINALISTS, num_settings), math.ceil(num_settings / 2))
        self._bar.total = total
        self._bar.refresh()


def settings_file(
    model: str, found: Sequence[Figures], methods: Mapping[str, Method], options: Mapping[str, Any], about: Sequence[str]
) -> str:
    """YAML as `serve --config` reads it, below what was measured."""
    entries = recommended(found, methods)
    settings: dict[str, Any] = {"model": model if model == DEMO_MODEL or not Path(model).exists() else str(Path(model).absolute())}
    settings |= {name.replace("_", "-"): value for name, value in options.items()}
    settings["speculative-config"] = entries[0] if len(entries) == 1 else entries
    lines = [f"{MARK} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.", *(f"# {line}" for line in about)]
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _about(args: argparse.Namespace, command: str, num_prompts: int, found: Sequence[Figures]) -> list[str]:
    """What somebody who finds the file wants to know."""
    return [
        f"Command: {' '.join(command.split())}",
        f"Machine: {this_machine().describe()}",
        f"{num_prompts} prompts, answers of at most {args.max_tokens} tokens at temperature {args.temperature:g}, {args.rounds} rounds "
        "of turns with and without speculation.",
        *_table(found).splitlines(),
        _verdict(found),
    ]


def _table(found: Sequence[Figures]) -> str:
    lines = [f"{'':24} {'requests':>8} {'Baseline':>9} {'Speculative':>11} {'Speedup':>8} {'middle half':>12} {'Acceptance rate':>16}"]
    for figures in sorted(found, key=lambda f: (f.concurrency, -f.speedup.median)):
        f, rate = figures, figures.acceptance_rate
        spread = f"{f.speedup.low:.2f}-{f.speedup.high:.2f}"
        lines.append(
            f"{f.setting.label:24} {f.concurrency:8} {f.baseline.median:9.1f} {f.speculative.median:11.1f} {f.speedup.median:7.2f}x "
            f"{spread:>12} {'-' if rate is None else f'{rate * 100:.1f} %':>16}"
        )
    return "\n".join(lines)


def _verdict(found: Sequence[Figures]) -> str:
    """One line: what was chosen, or that speculation does not pay, and why."""
    chosen = choose(scores(found))
    if chosen == OFF:
        return f"Speculation does not pay for these prompts on this machine. {advice(found)}"
    speeds = ", ".join(f"{f.speedup.median:.2f}x with {f.concurrency}" for f in by_setting(found)[chosen])
    return f"Chosen: {chosen.label} ({speeds} at a time). {advice(found)}"


def _require_ours(path: Path) -> None:
    """Somebody's own settings are not written over. Raises ConfigError, before an hour of measuring."""
    if path.is_dir() or (path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK)):
        raise ConfigError(f"{path} exists, and `foretoken tune` did not write it: give another --out")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.absolute().parent}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken tune",
        description="Find the speculation that is fastest for your own prompts on this machine, and write the settings for serve --config.",
        epilog=EXAMPLES,
    )
    add_flags(parser, concurrency=(1, 8), max_tokens=128, num_prompts=32, rounds=9)
    parser.add_argument(
        "--out", type=Path, default=Path("foretoken.yaml"), metavar="FILE", help="where the settings go (default %(default)s)"
    )
    return parser
