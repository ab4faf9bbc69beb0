"""`foretoken bench kernels`: the machine's own limits, and how near the network, the engine and the server come to them."""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ...engine.bench.checkpoints import SHAPES, Model, draft_pair, find_model
from ...engine.bench.generation import measure_generation, measure_speculation, measure_transformers
from ...engine.bench.machine import this_machine
from ...engine.bench.measurement import PRECISIONS, QUICK, Effort, Measurement, Precision, Results, Subject
from ...engine.bench.network import FilledNetwork, arithmetic_peaks, measure_network
from ...engine.bench.plot import plot
from ...engine.bench.report import report
from ...engine.cache_folder import cache_folder
from ...engine.errors import ForetokenError
from ...engine.model import read_config
from ...kernels import native_library
from ...kernels.config_limits import max_positions
from ...kernels.rope import UnsupportedModel
from ..exit_status import CONFIG, INTERRUPTED, failed
from ..help_format import CommandParser
from ..option_forms import count, some_of
from .kernels_http import measure_server
from .load_client import ServerFailed

EXAMPLES = """\
examples:
  foretoken bench kernels --quick --models demo
  foretoken bench kernels --models M2,M3 --precisions bf16,int8 --parts network,generate
  foretoken bench kernels --model ./my-model --precisions bf16 --output-dir results
  foretoken bench kernels --markdown docs/benchmarks/cpu.md

M1 (24M parameters), M2 (SmolLM2-135M's shape), M3 (Qwen2.5-0.5B's), M4 (0.7B, with experts) and M5 (Qwen3.5-0.8B's, recurrent) are made
with random weights, once, in the cache folder.
Let the machine do nothing else meanwhile.
"""
PARTS = ("network", "generate", "http", "transformers", "speculation")
OWN_MODELS = (*SHAPES, "demo")
DRAFT_LENGTH = 3
JSON_NAME, PLOT_NAME = "kernels.json", "kernels.png"
SCHEMA = 1


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 78 if something cannot be loaded or written, 130 if it was stopped; what is found is written."""
    args = _parser().parse_args(argv)
    command = shlex.join(["foretoken", "bench", "kernels", *argv])
    effort = QUICK if args.quick else Effort()
    if args.rounds:
        effort = dataclasses.replace(effort, rounds=args.rounds)
    started = time.monotonic()

    def announce(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    machine = this_machine()
    announce(machine.describe())
    models = args.models if args.models is not None else () if args.model else OWN_MODELS
    run = Run(args.threads, effort, args.models_dir, args.parts, announce)
    status = 0
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        for name in (*models, *args.model):
            run.measure_model(find_model(name, args.models_dir, announce), args.precisions)
        run.measure_once()
    except (ForetokenError, OSError) as error:
        status = failed(error, CONFIG)
    except KeyboardInterrupt:
        status = INTERRUPTED
        announce("interrupted")
        run.skipped.append("everything after an interruption")
    finally:  # an hour's figures are not lost to a mistake in the last minute
        if run.found:
            save(Results(SCHEMA, command, machine, effort, tuple(run.skipped), tuple(run.found)), args.output_dir, args.markdown, announce)
    return status


def save(results: Results, folder: Path, markdown: Path | None, announce: Callable[[str], None]) -> None:
    """Print the tables; write them, the JSON and the picture."""
    page = report(results)
    print(page)
    (folder / JSON_NAME).write_text(json.dumps(dataclasses.asdict(results), indent=1), encoding="utf-8")
    announce(f"wrote {folder / JSON_NAME}")
    if markdown:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(page, encoding="utf-8")
        announce(f"wrote {markdown}")
    if find_spec("matplotlib"):
        plot(results, folder / PLOT_NAME)
        announce(f"wrote {folder / PLOT_NAME}")
    else:
        announce("no plot: matplotlib is missing (pip install 'foretoken[bench]')")


class Run:
    """Goes through the parts and keeps what they find, or why they could not."""

    def __init__(self, threads: int, effort: Effort, cache: Path, parts: Sequence[str], announce: Callable[[str], None]) -> None:
        self.found: list[Measurement] = []
        self.skipped: list[str] = []
        self._threads, self._effort, self._cache, self._parts, self._say = threads, effort, cache, parts, announce

    def measure_model(self, model: Model, precisions: Sequence[Precision]) -> None:
        for precision in precisions:
            subject = Subject(model, precision, self._threads)
            label = f"{model.name}, {precision}"

            def announce(line: str, label: str = label) -> None:
                self._say(f"{label}: {line}")

            try:
                effort = self._effort.within(max_positions(read_config(model.folder)))
                found, num_bytes = self._network(subject, effort, announce)
                self.found += found
                if "generate" in self._parts:
                    self.found += measure_generation(subject, num_bytes, effort, announce)
                if "http" in self._parts:
                    self.found += measure_server(subject, num_bytes, effort, announce)
                if "transformers" in self._parts and precision in ("float32", "bf16"):
                    self.found += measure_transformers(subject, effort, announce)
            except (ForetokenError, ServerFailed, UnsupportedModel) as error:
                self.skipped.append(f"{label}: {error}")
                announce(f"left out: {error}")

    def _network(self, subject: Subject, effort: Effort, announce: Callable[[str], None]) -> tuple[list[Measurement], int]:
        """Passes; or, where they are not wanted, only the bytes that later parts compare with."""
        if "network" in self._parts:
            return measure_network(subject, effort, announce)
        return [], FilledNetwork(subject, effort).num_bytes

    def measure_once(self) -> None:
        """What does not depend on the models chosen."""
        if "network" in self._parts:
            self._say("arithmetic peak")
            self.found = arithmetic_peaks(self._threads, self._effort) + self.found
        if "speculation" in self._parts:
            target, draft = draft_pair(SHAPES["M2"], self._cache, self._say)
            pair = Model("M2 pair", "", target), Model("draft", "", draft)
            self.found += measure_speculation(*pair, DRAFT_LENGTH, self._threads, self._effort, self._say)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken bench kernels",
        description="Measure what this machine's processor allows, and how near the network, LLM.generate and the server come to it.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--models", type=some_of(OWN_MODELS), metavar="NAMES", help=f"of {','.join(OWN_MODELS)} (default: all, or none with --model)"
    )
    parser.add_argument("--model", action="append", default=[], metavar="PATH", help="a model's folder or hub id; may be repeated")
    parser.add_argument(
        "--precisions", type=some_of(PRECISIONS), default=PRECISIONS, metavar="NAMES", help=f"of {','.join(PRECISIONS)} (default: all)"
    )
    parser.add_argument("--parts", type=some_of(PARTS), default=PARTS, metavar="NAMES", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument(
        "--threads",
        type=count,
        default=native_library.usable_cores(),
        metavar="N",
        help="cores to compute with (default: all, %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=count, metavar="N", help=f"rounds of turns (default {Effort().rounds}, {QUICK.rounds} with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="small cases and few rounds: to see that it works, not for figures")
    parser.add_argument(
        "--models-dir", type=Path, default=cache_folder() / "bench", metavar="DIR", help="where random-weight models are kept (%(default)s)"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("."), metavar="DIR", help=f"for {JSON_NAME} and {PLOT_NAME} (default: here)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    return parser
