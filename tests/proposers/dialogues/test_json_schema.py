"""JSON from a schema: each answer matches the schema in its question; lists keep the things they are given."""

import json
from itertools import islice
from typing import Any

from foretoken.proposers.training.corpus import Record
from foretoken.proposers.training.dialogues.json_schema import LISTS_PER_KEY, json_schema, lists

PYTHON_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def first_object(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text[text.index("{"):])[0]


def matches(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON Schema that the dialogues use."""
    if schema["type"] == "array":
        return isinstance(value, list) and all(matches(schema["items"], part) for part in value)
    if schema["type"] == "object":
        names = schema["properties"]
        return (isinstance(value, dict) and list(value) == list(names) and set(schema.get("required", ())) <= value.keys()
                and all(matches(names[name], part) for name, part in value.items()))
    right = isinstance(value, PYTHON_TYPES[schema["type"]]) and isinstance(value, bool) == (schema["type"] == "boolean")
    return right and value in schema.get("enum", [value])


def test_the_check_itself_can_fail():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "enum": ["a"]}}}
    assert matches(schema, {"n": 1, "s": "a"})
    for wrong in ({"n": True, "s": "a"}, {"n": 1, "s": "b"}, {"s": "a", "n": 1}, {"n": 1}):
        assert not matches(schema, wrong)


def test_answers_follow_the_schema_in_the_question():
    types: set[str] = set()
    for each in islice(json_schema(()), 600):
        question, answer = (message["content"] for message in each.messages[-2:])
        schema = first_object(question)
        assert matches(schema, json.loads(answer)), question
        types.add(schema["type"])
        asks_for_one_line = question.endswith(("compact JSON.", "one line.", "No line breaks."))
        assert asks_for_one_line == ("\n" not in answer)
    assert types == {"object", "array"}


def test_lists_are_made_of_the_corpus():
    fruits = ["apple", "pear", "plum", "fig", "kiwi", "lime", "mango", "date {dried}", "grape, red"]
    records = (
        Record("data/foods/fruits.json", json.dumps({"fruits": fruits, "description": "sweet"}), (), 5),
        Record("data/words/expletives.json", json.dumps({"expletives": fruits}), (), 6),
    )
    made = list(lists(records))
    assert len(made) == LISTS_PER_KEY and {each.key for each in made} == {5}
    arrays = 0
    for each in made:
        question, answer = (message["content"] for message in each.messages[-2:])
        if answer.startswith("["):
            arrays += 1
            named = json.loads(answer)
        else:
            named = [line.split(" ", 1)[1] for line in answer.splitlines()]
        assert set(named) <= set(fruits[:-1]) and 3 <= len(named) <= 8
        assert str(len(named)) in question or all(name in question for name in named)
    assert arrays >= LISTS_PER_KEY // 3


def test_the_same_dialogues_every_time():
    assert list(islice(json_schema(()), 50)) == list(islice(json_schema(()), 50))
