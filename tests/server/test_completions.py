from typing import Any

import pytest
from asking import answer, chunks, refusal
from fake_engine import FakeEngine
from starlette.testclient import TestClient

ROUTE = "/v1/completions"


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return chunks(client, ROUTE, {"prompt": "Say"} | fields)


def test_a_whole_answer(client: TestClient, fake: FakeEngine) -> None:
    body = answer(client, ROUTE, {"prompt": "Say"})
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": fake.reply, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert fake.calls[0].prompt == fake.tokenizer.encode("Say") and fake.calls[0].params.max_tokens == 16
    assert "speculative_decoding" in body["metrics"]


def test_a_stream_says_the_same(client: TestClient, fake: FakeEngine) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == fake.reply
    assert chunks[-1]["usage"] == answer(client, ROUTE, {"prompt": "Say"})["usage"]


@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_times_n_are_numbered_prompt_by_prompt(client: TestClient, fake: FakeEngine, streamed: bool) -> None:
    fields = {"prompt": ["Say", "The quick"], "n": 2, "echo": True}
    if streamed:
        texts = [""] * 4
        for chunk in stream(client, **fields):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        body = answer(client, ROUTE, fields)
        texts = [choice["text"] for choice in body["choices"]]
        assert body["usage"]["prompt_tokens"] == sum(len(fake.tokenizer.encode(prompt)) for prompt in ("Say", "The quick"))
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert texts == ["Say" + fake.reply] * 2 + ["The quick" + fake.reply] * 2
    assert len({call.id for call in fake.calls}) == 2 and fake.num_open == 0


def test_token_ids_are_a_prompt(client: TestClient, fake: FakeEngine) -> None:
    tokens = fake.tokenizer.encode("The quick")
    body = answer(client, ROUTE, {"prompt": tokens, "echo": True})
    assert fake.calls[0].prompt == tokens and body["choices"][0]["text"] == "The quick" + fake.reply


@pytest.mark.parametrize("prompt", ["", [""], [[]], [300], [-1], [2**31], [2**63], [[1], [300]]])
def test_prompts_that_are_none_are_refused(client: TestClient, fake: FakeEngine, prompt: Any) -> None:
    assert refusal(client, ROUTE, {"prompt": prompt})["param"] == "prompt" and not fake.calls


def test_more_choices_than_seats_and_queue_can_hold_are_refused(client: TestClient, fake: FakeEngine) -> None:
    for prompts, n, param in ((9, 128, None), (200, 1, None), (8, 129, "n"), (10, 128, "n"), (1153, 1, "prompt")):
        response = client.post(ROUTE, json={"prompt": ["a"] * prompts, "n": n})
        error = response.json().get("error")
        assert response.status_code == (400 if param else 200) and (error and error["param"]) == param, error
        assert len(fake.calls) == (0 if param else prompts) and (param or len(response.json()["choices"]) == prompts * n)
        fake.calls.clear()


def test_one_bad_prompt_ends_all(client: TestClient, fake: FakeEngine) -> None:
    fake.fails_after = 1
    response = client.post(ROUTE, json={"prompt": ["a", "b"]})
    assert response.status_code == 500 and fake.num_open == 0


def test_logprobs_are_parallel_lists(client: TestClient, fake: FakeEngine) -> None:
    assert {client.post(ROUTE, json={"prompt": "Say", "logprobs": wrong}).status_code for wrong in (-1, 21)} == {400}
    logprobs = answer(client, ROUTE, {"prompt": "Say", "logprobs": 2})["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == fake.reply
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert all(len(best) == 3 and best[token] == -0.5 for best, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(client, logprobs=2)]
    assert {name: [item for part in parts for item in part[name]] for name in logprobs} == logprobs
