import json
from typing import Any

import pytest

from foretoken.proposers.training.answers import check_answer, json_fault, python_fault, schema_fault, tool_call_fault
from foretoken.proposers.training.encoding import Prompt

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "price": {"type": "number"},
        "size": {"type": "string", "enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "new": {"type": "boolean"},
    },
    "required": ["name", "age"],
}
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}, "required": required}}}
    for name, required in (("get_weather", ["city"]), ("get_time", []))
]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"name": "Ada", "age": 36}, None),
        ({"name": "Ada", "age": 36.0, "price": 3, "size": "small", "tags": [], "address": {"city": "Rome"}, "new": True, "more": 1}, None),
        ([], "the answer is not of type object"),
        ({"name": "Ada"}, "the answer lacks age"),
        ({"name": "Ada", "age": "36"}, "the answer.age is not of type integer"),
        ({"name": "Ada", "age": True}, "the answer.age is not of type integer"),
        ({"name": "Ada", "age": 1.5}, "the answer.age is not of type integer"),
        ({"name": "Ada", "age": float("inf")}, "the answer.age is not of type integer"),
        ({"name": None, "age": 1}, "the answer.name is not of type string"),
        ({"name": "Ada", "age": 1, "price": "3"}, "the answer.price is not of type number"),
        ({"name": "Ada", "age": 1, "size": "huge"}, "the answer.size is none of ['small', 'large']"),
        ({"name": "Ada", "age": 1, "tags": ["a", 2]}, "the answer.tags[1] is not of type string"),
        ({"name": "Ada", "age": 1, "address": {}}, "the answer.address lacks city"),
        ({"name": "Ada", "age": 1, "new": 0}, "the answer.new is not of type boolean"),
    ],
)
def test_schemas(value: Any, fault: str | None) -> None:
    assert schema_fault(value, SCHEMA) == fault


@pytest.mark.parametrize("answer", ['{"a": 1}', "[1, 2]", '```json\n{"a": 1}\n```', "```\n[]\n```", ' {"a": [1]}\n'])
def test_json(answer: str) -> None:
    assert json_fault(answer) is None


@pytest.mark.parametrize(
    "answer", ["", "{", '{"a": 1,}', 'Here it is: {"a": 1}', '{"a": 1} {"b": 2}', '```json\n{"a": 1\n```', "[" * 100_000]
)
def test_no_json(answer: str) -> None:
    assert (json_fault(answer) or "").startswith("does not parse")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>', None),
        ('Let me see.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', None),
        ("It is sunny.", "there is no call"),
        ('<tool_call>\n{"name": "get_time", "arguments": {}}', "a call is not closed"),
        ('<tool_call>{"name": "get_time", "arguments": {}}</tool_call><tool_call>', "a call is not closed"),
        ('<tool_call>\n{"name": "get_time", "arguments": {}\n</tool_call>', "a call does not parse"),
        ('<tool_call>\n{"name": "get_time"}\n</tool_call>', "a call has no name and arguments"),
        ('<tool_call>\n{"name": "get_time", "arguments": "{}"}\n</tool_call>', "a call has no name and arguments"),
        ('<tool_call>\n{"name": "get_rain", "arguments": {}}\n</tool_call>', "no function get_rain is on offer"),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"town": "Rome"}}\n</tool_call>', "get_weather lacks city"),
        ('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n<tool_call>{}</tool_call>', "a call has no name and arguments"),
    ],
)
def test_tool_calls(answer: str, fault: str | None) -> None:
    found = tool_call_fault(answer, TOOLS)
    assert found is None if fault is None else found is not None and found.startswith(fault)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("Like this:\n\n```python\ndef f(x):\n    return x\n```\n\nCall f(1).", None),
        ("```python\nimport re\nre.match('\\d', '1')\n```", None),           # an odd escape only warns
        ("```python\nx = 1\n```\n\n```sh\nrm -rf (\n```", None),              # other languages are not looked at
        ("```python\ndef f(x)\n    return x\n```", "does not compile"),
        ("```python\nx = 1\n```\n```python\nreturn 1\n```", "does not compile"),
        ("```python\nx = '\0'\n```", "does not compile"),
        ("```python\ndef f(x):\n    return x", "a block is not closed"),
        ("def f(x): return x", "there is no block of Python"),
    ],
)
def test_python(answer: str, fault: str | None) -> None:
    found = python_fault(answer)
    assert found is None if fault is None else found is not None and found.startswith(fault)


def prompt(question: str, reference: str | None, tools: list[dict[str, object]] | None = None, **extra: Any) -> Prompt:
    return Prompt([{"role": "user", "content": question}], tools or [], {"role": "assistant", "content": reference, **extra})


def test_the_reference_says_what_is_checked() -> None:
    call = {"tool_calls": [{"function": {"name": "get_time", "arguments": "{}"}}]}
    asked = f"Text: {{unclear}}. Ada is 36.\n\nWrite it as JSON with this schema:\n{json.dumps(SCHEMA)}"
    cases = [
        (prompt("What time is it?", None, TOOLS, **call), "I do not know.", ("tool call", "there is no call")),
        (prompt("Three fruits as JSON", '["apple"]'), "apple", ("json", "does not parse")),
        (prompt(asked, '{"name": "Ada", "age": 36}'), '{"name": "Ada"}', ("json", "the answer lacks age")),
        (prompt(asked, '{"name": "Ada", "age": 36}'), '{"name": "Bob", "age": 1}', ("json", None)),
        (prompt("Write f.", "```python\nf = 1\n```"), "```python\nf = \n```", ("python", "does not compile")),
        (prompt("Thanks!", "You are welcome.", TOOLS), "Bye", None),
        (prompt("2 + 2?", "4"), "four", None),                               # a number is no JSON document
        (prompt("How do I list files?", "```sh\nls\n```"), "ls", None),
        (prompt("Old Python", "```python\nprint 'x'\n```"), "print", None),  # the reference would not pass
        (prompt(asked, '{"name": "Ada"}'), "{", None),
    ]
    for given, answer, expected in cases:
        found = check_answer(given, answer)
        if expected is None or found is None:
            assert found is expected
        else:
            assert found.kind == expected[0]
            assert found.fault is None if expected[1] is None else (found.fault or "").startswith(expected[1])


def test_the_schema_is_the_latest_message_s() -> None:
    other = {"type": "array", "items": {"type": "integer"}}
    messages = [
        {"role": "user", "content": json.dumps(SCHEMA)}, {"role": "assistant", "content": "{}"},
        {"role": "user", "content": f"Now this: {json.dumps(other)} please"},
    ]
    found = check_answer(Prompt(messages, [], {"role": "assistant", "content": "[1]"}), '["a"]')
    assert found is not None and found.fault == "the answer[0] is not of type integer"
