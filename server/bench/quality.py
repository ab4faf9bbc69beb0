"""`foretoken bench quality`: what narrow number formats cost. Owns the flags and the table; the measuring is engine/bench/quality.py."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...engine.bench.held_out import HELD_OUT
from ...engine.bench.quality import DRAFT_LENGTHS, FORMATS, REFERENCE, QualityReport, measure
from ...engine.bench.table import Table
from ...engine.config import DEMO_MODEL
from ...engine.default_speculation import DEMO_DRAFT
from ...engine.errors import ForetokenError
from ..exit_status import CONFIG, failed
from ..help_format import CommandParser
from ..option_forms import count, new_file, some_of

EXAMPLES = """\
examples:
  foretoken bench quality
  foretoken bench quality --model ./my-model --draft ./my-draft --formats bfloat16,int4 --text held_out.txt

The text: documents separated by lines of ---. One that begins with "user: " is a conversation, with turns of "assistant: ".
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 78 if something cannot be loaded or measured."""
    parser = CommandParser(
        prog="foretoken bench quality",
        description="Measure what number formats cost: perplexity, agreement with bfloat16, accepted length of a draft model.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--model", default=DEMO_MODEL, help="folder or hub id of the target (default: the embedded model)")
    parser.add_argument("--draft", help="folder or hub id of a draft model (default: the embedded model's own)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text that the model was not trained on (default: 9 kB of our own)")
    parser.add_argument("--formats", type=some_of(tuple(FORMATS)), default=tuple(FORMATS), help=f"of {','.join(FORMATS)} (default: all)")
    parser.add_argument("--context", type=count, default=1024, help="tokens read in one context (default 1024)")
    parser.add_argument("--prompts", type=count, default=48, help="about so many answers for the accepted length (default 48)")
    parser.add_argument("--answer-tokens", type=count, default=64, help="most tokens of an answer (default 64)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")
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
        )
    except (ForetokenError, OSError) as error:
        return failed(error, CONFIG)
    print(markdown(report))
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
        announce(f"wrote {args.json}")
    return 0


def markdown(report: QualityReport) -> str:
    """One table, and what its figures are."""
    kinds = list(report.formats[0].accepted_length)
    lengths = " / ".join(map(str, DRAFT_LENGTHS))
    about = [
        f"{report.num_tokens:,} tokens of text; ± one standard error; agreement: how often the most likely token is that of {REFERENCE}.",
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
