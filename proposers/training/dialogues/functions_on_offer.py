"""What a tool on offer looks like: OpenAI's function schema, and a call of it."""

import json
from collections.abc import Iterable
from typing import Any

from ..corpus import Message

Tool = dict[str, Any]


def function(name: str, description: str, properties: dict[str, Any], required: Iterable[str] = ()) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(name: str, arguments: dict[str, Any], number: int = 1) -> Message:
    """The assistant's message that calls one function."""
    made = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": made}]}


def result(content: Any, number: int = 1) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(content, ensure_ascii=False)}
