"""Schemas as libraries write them are enforced; dates and times are ones that programs read, and all of those may be written."""

import json
from datetime import date, datetime, timedelta
from random import Random
from typing import Any

import pytest
from grammars import accepts, compiled

from foretoken.engine.errors import InvalidGrammar
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.engine.json_dialects import enforceable

json_schema = GrammarSpec.json_schema


def may_be_written(format: str, text: str) -> bool:
    return accepts(json_schema({"type": "string", "format": format}), json.dumps(text))


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
        "const": day, "properties": {"format": day, "x": {"anyOf": [day, {"format": "email"}]}, "default": day},
        "items": day | {"pattern": "^2"}, "required": ["format"],
    }
    exact = enforceable(schema, strict=True)
    assert exact["const"] == day and exact["required"] == ["format"] and exact["items"] == schema["items"]
    assert exact["properties"]["x"]["anyOf"][1] == {"format": "email"}
    for rewritten in (exact["properties"]["format"], exact["properties"]["default"], exact["properties"]["x"]["anyOf"][0]):
        assert rewritten["type"] == "string" and rewritten["pattern"].startswith("^") and "format" not in rewritten


PETS = {
    name: {"type": "object", "properties": {"kind": {"const": name, "default": name}, "age": {"type": "integer"}}}
    for name in ("cat", "dog")
}
UUID = "2eb8aa08-AA98-{}1ea-b4aa-73b441d16380"
DECIMAL = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (True, ['{"a": 1}', "null"], []),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/cat"}], "$defs": PETS}, ["null", '{"age": 3}'], ["3"]),
        (
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS, "discriminator": {"propertyName": "kind"}},
            ['{"kind": "dog", "age": 3}'],
            ['{"age": 3}', '{"kind": "bee"}'],
        ),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, ['{"a": 1}'], ['{"a": ""}']),
        (
            {"propertyNames": {"$ref": "#/$defs/a b"}, "properties": {"x": {"type": "null"}}, "$defs": {"a b": {"enum": ["x", "y"]}}},
            ['{"x": null, "y": 1}'],
            ['{"z": 1}', '{"x": 1}'],
        ),
        (
            {
                "propertyNames": {"enum": ["a"]},
                "additionalProperties": {
                    "anyOf": [{"$ref": "#/propertyNames"}, {"items": {"$ref": "#/additionalProperties"}, "type": "array"}]},
            },
            ['{"a": [[], "a"]}'],
            ['{"a": ["b"]}'],
        ),
        ({"propertyNames": {"format": "uuid4"}}, ['{"' + UUID.format(4) + '": 1}'], ['{"' + UUID.format(1) + '": 1}', '{"a": 1}']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ["{}", '{"aé": 1}'], ['{"a": 1}', '{"aaaa": 1}']),
        ({"type": "object", "properties": {"propertyNames": {"type": "null"}}}, ['{"propertyNames": null}'], ['{"propertyNames": 1}']),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], []),
        ({"type": "string", "format": "password"}, ['"x"'], ["1"]),
        ({"type": "number", "nullable": True}, ["1", "null"], ['""']),
        ({"enum": ["a"], "type": "string", "nullable": True}, ['"a"', "null"], ['"b"']),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}], "nullable": True}, ["1", "null"], ['""']),
        (
            {
                "type": "object", "$defs": {"a": {"const": 2, "nullable": False}}, "properties": {
                    "a": {"$ref": "#/$defs/a", "nullable": True}, "b": {"$ref": "#/properties/c/items"},
                    "c": {"type": "array", "items": {"const": 1}, "nullable": True},
                },
            },
            ['{"a": 2, "b": 1, "c": [1]}', '{"a": null, "c": null}'],
            ['{"b": null}', "null"],
        ),
        ({"allOf": [{"$ref": "#/$defs/a"}], "nullable": True, "$defs": {"a": {"const": 1}}}, ["1", "null"], ["2"]),
        (
            {
                "$id": "http://x", "nullable": True, "allOf": [{"$ref": "#/$defs/a/allOf/0"}], "properties": {
                    "b": {"$ref": "http://x#/$defs/a/anyOf/1"}, "c": {"$ref": "#/$defs/c/oneOf/0"}},
                "$defs": {
                    "a": {"nullable": True, "allOf": [{"type": "object"}], "anyOf": [{}, {"const": 1}]},
                    "c": {"oneOf": [{"type": "string"}, {"$ref": "http://x#/$defs/d"}]}, "d": {"type": "null"},
                },
            },
            ['{"b": 1, "c": ""}', "null"],
            ['{"b": null}', '{"c": null}', "1"],
        ),
        ({"type": "number", "minimum": -3.4e38, "maximum": 1.7976931348623157e308}, ["-1", f"{10**18}.5"], [str(10**19)]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 2**64}, ["0.5"], ["0", "-1"]),
        ({"$ref": "#/$defs/List<größe>", "$defs": {"List<größe>": {"type": "integer"}}}, ["1"], ['""']),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-9223372036854774784", "7"], ["-9223372036854775809"]),
        ({"type": ["integer", "null"], "minimum": -(2**63)}, ["-9223372036854774784", "null"], ["-9223372036854775809"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        ({"type": "integer", "exclusiveMinimum": 1e16, "exclusiveMaximum": 10**18 - 1}, [str(10**17)], [str(10**16), str(10**18 - 1)]),
        ({"type": "number", "minimum": 4, "exclusiveMaximum": 10**18 - 3}, ["4", "99999.5"], [str(10**18 - 3), str(10**18 - 2)]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01"], ["0", "0.0", "-0", "0.51"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.01"], ["0", "-0", "-0.51"]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.8}, ["1.01", "1.799"], ["1", "1.0", "1.8"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}, ["1", "9"], ["0", "10"]),
        ({"type": "number", "exclusiveMaximum": 9.492506610036271}, ["9", "-1.5"], ["9.492506610036271", "9.492506610036272"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_words_of_libraries(schema: Any, right: list[str], wrong: list[str]) -> None:
    spec = json_schema(schema)
    assert [text for text in right if not accepts(spec, text)] == []
    assert [text for text in wrong if accepts(spec, text)] == []


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (False, "false"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"propertyNames": {"enum": ["a"]}, "properties": []}, "propertyNames"),
        ({"items": [{"propertyNames": {"$ref": "#/a"}}] * 11, "a": {"enum": [*map(str, range(1000))]}}, "more than 10,000 names"),
        ({"type": "string", "format": "iri"}, "iri"),
        (DECIMAL, "look-around"),
        ({"type": "integer", "minimum": 10**400}, "no integer above 9223372036854775807"),
        ({"const": 1234567890123456789}, "1234567890123456789 has more digits than const"),
        ({"enum": [1, 1e20]}, "1e[+]20 has more digits than enum"),
        ({"items": {"enum": ["a", {"b": [-(2**53) - 1]}]}}, "enum can ask for"),
        ({"type": "integer", "minimum": "5", "exclusiveMinimum": 1e300}, "minimum"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_no_grammar_says_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(InvalidGrammar, match=says):
        compiled(json_schema(schema))


def test_numbers_of_many_digits_never_become_others() -> None:
    """The library has doubles: 1234567890123456789 would come as 1234567890123456768."""
    number = 1234567890123456789
    lenient = json_schema({"type": "integer", "enum": [number, 1]}, strict=False)
    assert accepts(lenient, str(number)) and not accepts(lenient, '"a"')
    exact = json_schema({"enum": [2**53 - 1, 2**60, -(10**18), 1.5, True, "a"], "default": number})
    assert all(accepts(exact, one) for one in (f"{2**53 - 1}", f"{2**60}", f"{-10**18}", "1.5", "true", '"a"')) and not accepts(exact, "2")


def test_patterns_that_look_around_are_lost_where_that_is_allowed() -> None:
    lenient = json_schema(DECIMAL, strict=False)
    assert accepts(lenient, '"1.50"') and accepts(lenient, "2") and not accepts(lenient, "null")
    kept = json_schema({"type": "string", "pattern": r"^[(?=]\(?=$"}, strict=False)
    assert accepts(kept, '"((="') and not accepts(kept, '"a"')
