"""The functions that a response may call, those in namespaces among them, and the choice of one, in the words of chat completions.

Owns their names: templates know no namespaces, so the model is told of `namespace.name`, and clients get the two apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from ..errors import ApiError
from .items import full_name


def checked(value: object) -> object:
    """Functions, and namespaces of functions. Tools that OpenAI runs itself are refused, never dropped."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise PydanticCustomError("tools", "must be a list")
    for tool in value:
        _check(tool)
        if tool["type"] == "namespace":
            inner = tool.get("tools")
            if not isinstance(tool.get("name"), str) or not tool["name"] or not isinstance(inner, list):
                raise PydanticCustomError("tools", "a namespace must have a name and a list of tools")
            for one in inner:
                _check(one)
                if one["type"] == "namespace":
                    raise PydanticCustomError("tools", "a namespace holds functions, not namespaces")
    return value


def _check(tool: object) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise PydanticCustomError("tools", "a tool must be an object with a type")
    if tool["type"] not in ("function", "namespace"):
        message = f"this server has no tools of its own: {tool['type'][:40]!r} is not available; send tools of type 'function'"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """tools: checked ones. What a namespace says of itself stands before what its first function does."""
    told: list[dict[str, Any]] = []
    about: Any = None
    for namespace, tool in _functions(tools):
        function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
        if namespace is not None and isinstance(tool.get("name"), str):
            function["name"] = full_name(namespace["name"], tool["name"])
            if namespace is not about and isinstance(namespace.get("description"), str):
                function["description"] = f"{namespace['description']}\n\n{tool.get('description') or ''}".strip()
        about = namespace
        told.append({"type": "function", "function": function})
    return told or None


def namespaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function in a namespace, by the name that the model knows."""
    return {
        full_name(namespace["name"], tool["name"]): (namespace["name"], tool["name"])
        for namespace, tool in _functions(tools)
        if namespace is not None and isinstance(tool.get("name"), str)
    }


def _functions(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
    """Each function behind its namespace, if it has one."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool, inner) for inner in tool["tools"])
        else:
            yield None, tool


def chat_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Raises ApiError."""
    match choice:
        case None | str():
            return choice
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chat_choice(_object(tool)) for tool in tools]}}
        case _:
            message = """tool_choice must be 'none', 'auto', 'required', {"type": "function", "name": ...} or allowed_tools of functions"""
            raise ApiError(400, message, param="tool_choice")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
