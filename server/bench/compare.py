"""`foretoken bench compare`: the same requests to several OpenAI-compatible servers in turn, and ratios pair by pair."""

import argparse
import asyncio
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ..config import variable
from ..exit_status import UNAVAILABLE, failed
from ..help_format import CommandParser
from ..option_forms import count, key, new_file
from .contestants import PATHS, Asking, Contestant, Server, Transformers, Turn
from .load_client import ServerFailed

EXAMPLES = """\
examples:
  foretoken bench compare --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:8080
  foretoken bench compare --base-url http://127.0.0.1:8000 --peer transformers --model ./my-model --endpoint completions
  foretoken bench compare --base-url http://a:8000 --base-url http://b:8000 --stream --concurrency 8 --num-prompts 64 --json result.json

The first server is the one that others are compared with. Only one of them works at a time.
"""
SCHEMA = 1

PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "Write a Python function that checks whether a string is a palindrome.",
    "List five things to take along on a hike in the mountains.",
    "Tom has 3 apples and buys 4 more, then gives 2 away. How many has he left?",
    "Summarise the story of the tortoise and the hare.",
    "Repeat this list three times: red, green, blue, yellow, purple.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short letter that thanks a neighbour for watering the plants.",
)


def take_turns(contestants: Sequence[Contestant], groups: Sequence[Sequence[str]]) -> dict[str, list[Turn]]:
    """Every group goes to everybody before the next one is sent, and to each first as often as to the others.

    The first group goes once more beforehand, uncounted. Raises ServerFailed.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    for number, group in enumerate(tqdm([groups[0], *groups], unit="group", leave=False, disable=None)):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            result = contestant.run(group)
            if number:
                turns[contestant.name].append(result)
    return turns


@dataclass(frozen=True)
class Summary:
    """One contestant over all groups; ratios to the first one group by group, above 1 where this one is better."""

    name: str
    tokens: int
    tokens_per_s: float  # median group
    first_ms: float | None
    gap_ms: float | None
    ratio: float  # of tokens/s, median
    ratio_low: float  # the quarter of the groups below lies under this
    ratio_high: float
    same_texts: float  # share of answers that are the first one's to the letter


def summaries(turns: dict[str, list[Turn]]) -> list[Summary]:
    reference = next(iter(turns.values()))
    return [_summary(name, mine, reference) for name, mine in turns.items()]


def _summary(name: str, mine: Sequence[Turn], reference: Sequence[Turn]) -> Summary:
    ratios = [a.rate / b.rate for a, b in zip(mine, reference, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    texts = [a == b for x, y in zip(mine, reference, strict=True) for a, b in zip(x.texts, y.texts, strict=True)]
    return Summary(
        name, sum(t.tokens for t in mine), statistics.median(t.rate for t in mine), _median_ms([t.first_s for t in mine]),
        _median_ms([t.gap_s for t in mine]), ratio, low, high, sum(texts) / len(texts),
    )


def _median_ms(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return statistics.median(known) * 1e3 if known else None


def table(found: Sequence[Summary]) -> str:
    width = max(len(s.name) for s in found)
    lines = [
        f"{'':{width}} {'tokens/s':>9} {'ratio':>6} {'middle half':>13} {'first ms':>9} {'ms/token':>9} {'tokens':>7} {'same text':>9}"
    ]
    for s in found:
        spread = f"{s.ratio_low:.2f} - {s.ratio_high:.2f}"
        lines.append(
            f"{s.name:{width}} {s.tokens_per_s:9.1f} {s.ratio:5.2f}x {spread:>13} {_shown(s.first_ms):>9} {_shown(s.gap_ms):>9} "
            f"{s.tokens:7} {s.same_texts:9.0%}"
        )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if len(args.base_url) + bool(args.peer) < 2:
        parser.error("two are needed to compare: give --base-url twice, or once with --peer transformers")
    if args.peer and not args.model:
        parser.error("--peer transformers needs --model: the folder that the server serves")
    if len(args.api_key) > 1 and len(args.api_key) != len(args.base_url):
        parser.error("give --api-key once for all servers, or once for each --base-url, in their order")
    try:
        texts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--prompts {args.prompts} cannot be read: {error}")
    texts = [text for text in texts if text.strip()]
    if not texts:
        parser.error(f"{args.prompts} has no prompts: write one a line")
    prompts = [texts[i % len(texts)] for i in range(args.num_prompts)]
    groups = [prompts[i : i + args.concurrency] for i in range(0, len(prompts), args.concurrency)]
    try:
        turns = _compare(args, groups)
    except ServerFailed as error:
        return failed(error, UNAVAILABLE)
    found = summaries(turns)
    print(table(found))
    if args.json:
        command = shlex.join(["foretoken", "bench", "compare", *argv])
        result = {"schema": SCHEMA, "command": command, "summaries": [asdict(s) for s in found]}
        result["groups"] = {name: [asdict(t) for t in mine] for name, mine in turns.items()}
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


def _compare(args: argparse.Namespace, groups: Sequence[Sequence[str]]) -> dict[str, list[Turn]]:
    asking = Asking(args.endpoint, args.max_tokens, args.stream, args.ignore_eos)
    default = variable("FORETOKEN_API_KEY")
    keys = args.api_key * len(args.base_url) if len(args.api_key) == 1 else args.api_key or [default] * len(args.base_url)
    with asyncio.Runner() as runner:
        name = None if args.peer else args.model
        contestants: list[Contestant] = [Server(url, name, key, asking, runner) for url, key in zip(args.base_url, keys, strict=True)]
        if not args.peer:
            return take_turns(contestants, groups)
        from transformers import AutoTokenizer

        from ...engine.bench.transformers_peer import TransformersPeer
        from ...engine.config import DEMO_MODEL
        from ...engine.errors import ModelLoadError
        from ...engine.model_folder import find_folder
        from ...kernels.native_library import usable_cores

        try:
            folder = find_folder(DEMO_MODEL if args.model == "demo" else args.model, None, lambda line: None)
            with TransformersPeer(folder, args.dtype, args.threads or usable_cores()) as peer:
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                return take_turns([*contestants, Transformers(peer, tokenizer, asking)], groups)
        except (ModelLoadError, OSError) as error:
            raise ServerFailed(f"transformers cannot run {args.model}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken bench compare",
        description="Send the same requests to several OpenAI-compatible servers in turn, and compare their speed pair by pair.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--base-url", action="append", default=[], metavar="URL", help="a server, with or without /v1; repeat it for each")
    add("--peer", choices=["transformers"], help="a further contestant without a server: transformers' own generate")
    add("--model", metavar="NAME", help="as in requests (default: the first that each server lists); with --peer, the folder to load")
    add("--endpoint", choices=sorted(PATHS), default="chat", help="which of the API's two (default %(default)s)")
    add("--num-prompts", type=count, default=24, metavar="N", help="requests to each server (default %(default)s)")
    add("--prompts", type=Path, metavar="FILE", help=f"text file, one prompt a line (default: {len(PROMPTS)} of our own, repeated)")
    add("--max-tokens", type=count, default=64, metavar="N", help="of each answer (default %(default)s)")
    add("--concurrency", type=count, default=1, metavar="N", help="requests sent together (default %(default)s)")
    add("--stream", action="store_true", help="stream the answers, and measure the first token and the gaps too")
    add("--ignore-eos", action="store_true", help="send ignore_eos, which most servers other than OpenAI's know: answers of equal length")
    text = "once for all servers or once for each (default: FORETOKEN_API_KEY)"
    add("--api-key", action="append", type=key, default=[], metavar="KEY", help=text)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the transformers peer (default %(default)s)")
    add("--threads", type=count, metavar="N", help="of the transformers peer (default: all cores)")
    add("--json", type=new_file, metavar="FILE", help="write all figures there")
    return parser

