"""What a request says of tools: the functions on offer, and whether the model may, must or must not call them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..errors import ApiError
from ..request_base import OpenAIObject
from .parser import Tool

MAX_TOOLS = 256
NAME = r"\A[A-Za-z0-9_.:/-]{1,128}\z"
"""Wider than OpenAI's, for names with a namespace before them."""


def _schema(value: object) -> object:
    """A JSON schema of an object, as far as it is looked into here."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("parameters", "must be a JSON schema: an object")
    if not isinstance(value.get("properties", {}), dict):
        raise PydanticCustomError("parameters", "parameters.properties must be an object")
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise PydanticCustomError("parameters", "parameters.required must be a list of names")
    return value


Parameters = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]


class Function(OpenAIObject):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class OfferedTool(OpenAIObject):
    type: Literal["function"]
    function: Function

    def for_template(self) -> Tool:
        told = {key: value for key in ("name", "description", "parameters") if (value := getattr(self.function, key)) is not None}
        return {"type": "function", "function": told}


Tools = Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)]


Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolChoice:
    """tool_choice, whichever of OpenAI's forms it came in. names: the only functions that may be called; None = all."""

    mode: Mode = "auto"
    names: frozenset[str] | None = None


def _choice(value: object) -> object:
    """"none", "auto", "required", {"type": "function", ...} or {"type": "allowed_tools", ...}."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(cast(Mode, value))
        case {"type": "function"}:
            return ToolChoice("required", frozenset({_name(value)}))
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*entries]}}:
            return ToolChoice(cast(Mode, mode), frozenset(map(_name, entries)))
        case _:
            raise PydanticCustomError("tool_choice", "must be 'none', 'auto', 'required', a function or allowed_tools")


def _name(entry: object) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise PydanticCustomError("tool_choice", 'a function is named as {"type": "function", "function": {"name": ...}}')


Choice = Annotated[Any, BeforeValidator(_choice)]  # ToolChoice or None


@dataclass(frozen=True)
class Offer:
    """The functions that the model is told of, which are those it may call, and whether it must."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True
    strict: bool = False  # a call, if one is made, must fit its function's schema: some function asks for that


def offer(tools: Sequence[OfferedTool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer:
    """Raises ApiError if the choice names what is not on offer."""
    choice = choice or ToolChoice()
    offered = {tool.function.name: tool for tool in tools or ()}
    if len(offered) < len(tools or ()):
        raise ApiError(400, "two tools have the same name", param="tools")
    if choice.mode == "required" and not offered:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
    if choice.names is not None and (not choice.names or not choice.names <= offered.keys()):
        unknown = ", ".join(sorted(name[:100] for name in choice.names - offered.keys()))
        message = f"tool_choice names a function that is not among the tools: {unknown}" if unknown else "tool_choice allows no function"
        raise ApiError(400, message, param="tool_choice")
    if choice.mode == "none":
        return Offer()
    chosen = [tool for name, tool in offered.items() if choice.names is None or name in choice.names]
    strict = any(tool.function.strict for tool in chosen)
    return Offer(tuple(tool.for_template() for tool in chosen), choice.mode == "required", parallel is not False, strict)
