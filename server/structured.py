"""What clients ask for as structured output, in all its spellings, as the one form that the engine knows.

OpenAI's response_format, vLLM's structured_outputs and its older guided_* fields, and what SGLang, llama.cpp, TGI and Ollama call the same.
Knows no grammar: what is wrong inside a schema is told by the engine, under the name of the field that it came from.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..engine.errors import InvalidGrammar
from ..engine.gbnf import is_gbnf
from ..engine.grammar_spec import GrammarSpec
from .errors import ApiError, unsupported

_NO_EFFECT = frozenset(("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend"))
"""Keys of structured_outputs that only say how, with their values that mean "as you like": null and false."""


def grammar_of(body: Mapping[str, Any]) -> GrammarSpec | None:
    """The form that a body asks for; None if it asks for none. Raises ApiError with the field that is wrong."""
    asked = [(name, read, body[name]) for name, read in FIELDS.items() if body.get(name) is not None]
    try:
        specs = [(name, spec) for name, read, value in asked if (spec := read(value, name)) is not None]
    except InvalidGrammar as error:
        raise refusal(error) from None
    if len({spec for _, spec in specs}) > 1:  # the same one twice is how clients ask servers whose version they do not know
        names = " and ".join(name for name, _ in specs)
        raise ApiError(400, f"{names} each ask for a form of the output; give one of them", param=specs[1][0])
    return specs[0][1] if specs else None


def refusal(error: InvalidGrammar) -> ApiError:
    """What a client is told about a form that cannot be enforced."""
    return ApiError(400, f"{error.param}: {error}", param=error.param, code="invalid_grammar")


def _response_format(value: Any, param: str) -> GrammarSpec | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise ApiError(400, f"{param} must be an object with a type: text, json_object or json_schema", param=param)
    match value["type"]:
        case "text":
            return None
        case "json_schema" if value.get("schema") is None:
            return _described(value, param)
        case "structural_tag":
            raise unsupported(param, f"{param} of type structural_tag")
        case kind if kind in _BESIDE_TYPE:
            read, keys = _BESIDE_TYPE[kind]
            if (key := next((key for key in keys if value.get(key) is not None), None)) is not None:
                return read(value[key], f"{param}.{key}")
            if kind == "json_object":
                return GrammarSpec.json_object(param)
            raise ApiError(400, f"{param} of type {kind} needs a {keys[0]}", param=f"{param}.{keys[0]}")
        case other:
            raise ApiError(400, f"there is no type {other[:40]!r}: use text, json_object or json_schema", param=f"{param}.type")


def _described(value: Mapping[str, Any], param: str) -> GrammarSpec:
    """A schema with a name, in OpenAI's key or in TGI's, where the name may be missing."""
    key = "value" if value.get("json_schema") is None and value.get("value") is not None else "json_schema"
    param, described = f"{param}.{key}", value.get(key)
    if not isinstance(described, Mapping):
        raise ApiError(400, "response_format of type json_schema needs a json_schema object", param=param)
    if key == "json_schema" and (not isinstance(described.get("name"), str) or not described["name"]):
        raise ApiError(400, "json_schema needs a name", param=f"{param}.name")
    if key == "value" and "schema" not in described:
        return _lenient(described, param)
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(400, "strict must be true or false", param=f"{param}.strict")
    if described.get("schema") is None:  # OpenAI's client makes it optional: then any object is right
        return GrammarSpec.json_object(param)
    return _schema(described["schema"], f"{param}.schema", strict=bool(strict))


def _structured_outputs(value: Any, param: str) -> GrammarSpec | None:
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


def _lenient(value: Any, param: str) -> GrammarSpec:
    """As OpenAI takes a schema that is not said to be strict."""
    return _schema(value, param, strict=False)


def _regex(value: Any, param: str) -> GrammarSpec:
    return GrammarSpec.regex(_text(value, param), param)


def _grammar(value: Any, param: str) -> GrammarSpec:
    return GrammarSpec.grammar(_text(value, param), param)


def _ebnf(value: Any, param: str) -> GrammarSpec:
    if not is_gbnf(text := _text(value, param)):
        lark = """send Lark as structured_outputs: {"grammar": ...}"""
        raise ApiError(400, f"{param} is EBNF, with rules such as root ::= ...; {lark}", param=param, code="invalid_grammar")
    return GrammarSpec.grammar(text, param)


def _text_or_typed(value: Any, param: str) -> GrammarSpec | None:
    """llama.cpp's `grammar` is text, and none if that is empty; TGI's is an object like a response_format."""
    if isinstance(value, Mapping):
        return _response_format(value, param)
    return None if value == "" else _ebnf(value, param)


def _format(value: Any, param: str) -> GrammarSpec | None:
    """Ollama's: "json" or a schema, and none if it is empty."""
    if isinstance(value, Mapping):
        return _schema(value, param)
    if value not in ("", "json"):
        raise ApiError(400, f"{param} must be 'json' or a JSON schema", param=param)
    return GrammarSpec.json_object(param) if value else None


def _choice(value: Any, param: str) -> GrammarSpec:
    if not isinstance(value, list):
        raise ApiError(400, "a choice must be a list of strings", param=param)
    return GrammarSpec.choice(value, param)


def _json_object(value: Any, param: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise ApiError(400, "json_object must be true or false", param=param)
    return GrammarSpec.json_object(param) if value else None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, "it must be a string", param=param)
    return value


_KINDS: dict[str, Callable[[Any, str], GrammarSpec | None]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
_BESIDE_TYPE: dict[str, tuple[Callable[[Any, str], GrammarSpec], tuple[str, ...]]] = {
    "json_object": (_lenient, ("schema", "value")),  # llama.cpp, TGI
    "json_schema": (_lenient, ("schema",)),  # llama.cpp
    "json": (_lenient, ("value", "schema")),  # TGI, TensorRT-LLM
    "regex": (_regex, ("value", "regex", "pattern")),  # TGI, TensorRT-LLM
    "regex_schema": (_regex, ("regex_schema",)),  # LMDeploy
    "ebnf": (_ebnf, ("ebnf",)),  # TensorRT-LLM
    "grammar": (_grammar, ("grammar",)),
}
"""Types whose form stands beside them, and the keys that it may have there."""
FIELDS: dict[str, Callable[[Any, str], GrammarSpec | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{kind}": read for kind, read in _KINDS.items()},  # vLLM's older ones
    "json_schema": _schema,  # SGLang, llama.cpp
    "regex": _regex,  # SGLang
    "ebnf": _ebnf,  # SGLang
    "grammar": _text_or_typed,  # llama.cpp, TGI
    "format": _format,  # Ollama
}
"""Fields of a request's body that ask for a form, and how each is read: (value, its name) -> the form, None if it asks for none."""
