"""Checks of an answer's form against its prompt: JSON that parses, tool calls that could be made, Python that compiles.

Which check applies is told by the reference, the answer that the corpus has: what it is, an answer should be too. Knows no model and
says nothing of whether an answer is true.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .encoding import Prompt

Kind = Literal["json", "tool call", "python"]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BLOCK = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """What was asked for, and what is wrong with the answer's form; None = nothing."""

    kind: Kind
    fault: str | None


def check_answer(prompt: Prompt, answer: str) -> Finding | None:
    """None where the reference is plain text, or would not pass its own check."""
    if prompt.reference.get("tool_calls"):
        return Finding("tool call", tool_call_fault(answer, prompt.tools))
    reference = str(prompt.reference.get("content") or "")
    schema = _schema_in(prompt)
    if _is_json(reference):
        return None if json_fault(reference, schema) else Finding("json", json_fault(answer, schema))
    if any(language == "python" for language, _ in _blocks(reference)):
        return None if python_fault(reference) else Finding("python", python_fault(answer))
    return None


def json_fault(answer: str, schema: Mapping[str, Any] | None = None) -> str | None:
    """Why the answer, bare or as one fenced block, is no JSON that fits the schema; None if it is."""
    try:
        value = json.loads(_bare(answer))
    except (ValueError, RecursionError) as error:
        return f"does not parse: {error}"
    return schema_fault(value, schema) if schema else None


def schema_fault(value: Any, schema: Mapping[str, Any], at: str = "the answer") -> str | None:
    """Types, required keys and enums of a JSON schema, at every depth; what else a schema may say is not looked at."""
    kind = schema.get("type")
    if isinstance(kind, str) and not _is_of_type(value, kind):
        return f"{at} is not of type {kind}"
    options = schema.get("enum")
    if isinstance(options, list) and value not in options:
        return f"{at} is none of {options}"
    if isinstance(value, list) and isinstance(items := schema.get("items"), dict):
        parts = ((f"{at}[{number}]", part, items) for number, part in enumerate(value))
    elif isinstance(value, dict):
        if missing := [key for key in schema.get("required", ()) if key not in value]:
            return f"{at} lacks {', '.join(missing)}"
        properties = schema.get("properties", {})
        parts = ((f"{at}.{key}", part, properties[key]) for key, part in value.items() if key in properties)
    else:
        return None
    return next((fault for at_part, part, inner in parts if (fault := schema_fault(part, inner, at_part))), None)


def tool_call_fault(answer: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the answer's calls, of which there must be one, could not all be made; None if they could."""
    calls = _CALL.findall(answer)
    if not calls or "tool_call>" in _CALL.sub("", answer):
        return "a call is not closed" if "<tool_call>" in answer else "there is no call"
    on_offer = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    return next((fault for call in calls if (fault := _call_fault(call, on_offer))), None)


def _call_fault(text: str, on_offer: Mapping[str, Mapping[str, Any]]) -> str | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"a call does not parse: {error}"
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            if name not in on_offer:
                return f"no function {name} is on offer"
            missing = [key for key in on_offer[name].get("required", ()) if key not in arguments]
            return f"{name} lacks {', '.join(missing)}" if missing else None
        case _:
            return "a call has no name and arguments"


def python_fault(answer: str) -> str | None:
    """Why the fenced Python of the answer, of which there must be some, does not compile; None if it does. Nothing is run."""
    blocks = [code for language, code in _blocks(answer) if language in ("python", "py", "")]
    if not blocks:
        return "a block is not closed" if "```" in answer else "there is no block of Python"
    return next((fault for code in blocks if (fault := _compile_fault(code))), None)


def _compile_fault(code: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")      # an odd escape in a string is no fault
            compile(code, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return f"does not compile: {error}"
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language in small letters, code) of each fenced block that is closed."""
    return [(language.lower(), code) for language, code in _BLOCK.findall(text)]


def _bare(text: str) -> str:
    """The inside of a text that is one fenced block of JSON, else the text."""
    match _blocks(text):
        case [("json" | "", code)] if text.strip().startswith("```") and text.strip().endswith("```"):
            return code
        case _:
            return text


def _is_json(text: str) -> bool:
    """An object or an array; a number or a quoted word is taken for text."""
    try:
        return isinstance(json.loads(_bare(text)), (dict, list))
    except ValueError:
        return False


def _schema_in(prompt: Prompt) -> dict[str, Any] | None:
    """The JSON schema in the latest message of the user that has one."""
    for message in reversed(prompt.messages):
        if message["role"] == "user":
            for value in _objects(str(message.get("content") or "")):
                if isinstance(value.get("properties"), dict) or value.get("type") == "array" and isinstance(value.get("items"), dict):
                    return value
    return None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects inside a text, in order."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            yield value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)


def _is_of_type(value: Any, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return number and float(value).is_integer()
        case "number":
            return number
        case "null":
            return value is None
        case _:
            return True
