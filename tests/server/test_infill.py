"""`suffix` of /v1/completions: the prompt in the order in which each family was taught it."""

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import END, SPECIAL_TOKENS, TEXT, byte_level
from transformers import PreTrainedTokenizerFast

ROUTE = "/v1/completions"
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
    body = fake.client().post(ROUTE, json=GAP | {"stop_token_ids": [7]}).json()
    (call,) = fake.calls
    ids = [fake.tokenizer.convert_tokens_to_ids(mark) for mark in [*marks, "<|fim_pad|>"]]
    assert fake.tokenizer.decode(call.prompt) == written and [call.prompt.count(i) for i in ids] == [1] * len(marks) + [0]
    assert call.params.stop_token_ids == [7, ids[-1]]
    assert body["choices"][0]["text"] == fake.reply and body["usage"]["prompt_tokens"] == len(call.prompt)


def test_what_has_no_gap_to_fill_is_refused(client: TestClient, fake: FakeEngine) -> None:
    refusal = client.post(ROUTE, json=GAP).json()["error"]
    assert refusal["param"] == "suffix" and "no tokens for filling in the middle" in refusal["message"]
    assert client.post(ROUTE, json=GAP | {"suffix": ""}).json()["choices"][0]["text"] == fake.reply

    able = engine_with(*QWEN)
    for more, param in (({"echo": True}, "echo"), ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"prompt": [1]}, "suffix")):
        response = able.client().post(ROUTE, json=GAP | more)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not able.calls
    able.client().post(ROUTE, json=GAP | {"ignore_eos": True, "prompt": ""})
    assert not able.calls[0].params.stop_token_ids
