"""What can be refused before a grammar is compiled: size, depth, number of alternatives, texts that are no JSON."""

from typing import Any

import pytest

from foretoken.engine.errors import InvalidGrammar, InvalidRequest
from foretoken.engine.grammar_spec import MAX_ALTERNATIVES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, GrammarSpec
from foretoken.engine.request import SamplingParams

json_schema = GrammarSpec.json_schema
DIGITS = "multipleOf has too many digits"


def test_what_is_asked_for_is_compared_by_what_it_says() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    spec = json_schema(schema, param="response_format")
    assert spec == json_schema(schema) and hash(spec) == hash(json_schema(schema))
    assert spec != json_schema(schema, strict=False) != GrammarSpec.json_object()
    assert json_schema(True).text == "true"
    assert GrammarSpec.choice(["a", "b"]) == GrammarSpec("choice", '["a", "b"]')


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: json_schema("{"), "not valid JSON"),
        (lambda: json_schema('{"minimum": NaN}'), "NaN"),
        (lambda: json_schema("[1]"), "must be an object"),
        (lambda: json_schema({"const": {1, 2}}), "cannot be written as JSON"),
        (lambda: json_schema({"const": float("inf")}), "cannot be written as JSON"),
        (lambda: json_schema({"title": "x" * MAX_SCHEMA_BYTES}), "the limit is 65,536"),
        (lambda: json_schema({"title": "ä" * (MAX_SCHEMA_BYTES // 2)}), "the limit is 65,536"),
        (lambda: json_schema(deep(MAX_SCHEMA_DEPTH)), "nested more than 64 levels"),
        (lambda: json_schema("[" * 60_000), "nested too deeply"),
        (lambda: json_schema({"items": [{"pattern": "\ud800"}]}), "json_schema/items/0/pattern .* lone surrogate"),
        (lambda: json_schema(r'{"$defs": {"\udfff": {}}}'), r"/\\udfff .* lone surrogate"),
        (lambda: json_schema({"enum": list(range(MAX_ALTERNATIVES + 1))}), "an enum has 1,001 values"),
        (lambda: json_schema({"multipleOf": 9_999_991}), DIGITS),
        (lambda: json_schema({"multipleOf": -9_999_991}), DIGITS),
        (lambda: json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), DIGITS),
        (lambda: json_schema({"multipleOf": 3.14159}), DIGITS),
        (lambda: json_schema({"multipleOf": 1e300 + 1e299}), DIGITS),
        (lambda: json_schema({"items": [{"multipleOf": 60_000 + i} for i in (1, 2)]}), DIGITS),
        (lambda: json_schema("  "), "is empty"),
        (lambda: GrammarSpec.regex("a" * 5000), "the limit is 4,096"),
        (lambda: GrammarSpec.regex(""), "is empty"),
        (lambda: GrammarSpec.grammar("a" * 20_000), "the limit is 16,384"),
        (lambda: GrammarSpec.grammar("a" * 300_000, trusted=True), "the limit is 262,144"),
        (lambda: GrammarSpec.choice([]), "at least one"),
        (lambda: GrammarSpec.choice("yes"), "list of non-empty strings"),
        (lambda: GrammarSpec.choice(["yes", ""]), "list of non-empty strings"),
        (lambda: GrammarSpec.choice(["yes", 1]), "list of non-empty strings"),  # type: ignore[list-item]
        (lambda: GrammarSpec.choice([f"c{i}" for i in range(MAX_ALTERNATIVES + 1)]), "1,001 choices"),
        (lambda: GrammarSpec.regex(5), "must be a string"),  # type: ignore[arg-type]
        (lambda: GrammarSpec("yaml", "x"), "not 'yaml'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused_at_once(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        make()
    assert isinstance(caught.value, InvalidGrammar) and caught.value.param == "grammar"


def test_limits_are_inclusive() -> None:
    json_schema(deep(MAX_SCHEMA_DEPTH - 1))
    json_schema({"enum": list(range(MAX_ALTERNATIVES))})
    json_schema({"allOf": [{"multipleOf": step} for step in (86_400, 0.01, 1e-7, 1_000_000, -10_800, 0, True, "x")]})
    GrammarSpec.regex("a" * 4096)
    GrammarSpec.choice([f"c{i}" for i in range(MAX_ALTERNATIVES)])


def test_errors_name_the_field_that_asked() -> None:
    with pytest.raises(InvalidGrammar) as caught:
        json_schema("{", param="response_format.json_schema.schema")
    assert caught.value.param == "response_format.json_schema.schema"


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidRequest, match="GrammarSpec"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        SamplingParams(grammar=GrammarSpec.json_object(), allowed_token_ids=[1])
