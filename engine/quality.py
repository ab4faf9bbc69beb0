"""`foretoken bench quality`: what narrow number formats cost in perplexity, in the choice of tokens and in accepted drafts.

Every format reads the same text and continues the same prompts. Loads networks and runs them; no requests are served.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..kernels import native
from ..kernels.layout import Executor
from ..proposers.config_entry import SpeculativeConfigError
from ..proposers.training.evaluate import mean_accepted_length
from ..proposers.vocabularies import check_vocabularies
from .bench.held_out import HELD_OUT, read_sample
from .bench.machine import Machine, this_machine
from .bench.network import set_threads
from .bench.report import Table
from .boot import DEMO_DRAFT
from .config import DEMO_MODEL, ModelConfig
from .errors import ConfigError, ForetokenError
from .model import LoadedModel, load_model
from .plan import PlanRow, StepPlan
from .request import Request, SamplingParams
from .runner import Runner

FORMATS: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "float32": {"dtype": "float32"},
}
REFERENCE = "bfloat16"  # measured whatever is asked for: the others are compared with it
DRAFT_FORMATS = ("bfloat16", "int8", "int4")
DRAFT_LENGTHS = (3, 5)
EXAMPLES = """\
examples:
  foretoken bench quality
  foretoken bench quality --model ./my-model --draft ./my-draft --formats bfloat16,int4 --text held_out.txt

The text: documents separated by lines of ---. One that begins with "user: " is a conversation, with turns of "assistant: ".
"""
BLOCK = 16
PASS_TOKENS = 256  # of a text in one pass: as many whole rows of logits are in memory

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Scores:
    """What a network makes of a text: one entry for each token but the first of each window."""

    losses: Tensor  # [N] float32, nats
    top: Tensor  # [N] int64, the token found most likely there

    @property
    def perplexity(self) -> float:
        return math.exp(self.losses.double().mean().item())


@dataclass(frozen=True)
class FormatQuality:
    """One format of the target beside the reference."""

    name: str
    weight_mb: float  # read by a pass
    perplexity: float
    change: float  # of the perplexity, relative
    change_error: float  # standard error of `change`, token by token
    agreement: float  # share of positions whose most likely token is the reference's
    accepted_length: dict[str, dict[int, float]]  # by format of the draft and k: mean accepted length, greedy


@dataclass(frozen=True)
class QualityReport:
    """Everything of one run, as it is written to JSON."""

    command: str
    machine: Machine
    model: str
    draft: str | None
    num_tokens: int  # scored
    num_prompts: int
    answer_tokens: int  # most in an answer
    formats: list[FormatQuality]
    skipped: list[str]  # what could not be measured, and why


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="foretoken bench quality",
        description="Measure what number formats cost: perplexity, agreement with bfloat16, accepted length of a draft model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEMO_MODEL, help="folder or hub id of the target (default: the embedded model)")
    parser.add_argument("--draft", help="folder or hub id of a draft model (default: the embedded model's own)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text that the model was not trained on (default: 9 kB of our own)")
    parser.add_argument("--formats", type=_formats, default=tuple(FORMATS), help=f"of {','.join(FORMATS)} (default: all)")
    parser.add_argument("--context", type=_positive, default=1024, help="tokens read in one context (default 1024)")
    parser.add_argument("--prompts", type=_positive, default=48, help="about so many answers for the accepted length (default 48)")
    parser.add_argument("--answer-tokens", type=_positive, default=64, help="most tokens of an answer (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    started = time.monotonic()

    def announce(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    command = shlex.join(["foretoken", "bench", "quality", *argv])
    draft = args.draft or (str(DEMO_DRAFT) if args.model == DEMO_MODEL else None)
    try:
        text = (args.text or HELD_OUT).read_text(encoding="utf-8")
        report = measure(
            args.model, draft, text, args.formats, args.context, args.prompts, args.answer_tokens, announce, command
        )  # fmt: skip
    except (ForetokenError, OSError) as error:
        sys.exit(f"foretoken: error: {error}")
    print(markdown(report))
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
        announce(f"wrote {args.json}")


def measure(
    model: str, draft: str | None, text: str, formats: Sequence[str], context: int, num_prompts: int, answer_tokens: int,
    announce: Announce, command: str = "",
) -> QualityReport:  # fmt: skip
    """Run every format, one network in memory at a time beside the drafts. Raises ConfigError, with ModelLoadError.

    A format that cannot be had on this machine is left out, and the report says why; the reference must be there.
    """
    native.set_threads(native.usable_cores())
    skipped: list[str] = []
    reference = load(model, REFERENCE, announce)
    drafts = _load_drafts(draft, reference.tokenizer, skipped, announce) if draft else {}
    longest = min([reference.max_model_len, *(executor.max_model_len for executor in drafts.values())])
    sample = read_sample(reference.tokenizer, text, min(context, reference.max_model_len), num_prompts, longest - answer_tokens)
    expected = score(reference.executor, sample.windows)
    found: list[FormatQuality] = []
    for name in dict.fromkeys((REFERENCE, *formats)):
        try:
            target = reference if name == REFERENCE else load(model, name, announce)
        except ConfigError as error:
            skipped.append(f"{name}: {error}")
            announce(f"left out: {skipped[-1]}")
            continue
        scores = expected if name == REFERENCE else score(target.executor, sample.windows)
        answers = greedy_answers(target.executor, sample.prompts, target.eos_token_ids, answer_tokens) if drafts else []
        accepted: dict[str, dict[int, float]] = {}
        for kind, executor in drafts.items():
            matches = greedy_matches(executor, sample.prompts, answers)
            accepted[kind] = {k: mean_accepted_length(matches, k) for k in DRAFT_LENGTHS}
        found.append(_compare(name, target.executor, scores, expected, accepted))
        announce(f"{name}: perplexity {scores.perplexity:.3f}")
    return QualityReport(
        command, this_machine(), model, draft, len(expected.losses), len(sample.prompts), answer_tokens, found, skipped
    )  # fmt: skip


def load(model: str, name: str, announce: Announce = lambda line: None) -> LoadedModel:
    """A network in one of FORMATS. Raises ConfigError where this machine has no such format for it."""
    loaded = load_model(replace(ModelConfig(model), **FORMATS[name]), announce)
    set_threads(loaded.plan, native.usable_cores())
    return loaded


def score(executor: Executor, windows: Sequence[Sequence[int]]) -> Scores:
    """How likely each token is after those before it in its window."""
    runner, tables = _runner(executor, 1, max(map(len, windows)), wants_logits=True)
    losses: list[Tensor] = []
    top: list[Tensor] = []
    for window in windows:
        request = _request(window)
        for start in range(0, len(window) - 1, PASS_TOKENS):
            stop = min(start + PASS_TOKENS, len(window) - 1)
            # One known token and all others as its draft: verification scores every one of them.
            output = runner.forward(StepPlan([_row(request, start, 1, window[start + 1 : stop], tables[0])], BLOCK))
            assert output.logits is not None
            following = torch.tensor(window[start + 1 : stop + 1])
            losses.append(torch.nn.functional.cross_entropy(output.logits.float(), following, reduction="none"))
            top.append(output.argmax)
    return Scores(torch.cat(losses), torch.cat(top))


def greedy_answers(executor: Executor, prompts: Sequence[list[int]], ends: frozenset[int], max_tokens: int) -> list[list[int]]:
    """At most max_tokens most likely tokens behind each prompt, up to and with the first of `ends`."""
    runner, tables = _runner(executor, len(prompts), max(map(len, prompts)) + max_tokens)
    requests = [_request(prompt) for prompt in prompts]
    unfinished = list(range(len(prompts)))
    while unfinished:
        rows: list[PlanRow] = []
        for i in unfinished:
            start = 0 if not requests[i].num_output_tokens else len(requests[i].token_ids) - 1
            rows.append(_row(requests[i], start, len(requests[i].token_ids) - start, [], tables[i]))
        tokens = runner.forward(StepPlan(rows, BLOCK)).argmax.tolist()
        for i, token in zip(unfinished, tokens, strict=True):
            requests[i].token_ids.append(token)
        unfinished = [i for i in unfinished if requests[i].token_ids[-1] not in ends and requests[i].num_output_tokens < max_tokens]
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def greedy_matches(draft: Executor, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[bool]]:
    """For each token of each answer: would the draft, given the same text before it, have said it?

    That is all acceptance needs: a greedy draft is kept up to its first miss, and up to there its tokens are the target's.
    """
    matches: list[list[bool]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        runner, tables = _runner(draft, 1, len(prompt) + len(answer))
        row = _row(_request(prompt), 0, len(prompt), answer[:-1], tables[0])
        guesses = runner.forward(StepPlan([row], BLOCK)).argmax.tolist()
        matches.append([guess == token for guess, token in zip(guesses, answer, strict=True)])
    return matches


def markdown(report: QualityReport) -> str:
    """One table, and what its figures are."""
    kinds = list(report.formats[0].accepted_length)
    lengths = " / ".join(map(str, DRAFT_LENGTHS))
    about = [
        f"{report.num_tokens:,} tokens of text; agreement: how often the most likely token is that of {REFERENCE}.",
        f"Mean accepted length at k = {lengths}, greedy, on {report.num_prompts} answers of at most {report.answer_tokens} tokens."
        if kinds
        else "",
        f"Machine: {report.machine.describe()}.",
        f"Command: `{report.command}`",
        *(f"Not measured: {line}" for line in report.skipped),
    ]
    header = ["format", "weights MB", "perplexity", f"against {REFERENCE}", "agreement", *(f"{kind} draft" for kind in kinds)]
    rows = [
        [
            f.name,
            f"{f.weight_mb:,.1f}",
            f"{f.perplexity:.2f}",
            "-" if f.name == REFERENCE else f"{f.change:+.2%} ± {f.change_error:.2%}",
            "-" if f.name == REFERENCE else f"{f.agreement:.1%}",
            *(" / ".join(f"{length:.2f}" for length in f.accepted_length[kind].values()) for kind in kinds),
        ]
        for f in report.formats
    ]
    return Table(f"Number formats of {report.model}", "\n".join(filter(None, about)), header, rows).markdown()


def _load_drafts(draft: str, tokenizer: PreTrainedTokenizerBase, skipped: list[str], announce: Announce) -> dict[str, Executor]:
    drafts: dict[str, Executor] = {}
    for name in DRAFT_FORMATS:
        try:
            loaded = load(draft, name, announce)
            check_vocabularies(tokenizer, loaded.tokenizer)
        except SpeculativeConfigError as error:
            raise ConfigError(f"draft {draft}: {error}") from error
        except ConfigError as error:
            if name == REFERENCE:
                raise
            skipped.append(f"{name} draft: {error}")
            announce(f"left out: {skipped[-1]}")
            continue
        drafts[name] = loaded.executor
    return drafts


def _compare(name: str, executor: Executor, scores: Scores, expected: Scores, accepted: dict[str, dict[int, float]]) -> FormatQuality:
    difference = (scores.losses - expected.losses).double()
    change = math.expm1(difference.mean().item())
    error = (1 + change) * difference.std().item() / math.sqrt(len(difference))
    agreement = (scores.top == expected.top).double().mean().item()
    return FormatQuality(name, executor.weight_bytes / 1e6, scores.perplexity, change, error, agreement, accepted)


def _runner(executor: Executor, num_rows: int, length: int, wants_logits: bool = False) -> tuple[Runner, list[range]]:
    """A cache for so many texts of so many tokens, and the block table of each."""
    blocks = -(-length // BLOCK)
    kv = executor.allocate(num_rows * blocks, BLOCK)
    return Runner(executor, kv, (), lambda request: wants_logits), [range(i * blocks, (i + 1) * blocks) for i in range(num_rows)]


def _request(tokens: Sequence[int]) -> Request:
    return Request("", tokens, SamplingParams(temperature=0.0), arrival_time=0.0, max_tokens=0, seed=0)


def _row(request: Request, start: int, num_known: int, draft: Sequence[int], table: Sequence[int]) -> PlanRow:
    """Reads num_known tokens, then the draft; scores behind the last known token and behind every draft token."""
    return PlanRow(request, start, num_known, list(draft), list(range(-1, len(draft) - 1)), [0] * len(draft), table, samples=True)


def _formats(text: str) -> tuple[str, ...]:
    chosen = tuple(filter(None, text.split(",")))
    if unknown := [name for name in chosen if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(FORMATS)}")
    return chosen


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
