import logging
import shlex

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.server.logs import OneLineFormatter, request_line

CHAT = {"messages": [{"role": "user", "content": "a secret of the user's"}]}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The request lines as key -> value; logfmt's quoting is the shell's as far as it goes."""
    said = [record.getMessage() for record in caplog.records if record.name == "foretoken.request"]
    return [dict(pair.split("=", 1) for pair in shlex.split(line)) for line in said]


@pytest.fixture(autouse=True)
def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foretoken.request")


def test_a_request_has_one_line_with_what_became_of_it(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"}).json()
    (line,) = lines(caplog)
    speculation = answer["metrics"]["speculative_decoding"]
    told = {
        "request_id": "mine-1", "client": "testclient", "method": "POST", "route": "/v1/chat/completions", "status": "200", "model": "tiny",
        "id": answer["id"], "finish_reason": "stop", "choices": "1", "prompt_tokens": str(answer["usage"]["prompt_tokens"]),
        "cached_tokens": "3", "output_tokens": str(answer["usage"]["completion_tokens"]), "queue_ms": "250.0",
        "ttft_ms": str(answer["metrics"]["time_to_first_token_ms"]), "drafted": str(speculation["num_draft_tokens"]),
        "accepted": str(speculation["num_accepted_draft_tokens"]), "mean_accepted_length": str(speculation["mean_acceptance_length"]),
    }
    assert float(line.pop("e2e_ms")) >= float(line["ttft_ms"])
    assert line == told


def test_a_stream_is_logged_when_it_has_ended(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with client.stream("POST", "/v1/completions", json={"prompt": ["one", "two"], "n": 2, "stream": True}) as response:
        response.read()
    (line,) = lines(caplog)
    assert (line["route"], line["choices"], line["finish_reason"]) == ("/v1/completions", "4", "stop")
    assert int(line["output_tokens"]) > 4 and float(line["e2e_ms"]) >= float(line["ttft_ms"])


def test_a_failure_on_the_way_is_told(client: TestClient, fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    fake.fails_after = 1
    client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    client.post("/v1/chat/completions", json=CHAT)
    assert [(line["status"], line["finish_reason"]) for line in lines(caplog)] == [("200", "error"), ("500", "error")]
    for line in lines(caplog):  # what only the end would have told is not told to be 0
        assert int(line["output_tokens"]) and not {"cached_tokens", "drafted", "accepted", "mean_accepted_length"} & set(line)


def test_what_was_refused_has_a_line_without_tokens(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.post("/v1/chat/completions", json=CHAT | {"n": 0})
    client.request("ODD", "/a-path-of-the-user's?with=things")
    refused, unknown = lines(caplog)
    assert (refused["status"], refused["route"]) == ("400", "/v1/chat/completions") and "output_tokens" not in refused
    assert set(unknown) == {"request_id", "client", "route", "status", "e2e_ms"}
    assert (unknown["route"], unknown["status"]) == ("other", "404")


def test_what_the_door_refuses_is_told_under_its_route(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    client = fake.client(api_keys=("k",), max_body_bytes=100)
    client.post("/v1/chat/completions", json=CHAT)
    client.get("/v1/models/a/secret-name", headers={"Authorization": "Bearer wrong"})
    client.post("/v1/completions", json={"prompt": "a" * 200}, headers={"Authorization": "Bearer k"})
    client.get("/nowhere")
    told = [(line["route"], line.get("method"), line["status"]) for line in lines(caplog)]
    assert told == [
        ("/v1/chat/completions", "POST", "401"), ("/v1/models/{name:path}", "GET", "401"), ("/v1/completions", "POST", "413"),
        ("other", None, "401"),
    ]
    counted = client.get("/metrics").text
    assert 'foretoken:http_requests_total{route="/v1/chat/completions",status="401"} 1.0' in counted


def test_nothing_that_a_client_wrote_is_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    secret = "Sesame7"
    fields = {"user": secret, "metadata": {"k": secret}, "stop": [secret], "cache_salt": secret, secret: 1, "prompt_cache_key": secret}
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}]} | fields)
    client.post("/v1/completions", json={"prompt": secret, "model": secret}, headers={"x-request-id": f"{secret} x=y\\n"})
    client.get(f"/{secret}", headers={"authorization": f"Bearer {secret}", "user-agent": secret})
    assert len(lines(caplog)) == 3 and secret not in caplog.text


def test_a_model_name_with_spaces_stays_one_value(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    fake.client(served_model_names=('my "best" model=1',)).post("/v1/chat/completions", json=CHAT)
    assert lines(caplog)[0]["model"] == 'my "best" model=1'


def test_probes_that_succeed_have_no_line(client: TestClient, fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/health/ready", "/metrics"):
        client.get(path)
    assert not lines(caplog)
    fake.draining = True
    client.get("/health/ready")
    client.get("/v1/models")
    assert [(line["route"], line["status"]) for line in lines(caplog)] == [("/health/ready", "503"), ("/v1/models", "200")]


def test_a_client_without_an_address_is_left_out() -> None:
    scope = {"method": "GET", "path": "/x", "client": None, "state": {"request_id": "a", "start_time": 0.0}}
    assert request_line(scope, 499).startswith("request_id=a route=other status=499 e2e_ms=")


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("foretoken", logging.INFO, "", 0, "GET %s", ("/a\r\n2026 INFO forged\x1b[31m\u2028",), None)
    line = OneLineFormatter("%(message)s").format(record)
    assert line == "GET /a\\x0d\\x0a2026 INFO forged\\x1b[31m\\u2028"
