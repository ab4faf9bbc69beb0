"""Adapters through the real app and a real process: chosen by name, listed, loaded and unloaded while it runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from random_adapters import pairs_for, save_adapter
from real_app import real_app
from running_server import RunningServer
from starlette.testclient import TestClient

from foretoken.server.generate_command import generate

PROMPT, USER = "The quick brown fox", [{"role": "user", "content": "one two one two"}]
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
WITH_LORA = {"executor": "torch", "dtype": "float32", "served_model_name": "tiny", "enable_lora": True, "max_loras": 3}
FLAGS = ("--executor", "torch", "--dtype", "float32", "--kv-cache-gb", "0.01", "--lora-modules")


@pytest.fixture(scope="module")
def folders(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    new = tmp_path_factory.mktemp("adapters")
    return {name: str(save_adapter(new / name, pairs_for(tiny_target, seed))) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def app(tiny_target: Path, folders: dict[str, str]) -> Iterator[TestClient]:
    with real_app(tiny_target, None, WITH_LORA, allow_runtime_lora_updating=True, served_model_names=("tiny", "alias")) as client:
        for name, folder in folders.items():
            assert load(client, name, folder) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        yield client


@pytest.fixture(scope="module")
def expected(app: TestClient) -> dict[str, str]:
    """What each goes on with behind the prompt. That it is what merged weights say is tested with the engine."""
    said = {name: complete(app, name) for name in ("tiny", "one", "two")}
    assert len(set(said.values())) == 3
    return said


def load(client: TestClient, name: str, path: str, **more: Any) -> tuple[int, str]:
    return told(client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more}))


def unload(client: TestClient, name: str) -> tuple[int, str]:
    return told(client.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": 1}))


def told(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"] if answer.is_error else answer.text


def complete(client: TestClient, model: str = "tiny", **fields: Any) -> str:
    answer = client.post("/v1/completions", json={"model": model, **GREEDY, **fields})
    assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
    return answer.json()["choices"][0]["text"]


def test_names_choose_and_adapters_do_not_mix(app: TestClient, expected: dict[str, str]) -> None:
    asked = {"tiny": "tiny", "one": "one", "two": "two", "alias": "tiny", "tiny:two": "two", "alias:one": "one"}
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda name: complete(app, name), asked)) == [expected[name] for name in asked.values()]


def test_every_route_takes_them(app: TestClient) -> None:
    bodies = {
        "chat/completions": {"messages": USER, "max_tokens": 9}, "messages": {"messages": USER, "max_tokens": 9},
        "responses": {"input": USER, "max_output_tokens": 9}, "embeddings": {"input": PROMPT},
    }
    for route, body in bodies.items():
        answers = [app.post(f"/v1/{route}", json={"model": name, "temperature": 0} | body).json() for name in ("tiny", "one", "two")]
        said = [next(answer[key] for key in ("choices", "content", "output", "data") if key in answer) for answer in answers]
        assert [answer["model"] for answer in answers] == ["tiny", "one", "two"]
        assert len({str([{**part, "id": 0} for part in parts]) for parts in said}) == 3, route
    assert app.post("/tokenize", json={"model": "one", "prompt": PROMPT}).status_code == 200


def test_other_servers_fields_choose_too(app: TestClient, expected: dict[str, str]) -> None:
    numbers = {entry["name"]: entry["id"] for entry in app.get("/lora-adapters").json()}
    scales = [{"id": numbers["one"], "scale": 0}, {"id": numbers["two"], "scale": 1.0}]
    assert complete(app, lora_path="two") == complete(app, lora=scales) == expected["two"]
    assert complete(app, lora=scales[:1]) == expected["tiny"]
    for fields, status, message in (
        ({"lora_path": "x"}, 404, "lora_path: there is no adapter 'x'; loaded: one, two"),
        ({"lora_path": "one", "model": "two"}, 400, "lora_path asks for another adapter"),
        ({"lora": [{"id": 99, "scale": 1}]}, 404, "lora: there is no adapter '99'"),
        ({"lora": [{"id": numbers["one"], "scale": 0.5}]}, 400, "send the adapter's name as model"),
        ({"model": "tiny:x"}, 404, "The model 'tiny:x' does not exist. Served here: tiny, alias, one, two"),
    ):
        answer = told(app.post("/v1/completions", json=GREEDY | fields))
        assert answer[0] == status and message in answer[1]


def test_they_are_listed(app: TestClient, folders: dict[str, str]) -> None:
    client, card = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=app), app.get("/v1/models/two").json()
    assert [model.id for model in client.models.list()] == ["tiny", "alias", "one", "two"]
    assert (card["parent"], card["root"]) == ("tiny", folders["two"])
    with pytest.raises(openai.NotFoundError, match="Served here: tiny, alias, one, two"):
        client.completions.create(model="three", prompt=PROMPT)
    described = app.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["tiny", "alias", "one", "two", None]
    for path, name in (("/v1/models", "ModelList"), ("/lora-adapters", "AdapterList")):
        Draft202012Validator(schemas[name] | described).validate(app.get(path).json())


def test_loading_and_unloading_while_it_runs(app: TestClient, folders: dict[str, str], expected: dict[str, str]) -> None:
    assert load(app, "three", folders["one"])[0] == 200 and complete(app, "three") == expected["one"]
    assert load(app, "three", folders["two"]) == (400, "the adapter 'three' is loaded already: unload it first, or say load_inplace")
    assert load(app, "three", folders["two"], load_inplace=True)[0] == 200 and complete(app, "three") == expected["two"]
    assert "all 3 places for adapters are taken, by one, two, three" in load(app, "four", folders["two"])[1]
    assert unload(app, "three") == (200, "Success: LoRA adapter 'three' removed successfully.")
    assert unload(app, "three") == (404, "lora_name: there is no adapter 'three'; loaded: one, two")
    added = app.post("/load_lora_adapter", json={"lora_name": "three", "lora_path": folders["one"]}).json()
    removed = app.post("/unload_lora_adapter", json={"lora_name": "three"}).json()
    assert (added["loaded_adapters"], removed["loaded_adapters"]) == (folders | {"three": folders["one"]}, folders)
    for name, path, message in (
        ("x", "/no/such/folder", "there is no folder /no/such/folder"),
        ("alias", "x", "'alias' is the model's own name"),
        ("a,b", "x", "printable, without commas"),
    ):
        assert load(app, name, path)[0] == 400 and message in load(app, name, path)[1]


def test_nothing_is_loaded_where_it_is_not_allowed(client: TestClient, tiny_target: Path) -> None:
    with real_app(tiny_target, options=WITH_LORA) as careful:
        for status, words in (load(careful, "one", "x"), unload(careful, "one")):
            assert status == 403 and "--allow-runtime-lora-updating" in words
    assert load(client, "one", "x") == (400, "adapters are not served: start the server with --enable-lora")
    assert "vllm:lora" not in client.get("/metrics").text


def test_metrics_say_whose_requests_run(app: TestClient) -> None:
    wanted = 'vllm:lora_requests_info{engine="0",max_lora="3",model_name="tiny",running_lora_adapters="one,two",waiting_lora_adapters=""}'
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(complete, app, name, max_tokens=400, presence_penalty=0.1) for name in ("two", "one")]
        while wanted not in app.get("/metrics").text:
            assert not all(one.done() for one in running)


def test_commands_load_them_at_the_start(
    tiny_target: Path, folders: dict[str, str], expected: dict[str, str], server_process: Callable[..., RunningServer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (str(tiny_target), *FLAGS, *(f"{name}={folder}" for name, folder in folders.items()))
    assert generate([PROMPT, "--raw", "--max-tokens", "12", "--adapter", "two", *flags]) == 0
    assert expected["two"].startswith(capsys.readouterr().out.rstrip("\n"))
    server = server_process(*flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="true")
    assert "  adapters    2 of 4: one (rank 4), two (rank 4)" in server.log
    with server.client() as http:
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
    answer: Any = server.complete(**GREEDY, model="two")
    assert answer["choices"][0]["text"] == expected["two"]
    assert server.stop() == 0 and "Traceback" not in server.log and "adapter 'one' unloaded" in server.log
