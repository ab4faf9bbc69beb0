"""The responses that are kept: one SQLite database, in memory or a file, with a thread of its own.

Owns the tables, the bounds (number, bytes, time since last use) and whose response is whose. Knows nothing of what it keeps but
its ids.
"""

import asyncio
import json
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ...engine.errors import ConfigError

logger = logging.getLogger("foretoken.server")

MAX_BYTES = 256 * 2**20
"""Of all responses with their inputs."""
MAX_CHAIN = 1024
MAX_CHAIN_BYTES = 32 * 2**20
"""Of a conversation that is read back: turns, and bytes of all of them."""
IN_MEMORY, NO_STORE = "memory", "none"
_APPLICATION_ID, _VERSION = 0x464F5245, 1
_ROW_BYTES = 256  # what a row costs beside its texts
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used_at REAL NOT NULL, size INTEGER NOT NULL, running INTEGER NOT NULL,
    input TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_at, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_response ON items (response);
"""

T = TypeVar("T")


class NotKept(Exception):
    """No such response or item of this tenant: never made, not stored, expired, deleted, or another's. The argument is its id."""


class ChainTooLong(Exception):
    """A conversation of more turns or bytes than are read back."""


@dataclass(frozen=True)
class Kept:
    """A response, the items that its request brought, and the id of the one that it follows."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    previous: str | None


class ResponseStore:
    """path: a file, or "memory". Every method but `close` waits for the thread, not for the event loop.

    Raises ConfigError if the file cannot be used: unwritable, damaged, in use by another process, or no store of ours.
    """

    def __init__(self, path: str, max_responses: int, ttl_s: float) -> None:
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._db = _opened(path)
        self._thread = ThreadPoolExecutor(1, "foretoken-responses")
        self._closer = weakref.finalize(self, self._db.close)

    async def put(self, tenant: str, kept: Kept, running: bool = False) -> None:
        """Keep it, or what has become of it; the least recently used go where there is no room. running: it is not finished."""
        await self._run(lambda: self._put(tenant, kept, running))

    async def get(self, tenant: str, id: str) -> Kept:
        """Raises NotKept."""
        return await self._run(lambda: self._row(tenant, id))

    async def chain(self, tenant: str, id: str) -> list[Kept]:
        """The response and those that it follows, first one first; all of them count as used now. Raises NotKept, ChainTooLong."""
        return await self._run(lambda: self._chain(tenant, id))

    async def items(self, tenant: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Items of outputs, by their ids. Raises NotKept, ChainTooLong."""
        return await self._run(lambda: self._items(tenant, ids))

    async def delete(self, tenant: str, id: str) -> None:
        """Raises NotKept."""
        await self._run(lambda: self._delete(tenant, id))

    async def close(self) -> None:
        """What is being written is written first."""
        await self._run(self._closer)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _put(self, tenant: str, kept: Kept, running: bool) -> None:
        input, response = _json(kept.input), _json(kept.response)
        size = len(input.encode()) + len(response.encode()) + _ROW_BYTES
        row = (kept.response["id"], tenant, kept.previous, time.time(), size, running, input, response)
        with self._db:
            self._db.execute("DELETE FROM responses WHERE used_at < ?", (self._oldest(),))
            self._db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            of_output = [(item["id"], kept.response["id"]) for item in kept.response["output"]]
            self._db.executemany("INSERT INTO items VALUES (?, ?)", of_output)
            self._make_room()

    def _make_room(self) -> None:
        """Who keeps the most gives way, so that nobody can push out what others keep."""
        usage = {tenant: [num, size] for tenant, num, size in self._db.execute(
            "SELECT tenant, count(*), sum(size) FROM responses GROUP BY tenant")}
        while (many := sum(num for num, _ in usage.values()) > self._max_responses) or sum(size for _, size in usage.values()) > MAX_BYTES:
            largest = max(usage, key=lambda tenant: usage[tenant][0 if many else 1])
            rowid, size = self._db.execute(
                "SELECT rowid, size FROM responses WHERE tenant = ? ORDER BY used_at, rowid LIMIT 1", (largest,)
            ).fetchone()
            self._db.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            usage[largest][0] -= 1
            usage[largest][1] -= size

    def _row(self, tenant: str, id: str) -> Kept:
        row = self._db.execute(
            "SELECT previous, input, response FROM responses WHERE id = ? AND tenant = ? AND used_at >= ?", (id, tenant, self._oldest())
        ).fetchone()
        if row is None:
            raise NotKept(id)
        previous, input, response = row
        return Kept(json.loads(response), json.loads(input), previous)

    def _chain(self, tenant: str, id: str) -> list[Kept]:
        ids, total, next = list[str](), 0, id
        while next is not None:  # sizes first: nothing large is read in vain
            row = self._db.execute("SELECT previous, size FROM responses WHERE id = ? AND tenant = ?", (next, tenant)).fetchone()
            if row is None:
                raise NotKept(next)
            ids.append(next)
            next, total = row[0], total + row[1]
            if len(ids) > MAX_CHAIN or total > MAX_CHAIN_BYTES:
                raise ChainTooLong()
        chain = [self._row(tenant, id) for id in reversed(ids)]
        try:
            with self._db:
                self._db.executemany("UPDATE responses SET used_at = ? WHERE id = ?", [(time.time(), id) for id in ids])
        except sqlite3.OperationalError as error:  # a full disk: what was kept can be read all the same
            logger.warning("the use of stored responses could not be noted: %s", error)
        return chain

    def _items(self, tenant: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        total = 0
        for id in ids:
            if id in found:
                continue
            row = self._db.execute(
                "SELECT r.id, r.size FROM items JOIN responses r ON r.id = items.response WHERE items.id = ? AND r.tenant = ?", (id, tenant)
            ).fetchone()
            if row is None:
                raise NotKept(id)
            total += row[1]
            if total > MAX_CHAIN_BYTES:
                raise ChainTooLong()
            found |= {item["id"]: item for item in self._row(tenant, row[0]).response["output"]}
        return found

    def _delete(self, tenant: str, id: str) -> None:
        self._row(tenant, id)
        with self._db:
            self._db.execute("DELETE FROM responses WHERE id = ?", (id,))

    def _oldest(self) -> float:
        return time.time() - self._ttl_s


def check_store(path: str) -> None:
    """Say at once what a server would find out once its model is loaded. Raises ConfigError."""
    if path != NO_STORE:
        _opened(path).close()


def _opened(path: str) -> sqlite3.Connection:
    """The database, ours alone, with its tables and nothing that claims to be running still."""
    in_memory = path in (IN_MEMORY, ":memory:")
    try:
        if not in_memory:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # conversations are nobody else's to read
        db = sqlite3.connect(":memory:" if in_memory else path, timeout=1.0, check_same_thread=False)
    except OSError as error:
        message = f"--response-store {path} cannot be opened: {error.strerror}; name a file in a folder that can be written"
        raise ConfigError(message) from error
    except sqlite3.Error as error:
        raise ConfigError(f"--response-store {path} cannot be opened: {error}") from error
    try:
        _prepare(db, path)
    except sqlite3.OperationalError as error:
        db.close()
        reason = "another process uses it" if "locked" in str(error) else str(error)
        raise ConfigError(f"--response-store {path} cannot be used: {reason}") from error
    except sqlite3.DatabaseError as error:
        db.close()
        raise ConfigError(f"--response-store {path} is damaged or no database ({error}); delete it, or name another file") from error
    except ConfigError:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: str) -> None:
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last responses, never the file
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA foreign_keys = ON")
    if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(found)
    (application,), (version,) = db.execute("PRAGMA application_id").fetchone(), db.execute("PRAGMA user_version").fetchone()
    is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not is_new and (application, version) != (_APPLICATION_ID, _VERSION):
        raise ConfigError(f"--response-store {path} is a database of something else, or of another version; name another file")
    db.executescript(f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION}; {_SCHEMA}")
    for id, response in db.execute("SELECT id, response FROM responses WHERE running").fetchall():
        error = {"code": "server_error", "message": "The server ended before the response did."}
        told = _json(json.loads(response) | {"status": "failed", "error": error})
        db.execute("UPDATE responses SET running = 0, response = ? WHERE id = ?", (told, id))
    db.commit()


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
