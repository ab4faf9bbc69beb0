"""Why an answer ended, in Anthropic's words, and blocks of parts in any order."""

from typing import Any

import pytest

from foretoken.engine.request import FinishReason, TokenDelta
from foretoken.server.anthropic.blocks import content, ending


@pytest.mark.parametrize(
    ("reason", "stop", "num_calls", "fills_context", "expected"),
    [
        ("stop", None, 0, False, ("end_turn", None)),
        ("stop", 7, 0, False, ("end_turn", None)),  # the end token
        ("stop", None, 2, False, ("tool_use", None)),
        ("stop", "END", 0, True, ("stop_sequence", "END")),
        ("length", None, 0, False, ("max_tokens", None)),
        ("length", None, 1, False, ("max_tokens", None)),
        ("length", None, 0, True, ("model_context_window_exceeded", None)),
    ],
)
def test_endings(
    reason: FinishReason, stop: int | str | None, num_calls: int, fills_context: bool, expected: tuple[str, str | None]
) -> None:
    last = TokenDelta("r", 0, [], "", [], finish_reason=reason, stop_reason=stop)
    assert tuple(ending(last, num_calls, fills_context=fills_context).values()) == expected


def test_blocks_follow_the_order_of_the_parts() -> None:
    begun: Any = {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]}
    more: Any = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}
    parts = [{"reasoning": "so"}, {"reasoning": "!"}, {"content": "a"}, {"content": "b"}, begun, more, {"content": "c"}, begun]
    assert content(parts) == [
        {"type": "thinking", "thinking": "so!", "signature": ""},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "c"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    assert content([]) == []


@pytest.mark.parametrize("arguments", ["[1]", "nul", '{"a"', "[" * 100_000])
def test_arguments_that_are_no_object_are_not_lost(arguments: str) -> None:
    begun: Any = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
    assert content([begun])[0]["input"] == {"INVALID_JSON": arguments}
