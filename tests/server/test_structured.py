"""Every spelling of structured output, and the field that an error names."""

from typing import Any

import pytest

from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.server.errors import ApiError
from foretoken.server.structured import grammar_of

EBNF = 'root ::= "a" | "b"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT, LENIENT = (GrammarSpec.json_schema(SCHEMA, strict) for strict in (True, False))
LETTERS, OBJECT = GrammarSpec.regex("a+"), GrammarSpec.json_object()


def named(**described: Any) -> dict[str, Any]:
    return form("json_schema", json_schema={"name": "x"} | described)


def form(type: str, **said: Any) -> dict[str, Any]:
    return {"response_format": {"type": type} | said}


def outputs(**forms: Any) -> dict[str, Any]:
    return {"structured_outputs": forms}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
        (form("text"), None),
        (form("json_object"), OBJECT),
        (form("json_object", schema={"type": "null"}), GrammarSpec.json_schema({"type": "null"}, strict=False)),
        (named(), OBJECT),
        (named(schema=SCHEMA, strict=True), STRICT),
        (named(schema=SCHEMA), LENIENT),
        (outputs(json=SCHEMA, regex=None), STRICT),
        (outputs(json='{"type": "null"}'), GrammarSpec.json_schema('{"type": "null"}')),
        (outputs(regex="a+", disable_any_whitespace=False), LETTERS),
        (outputs(choice=["a", "b"]), GrammarSpec.choice(["a", "b"])),
        (outputs(grammar='root ::= "a"'), GrammarSpec.grammar('root ::= "a"')),
        (outputs(json_object=True), OBJECT),
        (outputs(json_object=False), None),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, STRICT),
        ({"guided_regex": "a+"}, LETTERS),
        ({"guided_choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec.grammar('start: "a"')),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, LETTERS),  # guidance asks both vLLMs at once
        # SGLang
        ({"regex": "a+"}, LETTERS),
        ({"ebnf": EBNF}, GrammarSpec.grammar(EBNF)),
        ({"json_schema": '{"type": "null"}'}, GrammarSpec.json_schema('{"type": "null"}')),
        # llama.cpp
        ({"json_schema": SCHEMA}, STRICT),
        ({"grammar": EBNF}, GrammarSpec.grammar(EBNF)),
        ({"grammar": "", "json_schema": {}}, GrammarSpec.json_schema({})),
        (form("json_schema", schema=SCHEMA), LENIENT),
        # TGI
        ({"grammar": {"type": "json", "value": SCHEMA}}, LENIENT),
        ({"grammar": {"type": "regex", "value": "a+"}}, LETTERS),
        (form("json_object", value=SCHEMA), LENIENT),
        ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, LENIENT),
        ({"grammar": {"type": "json_schema", "value": SCHEMA}}, LENIENT),
        # TensorRT-LLM, LMDeploy, OpenAI's grammars
        (form("regex", regex="a+"), LETTERS),
        (form("ebnf", ebnf=EBNF), GrammarSpec.grammar(EBNF)),
        (form("regex_schema", regex_schema="a+"), LETTERS),
        (form("grammar", grammar='start: "a"'), GrammarSpec.grammar('start: "a"')),
        # Ollama
        ({"format": "json"}, OBJECT),
        ({"format": SCHEMA}, STRICT),
        ({"format": ""}, None),
    ],
)
def test_spellings(body: dict[str, Any], expected: GrammarSpec | None) -> None:
    assert grammar_of(body) == expected


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "object with a type"),
        (form("yaml"), "response_format.type", "'yaml'"),
        (form("structural_tag"), "response_format", "not supported"),
        (form("json_schema"), "response_format.json_schema", "json_schema object"),
        (named(name=None, schema=SCHEMA), "response_format.json_schema.name", "name"),
        (named(schema=[1]), "response_format.json_schema.schema", "must be an object"),
        (named(schema=SCHEMA, strict="yes"), "response_format.json_schema.strict", "true or false"),
        (outputs(json=SCHEMA, regex="a"), "structured_outputs", "takes one of"),
        (outputs(yaml="x"), "structured_outputs", "no key 'yaml'"),
        (outputs(structural_tag="x"), "structured_outputs.structural_tag", "not supported"),
        (outputs(choice="yes"), "structured_outputs.choice", "list of strings"),
        (outputs(choice=[]), "structured_outputs.choice", "at least one"),
        (outputs(regex=["a"]), "structured_outputs.regex", "must be a string"),
        (outputs(json_object="yes"), "structured_outputs.json_object", "true or false"),
        (outputs(json="{"), "structured_outputs.json", "not valid JSON"),
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
