"""Foretoken: an OpenAI-compatible inference server built around exact speculative decoding.

The package's face. Importing it loads nothing heavy; torch and the engine come with the first use of a name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.grammar_spec import GrammarSpec, GuidedDecodingParams, StructuredOutputsParams
    from .engine.llm import LLM
    from .engine.llm_metrics import Counter, Gauge, Histogram, Vector
    from .engine.llm_prompts import TextPrompt, TokensPrompt
    from .engine.outputs import CompletionOutput, RequestOutput
    from .engine.request import LoRARequest, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "Counter", "Gauge", "GrammarSpec", "GuidedDecodingParams", "Histogram", "LoRARequest", "RequestOutput",
    "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "Vector", "__version__",
]
_HOMES = {
    "llm": {"LLM"},
    "request": {"LoRARequest", "SamplingParams"},
    "grammar_spec": {"GrammarSpec", "GuidedDecodingParams", "StructuredOutputsParams"},
    "llm_metrics": {"Counter", "Gauge", "Histogram", "Vector"},
    "llm_prompts": {"TextPrompt", "TokensPrompt"},
    "outputs": {"CompletionOutput", "RequestOutput"},
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".engine.{home}", __name__), name)
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
