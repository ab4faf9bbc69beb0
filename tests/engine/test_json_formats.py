"""Dates and times that a schema asks for are ones that programs read, and all of those may be written."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from random import Random

import pytest
from grammars import compiled, encode, end_id

from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.engine.json_formats import with_exact_formats


def may_be_written(format: str, text: str) -> bool:
    state = compiled(GrammarSpec.json_schema({"type": "string", "format": format})).open(())
    path: list[int] = []
    for token in [*encode(json.dumps(text)), end_id()]:
        mask = state.mask(path)
        if mask is None or not mask.allows(token):
            return False
        path.append(token)
    return True


def test_every_day_there_is_and_no_other() -> None:
    dice = Random(0)
    days = [date.min, date.max, *(date(year, 2, 28) + timedelta(1) for year in (4, 1900, 2000, 2023, 2024, 9996))]
    days += [date.min + timedelta(dice.randrange((date.max - date.min).days)) for _ in range(60)]
    assert all(may_be_written("date", day.isoformat()) for day in days)
    for text in "0000-01-01 2023-02-29 1900-02-29 2024-02-30 2024-04-31 2024-13-01 2024-00-01 2024-01-00 24-01-01".split():
        assert not may_be_written("date", text), text
        with pytest.raises(ValueError):
            date.fromisoformat(text)


def test_times_of_day() -> None:
    for text in ("23:59:59Z", "00:00:00+14:00", "10:00:00.123456-01:30"):
        assert may_be_written("time", text) and may_be_written("date-time", "2024-02-29T" + text)
        datetime.fromisoformat("2024-02-29T" + text)
    for text in ("24:00:00Z", "23:59:60Z", "10:00:00", "10:00Z", "10:00:00.Z"):
        assert not may_be_written("time", text) and not may_be_written("date-time", "2024-02-29T" + text)
    assert not may_be_written("date-time", "2023-02-29T00:00:00Z")


def test_only_schemas_are_rewritten() -> None:
    day = {"type": "string", "format": "date"}
    schema = {
        "const": day, "properties": {"format": day, "x": {"anyOf": [day, {"format": "uuid"}]}}, "items": day | {"pattern": "^2"},
        "required": ["format"],
    }  # fmt: skip
    exact = with_exact_formats(schema)
    assert exact["const"] == day and exact["required"] == ["format"] and exact["items"] == schema["items"]
    assert exact["properties"]["x"]["anyOf"][1] == {"format": "uuid"}
    for rewritten in (exact["properties"]["format"], exact["properties"]["x"]["anyOf"][0]):
        assert rewritten["type"] == "string" and rewritten["pattern"].startswith("^") and "format" not in rewritten
