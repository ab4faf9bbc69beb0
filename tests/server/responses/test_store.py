"""The store: what it keeps, for whom, how much of it, and what files it refuses."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from running_server import environment

from foretoken.engine.errors import ConfigError
from foretoken.server.responses import store as store_module
from foretoken.server.responses.store import ChainTooLong, Kept, NotKept, ResponseStore, check_store


def kept(id: str, previous: str | None = None, text: str = "x") -> Kept:
    item = {"id": f"msg_{id}", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return Kept({"id": id, "status": "completed", "output": []}, [item], previous)


def ids(store: ResponseStore, tenant: str, names: str) -> str:
    """Those of the one-letter names that are there."""

    async def found() -> str:
        there = ""
        for name in names:
            try:
                there += (await store.get(tenant, name)).response["id"]
            except NotKept:
                pass
        return there

    return asyncio.run(found())


def run(*works: Coroutine[Any, Any, Any]) -> Any:
    async def all() -> Any:
        result = None
        for work in works:
            result = await work
        return result

    return asyncio.run(all())


def test_what_is_put_is_there_for_its_tenant_only() -> None:
    store = ResponseStore("memory", 10, 100)
    run(store.put("a", kept("x", text="ünï\u0000")), store.put("a", kept("y", "x")))
    assert run(store.get("a", "x")) == kept("x", text="ünï\u0000")
    assert [turn.response["id"] for turn in run(store.chain("a", "y"))] == ["x", "y"]
    for work in (store.get("b", "x"), store.chain("b", "y"), store.delete("b", "x"), store.get("a", "z")):
        with pytest.raises(NotKept):
            run(work)
    run(store.delete("a", "x"))
    with pytest.raises(NotKept) as caught:
        run(store.chain("a", "y"))
    assert caught.value.args == ("x",)


def test_a_conversation_goes_on_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(str(tmp_path / "kept"), 10, 100)
    run(store.put("a", kept("x")), store.put("a", kept("y", "x")))
    store._db.execute("PRAGMA query_only = ON")  # as on a full disk
    assert [turn.response["id"] for turn in run(store.chain("a", "y"))] == ["x", "y"] and "could not be noted" in caplog.text
    with pytest.raises(sqlite3.OperationalError):
        run(store.put("a", kept("z")))
    run(store.close())


def test_the_least_recently_used_go_and_using_one_uses_all_before_it() -> None:
    store = ResponseStore("memory", 3, 100)
    run(*(store.put("a", kept(name, previous)) for name, previous in (("p", None), ("q", "p"), ("r", None))))
    run(store.chain("a", "q"), store.put("a", kept("s", "q")))
    assert ids(store, "a", "pqrs") == "pqs"


def test_who_keeps_the_most_gives_way() -> None:
    store = ResponseStore("memory", 3, 100)
    run(store.put("quiet", kept("q")), *(store.put("loud", kept(name)) for name in "abcdef"))
    assert ids(store, "quiet", "q") == "q" and ids(store, "loud", "abcdef") == "ef"


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 10_000)
    store = ResponseStore("memory", 100, 100)
    run(*(store.put("a", kept(name, text="x" * 3000)) for name in "abcd"), store.put("a", kept("e", text="x" * 9_999)))
    assert ids(store, "a", "abcde") == ""  # the last one alone is too much
    run(*(store.put("a", kept(name, text="x" * 3000)) for name in "abcd"))
    assert ids(store, "a", "abcd") == "cd"


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(store_module.time, "time", lambda: now)
    store = ResponseStore("memory", 100, 60)
    run(store.put("a", kept("x")), store.put("a", kept("y", "x")), store.put("a", kept("z")))
    now += 40
    run(store.chain("a", "y"))
    now += 40
    assert ids(store, "a", "xyz") == "xy"
    now += 40
    with pytest.raises(NotKept):
        run(store.chain("a", "y"))


def test_a_conversation_is_read_back_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_CHAIN", 3)
    monkeypatch.setattr(store_module, "MAX_CHAIN_BYTES", 50_000)
    store = ResponseStore("memory", 100, 100)
    run(*(store.put("a", kept(name, previous)) for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "c"))))
    assert len(run(store.chain("a", "c"))) == 3
    run(store.put("a", kept("e", "a", "x" * 50_000)))
    for id in "de":
        with pytest.raises(ChainTooLong):
            run(store.chain("a", id))


def test_items_of_outputs_are_found_as_long_as_their_response_is_kept() -> None:
    store = ResponseStore("memory", 2, 100)

    def said(id: str) -> Kept:
        return Kept({"id": id, "output": [{"id": f"msg_{id}{number}"} for number in range(2)]}, [], None)

    run(*(store.put("a", said(id)) for id in "xx"), store.put("a", said("y")))  # x twice, as one that was running
    assert run(store.items("a", ["msg_x1", "msg_y0"]))["msg_x1"] == {"id": "msg_x1"}
    for tenant, id in (("b", "msg_x1"), ("a", "msg_z")):
        with pytest.raises(NotKept):
            run(store.items(tenant, [id]))
    run(store.put("a", said("z")), store.delete("a", "y"))
    for id in ("msg_x1", "msg_y0"):
        with pytest.raises(NotKept):
            run(store.items("a", [id]))


def test_a_file_keeps_it_and_ends_what_was_running(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(str(path), 10, 100)
    run(store.put("a", kept("x")), store.put("a", kept("y"), running=True), store.close())
    assert path.stat().st_mode & 0o777 == 0o600
    again = ResponseStore(str(path), 10, 100)
    assert run(again.get("a", "x")) == kept("x")
    ended = run(again.get("a", "y")).response
    assert ended["status"] == "failed" and ended["error"]["code"] == "server_error"
    run(again.close())


def test_deleted_texts_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore(str(path), 10, 100)
    run(store.put("a", kept("x", text="very secret")), store.delete("a", "x"), store.close())
    assert b"very secret" not in path.read_bytes()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"no database, but long enough to look like one" * 100)
    with pytest.raises(ConfigError, match="damaged or no database"):
        check_store(str(path))
    other = tmp_path / "other"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE photos (id)")
    db.close()
    with pytest.raises(ConfigError, match="something else"):
        check_store(str(other))
    for bad in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            check_store(str(bad))
    good = ResponseStore(str(tmp_path / "good"), 10, 100)
    run(*(good.put("a", kept(str(number), text="x" * 5000)) for number in range(10)))
    done = subprocess.run(  # of this process, a second one is none: locks are between processes
        [sys.executable, "-m", "foretoken", "serve", "--port", "0", "--response-store", str(tmp_path / "good")],
        capture_output=True, text=True, timeout=60, env=environment(),
    )
    assert done.returncode == 78 and "another process uses it" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    run(good.close())
    check_store(str(tmp_path / "good"))
    raw = bytearray((tmp_path / "good").read_bytes())
    raw[4096:12288] = b"\xff" * 8192
    (tmp_path / "good").write_bytes(raw)
    with pytest.raises(ConfigError, match="damaged"):
        check_store(str(tmp_path / "good"))
