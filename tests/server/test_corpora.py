"""Corpora over the API: the real app, engine thread and core, around a network of plain Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hash_model import HashModel
from running_server import RunningServer
from transformers import PreTrainedTokenizerBase

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.committer import Committer
from foretoken.engine.config import EngineConfig, SchedulerConfig
from foretoken.engine.controller import Controller
from foretoken.engine.core import EngineCore
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.intake import Intake
from foretoken.engine.kv_cache import KVCache
from foretoken.engine.policy.base import ProposerInfo
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.verifier import Verifier
from foretoken.proposers.config import SpeculativeConfig, SuffixConfig
from foretoken.proposers.corpus import Corpora
from foretoken.proposers.corpus_files import CorpusFolder
from foretoken.proposers.proposer_set import ProposerSet
from foretoken.proposers.suffix import SuffixProposer
from foretoken.server.app import create_app
from foretoken.server.config import ServerConfig

PATH = "/v1/speculation/corpora"
KEYS = ("first-key", "second-key")
VOCAB = 300


def make_engine(tokenizer: PreTrainedTokenizerBase, corpora: Corpora | None) -> Any:
    """What boot returns, as far as the app and the engine thread look."""
    model: Any = HashModel(VOCAB)
    kv = KVCache(400, 4, "hash", True)
    speculative = SpeculativeConfig((SuffixConfig(),))
    proposers = ProposerSet([SuffixProposer(SuffixConfig(), corpora=corpora)], corpora=corpora)
    controller = Controller(speculative, (ProposerInfo("suffix", 24),))
    runner = Runner(model, model.allocate(400, 4), (), full_logits_wanted)
    scheduler = Scheduler(SchedulerConfig(64, 8, 48), kv, controller, vocab_size=VOCAB, max_model_len=256, on_preempt=proposers.forget)
    committer = Committer(kv, scheduler, runner.move_slots, lambda r: Detokenizer(tokenizer, r.prompt_token_ids, r.params))
    return SimpleNamespace(
        core=EngineCore(scheduler, proposers, runner, Verifier("match"), committer, controller),
        intake=Intake(tokenizer, VOCAB, VOCAB, 256, 1600, [0], ["suffix"]),
        config=EngineConfig(),
        adapters=None,
        max_loras=None,
        sampling={},
        model=SimpleNamespace(name="tiny", max_model_len=256, vocab_size=VOCAB),
        tokenizer=tokenizer,
        proposer_names=("suffix",),
        num_spec_tokens=24,
        speculative=speculative,
    )


class Client:
    """The app, asked with one key after another."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, method: str, path: str, key: str | None, **arguments: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.request(method, path, headers=headers, **arguments)

    async def complete(self, key: str | None, prompt: list[int] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt or [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        answer = await self.ask("POST", "/v1/completions", key, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ids(self, key: str | None) -> list[str]:
        answer = await self.ask("GET", PATH, key)
        assert answer.status_code == 200 and answer.json()["object"] == "list"
        return [corpus["id"] for corpus in answer.json()["data"]]


def play(
    tokenizer: PreTrainedTokenizerBase,
    scenario: Callable[[Client], Awaitable[None]],
    *,
    corpora: Corpora | None = None,
    keys: tuple[str, ...] = KEYS,
) -> None:
    async def run() -> None:
        engine = AsyncEngine(make_engine(tokenizer, corpora))
        await engine.start()
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig(api_keys=keys)))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
                await scenario(Client(http))
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_everyone_sees_exports_and_deletes_their_own(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    async def scenario(client: Client) -> None:
        first, second = KEYS
        told = await client.complete(first, prompt=[5, 6, 7])
        await client.complete(first, prompt=[8, 9])
        (own,) = await client.ids(first)
        assert await client.ids(second) == []

        shown = (await client.ask("GET", PATH, first)).json()["data"][0]
        assert shown == {
            "id": own, "object": "speculation.corpus", "corpus_id": "default", "num_responses": 2, "num_tokens": 24,
        }  # fmt: skip
        export = await client.ask("GET", f"{PATH}/{own}", first)
        lines = [json.loads(line) for line in export.text.splitlines()]
        assert export.headers["content-type"] == "application/jsonl" and len(lines) == 2
        assert all(tiny_tokenizer.decode(line["token_ids"]) == line["text"] and len(line["token_ids"]) == 12 for line in lines)
        assert told["choices"][0]["text"].strip() in lines[0]["text"]

        for method in ("GET", "DELETE"):
            foreign, unknown = [await client.ask(method, f"{PATH}/{name}", second) for name in (own, own[:-1])]
            assert foreign.status_code == unknown.status_code == 404
            error = foreign.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "corpus_not_found"
            assert error["message"].replace(own, own[:-1]) == unknown.json()["error"]["message"]

        deleted = await client.ask("DELETE", f"{PATH}/{own}", first)
        assert deleted.json() == {"id": own, "object": "speculation.corpus", "deleted": True}
        assert await client.ids(first) == []
        assert (await client.ask("DELETE", f"{PATH}/{own}", first)).status_code == 404

    play(tiny_tokenizer, scenario, corpora=Corpora())


def test_key_salt_and_name_keep_apart_and_cannot_be_read_from_an_id(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    async def scenario(client: Client) -> None:
        variants: list[dict[str, Any]] = [
            {}, {"cache_salt": "s3cret"}, {"speculation": {"corpus_id": "my-project"}},
            {"cache_salt": "s3cret", "speculation": {"corpus_id": "my-project"}},
        ]  # fmt: skip
        for key in KEYS:
            for fields in variants:
                told = await client.complete(key, **fields)
                # Nobody like this has asked before: a guess can only come from a chance repetition in the answer itself.
                assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 0
        for key in KEYS:
            for fields in variants:
                told = await client.complete(key, **fields)
                assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 4
        first, second = [await client.ids(key) for key in KEYS]
        assert len({*first, *second}) == 8
        assert not any(secret in corpus_id for corpus_id in first + second for secret in ("s3cret", *KEYS))
        assert sum("my-project" in corpus_id for corpus_id in first) == 2

    play(tiny_tokenizer, scenario, corpora=Corpora())


def test_without_keys_everybody_is_one(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    corpora = Corpora()
    corpora.add("0123456789abcdef.default", [1, 2])  # of a time with keys: nobody's now

    async def scenario(client: Client) -> None:
        await client.complete(None)
        await client.complete(None, speculation={"corpus_id": "a"})
        assert sorted(await client.ids(None)) == ["anyone.a", "anyone.default"]
        assert (await client.ask("GET", f"{PATH}/0123456789abcdef.default", None)).status_code == 404
        assert (await client.ask("DELETE", f"{PATH}/anyone.a", None)).status_code == 200
        assert await client.ids(None) == ["anyone.default"]

    play(tiny_tokenizer, scenario, corpora=corpora, keys=())


@pytest.mark.parametrize("name", ["", "a.b", "x" * 65, "é", "a\n", 7, ["a"]])
def test_a_corpus_id_of_a_request_is_a_plain_name(tiny_tokenizer: PreTrainedTokenizerBase, name: object) -> None:
    async def scenario(client: Client) -> None:
        body = {"prompt": [5], "speculation": {"corpus_id": name}}
        answer = await client.ask("POST", "/v1/completions", None, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculation.corpus_id"

    play(tiny_tokenizer, scenario, keys=())


def test_a_server_without_corpora_has_an_empty_list(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    async def scenario(client: Client) -> None:
        await client.complete(None)
        assert await client.ids(None) == []
        assert (await client.ask("GET", f"{PATH}/anyone.default", None)).status_code == 404
        assert (await client.ask("POST", PATH, None)).status_code == 405

    play(tiny_tokenizer, scenario, keys=())


def test_stopping_saves_and_the_next_server_has_it(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    async def fills(client: Client) -> None:
        await client.complete(None)
        await client.complete(None, speculation={"corpus_id": "gone"})
        await client.ask("DELETE", f"{PATH}/anyone.gone", None)

    async def knows(client: Client) -> None:
        assert await client.ids(None) == ["anyone.default"]
        await client.complete(None)  # brings the corpus in
        told = await client.complete(None)
        assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 4

    for scenario in (fills, knows):
        play(tiny_tokenizer, scenario, corpora=Corpora(folder=CorpusFolder(tmp_path, "v", VOCAB)), keys=())


@pytest.mark.slow  # engines keep theirs in engine/test_llm.py; a server that stops saves them in the test above
def test_a_real_server_keeps_its_answers_across_a_restart(
    tiny_target: Path, tmp_path: Path, server_process: Callable[..., RunningServer]
) -> None:
    suffix = '{"method": "suffix", "adaptive": false}'  # whether guesses pay on a tiny model is not the question
    flags = ("--speculative-config", suffix, "--speculation-corpus-dir", tmp_path / "corpora", "--api-key", "a-key")
    headers = {"Authorization": "Bearer a-key"}

    def complete(server: RunningServer) -> dict[str, Any]:
        body = {"prompt": "The quick brown fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with server.client(headers=headers) as client:
            answer = client.post("/v1/completions", json=body | {"speculation": {"corpus_id": "tests"}})
        assert answer.status_code == 200, answer.text
        return answer.json()

    before = server_process(tiny_target, *flags)
    told = complete(before)
    assert before.stop() == 0
    (file,) = (tmp_path / "corpora").iterdir()
    assert "a-key" not in file.read_text(encoding="utf-8")

    after = server_process(tiny_target, *flags)
    with after.client(headers=headers) as client:
        (corpus,) = client.get(PATH).json()["data"]
        assert corpus["corpus_id"] == "tests" and corpus["num_tokens"] == 40
        assert json.loads(client.get(f"{PATH}/{corpus['id']}").text)["text"].strip().endswith(told["choices"][0]["text"].strip())
    complete(after)  # brings the corpus in
    again = complete(after)
    assert again["choices"] == told["choices"]
    assert again["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 20
    assert "Traceback" not in before.log + after.log
