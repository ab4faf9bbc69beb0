"""Every spelling of structured output, and the field that an error names."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.server.errors import ApiError
from foretoken.server.structured import grammar_of

EBNF = 'root ::= "a" | "b"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def named(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x"} | described}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
        ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, GrammarSpec.json_schema({"type": "null"}, strict=False)),
        (named(), GrammarSpec.json_object()),
        (named(schema=SCHEMA, strict=True), GrammarSpec.json_schema(SCHEMA)),
        (named(schema=SCHEMA), GrammarSpec.json_schema(SCHEMA, strict=False)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, GrammarSpec.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, GrammarSpec.json_schema('{"type": "null"}')),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}}, GrammarSpec.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarSpec.grammar('root ::= "a"')),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec.json_object()),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, GrammarSpec.json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, GrammarSpec.regex("a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec.grammar('start: "a"')),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),  # guidance asks both vLLMs at once
        # SGLang
        ({"regex": "a+"}, GrammarSpec.regex("a+")),
        ({"ebnf": EBNF}, GrammarSpec.grammar(EBNF)),
        ({"json_schema": '{"type": "null"}'}, GrammarSpec.json_schema('{"type": "null"}')),
        # llama.cpp
        ({"json_schema": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
        ({"grammar": EBNF}, GrammarSpec.grammar(EBNF)),
        ({"grammar": "", "json_schema": {}}, GrammarSpec.json_schema({})),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarSpec.json_schema(SCHEMA, strict=False)),
        # TGI
        ({"grammar": {"type": "json", "value": SCHEMA}}, GrammarSpec.json_schema(SCHEMA, strict=False)),
        ({"grammar": {"type": "regex", "value": "a+"}}, GrammarSpec.regex("a+")),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, GrammarSpec.json_schema(SCHEMA, strict=False)),
        ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, GrammarSpec.json_schema(SCHEMA, strict=False)),
        ({"grammar": {"type": "json_schema", "value": SCHEMA}}, GrammarSpec.json_schema(SCHEMA, strict=False)),
        # TensorRT-LLM, LMDeploy, OpenAI's grammars
        ({"response_format": {"type": "regex", "regex": "a+"}}, GrammarSpec.regex("a+")),
        ({"response_format": {"type": "ebnf", "ebnf": EBNF}}, GrammarSpec.grammar(EBNF)),
        ({"response_format": {"type": "regex_schema", "regex_schema": "a+"}}, GrammarSpec.regex("a+")),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, GrammarSpec.grammar('start: "a"')),
        # Ollama
        ({"format": "json"}, GrammarSpec.json_object()),
        ({"format": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
        ({"format": ""}, None),
    ],
)
def test_spellings(body: dict[str, Any], expected: GrammarSpec | None) -> None:
    assert grammar_of(body) == expected


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "object with a type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema object"),
        (named(name=None, schema=SCHEMA), "response_format.json_schema.name", "name"),
        (named(schema=[1]), "response_format.json_schema.schema", "must be an object"),
        (named(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict", "true or false"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "takes one of"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs", "no key 'yaml'"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", "must be a string"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "limit is 4,096"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "give one of them"),
        ({"grammar": EBNF, "json_schema": SCHEMA}, "grammar", "give one of them"),
        ({"ebnf": 'start: "a"'}, "ebnf", "send Lark as structured_outputs"),
        ({"grammar": 'start: "a"'}, "grammar", "send Lark as structured_outputs"),
        ({"grammar": 1}, "grammar", "must be a string"),
        ({"grammar": {"type": "regex"}}, "grammar.value", "needs a value"),
        ({"grammar": {"type": "yaml", "value": "a"}}, "grammar.type", "'yaml'"),
        ({"regex": ["a"]}, "regex", "must be a string"),
        ({"format": "yaml"}, "format", "'json' or a JSON schema"),
    ],
)
def test_mistakes_name_their_field(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        grammar_of(body)
    assert caught.value.status == 400 and caught.value.param == param
