"""The flags of `foretoken bench serve`: those of `vllm bench serve` where it has them, and what they come to."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..help_format import CommandParser
from ..option_forms import count, json_object, key, new_file, new_picture, port, several, temperature
from .contestants import PATHS
from .prompt_sets import OWN, PUBLISHED
from .serve_load import Load
from .serve_results import GOALS, METRICS, Report

EXAMPLES = """\
examples:
  foretoken bench serve --base-url http://127.0.0.1:8000
  foretoken bench serve --dataset chat --concurrency 1,8,32 --json result.json --plot result.png
  foretoken bench serve --dataset edits --request-rate 2,4,8 --num-prompts 200 --goodput ttft:200 tpot:50
  foretoken bench serve --dataset-name spec_bench --dataset-path question.jsonl --num-prompts 80 --max-concurrency 8
  foretoken bench serve --dataset my-prompts.jsonl --max-tokens 256 --temperature 0.7 --extra-body '{"seed": 1}'

FILE is JSON lines or a JSON array (also .gz) of records with turns, messages, conversations, prompt or text; or .txt, a prompt a line.
With several concurrencies or rates, each is a run of its own: a column of the table, a row of the CSV file.
"""
BACKENDS = {"openai-chat": "chat", "openai": "completions", "vllm": "completions", "vllm-chat": "chat", "sglang": "completions"}
ENDPOINTS = {name: name for name in PATHS} | {path: name for name, path in PATHS.items()}


@dataclass(frozen=True)
class Options:
    """What the command line asks for, checked."""

    args: argparse.Namespace
    base_url: str
    endpoint: str  # a key of PATHS
    loads: tuple[Load, ...]
    settings: dict[str, Any]  # of every request
    report: Report


def read(argv: Sequence[str]) -> Options:
    """Exits with a message for what makes no sense."""
    parser = _parser()
    args = parser.parse_args(argv)
    concurrency = args.concurrency or ([None] if args.request_rate else [1])
    settings: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.top_p is not None:
        settings["top_p"] = args.top_p
    if args.ignore_eos:
        settings["ignore_eos"] = True
    goals = tuple(_goal(parser, text) for text in args.goodput)
    return Options(
        args,
        args.base_url or f"http://{args.host}:{args.port}",
        args.endpoint or BACKENDS[args.backend],
        tuple(Load(places, rate, args.burstiness) for places in concurrency for rate in args.request_rate or [math.inf]),
        settings | args.extra_body,
        Report(args.percentile_metrics, args.metric_percentiles, goals, args.save_detailed),
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken bench serve",
        description="Load any OpenAI-compatible server with prompts, and measure latency, throughput and accepted drafts.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument_group("server").add_argument
    add("--base-url", metavar="URL", help="with or without /v1 (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="without --base-url (default %(default)s)")
    add("--port", type=port, default=8000, help="without --base-url (default %(default)s)")
    add("--backend", choices=sorted(BACKENDS), default="openai-chat", help="vLLM's word for the endpoint (default %(default)s)")
    add("--endpoint", type=_endpoint, metavar="NAME", help="chat or completions, or the path of either (default: what --backend says)")
    add("--model", metavar="NAME", help="as in requests (default: the first that the server lists)")
    add("--served-model-name", metavar="NAME", help="the same, before --model")
    add("--api-key", type=key, metavar="KEY", help="default: FORETOKEN_API_KEY or OPENAI_API_KEY")

    add = parser.add_argument_group("prompts").add_argument
    known = f"{', '.join(OWN)}, all, random; with a file of theirs {', '.join(PUBLISHED)}; or a FILE"
    add("--dataset", "--dataset-name", default="chat", metavar="NAME", help=f"{known} (default %(default)s)")
    add("--dataset-path", type=Path, metavar="FILE", help="the file of the set")
    add("--num-prompts", type=count, metavar="N", help="conversations of a run; repeats a set that is too small (default: all of it)")
    add("--random-input-len", type=count, default=256, metavar="N", help="words of a random prompt (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts' order and of the arrivals (default %(default)s)")

    add = parser.add_argument_group("load").add_argument
    text = "requests at once, one number or several (default: 1; with --request-rate no limit)"
    add("--concurrency", "--max-concurrency", type=several(count), metavar="N,N", help=text)
    text = "conversations that begin in a second, at random times: one number or several, or inf: all at once"
    add("--request-rate", type=several(_rate), metavar="R,R", help=text)
    add("--burstiness", type=_rate, default=1.0, metavar="B", help="of arrivals: below 1 in bursts, above more evenly (default: Poisson)")
    add("--num-warmups", type=_warm_ups, default=2, metavar="N", help="requests before each run that are not counted (default %(default)s)")

    add = parser.add_argument_group("requests").add_argument
    lengths = [f"--{name}-output-len" for name in ("custom", "spec-bench", "sharegpt", "random", "hf")]
    add("--max-tokens", "--output-len", *lengths, type=count, default=128, metavar="N", help="of an answer (default %(default)s)")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="default %(default)s")
    add("--top-p", type=float, metavar="P", help="default: the server's")
    add("--ignore-eos", action="store_true", help="answers of equal length, from servers that know this extension")
    add("--prediction", action="store_true", help="send the code to be edited as OpenAI's Predicted Outputs (sets edits and humanevalfix)")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of every request")
    add("--timeout", type=_rate, default=600.0, metavar="S", help="seconds until a request has failed (default %(default)g)")

    add = parser.add_argument_group("results").add_argument
    add("--percentile-metrics", type=_metrics, default=tuple(METRICS), metavar="M,M", help=f"of {','.join(METRICS)} (default: all)")
    add("--metric-percentiles", type=_percentiles, default=(50, 90, 99), metavar="P,P", help="default 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="GOAL", help=f"milliseconds of a good request, as ttft:200 ({', '.join(GOALS)})")
    add("--json", type=new_file, metavar="FILE", help="all runs in one file")
    add("--csv", type=new_file, metavar="FILE", help="a row for each run")
    add("--plot", type=new_picture, metavar="FILE.png", help="latencies and throughput (needs matplotlib: pip install foretoken[bench])")
    add("--save-result", action="store_true", help="vLLM's: a JSON file for each run, in --result-dir under --result-filename")
    add("--result-dir", type=Path, default=Path(), metavar="FOLDER", help="default: the current one")
    add("--result-filename", metavar="NAME", help="default: made of backend, load, model and date")
    add("--save-detailed", action="store_true", help="with every request's times and text")
    add("--label", metavar="TEXT", help="kept in the results")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    # Users paste these from vLLM; the server counts the tokens, so no tokenizer is needed here.
    for ignored in ("--tokenizer", "--ready-check-timeout-sec"):
        add(ignored, help=argparse.SUPPRESS)
    add("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    return parser


def _warm_ups(text: str) -> int:
    return 0 if text == "0" else count(text)


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _endpoint(text: str) -> str:
    if text not in ENDPOINTS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(ENDPOINTS)}")
    return ENDPOINTS[text]


def _metrics(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := [name for name in wanted if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(METRICS)}")
    return wanted


def _percentiles(text: str) -> tuple[float, ...]:
    wanted = tuple(_rate(part) for part in text.split(","))
    if max(wanted) > 100:
        raise argparse.ArgumentTypeError(f"{max(wanted):g} is above 100")
    return wanted


def _goal(parser: argparse.ArgumentParser, text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOALS:
        parser.error(f"argument --goodput: {text!r} should be METRIC:MILLISECONDS with one of {', '.join(GOALS)}")
    try:
        return name, _rate(value)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --goodput: {text!r}: {error}")
