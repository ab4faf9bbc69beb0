import struct
from pathlib import Path

import pytest

from foretoken.engine.bench.interleaved import Spread
from foretoken.engine.bench.machine import Machine, this_machine
from foretoken.engine.bench.measurement import (
    GENERATE,
    LEVELS,
    MACHINE,
    NETWORK,
    SERVER,
    STREAMED,
    Effort,
    Measurement,
    Precision,
    Results,
)
from foretoken.engine.bench.report import report


def one(
    level: str, case: str, x: int, value: float, ratio: float | None = None, model: str = "M2", precision: Precision = "bf16"
) -> Measurement:
    spread = None if ratio is None else Spread(ratio, ratio, ratio)
    return Measurement(model, precision, level, case, x, "", Spread(value, value, value), spread, "")


@pytest.fixture
def results() -> Results:
    machine = Machine("A CPU", 2, ("avx2",), "32768K", 24.0, "Linux", "3.11", "2.13", "avx512_bf16")
    measurements = (
        one(MACHINE, "weights", 0, 270.0), one(MACHINE, "read", 1, 17.0), one(MACHINE, "read", 2, 32.4),
        one(MACHINE, "arithmetic", 1, 0.46, model=""),
        *(one(level, "decode", 128, 101.5 + i, 0.84 + i / 100) for i, level in enumerate(LEVELS)),
        one(NETWORK, "verification", 1, 9.87, 1.0), one(NETWORK, "verification", 8, 11.0, 1.17),
        one(NETWORK, "rows", 1, 100.0, 1.0), one(NETWORK, "rows", 32, 1111.0, 11.11), one(GENERATE, "rows", 1, 90.0, 1.0),
        one(GENERATE, "rows", 32, 900.0, 10.0),
        one(GENERATE, "load", 32, 700.0, 1.0), one(SERVER, "load", 32, 650.0, 0.93), one(STREAMED, "load", 32, 560.0, 0.81),
        one(STREAMED, "server CPU", 32, 43.0), one(STREAMED, "chunks", 32, 0.98),
        one(NETWORK, "prefill", 512, 3773.0), one(GENERATE, "prefill", 512, 3700.0),
        *(one(NETWORK, "context", n, 9.0 + n / 1000) for n in (128, 1024, 2048, 4096)),
        one(GENERATE, "one stream", 1, 95.0, 3.6), one("transformers", "one stream", 1, 26.4, 1.0),
        one(GENERATE, "draft off", 3, 108.0, 1.0), one(GENERATE, "draft draft_model", 3, 161.0, 1.49),
        one(GENERATE, "draft length", 3, 2.18), one(GENERATE, "draft identical", 3, 1.0),
    )
    return Results(1, "foretoken bench kernels", machine, Effort(), ("M3, int4: no such thing",), measurements)


def line(page: str, title: str, start: str) -> list[str]:
    """The cells of a table's row."""
    section = page.split(f"## {title}")[1].split("\n## ")[0]
    (found,) = (text for text in section.splitlines() if text.startswith(f"| {start}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_every_figure_is_in_its_table(results: Results) -> None:
    page = report(results)
    assert "2 cores of A CPU" in page and "`foretoken bench kernels`" in page and "- not measured: M3, int4: no such thing" in page
    assert line(page, "The limit", "M2, bf16") == ["M2, bf16", "270.0", "17.0", "32.4", "120"]
    assert line(page, "Arithmetic", "bf16") == ["bf16", "0.46"]
    shares = ["101.5", "84%", "102.5", "85%", "103.5", "86%", "104.5", "87%"]
    assert line(page, "Decode", "M2, bf16, context 128") == ["M2, bf16, context 128", *shares]
    assert line(page, "Verification", "M2, bf16") == ["M2, bf16", "9.87", "1.17"]
    assert line(page, "Batched", "M2, bf16, network") == ["M2, bf16, network", "100.0", "1,111", "11.11"]
    assert line(page, "Batched", "M2, bf16, LLM") == ["M2, bf16, LLM.generate", "90.0", "900", "10.00"]
    assert line(page, "The server", "M2, bf16, 32")[1:] == ["700", "650.0", "0.93", "560.0", "0.81", "43", "0.98"]
    assert line(page, "Prefill of 512", "M2, bf16")[1:] == ["3,773", "3,700"]
    assert line(page, "Attention", "M2, bf16")[1:] == ["9.13", "10.02", "11.05", "13.10", "1,000", "1,000"]
    assert line(page, "Against transformers", "M2, bf16")[1:] == ["26.4", "95.0", "3.60"]
    assert line(page, "A draft model", "M2, bf16, k=3")[1:] == ["108.0", "161.0", "1.49", "2.18", "100%"]


def test_tables_without_figures_are_left_out(results: Results) -> None:
    page = report(Results(1, "", results.machine, Effort(), (), (one(NETWORK, "prefill", 512, 1.0),)))
    assert page.count("\n## ") == 1 and "not measured" not in page


def test_the_picture_is_one(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from foretoken.engine.bench.plot import plot

    plot(results, tmp_path / "plot.png")
    content = (tmp_path / "plot.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 20_000
    width, height = struct.unpack(">II", content[16:24])
    assert 1000 < width < 3000 and 500 < height < 3000


def test_an_effort_is_cut_to_the_model() -> None:
    cut = Effort().within(600)
    assert cut.contexts == (128, 256, 512) and cut.decode_contexts == (128,)
    assert cut.prompt_tokens == 512 and Effort().within(300).prompt_tokens == 236
    assert Effort().within(8192) == Effort()


def test_this_machine() -> None:
    machine = this_machine()
    assert machine.cores >= 1 and machine.memory_gb > 0.1 and machine.cpu and machine.native
    assert machine.cpu in machine.describe()
