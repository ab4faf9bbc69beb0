"""Everyday functions: calls name what is on offer with the right arguments, said by the user; the last word is a sentence."""

import json
from itertools import islice
from random import Random

from foretoken.proposers.training.corpus import Conversation
from foretoken.proposers.training.dialogues.everyday import everyday_tools
from foretoken.proposers.training.dialogues.everyday_actions import ACTIONS
from foretoken.proposers.training.dialogues.naming import naming_of

PYTHON_TYPES = {"string": str, "integer": int}
SOME = list(islice(everyday_tools(()), 1500))


def check_calls(conversation: Conversation) -> int:
    """How many calls there are. Raises if one is not what the tools allow."""
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
    said, number = "", 0
    for message in conversation.messages:
        if message["role"] == "user":
            said += message["content"].lower() + "\n"
        for call in message.get("tool_calls", ()):
            parameters = offered[call["function"]["name"]]
            arguments = json.loads(call["function"]["arguments"])
            assert set(parameters["required"]) <= arguments.keys() <= parameters["properties"].keys()
            for name, value in arguments.items():
                assert isinstance(value, PYTHON_TYPES[parameters["properties"][name]["type"]])
                assert str(value).lower() in said, f"{value!r} was never said"
            number += 1
    return number


def test_calls_fit_the_tools_and_the_question():
    calls = [check_calls(conversation) for conversation in SOME]
    assert 0.8 * len(calls) < sum(number > 0 for number in calls) < 0.97 * len(calls)
    assert 2 in calls


def test_one_to_four_tools_with_different_names():
    counts = {len(conversation.tools) for conversation in SOME}
    assert counts == {1, 2, 3, 4}
    for conversation in SOME:
        names = [tool["function"]["name"] for tool in conversation.tools]
        assert len(names) == len(set(names))
    assert len({tool["function"]["name"] for conversation in SOME for tool in conversation.tools}) > 500


def test_results_are_told_in_a_sentence():
    for conversation in SOME:
        assert conversation.messages[-1]["role"] == "assistant" and conversation.messages[-1]["content"]
        assert "{" not in conversation.messages[-1]["content"]
        for before, after in zip(conversation.messages, conversation.messages[1:], strict=False):
            if before["role"] == "tool":
                told = [str(value) for value in json.loads(before["content"]).values() if not isinstance(value, bool)]
                assert any(value in after["content"] for value in told) or not told


def test_enough_actions_and_every_wording_gives_what_is_required():
    assert len(ACTIONS) >= 25 and len({action.name for action in ACTIONS}) == len(ACTIONS)
    for action in ACTIONS:
        for wording in action.questions:
            assert all(f"{{{one.name}}}" in wording for one in action.parameters if one.required), wording
        assert bool(action.vague) == bool(action.ask)


def test_other_names_stay_apart():
    for action in ACTIONS:
        for seed in range(40):
            naming = naming_of(action, Random(seed))
            assert len(set(naming.parameters.values())) == len(action.parameters) and naming.function


def test_the_same_dialogues_every_time():
    assert list(islice(everyday_tools(()), 100)) == SOME[:100]
