"""`suffix` of /v1/completions, in the order in which each family was taught it, and the routes that editors ask."""

import json
from typing import Any

import pytest
from asking import answer, chunks, refusal
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import END, SPECIAL_TOKENS, TEXT, byte_level
from transformers import PreTrainedTokenizerFast

ROUTE = "/v1/completions"
FIM = "/v1/fim/completions"
BEFORE, AFTER = "def add(a, b):\n    ", "\nprint(add(1, 2))"
GAP = {"prompt": BEFORE, "suffix": AFTER}
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def engine_with(*marks: str) -> FakeEngine:
    bpe = byte_level(TEXT, 300, [*SPECIAL_TOKENS, *marks, "<|fim_pad|>"])
    return FakeEngine(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END))


@pytest.mark.parametrize(
    "written",
    [
        f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>",
        f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>",
        f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>",
        f"<[fim-suffix]>{AFTER}<[fim-prefix]>{BEFORE}<[fim-middle]>",
        f"[SUFFIX]{AFTER}[PREFIX]{BEFORE}",
    ],
)
def test_the_model_reads_both_sides_of_the_gap(written: str) -> None:
    marks = [mark for mark in written.replace(BEFORE, "\0").replace(AFTER, "\0").split("\0") if mark]
    fake = engine_with(*marks)
    body = answer(fake.client(), ROUTE, GAP | {"stop_token_ids": [7]})
    (call,) = fake.calls
    ids = [fake.tokenizer.convert_tokens_to_ids(mark) for mark in [*marks, "<|fim_pad|>"]]
    assert fake.tokenizer.decode(call.prompt) == written and [call.prompt.count(i) for i in ids] == [1] * len(marks) + [0]
    assert call.params.stop_token_ids == [7, ids[-1]]
    assert body["choices"][0]["text"] == fake.reply and body["usage"]["prompt_tokens"] == len(call.prompt)


def test_what_has_no_gap_to_fill_is_refused(client: TestClient, fake: FakeEngine) -> None:
    for route, body in ((ROUTE, GAP), (FIM, GAP), ("/infill", {})):
        assert "suffix with a model that has no tokens for filling in the middle" in refusal(client, route, body)["message"]
    assert answer(client, ROUTE, GAP | {"suffix": ""})["choices"][0]["text"] == fake.reply

    able = engine_with(*QWEN)
    for more, param in (({"echo": True}, "echo"), ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"prompt": [1]}, "suffix")):
        assert refusal(able.client(), ROUTE, GAP | more)["param"] == param
    assert not able.calls
    able.client().post(ROUTE, json=GAP | {"ignore_eos": True, "prompt": ""})
    assert not able.calls[0].params.stop_token_ids


def test_mistrals_clients_read_a_message(client: TestClient, fake: FakeEngine) -> None:
    for able, body in ((engine_with(*QWEN), GAP), (fake, {"prompt": "Say"})):
        client = able.client()
        whole = answer(client, FIM, body | {"random_seed": 5})
        assert whole["object"] == "chat.completion" and whole["choices"][0]["message"]["content"] == able.reply
        assert able.calls[0].params.seed == 5 and able.calls[0].params.max_tokens is None
        told = chunks(client, FIM, body)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in told) == able.reply
        assert told[-1]["usage"] == whole["usage"] and told[-1]["choices"][0]["finish_reason"] == "stop"


def asked(reply: str, **fields: Any) -> tuple[FakeEngine, dict[str, Any]]:
    """As llama.vim asks."""
    able = engine_with(*QWEN, "<|repo_name|>", "<|file_sep|>")
    able.reply = reply
    body = {"input_prefix": BEFORE, "prompt": "re", "input_suffix": AFTER, "samplers": ["infill"], "id_slot": 0}
    return able, answer(able.client(), "/infill", body | fields)


def test_llama_cpps_clients_send_other_files_and_choose_what_they_read() -> None:
    files = [{"filename": "a.py", "text": "import a\n", "time": [1, 2]}, {"text": "b"}]
    able, told = asked("turn", n_predict=0, input_extra=files, response_fields=["content", "timings/prompt_n", "no/such"])
    gap = f"<|fim_prefix|>{BEFORE}re<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert able.prompt() == f"<|repo_name|>myproject\n<|file_sep|>a.py\nimport a\n<|file_sep|>tmp\nb<|file_sep|>filename\n{gap}"
    assert told == {"content": "turn", "timings/prompt_n": len(able.calls[0].prompt) - 3}
    assert able.calls[0].params.max_tokens == 0 and able.calls[0].params.temperature == 0
    without = engine_with(*QWEN)
    answer(without.client(), "/infill", {"input_extra": files})
    assert without.prompt().startswith("\n\n--- snippet ---\n\nimport a\n\n\n--- snippet ---\n\nb<|fim_prefix|><|fim_suffix|>")


@pytest.mark.parametrize(
    ("fields", "content", "stop_type"),
    [
        ({}, "a:\n        b\n    print(c)", "eos"),
        ({"n_indent": 8}, "a:\n        b", "limit"),
        ({"t_max_predict_ms": 1e-6}, "a:\n", "limit"),
    ],
)
def test_a_middle_ends_with_its_block_or_its_time(fields: dict[str, Any], content: str, stop_type: str) -> None:
    able, told = asked("a:\n        b\n    print(c)", **fields)
    assert (told["content"].rstrip(" "), told["stop_type"], able.num_open) == (content, stop_type, 0)
    assert told["timings"]["predicted_n"] == told["tokens_predicted"] and told["generation_settings"]["n_ctx"] == 512
    response = able.client().post("/v1/infill", json={"stream": True} | fields)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert "".join(event["content"] for event in events).rstrip() == content.rstrip() and events[-1]["stop_type"] == stop_type


@pytest.mark.parametrize("size", [300, 10**5])
def test_what_does_not_fit_is_cut_where_it_is_farthest_from_the_cursor(size: int) -> None:
    able, told = asked("x", input_extra=[{"text": f"file {n}"} for n in range(99)], n_predict=9)
    assert told["truncated"] and "file 98" in able.prompt() and "file 9<" not in able.prompt() and BEFORE in able.prompt()
    able, told = asked("x", input_prefix="b" * size + "!", input_suffix="?" + "a" * size, n_predict=9)
    assert told["truncated"] and "!re<|fim_suffix|>?a" in able.prompt() and 450 < len(able.calls[0].prompt) <= 503
