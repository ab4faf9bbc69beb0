"""`foretoken bench speculation`: every method and k against no speculation on this machine, and what to set.

Owns the flags and what is printed and written; the measuring is engine/bench/speculation.py.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tqdm import tqdm

from ...engine.bench.advice import advice, recommended
from ...engine.bench.choice import by_setting, choose, scores
from ...engine.bench.machine import this_machine
from ...engine.bench.speculation import Bench, Effort, Method
from ...engine.bench.speculation_figures import OFF, Figures
from ...engine.bench.speculation_plot import plot
from ...engine.bench.speculation_report import closing, paste, tables
from ...engine.bench.speculation_turn import Step
from ...engine.errors import ForetokenError
from ..exit_status import CONFIG, failed
from ..help_format import CommandParser
from ..option_forms import new_file, new_picture
from .speculation_flags import add_flags, conversations_of, engine_options, methods_of

EXAMPLES = """\
examples:
  foretoken bench speculation
  foretoken bench speculation ./my-model --dataset prompts.jsonl --concurrency 1,8
  foretoken bench speculation ./my-model --speculative-config '{"method": "draft_model", "model": "./my-draft"}' --k 2,3,4
  foretoken bench speculation --methods ngram,draft_model --k 3 --per-request --plot speed.png --json speed.json
  foretoken bench speculation --methods draft_model --show-steps

Let the machine do nothing else meanwhile. Each method is measured by itself, in turns with no speculation.
"""
SCHEMA = 2
SHOWN_TOKENS = 32  # of a generation whose steps are shown


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 78 if something cannot be loaded or measured."""
    args = _parser().parse_args(argv)
    try:
        methods, conversations = methods_of(args), conversations_of(args)
        if args.show_steps:
            return _show_steps(args, methods, conversations[0])
        found = _measure(args, methods, conversations)
    except (ForetokenError, OSError) as error:
        return failed(error, CONFIG)
    _say(args, found, {method.name: method for method in methods}, shlex.join(["foretoken", "bench", "speculation", *argv]))
    return 0


def _measure(args: argparse.Namespace, methods: Sequence[Method], conversations: Sequence[Any]) -> list[Figures]:
    """Raises ForetokenError."""
    effort, options = Effort(args.max_tokens, args.rounds, args.temperature, args.ignore_eos), engine_options(args)
    turns = (len(args.k) + 2) * (effort.rounds + 1) * len(args.concurrency)  # of one method; k and adaptive, and no speculation
    found: list[Figures] = []
    with tqdm(total=turns * len(methods), unit="turn", leave=False, dynamic_ncols=True, disable=None) as bar:

        def on_turn() -> None:
            bar.update()

        for number, method in enumerate(methods, 1):
            bar.set_description(f"loading {method.name}")
            with Bench(args.model, method, args.k, max(args.concurrency), options) as bench:
                prompts = bench.read(conversations, effort.max_tokens)
                for concurrency in args.concurrency:
                    bar.set_description(f"{method.name}, {concurrency} at a time")
                    found += bench.measure(bench.settings, prompts, concurrency, effort, on_turn)
                if bench.fault:
                    tqdm.write(f"foretoken: warning: {bench.fault}", file=sys.stderr)
                if len(prompts) < len(conversations) and number == 1:
                    tqdm.write(f"foretoken: {len(conversations) - len(prompts)} prompts do not fit the context", file=sys.stderr)
            bar.update(turns * number - bar.n)  # a checkpoint may know fewer lengths than were asked for
    return sorted(found, key=lambda figures: figures.concurrency)


def _say(args: argparse.Namespace, found: Sequence[Figures], methods: dict[str, Method], command: str) -> None:
    best = best_of(found)
    sentence, entries = advice(found), recommended(found, methods)
    print("\n".join(table.markdown() for table in tables(found, best if args.per_request else None)))
    print(closing(best, sentence, entries))
    if args.json:
        report = {
            "schema": SCHEMA, "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": dataclasses.asdict(this_machine()), "figures": [as_json(figures) for figures in found], "advice": sentence,
            "speculative_config": entries, "paste": paste(entries),
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.plot:
        machine = this_machine()
        plot(found, args.plot, f"{args.model}: {machine.cpu}, {machine.cores} cores")


def best_of(found: Sequence[Figures]) -> Figures:
    """The chosen setting, or the nearest miss, with the fewest requests at a time."""
    scored = scores(found)
    chosen = choose(scored)
    return by_setting(found)[max(scored, key=lambda setting: scored[setting].value) if chosen == OFF else chosen][0]


def as_json(figures: Figures) -> dict[str, Any]:
    """All fields, and what follows from them."""
    derived = (
        "mean_accepted_length", "published", "predicted", "drafting_factor", "verification_factor", "bookkeeping_factor", "rest_factor",
    )
    return dataclasses.asdict(figures) | {name: getattr(figures, name) for name in derived}


def _show_steps(args: argparse.Namespace, methods: Sequence[Method], conversation: Any) -> int:
    """One short answer by each method. With a single --k always so many guesses, else as many as the engine likes."""
    effort = Effort(min(args.max_tokens, SHOWN_TOKENS), 1, args.temperature, args.ignore_eos)
    for method in methods:
        with Bench(args.model, method, args.k, 1, engine_options(args)) as bench:
            prompts = bench.read([conversation], effort.max_tokens)
            setting = bench.settings[0 if len(args.k) == 1 else -1]
            bench.turn(setting, prompts, 1, effort)  # warms up
            print(f"{setting.label}:")
            turn = bench.turn(setting, prompts, 1, effort, _print_step)
            said = _text(bench, turn.answers[0].token_ids)
            print(f"  {turn.tokens} tokens in {len(turn.steps)} steps, {turn.seconds * 1e3:.1f} ms: {said!r}")
    return 0


def _print_step(step: Step) -> None:
    print(f"  {step.describe()}")


def _text(bench: Bench, token_ids: list[int]) -> str:
    text = str(bench.engine.tokenizer.decode(token_ids))
    return text if len(text) <= 60 else text[:60] + "..."


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken bench speculation",
        description="Measure every method and draft length against no speculation on this machine: speed, acceptance, where the gain goes.",
        epilog=EXAMPLES,
    )
    add_flags(parser, concurrency=(1, 8, 32), max_tokens=64, num_prompts=8, rounds=5)
    add = parser.add_argument
    add("--per-request", action="store_true", help="a table of the single requests, too")
    add("--show-steps", action="store_true", help="one line for each step of a short answer, and nothing else")
    add("--json", type=new_file, metavar="FILE", help="write all figures there")
    add("--plot", type=new_picture, metavar="FILE", help="draw a heat map and curves over k there (PNG)")
    return parser


