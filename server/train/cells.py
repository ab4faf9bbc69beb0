"""Results of an evaluation, one line of jsonl per cell as soon as it is known, so that a run that was killed goes on.

A cell holds for the weights it was measured with: their fingerprints are part of its key, and a retrained drafter is measured anew.
"""

import json
from pathlib import Path
from typing import Any

Key = tuple[str | int | float, ...]


class Cells:
    """A file of results by key. Owner of the file; a half-written last line is cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Key, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            path.write_bytes(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self._found[tuple(row["key"])] = row["result"]

    def get(self, *key: str | int | float) -> dict[str, Any] | None:
        return self._found.get(key)

    def put(self, *key: str | int | float, result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result; it is on disk when this returns."""
        self._found[key] = result
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, "result": result}, ensure_ascii=False) + "\n")
        return result
