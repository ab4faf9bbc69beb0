from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import CHAT_TEMPLATE, END


def test_the_tokenizer_is_described_without_paths(client: TestClient, fake: FakeEngine) -> None:
    answer = client.get("/tokenizer_info")
    body = answer.json()
    assert body["tokenizer_class"] == type(fake.tokenizer).__name__ and body["chat_template"] == CHAT_TEMPLATE
    assert body["eos_token"] == body["pad_token"] == END
    assert body["vocab_size"] == 300 and body["model_max_length"] == 512
    end = next(entry for entry in body["added_tokens_decoder"].values() if entry["content"] == END)
    assert end["special"] is True
    assert body.keys().isdisjoint({"name_or_path", "vocab_file", "tokenizer_file"})


def test_it_wants_the_key(fake: FakeEngine) -> None:
    client = fake.client(api_keys=("k",))
    assert client.get("/tokenizer_info").status_code == 401
    assert client.get("/tokenizer_info", headers={"Authorization": "Bearer k"}).status_code == 200
