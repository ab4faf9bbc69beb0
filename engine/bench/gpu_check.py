"""`make gpu-check`: tests and measures the GPU path on a machine that nobody has seen before, in one go, and writes it down.

Whatever fails is recorded and the rest goes on. Cases run in processes of their own, because a mistake on a GPU can spoil the
whole process: one that dies or takes too long costs its case, and the others go on in a fresh one.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from tqdm import tqdm

from .gpu_bench import FULL, SMALL, Bench, Figure, release
from .gpu_cases import CASES
from .gpu_report import REASON, CaseResult, Report, TestResult
from .machine import this_machine

ROOT = Path(__file__).parents[2]
TESTS = ("tests/gpu", "tests/kernels/triton")
TEST_SHARE = 0.4  # of the time, at most
MOST_TEST_PROCESSES = 14  # where pytest can run several: most of the time goes into compiling kernels
CASE_S = 120.0  # at most
TAIL_LINES = 40
EXAMPLES = """\
examples:
  make gpu-check                                                  on a machine with a GPU
  python -m foretoken.engine.bench.gpu_check --out /tmp/found     the same, written elsewhere
  python -m foretoken.engine.bench.gpu_check --tiny --device cpu --out /tmp/found     whether the script itself runs
  python -m foretoken.engine.bench.gpu_check --cases decode eagle --no-tests
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    device = torch.device(args.device)
    if args.worker:
        return _worker(args.worker, device, args.tiny)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: PyTorch finds no GPU here; --tiny --device cpu tries the script itself out", file=sys.stderr)
        return 2
    started = time.monotonic()
    deadline = started + args.seconds
    worker = [sys.executable, "-m", "foretoken.engine.bench.gpu_check", "--device", args.device, *["--tiny"] * args.tiny]
    report = Report(_device_name(device), _machine(), f"python -m foretoken.engine.bench.gpu_check {' '.join(sys.argv[1:])}".strip())
    names = args.cases or list(CASES)
    with tqdm(total=len(names) + args.tests, desc="GPU check", leave=False, disable=None) as bar:
        if args.tests:
            report.tests = _run_tests(args.test_paths or TESTS, min(args.seconds * TEST_SHARE, deadline - time.monotonic()))
            bar.update()
            _save(report, args.out, started)
        for case in run_cases(names, worker, deadline):
            report.cases.append(case)
            bar.update()
            _save(report, args.out, started)  # after every case: whatever ends this process, what was found stays
    page = _save(report, args.out, started)
    print(report.markdown())
    print(f"written to {page} and {page.with_suffix('.json')}")
    return 0 if not report.tests.failed and all(not case.error for case in report.cases) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda, cuda:N; cpu only with --tiny (cuda)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", metavar="FOLDER", help="for the page and its JSON")
    parser.add_argument("--seconds", type=float, default=500.0, metavar="S", help="for everything (500)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="measure only")
    parser.add_argument("--test-paths", nargs="+", metavar="PATH", help=f"what pytest runs ({', '.join(TESTS)})")
    parser.add_argument("--tiny", action="store_true", help="a tiny network and little effort: tries the script out")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _save(report: Report, folder: Path, started: float) -> Path:
    report.seconds = time.monotonic() - started
    return report.save(folder)


def _run_tests(paths: Sequence[str], limit_s: float) -> TestResult:
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider"]
    command.append("--continue-on-collection-errors")  # a file that cannot be imported there costs its own tests
    # What is built for a GPU without one needs none here, and takes the time of tests that do.
    command += ["-o", "timeout=90", "--ignore", "tests/kernels/triton/test_compilation.py"]
    command += ["-p", "foretoken.engine.bench.gpu_failures"]
    if torch.cuda.is_available() and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(os.cpu_count() or 1, MOST_TEST_PROCESSES))]
    lines, ended = _run([*command, *paths], limit_s)
    found = read_tests(lines)
    if not ended:
        found.summary = f"stopped after {limit_s:.0f} s: {found.summary}"
        found.failed.append("the tests took too long")
    return found


def read_tests(lines: Sequence[str]) -> TestResult:
    """From what `pytest -v` says, to its end or not; several processes put the outcome first."""
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for line in lines:
        if line.startswith(REASON):
            name, _, reason = line.removeprefix(REASON).partition("\t")
            reasons[name] = reason
            continue
        outcome = next((word for word in ("PASSED", "FAILED", "ERROR", "SKIPPED") if f" {word} " in f"{line} "), None)
        if outcome is not None and "::" in line:
            before, _, after = f"{line} ".partition(f" {outcome} ")
            outcomes[before if before.startswith("tests/") else after.strip()] = outcome
        elif line.startswith("ERROR tests/"):  # a whole file, of which only the summary speaks
            outcomes[line.split()[1]] = "ERROR"
    counts = Counter(outcomes.values())
    summary = ", ".join(f"{counts[outcome]} {outcome.lower()}" for outcome in ("FAILED", "ERROR", "PASSED", "SKIPPED") if counts[outcome])
    wrong = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    failed = [f"{name}: {reasons[name]}" if name in reasons else name for name in wrong]
    if not outcomes:
        failed.append("no test ran")
    return TestResult(summary or "no test ran", failed, [*lines[-TAIL_LINES:]])


def _run(command: Sequence[str], limit_s: float) -> tuple[list[str], bool]:
    """Lines of its output, and whether it ended by itself."""
    process = _started(command)
    timer = threading.Timer(limit_s, _kill, [process])
    timer.start()
    assert process.stdout is not None
    with process.stdout as output:
        lines = [line.rstrip() for line in output]
    process.wait()
    ended = timer.is_alive()
    timer.cancel()
    return lines, ended


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that all of it can be ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        pass


def run_cases(names: Sequence[str], command: Sequence[str], deadline: float, case_s: float = CASE_S) -> Iterator[CaseResult]:
    """Each case as it ends. A worker goes on with the next case; behind one that failed, died or took too long another takes over.

    command: of a worker, `--worker CASE...` left out. deadline: by time.monotonic.
    """
    left = list(names)
    while left:
        if time.monotonic() >= deadline:
            for name in left:
                yield CaseResult(name, error="not run: no time was left")
            return
        for case in _one_worker(list(left), command, deadline, case_s):
            left.remove(case.name)
            yield case


def _one_worker(names: Sequence[str], command: Sequence[str], deadline: float, case_s: float) -> Iterator[CaseResult]:
    """Cases until all are done or one went wrong; at least one."""
    process = _started([*command, "--worker", *names])
    said: SimpleQueue[str | None] = SimpleQueue()
    assert process.stdout is not None
    listener = threading.Thread(target=_listen, args=(process.stdout, said), daemon=True)
    listener.start()
    others: list[str] = []  # what libraries print: the reason, if the process dies
    try:
        for name in names:
            case, started = CaseResult(name), time.monotonic()
            limit = min(started + case_s, deadline)
            while True:
                try:
                    line = said.get(timeout=max(limit - time.monotonic(), 0.01))
                except Empty:
                    case.error = f"stopped after {time.monotonic() - started:.0f} s"
                    break
                if line is None:
                    case.error = f"its process ended with status {process.wait()}: {' | '.join(others[-3:])}"
                    break
                message = _message(line)
                if message is None:
                    others = [*others[-50:], line.strip()]
                elif "figure" in message:
                    case.figures.append(Figure(**message["figure"]))
                else:
                    case.error = message["error"]
                    break
            case.seconds = time.monotonic() - started
            yield case
            if case.error:  # what state it is in, nobody knows
                return
    finally:
        _kill(process)
        process.wait()
        listener.join(timeout=5.0)
        process.stdout.close()


def _listen(output: Any, said: SimpleQueue[str | None]) -> None:
    for line in output:
        said.put(line)
    said.put(None)


MARK = "@gpu-check "


def _message(line: str) -> dict[str, Any] | None:
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None


def _say(message: dict[str, Any]) -> None:
    print("\n" + MARK + json.dumps(message), flush=True)


def _worker(names: Sequence[str], device: torch.device, tiny: bool) -> int:
    """The far side: figures as they are found, then how the case ended."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    elif device.index is not None:
        torch.cuda.set_device(device)  # where marks are set and kernels start that a case starts by itself
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, SMALL if tiny else FULL, Path(folder))
        for name in names:
            error = ""
            try:
                for figure in CASES[name](bench):
                    _say({"figure": asdict(figure)})
            except Exception as failure:  # recorded; the next case is tried all the same
                traceback.print_exc()
                last = traceback.extract_tb(failure.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                error = f"{type(failure).__name__} at {place}: {' '.join(str(failure).split())[:400]}"
            _say({"error": error})
            if error:
                return 1  # a fresh process is started for the rest
            release(device)
    return 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _machine() -> str:
    """The processor too: what lies between two passes is its work."""
    import transformers

    parts = [this_machine().describe(), f"transformers {transformers.__version__}"]
    try:
        import triton

        parts.append(f"triton {triton.__version__}")
    except ImportError:
        pass
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
