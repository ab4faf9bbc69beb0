"""`foretoken train evaluate`: what a family of target and drafters can do on prompts it was never trained on.

Perplexity, answers and their form, accepted lengths by method and domain, and on request speed through the real server. What takes long
is kept as soon as it is known; the same command goes on where a killed run stopped.
"""

import argparse
import csv
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ...engine.bench.machine import this_machine
from ...engine.errors import ForetokenError
from ..bench.load_client import ServerFailed
from ..exit_status import CONFIG, UNAVAILABLE, failed
from ..help_format import CommandParser
from ..option_forms import count, several, temperature
from .acceptance import acceptance_of
from .answers import Booted, Effort, form_of, plain_answers, read_prompts, reference_losses
from .cells import Cells
from .members import OFF, FamilyFolder
from .report import ALL, acceptance_plot, speed_plot, speed_table
from .speed import TEMPERATURES, Cell, Contest, SpeedEffort, measure_speed

EXAMPLES = """\
examples:
  foretoken train evaluate --models engine/demo_model --prompts WORK/prompts_held_out.jsonl --out results
  foretoken train evaluate --models MODELS --prompts PROMPTS --out results --methods ngram,eagle3 --k 5 --speed
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if a method changed an answer, 69 if a server fails, 78 if something cannot be loaded."""
    parser = _parser()
    args = parser.parse_args(argv)
    family = FamilyFolder(args.models)
    if not (family.target / "config.json").exists():
        parser.error(f"{args.models} has no target/: name the folder of a family")
    methods = tuple(args.methods.split(",")) if args.methods else family.methods
    if unknown := sorted(set(methods) - set(family.methods)):
        parser.error(f"{args.models} has no {', '.join(unknown)}; there are {', '.join(family.methods)}")
    if not args.prompts.exists():
        parser.error(f"there is no file {args.prompts}: `foretoken train family` leaves prompts_held_out.jsonl in its work folder")
    command = shlex.join(["foretoken", "train", "evaluate", *argv])
    try:
        return _evaluate(args, family, methods, command)
    except (ForetokenError, ServerFailed) as error:
        return failed(error, UNAVAILABLE if isinstance(error, ServerFailed) else CONFIG)


def _evaluate(args: argparse.Namespace, family: FamilyFolder, methods: Sequence[str], command: str) -> int:
    effort, cells = Effort(args.max_tokens, args.k, args.threads), Cells(args.out / "cells.jsonl")
    with closing(Booted(family, OFF, effort)) as plain:
        room = plain.engine.model.max_model_len - max(effort.max_tokens, args.speed_tokens)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(family.target)
        asked = read_prompts(args.prompts, tokenizer, args.per_domain, room)
        bar = tqdm(asked, desc="answers", dynamic_ncols=True, disable=None)
        answers = {domain: plain_answers(plain, domain, asked[domain], effort, cells) for domain in bar}
        losses = {domain: reference_losses(plain, tokenizer, some) for domain, some in asked.items()}
    report: dict[str, Any] = {
        "command": command, "machine": this_machine().describe(), "prompts_per_domain": args.per_domain, "max_tokens": effort.max_tokens,
        "domains": {domain: form_of(some, answers[domain]) for domain, some in asked.items()},
    }
    if of_all := list(chain.from_iterable(losses.values())):
        known = {domain: some for domain, some in losses.items() if some} | {ALL: of_all}
        report["perplexity"] = [
            {"domain": domain, "tokens": len(some), "perplexity": math.exp(statistics.fmean(some))} for domain, some in known.items()
        ]
    report["acceptance"] = [row for method in methods for row in acceptance_of(method, family, asked, answers, effort, cells)]
    if args.speed:
        contests = [Contest(method, family.speculation(method, args.speed_k), family.mark(method)) for method in methods]
        wanted = [Cell(domain, temperature, batch) for domain in asked for temperature in args.temperatures for batch in args.batch]
        prompts = {domain: [one.token_ids for one in some] for domain, some in asked.items()}
        speed = SpeedEffort(args.speed_k, args.speed_tokens, args.rounds, effort.threads)
        report["speed"] = measure_speed(family.target, contests, wanted, prompts, speed, cells)
        (args.out / "speed.md").write_text(speed_table(report["speed"], report["machine"]), encoding="utf-8")
        speed_plot(report["speed"], args.out / "speed.png")
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    _write_csv(args.out / "acceptance.csv", report["acceptance"])
    acceptance_plot(report["acceptance"], args.out / "acceptance.png")
    changed = sum(row["answers"] - row["same_answers"] for row in report["acceptance"])
    print(_summary(report, max(effort.ks)))
    return 1 if changed else 0


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _summary(report: Mapping[str, Any], most: int) -> str:
    """A few lines for a person: forms, perplexity and accepted lengths over all domains."""
    forms: dict[str, list[int]] = {}
    for domain in report["domains"].values():
        for kind, (good, total) in domain["well_formed"].items():
            before = forms.get(kind, [0, 0])
            forms[kind] = [before[0] + good, before[1] + total]
    lines = [f"well-formed {kind}: {good} of {total}" for kind, (good, total) in forms.items()]
    lines += [
        f"perplexity of the corpus's own answers: {row['perplexity']:.2f} ({row['tokens']:,} tokens)"
        for row in report.get("perplexity", ()) if row["domain"] == ALL
    ]
    lines += [
        f"{row['method']:15} k={row['k']}: mean accepted length {row['mean_accepted_length']:.2f}"
        f" ({row['same_answers']} of {row['answers']} answers as without speculation)"
        for row in report["acceptance"] if row["domain"] == ALL and row["k"] == most
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken train evaluate",
        description="Measure a family on held-out prompts: perplexity, form of answers, accepted lengths, with --speed the server's speed.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--models", type=Path, required=True, metavar="DIR", help="folder of the family: target/, and one folder for each learned method")
    add("--prompts", type=Path, required=True, metavar="FILE",
        help="held-out prompts, jsonl: messages, and as you like domain, tools, reference")
    add("--out", type=Path, required=True, metavar="DIR", help="where results go; the same folder again goes on where a run stopped")
    add("--per-domain", type=count, default=24, metavar="N", help="prompts of each domain (default %(default)s)")
    add("--methods", metavar="A,B", help="proposers to measure (default: all that the family has, ngram and suffix)")
    add("--k", type=several(count), default=(3, 5, 7), metavar="K,K", help="draft lengths (default 3,5,7)")
    add("--max-tokens", type=count, default=256, metavar="N", help="of an answer (default %(default)s)")
    add("--threads", type=count, metavar="N", help="of an engine (default: all cores)")
    speed = parser.add_argument_group("speed").add_argument
    speed("--speed", action="store_true", help="measure the server end to end, with each method and without speculation in turn")
    speed("--speed-k", type=count, default=3, metavar="K", help="draft length (default %(default)s)")
    speed("--speed-tokens", type=count, default=96, metavar="N", help="of an answer (default %(default)s)")
    speed("--rounds", type=count, default=3, metavar="N", help="times that everybody has a turn (default %(default)s)")
    speed("--temperatures", type=several(temperature), default=TEMPERATURES, metavar="T,T", help="default 0,0.7,1")
    speed("--batch", type=several(count), default=(1, 32), metavar="N,N", help="requests at once (default 1,32)")
    return parser
