"""`foretoken bench overhead`: what a step costs besides the forward pass. Owns the flags and what is printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from ..help_format import CommandParser
from ..option_forms import count, new_file


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = CommandParser(
        prog="foretoken bench overhead",
        description="Measure what the engine costs around the forward pass, with a network that answers at once.",
        epilog="example: foretoken bench overhead --steps 500 --json overhead.json",
    )
    parser.add_argument("--steps", type=count, default=300, help="steps to time in each case (default 300)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    import torch  # seconds that a mistake above need not wait for

    from ...engine.bench.overhead import ADAPTIVE_ROWS, CASES, Overhead, measure, weighed
    from ...engine.request import SamplingParams

    torch.set_num_threads(1)
    results: list[Overhead] = []
    print(f"{'case':38} {'rows':>5} {'tokens/row':>11} {'median ms':>10} {'p95 ms':>8} {'controller ms':>14}")

    def show(result: Overhead) -> None:
        results.append(result)
        print(
            f"{result.case:38} {result.rows:5} {result.tokens_per_step:11} {result.median_ms:10.3f} {result.p95_ms:8.3f} "
            f"{result.controller_ms:14.3f}",
            flush=True,
        )

    for case, rows, k, params in CASES:
        show(measure(case, rows, k, params, args.steps))
    greedy = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for rows in ADAPTIVE_ROWS:
        show(measure("greedy, adaptive n-gram k<=5", rows, 5, greedy, args.steps, costs=weighed(rows)))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0
