import asyncio
import logging
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from asking import CHAT
from fake_engine import STATS, FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from foretoken.engine.engine_metrics import OFF_REASONS
from foretoken.engine.intake import Intake
from foretoken.engine.request import SamplingParams, SpeculationStats
from foretoken.engine.stats import EngineStats
from foretoken.server import generation
from foretoken.server import metrics as module
from foretoken.server.metrics import Metrics, traffic_line


def samples(text: str) -> dict[tuple[str, ...], float]:
    """{(name, label values but model_name and engine ...): value}"""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
            found[sample.name, *labels.values()] = sample.value
    return found


def rendered(stats: EngineStats) -> dict[tuple[str, ...], float]:
    return samples(Metrics(lambda: stats, "tiny", ("ngram",)).render().decode())


def test_the_engines_snapshot_is_rendered(client: TestClient) -> None:
    response = client.get("/metrics")
    found = samples(response.text)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found["vllm:num_requests_running",] == 1 and found["vllm:num_requests_waiting",] == 2
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["vllm:spec_decode_num_drafts_total",] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total",] == 50
    assert found["vllm:spec_decode_num_accepted_tokens_total",] == 30
    assert [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(5)] == [10, 9, 6, 4, 1]
    assert found["vllm:spec_decode_acceptance_rate",] == 0.75
    assert [found["foretoken:spec_decode_disabled_total", reason] for reason in OFF_REASONS] == [0, 3, 0]
    assert found["foretoken:speculation_on",] == 1
    assert [found["foretoken:speculation_off_reason", reason] for reason in OFF_REASONS] == [0, 0, 0]
    assert found["foretoken:num_speculative_tokens",] == 5 and found["foretoken:mean_draft_ceiling",] == 4.5
    assert found["foretoken:acceptance_info", "true", "typical"] == 1
    told = {"drafts": 10, "draft_tokens": 50, "accepted_tokens": 30, "wasted_tokens": 20, "failures": 1}
    told |= {"draft_seconds": 0.25, "verify_seconds": 0.5}
    assert {name: found[f"foretoken:proposer_{name}_total", "ngram"] for name in told} == told
    assert found["foretoken:proposer_on", "ngram"] == 1


def test_why_speculation_is_off_is_one_of_a_closed_set() -> None:
    for reason in OFF_REASONS:
        found = rendered(replace(STATS, speculation_off=reason))
        assert found["foretoken:speculation_on",] == 0
        assert {of: found["foretoken:speculation_off_reason", of] for of in OFF_REASONS} == {of: of == reason for of in OFF_REASONS}
    dead = replace(STATS.proposers[0], off_reason="RuntimeError: anything at all")
    found = rendered(replace(STATS, proposers=(dead,)))
    assert found["foretoken:proposer_on", "ngram"] == 0 and not any("anything" in part for key in found for part in key)


def test_a_speed_up_that_nobody_knows_is_not_told() -> None:
    assert not any(key[0] == "foretoken:estimated_speedup" for key in rendered(STATS))
    assert rendered(replace(STATS, estimated_speedup=1.4))["foretoken:estimated_speedup",] == 1.4


def test_each_choice_observes_the_accepted_length_of_each_proposer_that_guessed() -> None:
    metrics = Metrics(lambda: STATS, "tiny", ("ngram", "suffix", "draft_model"))
    metrics.on_speculation(SpeculationStats(5, 20, 10, of_proposer={0: (4, 10), 2: (1, 0)}))
    metrics.on_speculation(SpeculationStats(2, 26, 26, of_proposer={0: (2, 26)}))
    metrics.on_speculation(SpeculationStats())
    found = samples(metrics.render().decode())
    name = "foretoken:request_mean_accepted_length"
    assert [found[f"{name}_count", proposer] for proposer in ("ngram", "suffix", "draft_model")] == [2, 0, 1]
    assert found[f"{name}_sum", "ngram"] == (1 + 10 / 4) + (1 + 26 / 2)
    # sample labels come in the order of their names: le before proposer
    of_ngram = {key[1]: value for key, value in found.items() if key[0] == f"{name}_bucket" and key[-1] == "ngram"}
    assert of_ngram["3.0"] == 0 and of_ngram["4.0"] == of_ngram["12.0"] == 1 and of_ngram["17.0"] == of_ngram["+Inf"] == 2
    assert found[f"{name}_bucket", "1.0", "draft_model"] == 1


def test_a_finished_request_tells_its_accepted_length(client: TestClient) -> None:
    told = client.post("/v1/chat/completions", json=CHAT | {"n": 2}).json()["choices"][0]["speculative_decoding"]
    found = samples(client.get("/metrics").text)
    assert found["foretoken:request_mean_accepted_length_count", "ngram"] == 2
    assert found["foretoken:request_mean_accepted_length_sum", "ngram"] == pytest.approx(2 * told["mean_acceptance_length"], abs=1e-3)


def test_requests_are_counted_once_each(client: TestClient, fake: FakeEngine) -> None:
    usage = client.post("/v1/chat/completions", json=CHAT | {"n": 2}).json()["usage"]
    fake.fails_after = 1
    client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    client.post("/v1/chat/completions", json=CHAT | {"n": 0})
    found = samples(client.get("/metrics").text)
    assert found["vllm:request_success_total", "stop"] == 2 and found["vllm:request_success_total", "error"] == 1
    assert found["vllm:e2e_request_latency_seconds_count",] == found["vllm:request_generation_tokens_count",] == 3
    assert found["vllm:time_to_first_token_seconds_count",] == 3
    assert found["vllm:request_queue_time_seconds_count",] == 2 and found["vllm:request_queue_time_seconds_sum",] == 2 * 0.25
    assert found["vllm:request_generation_tokens_sum",] == usage["completion_tokens"] + 2
    # Every token behind a choice's first step has a latency of its own.
    assert found["vllm:inter_token_latency_seconds_count",] == usage["completion_tokens"] - 2 * 2
    assert found["foretoken:http_requests_total", "/v1/chat/completions", "200"] == 2
    assert found["foretoken:http_requests_total", "/v1/chat/completions", "400"] == 1


def test_a_choice_ends_with_its_last_token_whenever_the_others_do(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(1)  # a second passes until it is read: at each delta, at the end
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics(fake.stats, "tiny", ("ngram",))

    async def run() -> list[int]:
        running = generation.Generation(fake.as_engine(), metrics, [[5, 6, 7]], SamplingParams(n=2), request_id="r", arrival_time=0)
        has_ended = [delta.finish_reason is not None async for _, delta in running.deltas()]
        running.close()
        return [second for second, ended in enumerate(has_ended, 1) if ended]

    ends = asyncio.run(run())
    assert len(ends) == 2 and samples(metrics.render().decode())["vllm:e2e_request_latency_seconds_sum",] == sum(ends)


def test_what_a_client_waits_for_begins_with_its_request(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "prepare", lambda *args: time.sleep(0.2))  # a form is compiled
    told = client.post("/v1/chat/completions", json=CHAT | {"response_format": {"type": "json_object"}}).json()["metrics"]
    found = samples(client.get("/metrics").text)
    assert told["time_to_first_token_ms"] >= 200
    assert 0.2 <= found["vllm:time_to_first_token_seconds_sum",] <= found["vllm:e2e_request_latency_seconds_sum",]


def test_a_token_of_a_long_step_has_a_share_of_the_gap() -> None:
    metrics = Metrics(lambda: STATS, "tiny", ("ngram",))
    metrics.on_tokens(0.4, 4)
    metrics.on_tokens(0.1, 1)
    found = samples(metrics.render().decode())
    assert found["vllm:inter_token_latency_seconds_count",] == 5
    assert found["vllm:inter_token_latency_seconds_sum",] == pytest.approx(0.5)
    assert found["vllm:inter_token_latency_seconds_bucket", "0.1"] == 5
    assert found["vllm:inter_token_latency_seconds_bucket", "0.075"] == 0
    metrics.on_tokens(30.0, 1)  # the wait for the chunks of a long prompt
    metrics.on_tokens(200.0, 2)  # beyond the last bound
    found = samples(metrics.render().decode())
    assert [found["vllm:inter_token_latency_seconds_bucket", bound] for bound in ("20.0", "40.0", "80.0", "+Inf")] == [5, 6, 6, 8]
    assert found["vllm:inter_token_latency_seconds_count",] == 8


def test_no_request_can_make_new_series(client: TestClient) -> None:
    client.get("/nothing")
    before = client.get("/metrics").text.count("\n")
    for index in range(5):
        client.get(f"/nothing-{index}", headers={"x-request-id": f"id-{index}"})
        client.request(f"ODD{index}", "/nothing")
        client.post("/v1/chat/completions", json=CHAT | {"model": f"m{index}", f"field{index}": 1})
    lines = client.get("/metrics").text
    assert lines.count("\n") <= before + 4  # the status 404 of one route and the metrics route itself
    assert "nothing" not in lines and "field3" not in lines and "ODD" not in lines


def test_two_apps_do_not_share_counts(client: TestClient, fake: FakeEngine) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    other = Metrics(fake.stats, "tiny", ("ngram",))
    assert samples(other.render().decode())["vllm:request_success_total", "stop"] == 0


def test_the_log_line_speaks_of_the_interval() -> None:
    later = replace(
        STATS, num_drafts=20, num_draft_tokens=85, num_accepted_tokens=56, num_steps=60, generation_tokens=140, prompt_tokens=120
    )
    line = traffic_line(STATS, later, 10.0)
    assert line.startswith("Speculative decoding acceptance rate: 74.3%, mean accepted length 3.6, k 3.5;")
    assert "running 1, waiting 2, generated 5.0 tokens/s, prompts 2.0 tokens/s, KV cache 25.0%" in line
    quiet = replace(STATS, num_steps=60, speculation_off="batch_size")
    assert traffic_line(STATS, quiet, 10.0).startswith("Speculative decoding: batch_size; running 1")


def test_the_log_line_comes_with_traffic_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 0.005)
    current = [STATS]

    async def run() -> list[int]:
        log = asyncio.create_task(Metrics(lambda: current[0], "tiny", ()).log_traffic())
        num_lines = []
        for stats in (STATS, replace(STATS, num_steps=41)):
            current[0] = stats
            await asyncio.sleep(0.1)
            num_lines.append(len(caplog.records))
        log.cancel()
        return num_lines

    with caplog.at_level(logging.INFO, "foretoken.server"):
        assert asyncio.run(run()) == [0, 1]
