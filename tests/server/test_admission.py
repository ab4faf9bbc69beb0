import asyncio
from collections.abc import Iterator

import pytest
from asking import CHAT, posted
from fake_engine import FakeEngine
from starlette.routing import BaseRoute
from starlette.testclient import TestClient

from foretoken.server import admission
from foretoken.server.page import PAGE_FILES


@pytest.fixture
def locked(fake: FakeEngine) -> TestClient:
    return fake.client(api_keys=("first-key", "second-key"))


def paths(routes: list[BaseRoute]) -> Iterator[str]:
    for route in routes:
        yield route.path.replace("{name:path}", "tiny")  # pyright: ignore[reportAttributeAccessIssue]


def test_every_route_but_health_and_metrics_needs_the_key(fake: FakeEngine) -> None:
    app = fake.app(api_keys=("first-key",))
    client, open_paths = TestClient(app), set()
    for path in {*paths(app.routes), "/nothing", "//v1/models", "/v1/%2e%2e/health", "/health/", "/health/live/x", "/docs"}:
        statuses = {client.request(method, path).status_code for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD", "TRACE")}
        if statuses != {401}:
            open_paths.add(path)
            assert statuses <= {200, 405}
    assert open_paths == {"/health", "/health/live", "/health/ready", "/metrics", "/ping", *PAGE_FILES}
    assert client.get("/v1/models", headers={"Host": "x/health?y="}).status_code == 401


@pytest.mark.parametrize("prefix", ["", "/name"])
def test_a_proxy_may_leave_its_prefix_on(fake: FakeEngine, prefix: str) -> None:
    client = fake.client(root_path="/name", api_keys=("k",))
    paths = ("/", "/health", "/page/main.js", "/v1/models", "/nothing", "/names/health")
    assert [client.get(prefix + path).status_code for path in paths] == [200, 200, 200, 401, 401, 401]
    assert client.get(prefix).status_code == 200
    described = client.get(prefix + "/openapi.json", headers={"x-api-key": "k"}).json()
    assert described["servers"] == [{"url": "/name"}]


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2", "Bearer first-ke", "Bearer \xff"],
)
def test_a_wrong_key_is_a_401(locked: TestClient, header: str) -> None:
    response = locked.get("/v1/models", headers={"Authorization": header.encode("latin-1")})  # pyright: ignore[reportArgumentType]
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first-key" not in response.text


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost:8000", True), ("127.0.0.1", True), ("[::1]:8000", True), ("192.168.0.7:80", True), ("box", True), ("", True),
        ("a.localhost.", True), ("host.docker.internal:1", True), ("Chat.example:443", True), ("evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("evil.example.", False), ("localhost.evil.example", False), ("[a.b", False),
    ],
)
def test_without_a_key_a_page_cannot_come_in_under_a_name_of_its_own(fake: FakeEngine, host: str, served: bool) -> None:
    client = fake.client(allowed_origins=("https://chat.example",))
    answers = [client.post("/v1/chat/completions", json=CHAT, headers={"Host": host}), client.get("/v1/models", headers={"Host": host})]
    assert {answer.status_code for answer in answers} == {200 if served else 403}
    assert served or answers[0].json()["error"]["code"] == "unknown_host"
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_where_a_key_or_nothing_protects_any_name_does(fake: FakeEngine) -> None:
    headers = {"Host": "our.example", "Authorization": "Bearer first-key"}
    for client in (fake.client(api_keys=("first-key",)), fake.client(insecure_no_auth=True), fake.client(allowed_origins=("*",))):
        assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_any_of_the_keys_opens(locked: TestClient, key: str) -> None:
    assert locked.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_nobody_overtakes_others_by_asking_for_it(fake: FakeEngine) -> None:
    def status(client: TestClient, key: str, priority: int | None) -> int:
        body = CHAT if priority is None else CHAT | {"priority": priority}
        return client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code

    several = fake.client(api_keys=("first", "fast", "slow"), key_priorities=(0, -5, 3))
    asked = [("first", None), ("first", 7), ("fast", None), ("fast", -5), ("fast", 1), ("slow", None), ("slow", 4)]
    assert [status(several, *one) for one in asked] == [200] * 7
    assert [call.priority for call in fake.calls] == [0, 7, -5, -5, 1, 3, 4]
    assert [status(several, *one) for one in (("first", -1), ("fast", -6), ("slow", 2), ("slow", 0))] == [400] * 4
    refused = several.post("/v1/completions", json={"prompt": "a", "priority": -1}, headers={"Authorization": "Bearer first"}).json()
    assert refused["error"]["param"] == "priority" and refused["error"]["code"] == "priority_not_allowed"
    alone = fake.client(api_keys=("only",))
    assert status(alone, "only", -9) == 200 and fake.calls[-1].priority == -9


def test_each_of_several_keys_has_a_cache_of_its_own(locked: TestClient, fake: FakeEngine) -> None:
    random = "c2FsdCBvZiBhIHRlbmFudCwgMjU2IGJpdHM+Pz8/Pw=="  # as openssl rand -base64 says one
    for key, salt in (("first-key", None), ("second-key", None), ("first-key", "mine"), ("first-key", random), ("first-key", "a b/ü")):
        headers = {"Authorization": f"Bearer {key}"}
        assert locked.post("/v1/chat/completions", json=CHAT | {"cache_salt": salt}, headers=headers).status_code == 200
    salts = [call.salt for call in fake.calls]
    assert len(set(salts)) == 5 and all(salts)
    fake.client(api_keys=("k",)).post(
        "/v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer k"}
    )
    assert fake.calls[-1].salt == ""  # one key, one party


def test_a_sane_label_is_echoed_and_another_replaced(client: TestClient) -> None:
    assert client.get("/health", headers={"x-request-id": "Job-7.a_b"}).headers["x-request-id"] == "Job-7.a_b"
    for label in ("a b", "x" * 129, "", "\x1b[31m", "é".encode().decode("latin-1")):
        given = client.get("/health", headers={"x-request-id": label.encode("latin-1")}).headers["x-request-id"]  # pyright: ignore
        assert given != label and len(given) == 32


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({f"x-{number}": "a" for number in range(90)}, 200),
        ({f"x-{number}": "a" for number in range(101)}, 431),
        ({"x": "a" * 2**16}, 431),
        ({"transfer-encoding": "chunked", "content-length": "0"}, 400),
    ],
)
def test_heads_that_are_too_large_or_mean_two_things(client: TestClient, headers: dict[str, str], status: int) -> None:
    response = client.get("/health", headers=headers)
    assert response.status_code == status and (status == 200 or response.headers["connection"] == "close")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_a_413(fake: FakeEngine, chunked: bool) -> None:
    client = fake.client(max_body_bytes=1000)
    headers = {"Content-Type": "application/json"}
    for size, status in ((900, 400), (1001, 413)):
        body = b"[" + b" " * (size - 2) + b"]"
        response = client.post("/v1/completions", content=iter([body[:500], body[500:]]) if chunked else body, headers=headers)
        assert response.status_code == status
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_that_does_not_arrive_is_a_408(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_DEADLINE_S", 0.05)

    async def receive() -> None:
        await asyncio.Event().wait()

    sent = posted(fake.app(), "/v1/completions", receive)
    assert sent[0]["status"] == 408
