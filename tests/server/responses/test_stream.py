"""POST /v1/responses streamed: the events, their order and numbers, and that they say what the whole response says."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_engine import FakeEngine
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from responses_api import Event, create, function, stream
from starlette.testclient import TestClient
from tiny_models import END

TOOLS = [function("weather"), function("time")]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT_AND_CALL = 'Hm.\n</think>\n\nSo.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
_KNOWN: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def kinds(events: Sequence[Event]) -> list[str]:
    """The types without `response.`, a run of deltas as one."""
    told = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(told) if not (kind.endswith(".delta") and at and told[at - 1] == kind)]


def check(events: Sequence[Event]) -> None:
    """Every event is one of OpenAI's types, and the numbers have no gap."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert _KNOWN.validate_python(event).type == event["type"]


def settled(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one to the next."""
    output = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    changing = ("id", "created_at", "completed_at", "metrics")
    return {key: value for key, value in response.items() if key not in changing} | {"output": output}


def test_an_answer(api: TestClient, fake: FakeEngine) -> None:
    events = stream(api, metadata={"a": "b"})
    check(events)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == fake.reply
    (item,) = events[-1]["response"]["output"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["content"] == [] and added["item"]["status"] == "in_progress" and item["status"] == "completed"
    assert [events[at]["response"]["status"] for at in (0, 1, -1)] == ["in_progress", "in_progress", "completed"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    assert settled(events[-1]["response"]) == settled(create(api, metadata={"a": "b"}))
    assert fake.num_open == 0


def test_reasoning_text_and_a_call(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = THOUGHT_AND_CALL
    events = stream(api, tools=TOOLS, **THINKING)
    check(events)
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output and [event["output_index"] for event in done] == [0, 1, 2]
    arguments = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == output[2]["arguments"] == '{"city": "Rome"}' and len(arguments) > 1
    assert settled(events[-1]["response"]) == settled(create(api, tools=TOOLS, **THINKING))


def test_a_call_that_a_stop_string_cuts_is_incomplete(api: TestClient, fake: FakeEngine) -> None:
    whole = THOUGHT_AND_CALL.removesuffix("}\n</tool_call>\n")
    for fake.reply, status in ((whole, "completed"), (whole.removesuffix('"}'), "incomplete")):
        fake.ending = ("stop", "Rome")
        events = stream(api, tools=TOOLS, **THINKING)
        check(events)
        response = events[-1]["response"]
        assert (response["status"], response["output"][-1]["type"]) == ("completed", "function_call")
        assert response["output"][-1]["status"] == events[-2]["item"]["status"] == status
        fake.ending = ("stop", None)  # what the model ends itself comes as it is
        assert create(api, tools=TOOLS, **THINKING)["output"][-1]["status"] == "completed"


def test_white_space_around_calls_is_no_message(api: TestClient, fake: FakeEngine) -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    fake.reply = f"{call}\n\n{call}\n \nDone"
    output = create(api, tools=TOOLS)["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call", "message"]
    assert output[2]["content"][0]["text"].strip() == "Done"


def test_logprobs_and_who_guessed_come_with_the_text(api: TestClient, fake: FakeEngine) -> None:
    fields = {"top_logprobs": 1, "stream_options": {"include_speculation": True}}
    events = stream(api, **fields)
    check(events)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert "".join(entry["token"] for event in deltas for entry in event["logprobs"]) == fake.reply
    assert done["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
    told = [entry["proposer"] for event in deltas for entry in event["speculation"]]
    assert told == [None if at % 2 == 0 else "ngram" for at in range(len(fake.tokenizer.encode(fake.reply)))]


def test_a_message_has_no_tokens_of_the_call_that_its_last_step_began(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = THOUGHT_AND_CALL
    logprobs = create(api, top_logprobs=1, tools=TOOLS, **THINKING)["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).endswith("So.")


@pytest.mark.parametrize("reply", ["The quick ", "The quick", "T", ""])
def test_the_end_token_counts_among_the_logprobs_in_whatever_step_it_comes(api: TestClient, fake: FakeEngine, reply: str) -> None:
    """Two tokens are a step: here the last one is the end token alone, there it comes behind a text."""
    fake.reply = reply + END
    num_tokens = len(fake.tokenizer.encode(fake.reply, add_special_tokens=False))
    events = stream(api, top_logprobs=1, stream_options={"include_speculation": True})
    check(events)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == sum(len(event["speculation"]) for event in deltas) == num_tokens
    (item,) = create(api, top_logprobs=1)["output"]
    assert len(item["content"][0]["logprobs"]) == num_tokens and item["content"][0]["text"] == reply


def test_a_failure_is_told_and_kept(api: TestClient, fake: FakeEngine) -> None:
    fake.fails_after = 2
    events = stream(api)
    check(events)
    assert kinds(events)[-5:] == ["output_text.done", "content_part.done", "output_item.done", "error", "failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("numerical_error", "not finite")
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"] == {"code": "server_error", "message": "not finite"}
    assert response["output"][0]["status"] == "incomplete" and fake.num_open == 0
    assert response["completed_at"] is None and response["usage"]
    assert api.get(f"/v1/responses/{response['id']}").json() == response


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_an_answer_without_a_word(api: TestClient, fake: FakeEngine, fields: dict[str, Any]) -> None:
    fake.reply = "\n"
    events = stream(api, **fields, **THINKING)
    check(events)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]
