"""Corpora over the API: the real app, engine thread and core, around a network of plain Python."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hash_engine import hash_engine
from real_app import app_of
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerBase

from foretoken.proposers.config import SpeculativeConfig, SuffixConfig
from foretoken.proposers.corpus import Corpora
from foretoken.proposers.corpus_files import CorpusFolder
from foretoken.proposers.proposer_set import ProposerSet
from foretoken.proposers.suffix import SuffixProposer

PATH = "/v1/speculation/corpora"
KEYS = ("first-key", "second-key")


class Client:
    """The app, asked with one key after another."""

    def __init__(self, http: TestClient) -> None:
        self.http = http

    def ask(self, method: str, path: str, key: str | None, **arguments: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.http.request(method, path, headers=headers, **arguments)

    def complete(self, key: str | None, prompt: list[int] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt or [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        answer = self.ask("POST", "/v1/completions", key, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, key: str | None) -> list[str]:
        answer = self.ask("GET", PATH, key)
        assert answer.status_code == 200 and answer.json()["object"] == "list"
        return [corpus["id"] for corpus in answer.json()["data"]]


@contextmanager
def serving(tokenizer: PreTrainedTokenizerBase, corpora: Corpora | None = None, keys: tuple[str, ...] = ()) -> Iterator[Client]:
    suffix = SuffixConfig()
    proposers = ProposerSet([SuffixProposer(suffix, corpora=corpora)], corpora=corpora)
    with app_of(hash_engine(tokenizer, proposers, SpeculativeConfig((suffix,))), api_keys=keys) as http:
        yield Client(http)


def test_everyone_sees_exports_and_deletes_their_own(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with serving(tiny_tokenizer, Corpora(), KEYS) as client:
        first, second = KEYS
        told = client.complete(first, prompt=[5, 6, 7])
        client.complete(first, prompt=[8, 9])
        (own,) = client.ids(first)
        assert client.ids(second) == []

        shown = client.ask("GET", PATH, first).json()["data"][0]
        assert shown == {
            "id": own, "object": "speculation.corpus", "corpus_id": "default", "num_responses": 2, "num_tokens": 24,
        }
        export = client.ask("GET", f"{PATH}/{own}", first)
        lines = [json.loads(line) for line in export.text.splitlines()]
        assert export.headers["content-type"] == "application/jsonl" and len(lines) == 2
        assert all(tiny_tokenizer.decode(line["token_ids"]) == line["text"] and len(line["token_ids"]) == 12 for line in lines)
        assert told["choices"][0]["text"].strip() in lines[0]["text"]

        for method in ("GET", "DELETE"):
            foreign, unknown = [client.ask(method, f"{PATH}/{name}", second) for name in (own, own[:-1])]
            assert foreign.status_code == unknown.status_code == 404
            error = foreign.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "corpus_not_found"
            assert error["message"].replace(own, own[:-1]) == unknown.json()["error"]["message"]

        deleted = client.ask("DELETE", f"{PATH}/{own}", first)
        assert deleted.json() == {"id": own, "object": "speculation.corpus", "deleted": True}
        assert client.ids(first) == []
        assert client.ask("DELETE", f"{PATH}/{own}", first).status_code == 404


def test_key_salt_and_name_keep_apart_and_cannot_be_read_from_an_id(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with serving(tiny_tokenizer, Corpora(), KEYS) as client:
        variants: list[dict[str, Any]] = [
            {}, {"cache_salt": "s3cret"}, {"speculation": {"corpus_id": "my-project"}},
            {"cache_salt": "s3cret", "speculation": {"corpus_id": "my-project"}},
        ]
        for key in KEYS:
            for fields in variants:
                told = client.complete(key, **fields)
                # Nobody like this has asked before: a guess can only come from a chance repetition in the answer itself.
                assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 0
        for key in KEYS:
            for fields in variants:
                told = client.complete(key, **fields)
                assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 4
        first, second = [client.ids(key) for key in KEYS]
        assert len({*first, *second}) == 8
        assert not any(secret in corpus_id for corpus_id in first + second for secret in ("s3cret", *KEYS))
        assert sum("my-project" in corpus_id for corpus_id in first) == 2


def test_without_keys_everybody_is_one(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    corpora = Corpora()
    corpora.add("0123456789abcdef.default", [1, 2])  # of a time with keys: nobody's now

    with serving(tiny_tokenizer, corpora) as client:
        client.complete(None)
        client.complete(None, speculation={"corpus_id": "a"})
        assert sorted(client.ids(None)) == ["anyone.a", "anyone.default"]
        assert client.ask("GET", f"{PATH}/0123456789abcdef.default", None).status_code == 404
        assert client.ask("DELETE", f"{PATH}/anyone.a", None).status_code == 200
        assert client.ids(None) == ["anyone.default"]


@pytest.mark.parametrize("name", ["", "a.b", "x" * 65, "é", "a\n", 7, ["a"]])
def test_a_corpus_id_of_a_request_is_a_plain_name(tiny_tokenizer: PreTrainedTokenizerBase, name: object) -> None:
    with serving(tiny_tokenizer) as client:
        body = {"prompt": [5], "speculation": {"corpus_id": name}}
        answer = client.ask("POST", "/v1/completions", None, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculation.corpus_id"


def test_a_server_without_corpora_has_an_empty_list(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with serving(tiny_tokenizer) as client:
        client.complete(None)
        assert client.ids(None) == []
        assert client.ask("GET", f"{PATH}/anyone.default", None).status_code == 404
        assert client.ask("POST", PATH, None).status_code == 405


def test_stopping_saves_and_the_next_server_has_it(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def corpora() -> Corpora:
        return Corpora(folder=CorpusFolder(tmp_path, "v", len(tiny_tokenizer)))

    with serving(tiny_tokenizer, corpora()) as client:
        client.complete(None)
        client.complete(None, speculation={"corpus_id": "gone"})
        client.ask("DELETE", f"{PATH}/anyone.gone", None)
    with serving(tiny_tokenizer, corpora()) as client:
        assert client.ids(None) == ["anyone.default"]
        client.complete(None)  # brings the corpus in
        told = client.complete(None)
        assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 4
