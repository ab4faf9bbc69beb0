"""Figures from invented times, and the whole command against real servers."""

import asyncio
import csv
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start_server

from foretoken.server.bench import serve_acceptance as acceptance
from foretoken.server.bench.load_client import Answer, LoadClient, ServerFailed, Unreachable
from foretoken.server.bench.prompt_sets import Prompt
from foretoken.server.bench.serve import main
from foretoken.server.bench.serve_load import Load, Outcome, Player, RequestTemplate, Run
from foretoken.server.bench.serve_results import Report, failures, table

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": false}'  # drafts whether they pay or not


@pytest.fixture(scope="module")
def server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("bench-serve") / "server.log"
    running = start_server([str(tiny_target), "--dtype", "float32", "--speculative-config", NGRAM], log)
    yield running
    running.process.kill()
    running.process.wait()


def written(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["runs"]


# How requests come.


def test_arrivals_are_a_poisson_process_and_repeatable() -> None:
    arrivals = Load(request_rate=5.0).arrivals(4000, seed=3)
    assert arrivals == Load(request_rate=5.0).arrivals(4000, seed=3) != Load(request_rate=5.0).arrivals(4000, seed=4)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert arrivals[0] == 0.0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)  # exponential: as large as the mean
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    even = Load(request_rate=5.0, burstiness=100.0).arrivals(2000, seed=3)
    assert statistics.stdev(b - a for a, b in zip(even, even[1:], strict=False)) == pytest.approx(0.02, rel=0.1)
    assert Load().arrivals(3, seed=0) == [0.0, 0.0, 0.0]


# What is made of the times.


def played(*outcomes: Outcome, seconds: float = 10.0) -> Run:
    return Run(Load(2), list(outcomes), seconds=seconds, client_cpu_s=0.5, most_at_once=2)


def test_figures_of_known_times() -> None:
    run = played(
        Outcome(0.0, Answer(0.5, 5, 10, "abc", (0.1, 0.2, 0.4))),
        Outcome(0.0, Answer(1.5, 11, 20, "defg", (0.3, 0.5, 0.8, 1.3))),
        Outcome(0.5, Answer(0.2, 1, 30, "h", (0.2,))),
        Outcome(0.5, Answer(0.2, 8, 0, "h", (0.2,))),  # all in one piece: no time per token
        Outcome(0.6, Answer(0.2, 1, 0, "")),  # nothing but the end of the text
        Outcome(0.7, failure=ServerFailed("slow down", 429, 2.0)),
        Outcome(0.7, failure=ServerFailed("slow down", 429, 7.0)),
        Outcome(0.8, failure=ServerFailed("broken")),
    )
    run.not_sent = 4
    found = Report(percentiles=(50, 90), goals=(("ttft", 250.0), ("tpot", 80.0)), detailed=True).fields(run)
    assert (found["completed"], found["failed"], found["not_sent"], found["rate_limited"], found["max_retry_after_s"]) == (5, 7, 4, 2, 7.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (60, 26)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.5, 2.6, 8.6)
    assert found["request_goodput"] == pytest.approx(0.4)  # the second's first token took too long
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["p90_ttft_ms"] == pytest.approx(270)
    assert found["mean_tpot_ms"] == pytest.approx((0.3 / 4 + 1.0 / 10) / 2 * 1e3)
    assert found["median_itl_ms"] == found["p50_itl_ms"] == pytest.approx(200)  # of 100, 200, 200, 300, 500
    assert found["mean_e2el_ms"] == pytest.approx((0.4 + 1.3 + 0.2 + 0.2) / 4 * 1e3)
    assert found["tokens_per_chunk"] == 26 / 9 and found["client_cpu_share"] == 0.05
    assert found["ttfts"] == [0.1, 0.3, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0] and found["errors"][-1] == "broken"
    assert found["itls"][0] == pytest.approx([0.1, 0.2]) and found["start_times"][2] == 0.5
    assert failures(run) == ["2 failed: slow down", "1 failed: broken", "4 were not sent after that"]


def test_a_run_without_answers_has_no_latencies() -> None:
    found = Report().fields(played(Outcome(0.0, failure=ServerFailed("broken")), seconds=0.0))
    assert found["failed"] == 1 and found["output_throughput"] == 0 and not any("ttft" in name for name in found)


def test_the_table_has_a_column_for_each_run_and_vllms_words() -> None:
    report = Report(metrics=("ttft",), percentiles=(50, 99))
    one = report.fields(played(Outcome(0.0, Answer(0.5, 5, 10, "abc", (0.1, 0.2)))))
    lines = table([one | {"max_concurrency": 1}, one | {"max_concurrency": 8, "mean_ttft_ms": None}], report).splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = {label: rest.split() for label, colon, rest in (line.partition(":") for line in lines) if colon}
    assert cells["Maximum request concurrency"] == ["1", "8"] and cells["Mean TTFT (ms)"] == ["100.00", "-"]
    assert cells["Median TTFT (ms)"] == cells["P99 TTFT (ms)"] == ["100.00", "100.00"]
    assert "Request goodput (req/s)" not in cells and "Acceptance rate (%)" not in cells and "Mean TPOT (ms)" not in cells


METRICS_PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 5.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 9.0
vllm:e2e_request_latency_seconds_bucket{le="1.0"} 4.0
"""


def test_acceptance_is_a_difference_summed_over_engines() -> None:
    before = acceptance.parse(METRICS_PAGE)
    page = METRICS_PAGE.replace(" 10.0", " 20.0").replace(" 45.0", " 85.0").replace(" 30.0", " 62.0").replace(" 9.0", " 16.0")
    after = acceptance.parse(page)
    assert before is not None and after is not None and before.num_drafts == 15
    found = after.since(before).fields()
    assert found["spec_decode_acceptance_rate"] == pytest.approx(80) and found["spec_decode_acceptance_length"] == pytest.approx(4.2)
    assert found["spec_decode_per_position_acceptance_rates"] == [0.0, 0.7]
    assert before.since(before).fields() == {} and acceptance.parse("# nothing\nup 1\n") is None


# Against a real server.


def test_everything_that_is_written(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        before = acceptance.parse(client.get("/metrics").text)
    files = {kind: tmp_path / f"result.{kind}" for kind in ("json", "csv", "png")}
    flags = ["--dataset", "short", "--num-prompts", "6", "--num-warmups", "1", "--max-tokens", "24", "--ignore-eos", "--concurrency", "1,3"]
    flags += ["--json", files["json"], "--csv", files["csv"], "--plot", files["png"], "--save-detailed", "--goodput", "e2el:600000"]
    flags += ["--save-result", "--result-dir", tmp_path / "each", "--result-filename", "run.json", "--label", "mine"]
    assert main(["--base-url", server.url + "/v1", *map(str, flags)]) == 0
    printed = capsys.readouterr().out
    runs = written(files["json"])
    assert [run["max_concurrency"] for run in runs] == [run["max_concurrent_requests"] for run in runs] == [1, 3]
    for run in runs:
        assert (run["completed"], run["failed"], run["num_prompts"], run["label"]) == (6, 0, 6, "mine")
        assert run["total_output_tokens"] == sum(run["output_lens"]) == 6 * 24 and run["total_input_tokens"] == sum(run["input_lens"])
        assert run["output_throughput"] == pytest.approx(144 / run["duration"]) and run["request_rate"] == "inf"
        assert run["request_goodput"] == pytest.approx(run["request_throughput"])
        for metric in ("ttft", "tpot", "itl", "e2el"):
            assert 0 <= run[f"p50_{metric}_ms"] <= run[f"p90_{metric}_ms"] <= run[f"p99_{metric}_ms"]
        assert 0 < run["mean_ttft_ms"] < run["mean_e2el_ms"] <= run["duration"] * 1e3
        assert 0 < run["spec_decode_acceptance_rate"] <= 100 and 1 < run["spec_decode_acceptance_length"] <= 4
    (line,) = (line for line in printed.splitlines() if line.startswith("Output token throughput (tok/s):"))
    assert line.split()[-2:] == [f"{run['output_throughput']:.2f}" for run in runs]
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [row["max_concurrency"] for row in rows] == ["1", "3"] and float(rows[1]["p99_itl_ms"]) == runs[1]["p99_itl_ms"]
    assert files["png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and files["png"].stat().st_size > 20_000
    saved = sorted((tmp_path / "each").iterdir())
    assert [json.loads(path.read_text()) for path in saved] == runs and "concurrency1" in saved[0].name
    with server.client() as client:
        after = acceptance.parse(client.get("/metrics").text)
    assert before is not None and after is not None
    counted = sum(run["spec_decode_num_drafts"] for run in runs)
    assert 0 < counted <= after.num_drafts - before.num_drafts, "a run counts its own drafts only, not the warm-up's"


def test_turns_are_played_with_the_models_own_answers(server: RunningServer, tmp_path: Path) -> None:
    dialogue, out = tmp_path / "dialogue.jsonl", tmp_path / "out.json"
    dialogue.write_text(json.dumps({"turns": ["Hello", "Go on", "And then"]}))
    flags = ["--dataset", dialogue, "--max-tokens", "20", "--ignore-eos", "--save-detailed", "--json", out, "--disable-tqdm"]
    assert main(["--base-url", server.url, *map(str, flags)]) == 0
    (run,) = written(out)
    assert run["completed"] == 3 and run["num_prompts"] == 1
    with server.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        first, second, _ = run["generated_texts"]
        said = [("user", "Hello"), ("assistant", first), ("user", "Go on"), ("assistant", second), ("user", "And then")]
        for turn, prompt_tokens in enumerate(run["input_lens"]):
            messages = [{"role": role, "content": text} for role, text in said[: 2 * turn + 1]]
            usage = client.post("/v1/chat/completions", json={"model": model, "messages": messages, "max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens"] == prompt_tokens
    assert main(["--base-url", server.url, "--backend", "vllm", *map(str, flags)]) == 0
    assert written(out)[0]["completed"] == 1 and written(out)[0]["backend"] == "openai", "completions have no turns"


def test_a_pasted_vllm_command_and_arrivals(server: RunningServer, tmp_path: Path) -> None:
    flags = "--backend vllm --endpoint /v1/completions --dataset-name random --random-input-len 8 --random-output-len 12 --num-prompts 5 "
    flags += "--request-rate 20 --burstiness 1.0 --seed 1 --ignore-eos --percentile-metrics ttft,tpot --metric-percentiles 50,95 "
    flags += "--tokenizer some/model --trust-remote-code --save-result --save-detailed --result-filename pasted.json --disable-tqdm"
    address = ["--host", "127.0.0.1", "--port", server.url.rpartition(":")[2], "--result-dir", str(tmp_path)]
    assert main([*address, *flags.split()]) == 0
    run = json.loads((tmp_path / "pasted.json").read_text())
    assert run["completed"] == 5 and run["output_lens"] == [12] * 5 and run["max_concurrency"] is None and run["request_rate"] == 20
    for asked, began in zip(Load(request_rate=20).arrivals(5, seed=1), sorted(run["start_times"]), strict=True):
        assert asked <= began < asked + 0.5
    assert "p95_tpot_ms" in run and "mean_e2el_ms" not in run


def test_the_client_costs_little(server: RunningServer) -> None:
    """CPU time of a chunk: 10 to 50 us on a machine that has nothing else to do; of a token less, where a chunk has several."""

    async def stream() -> Run:
        run = Run(Load())
        client = LoadClient(server.url)
        settings = {"max_tokens": 300, "ignore_eos": True, "speculation": {"method": "off"}}
        template = RequestTemplate(await client.model(), "completions", settings)
        await Player(client, template).play([Prompt((f"Number {n}",)) for n in range(8)], run)
        return run

    found = min((Report().fields(asyncio.run(stream())) for _ in range(2)), key=lambda run: run["client_us_per_chunk"])
    assert found["completed"] == 8 and found["total_output_tokens"] == 2400
    assert found["client_us_per_chunk"] / found["tokens_per_chunk"] < 250


# What goes wrong.


def test_a_server_that_is_killed_leaves_its_answers(server_process: Callable[..., RunningServer], tiny_target: Path) -> None:
    victim = server_process(tiny_target, "--dtype", "float32", "--speculative-config", '{"method": "off"}')
    answered = 0

    def kill_after_three() -> None:
        nonlocal answered
        answered += 1
        if answered == 3:
            victim.process.kill()
            victim.process.wait()

    async def play(run: Run) -> None:
        client = LoadClient(victim.url)
        template = RequestTemplate(await client.model(), "chat", {"max_tokens": 64, "ignore_eos": True})
        await Player(client, template, kill_after_three).play([Prompt(("Hello", "Go on"))] * 10, run)

    run = Run(Load(2))
    asyncio.run(play(run))
    found = Report().fields(run)
    assert 3 <= found["completed"] <= 4 and found["completed"] + found["failed"] == 20
    assert 1 <= len(run.failures) <= 3 and run.not_sent >= 13, "no request is sent to a server that has gone"
    assert any(isinstance(failure, Unreachable) for failure in run.failures)
    assert "were not sent after that" in failures(run)[-1] and "Mean TTFT (ms)" in table([found], Report())


def test_a_full_server_with_a_key(
    server_process: Callable[..., RunningServer],
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.json"
    full = server_process(tiny_target, "--dtype", "float32", "--max-num-seqs", "1", "--max-queued-requests", "1", "--api-key", "secret")
    flags = ["--base-url", full.url, "--dataset", "short", "--num-prompts", "12", "--concurrency", "12", "--max-tokens", "48"]
    flags += ["--ignore-eos", "--num-warmups", "1", "--json", str(out)]
    assert main([*flags, "--api-key", "secret"]) == 1
    (run,) = written(out)
    assert 1 <= run["completed"] and run["completed"] + run["rate_limited"] == 12 and run["failed"] == run["rate_limited"] > 0
    assert run["max_retry_after_s"] >= 1
    printed = capsys.readouterr().out
    assert f"turned away {run['failed']} requests as too many" in printed and f"{run['failed']} failed: " in printed

    assert main(flags) == 69
    assert "status 401" in (said := capsys.readouterr().err) and "--api-key, or in OPENAI_API_KEY" in said
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main([*flags, "--num-prompts", "1"]) == 0


def test_status_429_and_its_pause() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "slow down"}}'
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async def play(run: Run) -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as limited:
            client = LoadClient(f"http://127.0.0.1:{limited.sockets[0].getsockname()[1]}")
            await Player(client, RequestTemplate("m", "chat", {})).play([Prompt(("Hello",))] * 3, run)

    run = Run(Load(2))
    asyncio.run(play(run))
    found = Report().fields(run)
    assert (found["failed"], found["rate_limited"], found["not_sent"], found["max_retry_after_s"]) == (3, 3, 0, 7.0)
    assert failures(run)[0].startswith("3 failed: ") and "status 429: slow down" in failures(run)[0]


def test_a_model_that_the_server_does_not_have(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        served = client.get("/v1/models").json()["data"][0]["id"]
    assert main(["--base-url", server.url, "--model", "another"]) == 69
    assert f"has no model 'another', only '{served}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--concurrency", "1,0"], "'0' is not a positive integer"),
        (["--request-rate", "-1"], "'-1' is not a number above 0"),
        (["--goodput", "itl:5"], "'itl:5' should be METRIC:MILLISECONDS with one of ttft, tpot, e2el"),
        (["--goodput", "ttft:soon"], "'soon' is not a number"),
        (["--percentile-metrics", "ttft,latency"], "'latency' is none of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "101 is above 100"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--endpoint", "/v1/embeddings"], "is none of chat, completions"),
    ],
)
def test_mistakes_in_the_command_line(flags: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2 and complaint in capsys.readouterr().err
