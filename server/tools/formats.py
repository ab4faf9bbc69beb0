"""The formats by the names that vLLM gives them, and which one a chat template speaks of."""

from __future__ import annotations

from .hermes import Hermes
from .llama3_json import Llama3Json
from .mistral import Mistral, MistralList
from .parser import ToolParser
from .qwen3_xml import Qwen3Xml

FORMATS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "mistral": Mistral,
    "mistral_list": MistralList,
    "qwen3_coder": Qwen3Xml,
    "qwen3_xml": Qwen3Xml,
}
NO_PARSER = "none"
"""The name, among those of parsers, of leaving the text as it is."""


def takes_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools."""
    return "tools" in template


def detected(template: str) -> type[ToolParser] | None:
    """The format that a chat template shows the model; None if it shows none that is known."""
    if not takes_tools(template):
        return None
    if "<tool_call>" in template:
        return Qwen3Xml if "<function=" in template else Hermes
    if "[TOOL_CALLS]" in template:
        return Mistral if "[ARGS]" in template else MistralList
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return Llama3Json
    return None
