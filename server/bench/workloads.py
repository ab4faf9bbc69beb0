"""`foretoken bench workloads`: is speculation ever slower? Adaptive speculation against none, over kinds of work and batch sizes.

Owns the kinds of work, the flags and what is printed; the measuring is engine/bench/workloads.py.
"""

import argparse
import dataclasses
import json
import random
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...engine.bench.machine import this_machine
from ...engine.bench.workloads import ADAPTIVE, FEWEST_PAIRS, OFF, Comparison, Workload, compare
from ...engine.config import DEMO_MODEL
from ...engine.errors import ConfigError, ForetokenError
from ..exit_status import CONFIG, failed
from ..help_format import CommandParser
from ..option_forms import count, new_file, new_picture
from .prompt_sets import OWN, RANDOM, Prompt, PromptSetError, load, read
from .speculation_flags import conversation, numbers

EXAMPLES = """\
examples:
  foretoken bench workloads
  foretoken bench workloads --batch 1 --pairs 5 --only edits,json
  foretoken bench workloads --batch 1 --only 'edits known,json known'
  foretoken bench workloads ./my-model --speculative-config '{"method": "eagle3", "model": "./my-head"}' --markdown result.md

Let the machine do nothing else meanwhile.
"""
NOT_SLOWER, NOT_MUCH_SLOWER = 0.97, 0.94  # median and lower bound that count as "never slower"
RANDOM_TOKENS, RANDOM_PROMPTS = 64, 24
HOT = 20.0  # a temperature at which every token is as good as any other


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a kind of work is asked for. category: of the prompts; RANDOM: made up."""

    category: str
    max_tokens: int = 96
    temperature: float = 0.0
    ignore_eos: bool = False
    at_least: float | None = None  # at one request at a time
    is_predicted: bool = False  # a Predicted Output comes with the prompt
    is_known: bool = False  # and it is the very answer


KINDS: Mapping[str, Kind] = {
    "edits": Kind("edits", 160, at_least=2.5),
    "edits predicted": Kind("edits", 160, at_least=4.0, is_predicted=True),
    "json": Kind("json", at_least=2.0),
    "retrieval": Kind("retrieval", at_least=1.5),
    "chat": Kind("chat", at_least=1.5),
    "chat at 0.7": Kind("chat", temperature=0.7),
    "chat at 1": Kind("chat", temperature=1.0),
    "chat at 1.2": Kind("chat", temperature=1.2),
    "20 tokens": Kind("chat", 20, ignore_eos=True),
    "100 tokens": Kind("chat", 100, ignore_eos=True),
    "random tokens": Kind(RANDOM, 64, HOT, ignore_eos=True),
}
KNOWN: Mapping[str, Kind] = {
    f"{name} known": dataclasses.replace(KINDS[name], at_least=None, is_known=True) for name in ("edits", "json", "chat")
}
"""Measured if they are named: how much faster this machine is with guesses that are all right."""
ALL_KINDS = {**KINDS, **KNOWN}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if speculation was slower somewhere or changed a text, 78 if something cannot be loaded."""
    parser = _parser()
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only) - set(ALL_KINDS)):
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(ALL_KINDS)}")
    try:
        found = _measure(args)
    except (ForetokenError, OSError) as error:
        return failed(error, CONFIG)
    command = shlex.join(["foretoken", "bench", "workloads", *argv])
    text = report(found, command)
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps({
            "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": dataclasses.asdict(this_machine()),
            "comparisons": [dataclasses.asdict(one) for one in found],
        }, indent=1), encoding="utf-8")
    if args.plot:
        plot(found, args.plot)
    return 0 if all(holds(one) and one.same for one in found) else 1


def workloads(prompts: Sequence[Prompt], tokenizer: Any, names: Sequence[str]) -> list[Workload]:
    """Those of the kinds that there are prompts for."""
    found: list[Workload] = []
    for name in names:
        kind = ALL_KINDS[name]
        chosen = [prompt for prompt in prompts if prompt.category == kind.category and (prompt.prediction or not kind.is_predicted)]
        token_ids = [tokenizer.apply_chat_template(conversation(one), add_generation_prompt=True, return_dict=False) for one in chosen]
        if kind.category == RANDOM:
            draw = random.Random(0)
            token_ids = [[draw.randrange(16, len(tokenizer)) for _ in range(RANDOM_TOKENS)] for _ in range(RANDOM_PROMPTS)]
        if token_ids:
            predictions = [one.prediction or "" for one in chosen] if kind.is_predicted else []
            found.append(Workload(name, token_ids, kind.max_tokens, kind.temperature, kind.ignore_eos, predictions, kind.is_known))
    return found


def holds(one: Comparison) -> bool:
    """Whether speculation was nowhere slower, and as fast as it should be with one request at a time."""
    wanted = (ALL_KINDS[one.workload].at_least if one.batch == 1 else None) or NOT_SLOWER
    return one.median >= wanted and one.low >= NOT_MUCH_SLOWER


def report(found: Sequence[Comparison], command: str) -> str:
    """Markdown: command, machine, and a line for each comparison."""
    pairs = found[0].pairs if found else 0
    spread = "95 % interval" if pairs >= FEWEST_PAIRS else "range"
    lines = [
        f"| work | requests at once | speed-up, median | {spread} | tokens/s | mean accepted length | guessed | same text |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {one.workload} | {one.batch} | {one.median:.2f}{'' if holds(one) else ' (!)'} | {one.low:.2f} to {one.high:.2f} | "
            f"{one.tokens_per_s:,.0f} | {one.mean_accepted_length:.2f} | {one.guessed_share:.0%} | {'yes' if one.same else 'NO'} |"
            for one in found
        ),
    ]
    return (
        f"```sh\n{command}\n```\n\n{this_machine().describe()}.\n\nAdaptive speculation against none, {pairs} interleaved pairs each: "
        f"seconds without over seconds with it, the median of the pairs and its {spread}. Mean accepted length is of passes with a "
        "draft; guessed is the share of the tokens that were accepted guesses.\n\n" + "\n".join(lines) + "\n"
    )


def plot(found: Sequence[Comparison], path: Path) -> None:
    """Speed-ups with their intervals as a PNG, a panel for each number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({one.batch for one in found})
    figure, panels = pyplot.subplots(1, len(batches), figsize=(4.2 * len(batches), 4.5), sharey=True, squeeze=False, layout="constrained")
    for batch, panel in zip(batches, panels[0], strict=True):
        mine = [one for one in found if one.batch == batch]
        errors = [[one.median - one.low for one in mine], [one.high - one.median for one in mine]]
        panel.errorbar([one.median for one in mine], [one.workload for one in mine], xerr=errors, fmt="o", capsize=3)
        panel.axvline(1.0, color="grey", linewidth=1)
        panel.axvline(NOT_SLOWER, color="tab:red", linewidth=1, linestyle=":")
        panel.set_title(f"{batch} at once")
        panel.set_xlabel("speed-up over no speculation")
        panel.set_xlim(left=0)
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _measure(args: argparse.Namespace) -> list[Comparison]:
    """Raises ForetokenError."""
    from ...engine.llm import LLM  # imports torch

    try:
        prompts = read(args.dataset) if args.dataset else [prompt for name in OWN for prompt in load(name)]
    except PromptSetError as error:
        raise ConfigError(str(error)) from None
    options: dict[str, Any] = {} if args.threads is None else {"threads": args.threads}
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(desc="loading", unit="turn", leave=False, dynamic_ncols=True, disable=None))
        configs = {OFF: {"method": "off"}, ADAPTIVE: args.speculative_config}
        engines = {
            name: stack.enter_context(LLM(args.model, config, max_num_seqs=max(args.batch), **options)) for name, config in configs.items()
        }
        work = workloads(prompts, engines[OFF].get_tokenizer(), args.only or tuple(KINDS))
        bar.reset(len(work) * len(args.batch) * 2 * (args.pairs + 1))
        found: list[Comparison] = []
        for one in work:
            for batch in args.batch:
                bar.set_description(f"{one.name}, {batch} at once")
                found.append(compare(engines, one, batch, args.pairs, bar.update))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken bench workloads",
        description="Compare adaptive speculation with none, in interleaved pairs, over kinds of work and numbers of requests at once.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help="folder or hub id of the target (default: the embedded model)")
    add("--speculative-config", "-sc", metavar="CONFIG", help="as for serve (default: the model's default)")
    add("--dataset", type=Path, metavar="FILE", help="prompts with a category of edits, json, chat, retrieval (default: our own sets)")
    add("--batch", "--concurrency", type=numbers, default=(1, 8, 32), metavar="N,N", help="requests at once (default 1,8,32)")
    add("--pairs", type=count, default=20, metavar="N", help="turns of each side (default %(default)s)")
    add("--only", type=lambda text: tuple(filter(None, text.split(","))), default=(), metavar="A,B",
        help=f"of: {', '.join(KINDS)}; and of those with guesses that are all right, as many as this machine could gain from: "
        f"{', '.join(KNOWN)}")
    add("--threads", type=count, metavar="N", help="cores to compute with (default: all)")
    add("--json", type=new_file, metavar="FILE", help="write all figures")
    add("--markdown", type=new_file, metavar="FILE", help="write the table")
    add("--plot", type=new_picture, metavar="FILE", help="write a picture (PNG)")
    return parser
