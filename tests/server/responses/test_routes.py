"""What can be done with a response afterwards: reading, listing its input, deleting; each key has its own; restarts."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from responses_api import create, refusal, stream
from starlette.testclient import TestClient

from foretoken.server.responses.store import ResponseStore

PATH = "/v1/responses"


def test_a_response_is_read_back_and_deleted(api: TestClient) -> None:
    for told in (create(api), stream(api)[-1]["response"]):
        where = f"{PATH}/{told['id']}"
        assert api.get(where).json() == told
        assert api.delete(where).json() == {"id": told["id"], "object": "response", "deleted": True}
        for response in (api.get(where), api.delete(where), api.get(where + "/input_items"), api.post(where + "/cancel")):
            assert response.status_code == 404 and response.json()["error"]["code"] == "response_not_found"
        assert refusal(api, previous_response_id=told["id"])["code"] == "previous_response_not_found"


def test_a_response_that_cannot_be_deleted_is_still_there(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: ResponseStore, tenant: str, id: str) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseStore, "_delete", full)
    where = f"{PATH}/{create(api)['id']}"
    response = api.delete(where)
    assert response.status_code == 503 and response.json()["error"]["code"] == "store_not_writable"
    assert api.get(where).status_code == 200


@pytest.mark.parametrize("id", ["x", "resp_0", "%00", "%ff", "..%2f", "'; DROP TABLE responses; --", "x" * 5000])
def test_odd_ids_are_not_found(api: TestClient, id: str) -> None:
    assert api.get(f"{PATH}/{id}").status_code == 404
    assert api.delete(f"{PATH}/{id}").status_code == 404


def test_the_input_is_listed_page_by_page(api: TestClient, fake: FakeEngine) -> None:
    first = create(api, "one")
    items = [{"role": "user", "content": "two"}, {"role": "user", "content": "three", "id": "msg_mine"}]
    second = create(api, items, previous_response_id=first["id"])
    where = f"{PATH}/{second['id']}/input_items"
    page = api.get(where, params={"order": "asc"}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["one", fake.reply, "two", "three"]
    assert page["data"][1] == first["output"][0] and not page["has_more"] and page["object"] == "list"
    ids = [item["id"] for item in page["data"]]
    assert (page["first_id"], page["last_id"], ids[-1]) == (ids[0], ids[-1], "msg_mine") and len(set(ids)) == 4
    assert [item["id"] for item in api.get(where).json()["data"]] == ids[::-1]
    found, after = [], None
    while True:
        page = api.get(where, params={"limit": 3} | ({"after": after} if after else {})).json()
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert found == ids[::-1]
    api.delete(f"{PATH}/{first['id']}")  # what came before is gone, what was asked is not
    assert [item["content"][0]["text"] for item in api.get(where).json()["data"]] == ["three", "two"]
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "no"}):
        response = api.get(where, params=params)
        assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(params))


def test_an_item_that_comes_back_is_listed_once(api: TestClient) -> None:
    first = create(api)
    second = create(api, [*first["output"], {"role": "user", "content": "x"}], previous_response_id=first["id"])
    ids = [item["id"] for item in api.get(f"{PATH}/{second['id']}/input_items").json()["data"]]
    assert len(ids) == len(set(ids)) == 3


def test_only_the_background_can_be_cancelled(api: TestClient) -> None:
    response = api.post(f"{PATH}/{create(api)['id']}/cancel")
    assert response.status_code == 400 and "background" in response.json()["error"]["message"]


def test_each_key_has_its_own(serve: Callable[..., TestClient]) -> None:
    api = serve(api_keys=("one", "two"))
    assert api.post(PATH, json={"input": "x"}).status_code == 401
    api.headers["authorization"] = "Bearer one"
    done, running = create(api), create(api, background=True)
    assert create(api, previous_response_id=done["id"])["status"] == "completed"
    api.headers["authorization"] = "Bearer two"
    for id in (done["id"], running["id"]):
        where = f"{PATH}/{id}"
        answers = (api.get(where), api.delete(where), api.get(where + "/input_items"), api.post(where + "/cancel"))
        assert [answer.status_code for answer in answers] == [404] * 4
        assert api.get(where, params={"stream": "true"}).status_code == 404
        assert refusal(api, previous_response_id=id)["code"] == "previous_response_not_found"
    api.headers["authorization"] = "Bearer one"
    assert api.get(f"{PATH}/{done['id']}").json() == done


def test_a_restart_keeps_the_file(fake: FakeEngine, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with fake.client(response_store=store) as api:
        first = create(api)
    with fake.client(response_store=store) as api:
        assert api.get(f"{PATH}/{first['id']}").json() == first
        assert create(api, previous_response_id=first["id"])["previous_response_id"] == first["id"]


def test_the_number_of_responses_is_bounded(serve: Callable[..., TestClient]) -> None:
    api = serve(max_stored_responses=2)
    ids = [create(api)["id"] for _ in range(3)]
    assert [api.get(f"{PATH}/{id}").status_code for id in ids] == [404, 200, 200]
