"""Reasoning ends where its budget does, at once or token by token, and whatever was guessed the text is the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from saying import said

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import InvalidRequest
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.engine.thinking_budget import ThinkingBudget, ThinkingState

END = list(b"</end>")
PROMPTS = ["The quick brown fox", "def add(a, b):", "one two one two one two one", "x"]


def opened(limit: int, inside: bool = True) -> tuple[ThinkingState, list[int]]:
    """A state over a vocabulary of single bytes, and the live tokens that it follows."""
    tokens = [1, 2]
    budget = ThinkingBudget(limit, "<begin>", "</end>", inside, call="<calls>")
    return ThinkingState(budget, END, lambda token: bytes([token]), tokens, 256), tokens


def due(limit: int, said: bytes, inside: bool = True) -> int | None:
    """What has to come behind this output, asked for at once; the same must come if it was said token by token, or is a guess."""
    (state, tokens), (grown, growing), (ahead, _) = opened(limit, inside), opened(limit, inside), opened(limit, inside)
    tokens += said
    for token in said:
        grown.forced(())
        growing.append(token)
    at_once = state.forced(())
    assert at_once == grown.forced(()) == ahead.forced(list(said))
    mask = state.mask(())
    assert (mask is None) == (at_once is None) and (mask is None or mask.only == at_once)
    return at_once


@pytest.mark.parametrize(
    ("limit", "said", "inside", "expected"),
    [
        (3, b"ab", True, None),
        (3, b"abc", True, b"<"),
        (3, b"abc</en", True, b"d"),
        (3, b"abc</end", True, b">"),
        (3, b"abc</end>", True, None),
        (3, b"abc</end> more and more", True, None),
        (0, b"", True, b"<"),
        (9, b"ab</end>cdefghijkl", True, None),  # it ended by itself
        (9, b"ab<calls>cdefghijkl", True, None),  # so do calls
        (9, b"ab<calls", True, None),
        (6, b"abc</e", True, b"<"),  # not yet: the whole marker comes
        (2, b"\xe2\x82", True, None),  # a character is not cut ...
        (2, b"\xe2\x82\xac", True, b"<"),
        (2, b"\xf0\x9f", True, None),
        (2, b"\xe2\xe2", True, None),
        (2, b"\xe2\xe2\xe2\xe2\xe2", True, b"<"),  # ... unless it is none
        (2, b"a\x80", True, b"<"),
        (2, b"abcdef", False, None),  # it does not reason
        (2, b" <begin>", False, None),
        (2, b" <begin>a", False, None),
        (2, b" <begin>ab", False, b"<"),
        (2, b" <begi", False, None),
        (2, b" " * 200 + b"<begin>abcd", False, None),
    ],
)
def test_what_has_to_come(limit: int, said: bytes, inside: bool, expected: bytes | None) -> None:
    assert due(limit, said, inside) == (None if expected is None else expected[0])


def test_looking_ahead_leaves_no_trace() -> None:
    dice = Random(3)
    for _ in range(60):
        state, tokens = opened(dice.randint(0, 8))
        for _ in range(12):
            for _ in range(3):
                path = dice.choices(b"</end>ab\xe2", k=dice.randint(0, 9))
                state.forced(path)
            fresh, known = opened(state._limit)
            known += tokens[2:]
            assert state.forced(()) == fresh.forced(())
            token = state.forced(())
            tokens.append(dice.choice(b"</end>ab\xe2") if token is None else token)
        assert not state.watches or b"</end>" not in bytes(tokens[2:])


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_budget_is_a_number(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="thinking_token_budget"):
        ThinkingBudget(wrong, "<think>", "</think>", True)


def answers(llm: LLM, method: str, each: Sequence[SamplingParams]) -> list[list[int]]:
    asked = [replace(params, speculation={"method": method}) for params in each]
    return said(llm, PROMPTS, asked)


@pytest.mark.parametrize("executor", ["auto", "torch"])
@pytest.mark.parametrize("settings", [{}, {"presence_penalty": 1.5, "bad_words": ["<"]}, {"allowed_token_ids": list(range(50, 290))},
                                      {"grammar": GrammarSpec.grammar('start: TEXT "</think>" /[0-9]{1,9}/\nTEXT: /[a-z ]*/')}],
                         ids=["alone", "edits", "allowed", "grammar"])
def test_guesses_change_nothing(tiny_target: Path, executor: str, settings: dict[str, Any]) -> None:
    drafters: list[dict[str, Any]] = [
        {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": 5, "adaptive": False, "disable_by_batch_size": 64},
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_branches": 3},
        {"method": "suffix"},
    ]
    shared = {"seed": 4, "max_tokens": 40, "ignore_eos": True, "thinking": ThinkingBudget(9, "<think>", "</think>", True)} | settings
    each = [SamplingParams(temperature=temperature, **shared) for temperature in (0.0, 1.0, 0.0, 1.0)]
    with LLM(tiny_target, speculative_config=drafters, kv_cache_gb=0.01, dtype="float32", executor=executor) as llm:
        end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
        plain = answers(llm, "off", each)
        for token_ids in plain:
            first = next(start for start in range(9, 13) if token_ids[start : start + len(end)] == end)
            assert "</think>" not in llm.get_tokenizer().decode(token_ids[:first])
        for method in ("draft_model", "ngram", "suffix"):
            assert answers(llm, method, each) == plain, method
        assert llm.stats().num_accepted_tokens > 0
