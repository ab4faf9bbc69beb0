"""A conversation as chat templates take it: turns in OpenAI's shape, and the same words for templates that refuse them so."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

Turn = dict[str, Any]
Written = Callable[[Sequence[tuple[str, str]]], str]
"""Calls, each a name and its arguments, as a model writes them; "" where that is not known."""


def turns_of(messages: Sequence[Turn], arguments_as_text: bool, written: Written | None = None) -> list[Turn]:
    """A tool's result has the name of its function, which some templates write and clients say at the call only.

    messages: their contents are texts, and so are the arguments of their calls. written: calls become a part of what was said.
    """
    called: dict[Any, str] = {}
    turns: list[Turn] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        for call in calls:
            match call:
                case {"id": id, "function": {"name": str(name)}}:
                    called[id] = name
                case _:
                    pass
        name = called.get(message.get("tool_call_id")) if message["role"] == "tool" else None
        turn = {"name": name} | message if name else message
        functions = [call["function"] for call in calls] if written is not None else []
        if written is not None and (said := written([(one["name"], one["arguments"]) for one in functions]) if functions else ""):
            turn = {key: value for key, value in turn.items() if key != "tool_calls"}
            turn["content"] = "\n".join(filter(None, (turn["content"], said)))
        elif calls and not arguments_as_text:
            turn = turn | {"tool_calls": [_with_parsed_arguments(call) for call in calls]}
        turns.append(turn)
    return turns


def parsed_arguments(arguments: str) -> dict[str, Any] | str:
    """A call's arguments as an object. What is none, as a model may once have written it, stays text."""
    try:
        parsed: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _with_parsed_arguments(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            return {**call, "function": {**function, "arguments": parsed_arguments(arguments)}}
        case _:
            return call


def ways(turns: list[Turn]) -> Iterator[list[Turn]]:
    """As they are, then as stricter templates want them; none twice."""
    yield turns
    told = [turns]
    strict = [_by_turns(turns, first) for first in ("system", "user")]
    for way in (_thinking_alone(turns), _one_call_each(turns), *strict, *map(_for_mistral, strict)):
        if way not in told:
            told.append(way)
            yield way


def _thinking_alone(turns: Sequence[Turn]) -> list[Turn]:
    """For gpt-oss's template, which takes one text beside a call: what was thought, and behind it what was said."""
    return [
        turn | {"thinking": f"{turn['thinking']}\n{turn['content']}", "content": ""}
        if turn.get("tool_calls") and turn.get("thinking") and turn["content"]
        else turn
        for turn in turns
    ]


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """For Llama's templates, which take one call in a message, while the models make several: each with its results behind it."""
    single: list[Turn] = []
    results: list[Turn] = []
    for at, turn in enumerate(turns):
        if turn["role"] == "tool" and results:
            continue
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            single.append(turn)
            results = []
            continue
        results = list(takewhile(lambda turn: turn["role"] == "tool", turns[at + 1 :]))
        left = results
        for call in calls:
            single.append(turn | {"tool_calls": [call]})
            single += [result for result in left if result.get("tool_call_id") == call["id"]]
            left = [result for result in left if result.get("tool_call_id") != call["id"]]
            turn = {"role": "assistant", "content": ""}
        single += left
    return single


def _by_turns(turns: Sequence[Turn], first: str) -> list[Turn]:
    """For those that insist on users and answers by turns, behind one message of the system at most.

    Agents put news of the system between the turns, and several messages where Mistral's and Gemma's templates want one. Those of the
    system that are not at the beginning are the user's then. first: whose the first ones are, as some templates have no system at all.
    """
    joined: list[Turn] = []
    for turn in turns:
        role = turn["role"]
        if role == "system":
            role = first if not joined or joined[-1]["role"] == "system" else "user"
        if joined and role == joined[-1]["role"] and role in ("system", "user"):
            joined[-1] = _continued(joined[-1], turn)
        else:
            joined.append(turn | {"role": role})
    return joined


def _for_mistral(turns: Sequence[Turn]) -> list[Turn]:
    """For Mistral's, which want an answer behind results, where agents say more with them, and ids of nine letters and digits."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and joined[-1]["role"] == "tool" and turn["role"] == "user":
            joined[-1] = _continued(joined[-1], turn)
            continue
        calls = {"tool_calls": [call | {"id": _short(call["id"])} for call in turn["tool_calls"]]} if "tool_calls" in turn else {}
        answers = {"tool_call_id": _short(turn["tool_call_id"])} if "tool_call_id" in turn else {}
        joined.append(turn | calls | answers)
    return joined


def _continued(turn: Turn, more: Turn) -> Turn:
    return turn | {"content": f"{turn['content']}\n\n{more['content']}"}


def _short(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode()).hexdigest()[:9]
