"""What a run of `make gpu-check` found, as JSON and as a page: the bars first, then everything. Knows no device."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .gpu_bench import Figure

REASON = "@because "
"""What pytest says of a test that failed: this, its name, a tab and one line of reason."""

THROUGHPUT_BAR = 5.0  # times transformers' continuous batching, in the same run


@dataclass
class CaseResult:
    """One case: its figures, and why it gave no more."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""  # "" = it ended well


@dataclass
class TestResult:
    """What pytest said."""

    __test__ = False  # pytest looks for classes of this name

    summary: str = "not run"
    failed: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


@dataclass
class Report:
    """A whole run."""

    device: str
    machine: str
    command: str
    seconds: float = 0.0
    tests: TestResult = field(default_factory=TestResult)
    cases: list[CaseResult] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`gpu-nvidia-h200`: of its files."""
        words = "".join(c if c.isalnum() else " " for c in self.device.lower()).split()
        return "-".join(["gpu", *words])

    @property
    def figures(self) -> list[Figure]:
        found = [figure for case in self.cases for figure in case.figures]
        rates = {figure.name: figure.value for figure in found if figure.case == "throughput"}
        for name, theirs in reversed(rates.items()):  # of the longest requests that both had time for
            whose, _, requests = name.partition(", ")
            ours = rates.get(f"ours, {requests}")
            if whose == "transformers" and ours:
                found.append(Figure("throughput", f"ours against transformers', {requests}", ours / theirs, "x", THROUGHPUT_BAR))
                break
        return found

    def save(self, folder: Path) -> Path:
        """Write NAME.json and NAME.md; the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        page = folder / f"{self.name}.md"
        page.write_text(self.markdown(), encoding="utf-8")
        return page

    def markdown(self) -> str:
        figures = self.figures
        bars = [figure for figure in figures if figure.bar is not None]
        lines = [
            f"# The GPU path on {self.device}",
            "",
            f"Made by `{self.command}` in {self.seconds:.0f} s. {self.machine}. Weights are random: speed depends on shapes alone.",
            "",
            "| | measured | bar | |",
            "|---|---|---|---|",
            *(_row(figure) for figure in bars),
            "",
            f"Tests: {self.tests.summary}.",
            *(f"- failed: `{name}`" for name in self.tests.failed),
            "",
            "## Everything",
            "",
            "| case | what | value | |",
            "|---|---|---|---|",
            *(f"| {figure.case} | {figure.name} | {_value(figure.value)} {figure.unit} | {figure.note} |" for figure in figures),
        ]
        failures = [case for case in self.cases if case.error]
        if failures:
            lines += ["", "## What went wrong", ""]
            lines += [f"- **{case.name}** (after {case.seconds:.0f} s): `{case.error}`" for case in failures]
        return "\n".join(lines) + "\n"


def _row(figure: Figure) -> str:
    sign = "at least" if figure.better == "more" else "at most"
    verdict = "kept" if figure.kept else "**missed**"
    return f"| {figure.case}: {figure.name} | {_value(figure.value)} {figure.unit} | {sign} {figure.bar:g} | {verdict} |"


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
