"""Forms that a model cannot be held to: what a client is told when that turns out only while the answer is written."""

import json
from pathlib import Path

from asking import refusal
from real_app import real_app

AMBIGUOUS = 'start: "a" start | start start'


def test_a_grammar_that_gets_out_of_hand_is_the_requests_mistake(tiny_target: Path) -> None:
    body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"grammar": AMBIGUOUS}}
    with real_app(tiny_target) as client:
        error = refusal(client, "/v1/completions", body)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_parameters") and "too complex" in error["message"]
        streamed = client.post("/v1/completions", json=body | {"stream": True})
        *_, told, done = streamed.text.split("\n\n")[:-1]
        assert json.loads(told.removeprefix("data: "))["error"] == error and done == "data: [DONE]"
