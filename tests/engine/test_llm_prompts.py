"""Prompts and conversations in the shapes that scripts have them in, and what is refused rather than dropped."""

from typing import Any

import numpy as np
import pytest
import torch

from foretoken.engine.errors import InvalidRequest
from foretoken.engine.llm_prompts import ParsedPrompt, parse_conversations, parse_prompts, turn_of

HI = {"role": "user", "content": "hi"}


def ids(*prompts: list[int]) -> list[ParsedPrompt]:
    return [ParsedPrompt(None, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("a", [ParsedPrompt("a", None)]),
        (["a", "b"], [ParsedPrompt("a", None), ParsedPrompt("b", None)]),
        ((text for text in "ab"), [ParsedPrompt("a", None), ParsedPrompt("b", None)]),
        (np.array(["a"]), [ParsedPrompt("a", None)]),
        ([], []),
        ([5, 6], ids([5, 6])),
        (range(5, 7), ids([5, 6])),
        ([[5, 6], (7,)], ids([5, 6], [7])),
        (np.array([5, 6]), ids([5, 6])),
        (torch.tensor([5, 6]), ids([5, 6])),
        (np.array([[5, 6], [7, 8]]), ids([5, 6], [7, 8])),
        (torch.tensor([[5], [7]]), ids([5], [7])),
        ([torch.tensor([5]), torch.tensor([7])], ids([5], [7])),
        ([np.array([5, 6]), np.array([7])], ids([5, 6], [7])),
        ({"prompt": "a", "cache_salt": "s", "multi_modal_data": None}, [ParsedPrompt("a", None, "s")]),
        ({"prompt": "a", "prompt_token_ids": None}, [ParsedPrompt("a", None)]),
        ({"prompt_token_ids": np.array([5])}, ids([5])),
    ],
)
def test_shapes_of_prompts(prompts: Any, parsed: list[ParsedPrompt]) -> None:
    assert parse_prompts(prompts) == parsed


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "not 'multi_modal_data'"),
        ({"prompt": None}, "a prompt is"),
        (b"abc", "a prompt is"),
        ([b"abc"], "a prompt is"),
        (None, "not NoneType"),
        (["a", None], r"^prompts\[1\]: a prompt is"),
        ([1, "a"], "token ids, which are integers, not"),
        ({"prompt_token_ids": "abc"}, "integers, not 'abc'"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt is a string, not 5"),
    ],
)
def test_what_is_no_prompt(prompts: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        parse_prompts(prompts)


def test_truth_values_are_left_to_the_check_of_token_ids() -> None:
    (prompt,) = parse_prompts([[5, True]])
    assert prompt.token_ids is not None and prompt.token_ids[1] is True


def test_shapes_of_conversations() -> None:
    assert parse_conversations([HI]) == parse_conversations([[HI]]) == [[HI]]
    assert parse_conversations([HI] for _ in range(2)) == [[HI], [HI]]
    assert parse_conversations([]) == []


@pytest.mark.parametrize("messages", ["hi", HI, ["hi"], [[]], [HI, "hi"], [[HI], []]])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(TypeError, match="list of messages"):
        parse_conversations(messages)


def test_a_message_as_templates_know_it() -> None:
    parts = {"role": "developer", "content": ["a", {"type": "text", "text": "b"}]}
    assert turn_of(parts) == {"role": "system", "content": "a\nb"}
    dumped = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    assert turn_of(dumped) == {"role": "assistant", "content": ""}
    for message in ({"role": "user", "content": 5}, {"role": "user", "content": [{"type": "text"}]},
                    {"role": "user", "content": [{"type": "image_url"}]}, {"content": "hi"}):
        with pytest.raises(InvalidRequest):
            turn_of(message)
