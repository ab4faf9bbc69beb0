"""Values of arguments that formats write without JSON: what their schema asks for, or texts."""

import json

import pytest

from foretoken.server.tools.literals import as_json
from foretoken.server.tools.qwen3_xml import parameter_kinds


@pytest.mark.parametrize(
    ("raw", "kinds", "written"),
    [
        ("1", {"number"}, "1"),
        ("1.5", {"integer"}, '"1.5"'),
        ("1", {"string", "integer"}, "1"),
        (".5", {"number"}, "0.5"),
        ("None", {"null", "string"}, "null"),
        ("NaN", {"number"}, '"NaN"'),
        ("{'a': 1e999}", {"object"}, json.dumps("{'a': 1e999}")),
        ("['\\ud800']", {"array"}, json.dumps("['\\ud800']")),
        ("{'a'}", {"object"}, json.dumps("{'a'}")),
        ("['a']", {"object"}, json.dumps("['a']")),
        ("[__import__('os')]", {"array"}, json.dumps("[__import__('os')]")),
        ('"a"', {"string", "null"}, '"\\"a\\""'),
        ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
        ("9" * 5000, {"integer"}, json.dumps("9" * 5000)),
    ],
)
def test_a_value_is_what_its_schema_asks_for_or_a_text(raw: str, kinds: set[str], written: str) -> None:
    assert as_json(raw, frozenset(kinds)) == written


def test_kinds_of_odd_schemas() -> None:
    odd = {"a": True, "b": {"type": 3}, "c": {"type": ["string", 4]}, "d": {"anyOf": 1}, "e": {"$ref": "#/$defs/x"}, "f": {"$ref": "http://x"}}
    odd |= {"g": {"enum": [1, "a"]}, "h": {"const": None}, "i": {"enum": 1}, "j": {"allOf": [{"type": "object"}]}}
    odd |= {"k": {"type": "string", "nullable": True}, "l": {"nullable": True}, "m": {"$ref": "#/$defs/n", "nullable": True}}
    looping = {"properties": odd, "$defs": {"x": {"$ref": "#/$defs/x"}, "n": {"type": "integer"}}}
    assert {key: set(kinds) for key, kinds in parameter_kinds(looping).items()} == {
        "a": set(), "b": set(), "c": {"string"}, "d": set(), "e": set(), "f": set(),
        "g": {"integer", "string"}, "h": {"null"}, "i": set(), "j": {"object"},
        "k": {"string", "null"}, "l": set(), "m": {"integer", "null"},
    }
