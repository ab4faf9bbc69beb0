"""Log probabilities of prompts over HTTP, as scoring tools ask for them, against transformers in float32."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import answer, chunks, refusal
from real_app import real_app
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.server.logprobs import CompletionLogprobs

ROUTE, CHAT_ROUTE = "/v1/completions", "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "The quick brown fox"}]}
TEXT = "The quick brown fox jumps over the lazy dog. " * 5
SCORING = {"prompt": TEXT, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
"""What lm-eval's local-completions sends for a log likelihood."""


@pytest.fixture(scope="module")
def client(tiny_target: Path) -> Iterator[TestClient]:
    draft = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with real_app(tiny_target, draft, {"dtype": "float32", "max_num_batched_tokens": 32}) as client:
        yield client


class Reference:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def scores(self, token_ids: list[int]) -> torch.Tensor:
        """[len - 1, V]: row i is about token i + 1."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)

    def logprobs(self, token_ids: list[int]) -> list[float]:
        return [float(row[token]) for row, token in zip(self.scores(token_ids), token_ids[1:], strict=True)]


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Reference:
    return Reference(tiny_target)


def choice(client: TestClient, route: str = ROUTE, **fields: Any) -> dict[str, Any]:
    return answer(client, route, fields)["choices"][0]


def parts(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(client, ROUTE, fields) for choice in chunk["choices"]]


@pytest.mark.parametrize("round", ["cold", "warm"])
def test_a_scoring_tool_gets_every_token_of_the_prompt(client: TestClient, reference: Reference, round: str) -> None:
    said = choice(client, **SCORING)
    token_ids = reference.tokenizer.encode(TEXT)
    logprobs = said["logprobs"]
    assert len(logprobs["tokens"]) == len(token_ids) + 1 and said["text"].startswith(TEXT)
    assert logprobs["tokens"][: len(token_ids)] == [reference.tokenizer.decode([token]) for token in token_ids]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(token_ids)] == pytest.approx(reference.logprobs(token_ids), abs=2e-4)
    for row, token, best in zip(reference.scores(token_ids), logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=False):
        assert token in best and max(best.values()) == pytest.approx(float(row.max()), abs=2e-4)


@pytest.mark.parametrize("fields", [{}, {"return_tokens_as_token_ids": True}, {"max_tokens": 0, "prompt": [5, 290, 1, 70]}], ids=str)
def test_offsets_are_places_in_the_text(client: TestClient, reference: Reference, fields: dict[str, Any]) -> None:
    asked = SCORING | {"prompt": "Größe 🙂: naïve 日本", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True} | fields
    said = choice(client, **asked)
    offsets, token_ids = said["logprobs"]["text_offset"], [*said["prompt_token_ids"], *said["token_ids"]]
    assert len(offsets) == len(token_ids) and offsets == sorted(offsets)
    texts = [reference.tokenizer.decode([token]) for token in token_ids]
    whole = [(text, offset) for text, offset in zip(texts, offsets, strict=True) if "\ufffd" not in text]
    assert 4 <= len(whole) and all(said["text"][offset:].startswith(text) for text, offset in whole)
    if asked["max_tokens"]:
        assert offsets[len(said["prompt_token_ids"])] == len(asked["prompt"])
        assert [offset for part in parts(client, **asked) if part["logprobs"] for offset in part["logprobs"]["text_offset"]] == offsets


def test_offsets_behind_a_prompt_that_ends_within_a_character(client: TestClient, reference: Reference) -> None:
    for cut in (1, 2, 3):
        token_ids = reference.tokenizer.encode("Hi \U0001f642")[:-cut]
        logit_bias = dict.fromkeys(map(str, reference.tokenizer.encode("\U0001f642")[-3:]), 100)
        said = choice(client, prompt=token_ids, echo=True, logprobs=0, max_tokens=4, temperature=0, logit_bias=logit_bias)
        text, offsets = reference.tokenizer.decode(token_ids), said["logprobs"]["text_offset"]
        assert said["text"].startswith(text) and offsets[0] == 0 and offsets[len(token_ids)] == len(text)
        assert offsets[len(token_ids) :] == [len(text) + index for index in range(4)]


def test_nothing_is_generated_where_nothing_is_asked_for(client: TestClient, reference: Reference) -> None:
    body = answer(client, ROUTE, SCORING | {"max_tokens": 0, "prompt": [TEXT, "Short"], "n": 2})
    assert body["usage"]["completion_tokens"] == 0 and len(body["choices"]) == 4
    for index, said in enumerate(body["choices"]):
        text = [TEXT, TEXT, "Short", "Short"][index]
        assert said["text"] == text == "".join(said["logprobs"]["tokens"]) and said["finish_reason"] == "length"
        assert said["logprobs"]["token_logprobs"][1:] == pytest.approx(reference.logprobs(reference.tokenizer.encode(text)), abs=2e-4)
    assert choice(client, prompt="Short", max_tokens=0, echo=True)["text"] == "Short"
    assert refusal(client, ROUTE, {"prompt": "Short", "max_tokens": 0})["param"] == "max_tokens"


def test_a_stream_says_the_same(client: TestClient) -> None:
    asked = SCORING | {"max_tokens": 7, "logprobs": 2, "n": 2, "ignore_eos": True}
    whole = answer(client, ROUTE, asked)["choices"]
    chunks = parts(client, **asked)
    for index, expected in enumerate(whole):
        mine = [part for part in chunks if part["index"] == index]
        assert "".join(part["text"] for part in mine) == expected["text"]
        told = [part["logprobs"] for part in mine if part["logprobs"]]
        assert told[0]["token_logprobs"][0] is None
        for name, values in expected["logprobs"].items():
            flat = [value for part in told for value in part[name]]
            assert flat == values if name != "token_logprobs" else flat[1:] == pytest.approx(values[1:])


def test_prompts_as_token_ids_and_tokens_as_ids(client: TestClient, reference: Reference) -> None:
    token_ids = reference.tokenizer.encode("The quick é")
    asked = SCORING | {"prompt": token_ids, "return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    said = choice(client, **asked)
    assert said["prompt_token_ids"] == token_ids and len(said["token_ids"]) <= 3
    assert said["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*token_ids, *said["token_ids"]]]
    assert all(name.startswith("token_id:") for best in said["logprobs"]["top_logprobs"][1:] for name in best)
    streamed = parts(client, **asked)
    assert streamed[0]["prompt_token_ids"] == token_ids
    assert [token for part in streamed for token in part["token_ids"]] == said["token_ids"]


@pytest.mark.parametrize("num_best", [0, 3])
def test_vllms_shape(client: TestClient, reference: Reference, num_best: int) -> None:
    whole = answer(client, CHAT_ROUTE, CHAT | {"max_tokens": 2, "prompt_logprobs": num_best, "return_token_ids": True, "n": 2})
    token_ids = whole["prompt_token_ids"]
    assert reference.tokenizer.decode(token_ids).startswith("<|user|>The quick")
    completed = choice(client, prompt=token_ids, max_tokens=0, prompt_logprobs=num_best)
    for entries in (whole["prompt_logprobs"], completed["prompt_logprobs"]):
        assert len(entries) == len(token_ids) and entries[0] is None
        for row, token, entry in zip(reference.scores(token_ids), token_ids[1:], entries[1:], strict=True):
            assert num_best <= len(entry) <= num_best + 1
            assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
            assert entry[str(token)]["decoded_token"] and all(1 <= other["rank"] <= 300 for other in entry.values())
            if num_best:
                assert min(entry.values(), key=lambda other: other["rank"])["logprob"] == pytest.approx(float(row.max()), abs=2e-4)
    assert "logprobs" in completed and completed["logprobs"] is None and completed["text"] == ""
    assert all(len(said["token_ids"]) <= 2 for said in whole["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_those_of_a_prompt_are_written_where_no_stream_waits_for_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads: list[str] = []
    add = CompletionLogprobs.add_prompt

    def noting(logprobs: CompletionLogprobs, *args: Any) -> None:
        threads.append(threading.current_thread().name)
        add(logprobs, *args)

    monkeypatch.setattr(CompletionLogprobs, "add_prompt", noting)
    assert client.post(ROUTE, json=SCORING | {"stream": stream}).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("asyncio_")  # the name of to_thread's pool


def test_a_chat_streams_its_tokens(client: TestClient) -> None:
    asked = CHAT | {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    expected = answer(client, CHAT_ROUTE, asked)
    choices = [choice for chunk in chunks(client, CHAT_ROUTE, asked) for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == expected["prompt_token_ids"]
    told = [token for choice in choices for token in choice["token_ids"]]
    assert told == expected["choices"][0]["token_ids"] and len(told) == 9
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"prompt_logprobs": wrong}, "prompt_logprobs") for wrong in (21, -1, "1")],
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
@pytest.mark.parametrize("route", [ROUTE, CHAT_ROUTE])
def test_what_cannot_be_had_is_refused(client: TestClient, route: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(client, route, (CHAT if route == CHAT_ROUTE else {"prompt": "a"}) | fields)["param"] == param


def test_logprobs_of_chosen_tokens(client: TestClient) -> None:
    asked = CHAT | {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True}
    best = choice(client, CHAT_ROUTE, **asked, top_logprobs=20)["logprobs"]["content"]
    named = choice(client, CHAT_ROUTE, **asked, logprob_token_ids=[7, 280], return_tokens_as_token_ids=True)["logprobs"]["content"]
    for one, other in zip(best, named, strict=True):
        assert [entry["token"] for entry in other["top_logprobs"]] == ["token_id:7", "token_id:280"]
        assert other["logprob"] == pytest.approx(one["logprob"], abs=1e-5) and one["bytes"] == other["bytes"]
        assert all(entry["logprob"] <= one["top_logprobs"][0]["logprob"] + 1e-5 for entry in other["top_logprobs"])
    for told, wrong in ((False, [7]), (True, [300]), (True, [7] * 129)):
        assert refusal(client, CHAT_ROUTE, CHAT | {"logprobs": told, "logprob_token_ids": wrong})["param"] == "logprob_token_ids"


def test_long_prompts_are_cut_where_that_is_wanted(client: TestClient, reference: Reference) -> None:
    token_ids = reference.tokenizer.encode(TEXT * 10)
    asked = {"prompt": TEXT * 10, "max_tokens": 4, "return_token_ids": True, "echo": True}
    assert refusal(client, ROUTE, asked)["code"] == "context_length_exceeded"
    last = choice(client, **asked, truncate_prompt_tokens=20)
    assert last["prompt_token_ids"] == token_ids[-20:] and last["text"].startswith(reference.tokenizer.decode(token_ids[-20:]))
    assert choice(client, **asked, truncate_prompt_tokens=20, truncation_side="right")["prompt_token_ids"] == token_ids[:20]
    assert choice(client, **asked, truncate_prompt_tokens=-1)["prompt_token_ids"] == token_ids[-508:]
    messages = [{"role": "user", "content": TEXT * 10}]
    body = answer(client, CHAT_ROUTE, {"messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 9})
    assert body["usage"]["prompt_tokens"] == 9
    body = answer(client, CHAT_ROUTE, {"messages": messages, "truncate_prompt_tokens": -1})
    assert body["usage"]["prompt_tokens"] == 511 and body["usage"]["completion_tokens"] == 1
