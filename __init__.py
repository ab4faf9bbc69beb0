"""Foretoken: an OpenAI-compatible inference server built around exact speculative decoding.

The package's face. Importing it loads nothing heavy; torch and the engine come with the first use of a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.grammar_spec import GrammarSpec
    from .engine.llm import LLM
    from .engine.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "GrammarSpec", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    match name:
        case "GrammarSpec":
            from .engine.grammar_spec import GrammarSpec

            return GrammarSpec
        case "LLM":
            from .engine.llm import LLM

            return LLM
        case "SamplingParams":
            from .engine.request import SamplingParams

            return SamplingParams
        case _:
            raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
