"""`foretoken bench speculation`: the same prompts with and without speculation, one stream at a time or in a batch.

Rounds of all variants alternate, so that a machine that slows down slows all of them; each variant's median round counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .boot import DEMO_DRAFT
from .llm import LLM
from .request import SamplingParams

PROMPTS = (
    "How do I list the files of a folder?",
    "Write a Python function that adds two numbers.",
    "Tom has 3 apples and buys 4 more. How many apples does he have now?",
    "What is your favourite food?",
    "Repeat this list twice: red, green, blue, yellow.",
    "Tell me about the capital of France.",
)


@dataclass(frozen=True)
class Comparison:
    """One variant against no speculation, over all prompts."""

    method: str
    k: int
    batch: int
    tokens_per_s: float
    speedup: float  # against "off" in the same batch size
    acceptance_rate: float  # accepted / drafted
    mean_accepted_length: float  # tokens per target pass of a row that had a draft
    ms_per_step: float


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="foretoken bench speculation",
        description="Compare generation with and without speculation on this machine.",
        epilog="example: foretoken bench speculation ./target --draft ./draft --k 1,3,5,7 --batch 1,8 --json result.json",
    )
    parser.add_argument("model", nargs="?", help="folder or hub id of the target (default: the embedded model)")
    parser.add_argument("--draft", help="folder of a draft model (default: the embedded model's own)")
    parser.add_argument("--k", default="3,5", help="draft lengths to try, comma-separated (default 3,5)")
    parser.add_argument("--batch", default="1", help="prompts at a time, comma-separated (default 1)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per prompt (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="times to run everything (default 3)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-sample-method", choices=["greedy", "probabilistic"], default="greedy", help="how the draft model guesses")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line (default: six of our own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    draft = args.draft or (None if args.model else str(DEMO_DRAFT))
    prompts = args.prompts.read_text().splitlines() if args.prompts else list(PROMPTS)
    results = compare(
        args.model,
        {"method": "draft_model", "model": draft, "draft_sample_method": args.draft_sample_method} if draft else None,
        _numbers(args.k),
        _numbers(args.batch),
        prompts,
        args.max_tokens,
        args.rounds,
        args.temperature,
    )
    print(f"{'method':12} {'k':>2} {'batch':>5} {'tokens/s':>9} {'speed-up':>9} {'acceptance':>11} {'mean length':>12} {'ms/step':>8}")
    for r in results:
        print(
            f"{r.method:12} {r.k:2} {r.batch:5} {r.tokens_per_s:9.1f} {r.speedup:8.2f}x "
            f"{r.acceptance_rate:10.1%} {r.mean_accepted_length:12.2f} {r.ms_per_step:8.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


def compare(
    model: str | None,
    draft: dict[str, Any] | None,
    ks: Sequence[int],
    batches: Sequence[int],
    prompts: Sequence[str],
    max_tokens: int,
    rounds: int,
    temperature: float,
) -> list[Comparison]:
    """Run every variant `rounds` times, in turn. draft: its speculative config without k, None = n-gram only."""
    most = max(ks)
    ngram = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    configured: list[dict[str, Any]] = [{**ngram, "disable_by_batch_size": 1024}]
    if draft:  # in front: a proposer without a guess hands over to those behind it, and n-gram is to be measured by itself
        configured.insert(0, {**draft, "num_speculative_tokens": most})
    methods = [str(c["method"]) for c in configured]
    with LLM(model, configured, enable_prefix_caching=False, max_num_seqs=max(128, *batches)) as llm:
        variants = [(b, m, k) for b in batches for m, k in [("off", 0), *((m, k) for m in methods for k in ks)]]
        tally = {variant: _Tally() for variant in variants}
        bar = tqdm([(number, variant) for number in range(rounds + 1) for variant in variants], unit="run", leave=False)
        for number, variant in bar:
            bar.set_description("{1} k={2} batch={0}".format(*variant))
            tally[variant].add(_run(llm, prompts, *variant, max_tokens, temperature), counts=number > 0)  # round 0 warms up
    return [tally[v].result(v, tally[v[0], "off", 0].tokens_per_s) for v in variants]


@dataclass(frozen=True)
class _Round:
    seconds: float
    tokens: int
    steps: int
    drafts: int
    drafted: int
    accepted: int


class _Tally:
    def __init__(self) -> None:
        self.rounds: list[_Round] = []

    def add(self, one: _Round, counts: bool) -> None:
        if counts:
            self.rounds.append(one)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(r.tokens / r.seconds for r in self.rounds)

    def result(self, variant: tuple[int, str, int], plain: float) -> Comparison:
        batch, method, k = variant
        drafts, drafted, accepted = (sum(getattr(r, name) for r in self.rounds) for name in ("drafts", "drafted", "accepted"))
        ms_per_step = statistics.median(r.seconds / r.steps for r in self.rounds) * 1e3
        return Comparison(
            method, k, batch, self.tokens_per_s, self.tokens_per_s / plain, accepted / max(drafted, 1), 1 + accepted / max(drafts, 1),
            ms_per_step,
        )  # fmt: skip


def _run(llm: LLM, prompts: Sequence[str], batch: int, method: str, k: int, max_tokens: int, temperature: float) -> _Round:
    """All prompts once, `batch` at a time; a batch larger than the list repeats it."""
    wish = {"method": method} if method == "off" else {"method": method, "num_speculative_tokens": k}
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=1, speculation=wish)
    listed = list(prompts) * (-(-batch // len(prompts)))
    before, started, tokens = llm.stats(), time.perf_counter(), 0
    for first in range(0, len(listed) - batch + 1, batch):
        conversations = [[{"role": "user", "content": text}] for text in listed[first : first + batch]]
        outputs = llm.chat(conversations, params, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds, after = time.perf_counter() - started, llm.stats()
    return _Round(
        seconds, tokens, after.num_steps - before.num_steps, after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens, after.num_accepted_tokens - before.num_accepted_tokens,
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
