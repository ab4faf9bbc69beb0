"""What the API takes, as JSON schemas: the request models as they are declared, and what their validators do beyond that.

Owns the table of shorthands and the table of ranges. The models are the truth; tests hold both tables to them.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema

from ..engine.request import MAX_BIASED_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from .anthropic.requests import MessagesRequest
from .llama_infill import InfillRequest
from .mistral_fim import FimRequest
from .openapi_answers import ANY_OBJECT, COUNT, TEXT, Schema, many, maybe, one_of, record, ref
from .responses.request import ResponseRequest
from .schemas import MAX_CHOICES, MAX_LOGPROBS, ChatRequest, CompletionRequest

REF = "#/components/schemas/{model}"

LIMITS: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "stop": {"maxItems": MAX_STOPS, "maxLength": MAX_STOP_CHARS, "minLength": 1},
    "logit_bias": {"maxProperties": MAX_BIASED_TOKENS},
    "bad_words": {"maxItems": MAX_BIASED_TOKENS},
}
"""Of the fields of requests that generate, whose ranges the engine owns."""


def _or_without(schema: Schema) -> Schema:
    """Null and false mean that it is not there."""
    return {"anyOf": [schema, one_of(None, False)]}


_NAMED_SCHEMA = record({"schema": maybe(ANY_OBJECT), "strict": maybe({"type": "boolean"})}, name=TEXT | {"minLength": 1})
_FORM: dict[str, Schema] = {
    "response_format": {
        "description": "What form the answer must have.",
        "anyOf": [
            record(type=one_of("text")),
            record({"schema": maybe(ANY_OBJECT)}, type=one_of("json_object")),
            record(type=one_of("json_schema"), json_schema=_NAMED_SCHEMA),
            {"type": "null"},
        ],
    },
    "structured_outputs": {
        "description": "The same in vLLM's words: one of these.",
        "type": ["object", "null"],
        "properties": {
            "json": {"type": ["object", "boolean", "string", "null"]},
            "regex": _or_without(TEXT),
            "choice": _or_without(many(TEXT | {"minLength": 1}) | {"minItems": 1}),
            "grammar": _or_without(TEXT),
            "json_object": {"type": ["boolean", "null"]},
        },
        "additionalProperties": False,
    },
}
"""Fields that several request models read without declaring them."""

_TEXTS_OR_TOKENS: Schema = {
    "anyOf": [TEXT, *({"type": "array", "minItems": 1, "items": items} for items in (TEXT, COUNT, many(COUNT)))]
}
_PART = {"anyOf": [record(type=one_of("text"), text=TEXT), record(type=one_of("refusal"), refusal=TEXT)]}
_CONTENT: Schema = {"anyOf": [TEXT, many(_PART), {"type": "null"}]}
_ITEM_PART = record(type=one_of("input_text", "output_text", "text", "reasoning_text", "summary_text"), text=TEXT)
_ITEM_PARTS: Schema = {"anyOf": [TEXT, many(_ITEM_PART), {"type": "null"}]}
_STOP: Schema = {"anyOf": [TEXT, many(TEXT), {"type": "null"}]}
_CHOICE: Schema = {"anyOf": [one_of("none", "auto", "required", None), record(type=one_of("function", "allowed_tools"))]}
_TEXT_BLOCKS: Schema = {"anyOf": [TEXT, many(ref("TextBlock")), {"type": "null"}]}
AS_SENT: dict[str, dict[str, Schema]] = {
    "ChatRequest": {"stop": _STOP, "tool_choice": _CHOICE},
    "CompletionRequest": {"stop": _STOP, "prompt": _TEXTS_OR_TOKENS},
    "FimRequest": {"stop": _STOP, "prompt": _TEXTS_OR_TOKENS},
    "InfillRequest": {"stop": _STOP},
    "ResponseRequest": {"stop": _STOP},
    "EmbeddingRequest": {"input": _TEXTS_OR_TOKENS},
    "DetokenizeRequest": {"tokens": many(COUNT) | {"minItems": 1}},
    "Message": {"content": _CONTENT},
    "Prediction": {"content": _CONTENT},
    "MessageItem": {"content": _ITEM_PARTS},
    "ResultItem": {"output": _ITEM_PARTS},
    "ReasoningItem": {"content": _ITEM_PARTS, "summary": _ITEM_PARTS},
    "ToolResultBlock": {"content": _TEXT_BLOCKS},
    "CountTokensRequest": {"system": _TEXT_BLOCKS},
    "MessagesRequest": {"system": _TEXT_BLOCKS},
}
"""Fields whose validators take more than the type that they make of it: what may be sent, by model and field."""
_SHORTHANDS = {"ResponseRequest": {"input": [TEXT], "tools": [{"type": "null"}]}, "Turn": {"content": [TEXT, {"type": "null"}]}}
"""The same where it comes beside what the type says."""

_GENERATING = (ChatRequest, CompletionRequest, FimRequest, InfillRequest, ResponseRequest, MessagesRequest)


def request_schemas(
    models: Sequence[type[BaseModel]], model_names: Sequence[str]
) -> tuple[dict[type[BaseModel], Schema], dict[str, Schema]]:
    """A reference for each request model, and all components that they need."""
    asked: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
    references, whole = models_json_schema(asked, ref_template=REF, schema_generator=_Untitled)
    bodies = {model: references[model, "validation"] for model in models}
    schemas: dict[str, Schema] = whole["$defs"]
    for schema in schemas.values():  # fields of any type are known only to be refused, or to change nothing
        schema["properties"] = {name: told for name, told in schema["properties"].items() if told.keys() - {"default", "description"}}
    for name, fields in AS_SENT.items():
        schemas[name]["properties"] |= {field: deepcopy(schema) for field, schema in fields.items()}
    for name, shorthands in _SHORTHANDS.items():
        properties = schemas[name]["properties"]
        for field, more in shorthands.items():
            properties[field] = {"anyOf": [properties[field], *more]}
    for model, reference in bodies.items():
        properties = schemas[reference["$ref"].rpartition("/")[2]]["properties"]
        if "model" in model.model_fields:
            properties["model"] = {"enum": [*model_names, None], "description": "Without one, the first."}
        if model in _GENERATING:
            for name, limits in LIMITS.items():
                if name in properties:
                    _limit(properties[name], limits)
        if model in (ChatRequest, CompletionRequest, FimRequest):
            properties |= _FORM
    _respell_patterns(schemas)
    return bodies, schemas


def _respell_patterns(schema: Any) -> None:
    """In JSON schemas the ends of a text are ^ and $; \\A and \\z are Rust's names for them."""
    match schema:
        case dict():
            if isinstance(pattern := schema.get("pattern"), str):
                schema["pattern"] = pattern.replace(r"\A", "^").replace(r"\z", "$")
            for inner in schema.values():
                _respell_patterns(inner)
        case list():
            for inner in schema:
                _respell_patterns(inner)


class _Untitled(GenerateJsonSchema):
    """Titles would only repeat the fields' names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _limit(schema: Schema, limits: Schema) -> None:
    """Put limits on those of a schema's alternatives that they can be about."""
    about = {"minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "maxProperties": "object"}
    about |= {"maxItems": "array", "maxLength": "string", "minLength": "string"}
    for part in schema.get("anyOf", [schema]):
        kind = "number" if part.get("type") == "integer" else part.get("type")
        part |= {name: value for name, value in limits.items() if about[name] == kind}
        if kind == "array":
            _limit(part["items"], {name: value for name, value in limits.items() if about[name] == "string"})
