"""What clients ask for as structured output, in all its spellings, as the one form that the engine knows.

OpenAI's response_format, vLLM's structured_outputs and its older guided_* fields. Knows no grammar: what is wrong inside a schema
is told by the engine, under the name of the field that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..engine.errors import InvalidGrammar
from ..engine.grammar_spec import GrammarSpec
from .errors import ApiError, unsupported

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
"""Fields of a request's body that this file reads."""
_NO_EFFECT = frozenset(("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend"))
"""Keys of structured_outputs that only say how, with their values that mean "as you like": null and false."""


def grammar_of(body: Mapping[str, Any]) -> GrammarSpec | None:
    """The form that a body asks for; None if it asks for none. Raises ApiError with the field that is wrong."""
    asked = [(name, body[name]) for name in FIELDS if body.get(name) is not None]
    try:
        specs = [(name, spec) for name, value in asked if (spec := _spec(name, value)) is not None]
    except InvalidGrammar as error:
        raise refusal(error) from None
    if len(specs) > 1:
        names = " and ".join(name for name, _ in specs)
        raise ApiError(400, f"{names} each ask for a form of the output; give one of them", param=specs[1][0])
    return specs[0][1] if specs else None


def refusal(error: InvalidGrammar) -> ApiError:
    """What a client is told about a form that cannot be enforced."""
    return ApiError(400, f"{error.param}: {error}", param=error.param, code="invalid_grammar")


def _spec(name: str, value: Any) -> GrammarSpec | None:
    match name:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured_outputs(value)
        case _:
            return _KINDS[name.removeprefix("guided_")](value, name)


def _response_format(value: Any) -> GrammarSpec | None:
    param = "response_format"
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise ApiError(400, "response_format must be an object with a type: text, json_object or json_schema", param=param)
    match value["type"]:
        case "text":
            return None
        case "json_object" if value.get("schema") is None:
            return GrammarSpec.json_object(param)
        case "json_object":  # as llama.cpp and others take one
            return _schema(value["schema"], f"{param}.schema", strict=False)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, Mapping):
                raise ApiError(400, "response_format of type json_schema needs a json_schema object", param=f"{param}.json_schema")
            if not isinstance(described.get("name"), str) or not described["name"]:
                raise ApiError(400, "json_schema needs a name", param=f"{param}.json_schema.name")
            strict = described.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise ApiError(400, "strict must be true or false", param=f"{param}.json_schema.strict")
            if described.get("schema") is None:  # OpenAI's client makes it optional: then any object is right
                return GrammarSpec.json_object(param)
            return _schema(described["schema"], f"{param}.json_schema.schema", strict=bool(strict))
        case "structural_tag":
            raise unsupported(param, "response_format of type structural_tag")
        case other:
            raise ApiError(400, f"there is no type {other[:40]!r}: use text, json_object or json_schema", param=f"{param}.type")


def _structured_outputs(value: Any) -> GrammarSpec | None:
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ApiError(400, "structured_outputs must be an object with one of json, regex, choice, grammar, json_object", param=param)
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    for key in given:
        if key in _NO_EFFECT or key == "structural_tag":
            raise unsupported(f"{param}.{key}")
        if key not in _KINDS:
            raise ApiError(400, f"structured_outputs has no key {key[:40]!r}", param=param)
    if len(given) > 1:
        raise ApiError(400, f"structured_outputs takes one of {', '.join(_KINDS)}, not {' and '.join(given)}", param=param)
    for key, inner in given.items():
        return _KINDS[key](inner, f"{param}.{key}")
    return None


def _schema(value: Any, param: str, strict: bool = True) -> GrammarSpec:
    if not isinstance(value, (Mapping, bool, str)):
        raise ApiError(400, "a JSON schema must be an object", param=param)
    return GrammarSpec.json_schema(value, strict, param)


def _regex(value: Any, param: str) -> GrammarSpec:
    return GrammarSpec.regex(_text(value, param), param)


def _grammar(value: Any, param: str) -> GrammarSpec:
    return GrammarSpec.grammar(_text(value, param), param)


def _choice(value: Any, param: str) -> GrammarSpec:
    if not isinstance(value, list):
        raise ApiError(400, "a choice must be a list of strings", param=param)
    return GrammarSpec.choice(value, param)


def _json_object(value: Any, param: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise ApiError(400, "json_object must be true or false", param=param)
    return GrammarSpec.json_object(param) if value else None


_KINDS: dict[str, Callable[[Any, str], GrammarSpec | None]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, "it must be a string", param=param)
    return value
