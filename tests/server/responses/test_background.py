"""Responses in the background: they go on alone, can be polled, watched again and cancelled, and a server's end is told."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import events_of
from fake_engine import FakeEngine
from responses_api import create, refusal, stream
from starlette.testclient import TestClient

from foretoken.server.responses import background

PATH = "/v1/responses"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finished(api: TestClient, id: str) -> dict[str, Any]:
    """The response once it has ended."""
    until(lambda: api.get(f"{PATH}/{id}").json()["status"] not in ("queued", "in_progress"))
    return api.get(f"{PATH}/{id}").json()


def test_it_is_queued_at_once_and_done_later(api: TestClient, fake: FakeEngine) -> None:
    told = create(api, background=True)
    assert told["status"] == "queued" and told["output"] == [] and told["background"]
    done = finished(api, told["id"])
    assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == fake.reply
    until(lambda: fake.num_open == 0)  # its task ends after its last event
    assert api.post(f"{PATH}/{told['id']}/cancel").json() == done
    assert create(api, previous_response_id=told["id"])["status"] == "completed"


def test_it_is_cancelled(api: TestClient, fake: FakeEngine) -> None:
    fake.stuck = True
    told = create(api, background=True)
    assert api.get(f"{PATH}/{told['id']}").json()["status"] in ("queued", "in_progress")
    assert "not finished" in refusal(api, previous_response_id=told["id"])["message"]
    cancelled = api.post(f"{PATH}/{told['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and fake.num_open == 0
    assert api.get(f"{PATH}/{told['id']}").json() == cancelled


def test_deleting_one_ends_it(api: TestClient, fake: FakeEngine) -> None:
    fake.stuck = True
    where = f"{PATH}/{create(api, background=True)['id']}"
    assert api.delete(where).json()["deleted"] and fake.num_open == 0 and api.get(where).status_code == 404


def test_a_failure_is_kept(api: TestClient, fake: FakeEngine) -> None:
    fake.fails_after = 1
    done = finished(api, create(api, background=True)["id"])
    assert done["status"] == "failed" and done["error"]["message"] == "not finite"


def test_its_events_can_be_read_again_from_any_number(api: TestClient, fake: FakeEngine) -> None:
    events = stream(api, background=True)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    where = f"{PATH}/{events[0]['response']['id']}"
    for number in (None, 0, 5, len(events) - 2):
        params = {"stream": "true"} | ({} if number is None else {"starting_after": number})
        assert events_of(api.get(where, params=params).text) == events[0 if number is None else number + 1 :]
    assert api.get(where, params={"stream": "true", "starting_after": "-1"}).status_code == 400
    assert api.get(where).json() == events[-1]["response"]


def test_events_that_are_not_kept_are_refused(api: TestClient, fake: FakeEngine) -> None:
    for told in (create(api), create(api, background=True)):
        finished(api, told["id"])
        response = api.get(f"{PATH}/{told['id']}", params={"stream": "true"})
        assert response.status_code == 400 and response.json()["error"]["code"] == "events_not_kept"


def test_events_take_bounded_memory(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stream(api, background=True)
    size = sum(len(str(event)) for event in first)
    monkeypatch.setattr(background, "MAX_LOG_BYTES", int(size * 1.5))
    second = stream(api, background=True)
    assert second[-1]["type"] == "response.completed"
    params = {"stream": "true"}
    assert api.get(f"{PATH}/{first[0]['response']['id']}", params=params).status_code == 400  # the older ones went
    assert len(events_of(api.get(f"{PATH}/{second[0]['response']['id']}", params=params).text)) == len(second)
    monkeypatch.setattr(background, "MAX_LOG_BYTES", 1000)
    third = stream(api, background=True)
    assert third[-1]["code"] == "events_not_kept"


def test_a_servers_end_is_told_after_a_restart(fake: FakeEngine, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    fake.stuck = True
    with fake.client(response_store=store) as api:
        id = create(api, background=True)["id"]
    assert fake.num_open == 0
    with fake.client(response_store=store) as api:
        told = api.get(f"{PATH}/{id}").json()
    assert told["status"] == "failed" and "ended" in told["error"]["message"]


def test_a_full_queue_is_told_at_once(serve: Callable[..., TestClient], fake: FakeEngine) -> None:
    from foretoken.engine.errors import QueueFull

    fake.error = QueueFull("full", 3)
    response = serve().post(PATH, json={"input": "x", "background": True})
    assert response.status_code == 503 and response.headers["retry-after"] == "3"
