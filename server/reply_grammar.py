"""The one grammar of a reply: the reasoning that may come first, then calls of tools, or an answer of the form that was asked for."""

import json
from collections.abc import Callable
from typing import Any

from ..engine.grammar_compiler import WHITESPACE
from ..engine.grammar_spec import GrammarSpec
from ..engine.json_dialects import enforceable
from .errors import ApiError
from .reasoning import ReasoningFormat
from .tools.parser import ToolParser, quoted, schema_of
from .tools.request import Offer
from .tools.value_rules import text_rules, without

Spell = Callable[[str], str]
"""A marker as grammars write it: a quoted text, or a token."""


def reply_grammar(
    wanted: GrammarSpec | None, tools: type[ToolParser] | None, offer: Offer, reasoning: ReasoningFormat | None, inside: bool, spell: Spell
) -> GrammarSpec | None:
    """None if the model may write what it likes. wanted: the answer's form. inside: whether the reply begins inside of reasoning.

    A call that must be made comes in an answer's stead. One that may be made among free text is held to its schema where a function
    is strict and calls begin with a token of their own, which no text can be taken for.
    Raises ApiError for forms that cannot stand beside anything, InvalidGrammar.
    """
    wanted = None if offer.required else wanted
    free = tools is not None and wanted is None and not offer.required and offer.strict and spell(tools.opening) != quoted(tools.opening)
    calls = _calls(tools, offer, spell) if tools is not None and (offer.required or wanted is not None or free) else ""
    if not calls and (wanted is None or (not inside and reasoning is None)):
        return wanted
    answer = "" if wanted is None else _answer(wanted)
    if not answer and wanted is not None:
        if not calls and not inside:
            return wanted  # the model does without reasoning
        beside = "tools" if calls else "reasoning"
        raise ApiError(400, f"{wanted.param} of this kind cannot be combined with {beside}; a JSON schema can", param=wanted.param)
    if free and tools is not None:
        answer = f"answer: ANYTHING (calls ANYTHING)?\nANYTHING: {without((tools.opening, *tools.other))}\n"
    lead = [spell(reasoning.lead)] if reasoning is not None and reasoning.lead else []
    start = " | ".join([*(["calls"] if calls and not free else []), *([" ".join((*lead, "answer"))] if answer else [])])
    rules = _thoughts(reasoning, inside, spell) + f"({start})\n" + calls + answer
    return GrammarSpec.grammar(rules, param="tools" if wanted is None else wanted.param, trusted=True)


def _calls(tools: type[ToolParser], offer: Offer, spell: Spell) -> str:
    for tool in offer.tools:
        GrammarSpec.json_schema(schema_of(tool), param="tools")  # within the limits of all schemas
    return tools.grammar(offer.tools, spell, offer.parallel)


def _thoughts(reasoning: ReasoningFormat | None, inside: bool, spell: Spell) -> str:
    """The beginning of a grammar, up to what follows the reasoning in `start`."""
    if reasoning is None:
        return "start: "
    end = spell(reasoning.end)
    rules = text_rules("thoughts", "*", reasoning.end, end, reasoning.ends[1:]) + "GAP: /[ \\n]{0,4}/\n"
    between = spell(reasoning.turn) if reasoning.turn else "GAP"
    return rules + (f"start: thoughts {between} " if inside else f"start: ({spell(reasoning.begin)} thoughts {between})? ")


def _answer(wanted: GrammarSpec) -> str:
    """The rule of an answer; "" for forms that only stand alone."""
    match wanted.kind:
        case "json_object":
            schema: Any = {"type": "object"}
        case "json_schema":
            schema = enforceable(json.loads(wanted.text), wanted.strict, wanted.param)
        case "choice":
            return f"answer: {' | '.join(map(quoted, json.loads(wanted.text)))}\n"
        case _:
            return ""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not wanted.strict}
    return f"answer: %json {json.dumps(schema | {'x-guidance': options})}\n"
