"""The embedded family, measured on a few prompts; what a killed run leaves; speed through real servers in one small cell."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from variants import slow_but

from foretoken.engine.config import DEMO_MODEL
from foretoken.engine.model_folder import embedded
from foretoken.proposers.training.reading import DataError
from foretoken.server.bench.load_client import Answer
from foretoken.server.train import acceptance as train_acceptance
from foretoken.server.train import answers as train_answers
from foretoken.server.train import speed as train_speed
from foretoken.server.train.evaluate import main
from foretoken.server.train.members import FamilyFolder
from foretoken.server.train.report import acceptance_plot, speed_plot, speed_table

FAMILY = embedded(DEMO_MODEL).parent
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def row(domain: str, question: str, reference: str, **extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"domain": domain, "messages": messages, "tools": [], "reference": {"role": "assistant", "content": reference}} | extra


ROWS = (
    row("talk", "Hello!", "Hi!"),
    row("json", f"Give me an example of JSON that matches this schema:\n{json.dumps(SCHEMA)}", '{"name": "Ada"}'),
    row("talk", "What do you do for fun?", "I read."),
    row("json", "Return 3 fruits as a JSON array.", '["apple", "pear", "plum"]'),
    row("talk", "A question that is far too long. " * 500, "It is."),
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    return path


def test_answers_and_accepted_lengths(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["--models", str(FAMILY), "--prompts", str(prompts), "--out", str(out), "--per-domain", "2", "--k", "3", "--max-tokens", "24"]
    words += ["--methods", "ngram,draft_model", "--threads", "1"]
    assert main(words) == 0, "speculation changed an answer"
    report = json.loads((out / "evaluation.json").read_text())
    domains = report["domains"]
    assert {name: found["prompts"] for name, found in domains.items()} == {"talk": 2, "json": 2}, "the long one does not fit"
    assert domains["talk"]["well_formed"] == {} and domains["json"]["well_formed"]["json"][1] == 2
    first = domains["talk"]["transcripts"][0]
    assert first["messages"] == ROWS[0]["messages"] and first["answer"] and first["fault"] is None
    rows = {(found["method"], found["domain"]): found for found in report["acceptance"]}
    assert set(rows) == {(method, domain) for method in ("ngram", "draft_model") for domain in ("talk", "json", "all")}
    for found in rows.values():
        assert found["same_answers"] == found["answers"] and found["accepted"] <= found["drafted"] <= 3 * found["drafts"]
        assert found["drafts"] <= found["passes"] and found["mean_accepted_length"] == pytest.approx(1 + found["mu"])
    for method in ("ngram", "draft_model"):
        assert rows[method, "all"]["passes"] == rows[method, "talk"]["passes"] + rows[method, "json"]["passes"]
    drafted = rows["draft_model", "all"]
    assert drafted["drafts"] > 0 and 1 < drafted["mean_accepted_length"] <= 4
    said = capsys.readouterr().out
    assert "draft_model     k=3: mean accepted length" in said and "perplexity of the corpus's own answers: " in said
    likely = {found["domain"]: found for found in report["perplexity"]}
    tokens = {domain: found["tokens"] for domain, found in likely.items()}
    assert list(tokens) == ["talk", "json", "all"] and tokens["all"] == tokens["talk"] + tokens["json"]
    assert likely["talk"]["perplexity"] == pytest.approx(perplexity_by_transformers(ROWS[0], ROWS[2]), rel=0.02)
    assert (out / "acceptance.csv").read_text().count("\n") == 7

    def not_again(*_: object) -> None:
        raise AssertionError("a figure that is known is not measured again")

    lines = (out / "cells.jsonl").read_bytes()
    (out / "cells.jsonl").write_bytes(lines + b'{"key": ["half a li')
    monkeypatch.setattr(train_acceptance, "answer", not_again)
    monkeypatch.setattr(train_answers, "answer", not_again)
    assert main(words) == 0
    assert (out / "cells.jsonl").read_bytes() == lines
    assert json.loads((out / "evaluation.json").read_text())["acceptance"] == report["acceptance"]


def perplexity_by_transformers(*rows: dict[str, Any]) -> float:
    """Of what the references say and the token that ends them, as the target's own library has it."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    model = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    losses: list[torch.Tensor] = []
    for one in rows:
        begun = str(tokenizer.apply_chat_template(one["messages"], tokenize=False, add_generation_prompt=True))
        prompt, whole = (tokenizer(text, add_special_tokens=False).input_ids
                         for text in (begun, begun + one["reference"]["content"] + "<|im_end|>"))
        logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(whole[len(prompt):]), reduction="none"))
    return torch.cat(losses).mean().exp().item()


class Parrot:
    """A client whose server takes 20 ms: prompt and seed decide what it says, whoever guesses."""

    def __init__(self, url: str) -> None: ...

    async def model(self) -> str:
        return "parrot"

    async def complete(self, path: str, request: Mapping[str, Any], stream: bool) -> Answer:
        await asyncio.sleep(0.02)
        return Answer(0.02, request["max_tokens"], len(request["prompt"]), f"{request['prompt']} {request['seed']}")


@pytest.mark.parametrize("servers", slow_but(["pretended"], ["pretended", "real"]))
def test_speed_of_one_cell(servers: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    if servers == "pretended":
        monkeypatch.setattr(train_speed, "ServerProcess", lambda subject, speculation: nullcontext(SimpleNamespace(url="")))
        monkeypatch.setattr(train_speed, "LoadClient", Parrot)
    out = tmp_path / "out"
    words = ["--models", str(FAMILY), "--prompts", str(prompts), "--out", str(out), "--per-domain", "1", "--k", "1", "--max-tokens", "4"]
    words += ["--methods", "draft_model", "--threads", "1", "--speed", "--speed-tokens", "8", "--rounds", "1"]
    assert main([*words, "--temperatures", "1", "--batch", "2"]) == 0
    report = json.loads((out / "evaluation.json").read_text())
    assert [(found["domain"], found["temperature"], found["batch"]) for found in report["speed"]] == [("talk", 1.0, 2), ("json", 1.0, 2)]
    for found in report["speed"]:
        assert found["same_answers"] == found["answers"] == 8, "seeded answers are the same with and without speculation"
        assert found["speedup"] == pytest.approx(found["tokens_per_s"] / found["plain_tokens_per_s"], rel=0.01)
    assert "| 2 | 1 | draft_model |" in (out / "speed.md").read_text()
    assert (out / "speed.png").exists() and (out / "acceptance.png").exists()


def test_a_family_is_what_its_folders_hold(tmp_path: Path) -> None:
    for name in ("target", "medusa", "eagle3", "ngram_cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))
    (tmp_path / "mtp").mkdir()
    family = FamilyFolder(tmp_path)
    assert family.methods == ("ngram", "suffix", "eagle3", "medusa", "ngram_cache")
    eagle3 = family.speculation("eagle3", 5)
    assert eagle3["num_speculative_tokens"] == 5 and eagle3["model"] == str(tmp_path / "eagle3")
    assert "num_speculative_tokens" not in family.speculation("medusa", 5), "it has as many heads as it has"
    assert "draft_sample_method" not in family.speculation("ngram_cache", 5), "it samples nothing"
    before = family.mark("eagle3"), family.mark("medusa"), family.mark("ngram")
    (tmp_path / "eagle3" / "model.safetensors").write_bytes(b"other weights")
    after = family.mark("eagle3"), family.mark("medusa"), family.mark("ngram")
    assert before[0] != after[0] and before[1:] == after[1:]


def test_tables_and_pictures_of_figures_with_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base = {"k": 3, "low": 1.0, "high": 1.0, "answers": 4, "same_answers": 4, "plain_tokens_per_s": 100.0}
    rows = [
        {**base, "method": method, "domain": domain, "temperature": temperature, "batch": batch, "speedup": speedup}
        for method, domain, speedup in (("ngram", "edits", 4.0), ("ngram", "talk", 1.0), ("eagle3", "edits", 2.0))
        for temperature in (0.0, 0.7) for batch in (1, 32)
    ]
    table = speed_table(rows, "a machine")
    assert "| 1 | 0 | ngram | 4.00 | 1.00 | 2.00 |" in table, "the geometric mean comes last"
    assert "| 32 | 0.7 | eagle3 | 2.00 | - | 2.00 |" in table and "| 1 | 0.7 | off | 100 | 100 | |" in table
    assert "48 of 48 answers" in table
    speed_plot(rows, tmp_path / "speed.png")
    acceptance_plot([{"method": "ngram", "domain": "all", "k": 3, "mean_accepted_length": 2.0}], tmp_path / "acceptance.png")
    for name in ("speed.png", "acceptance.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--models", "/no/such", "--prompts", "x"], "has no target/"),
        (["--models", str(FAMILY), "--prompts", "/no/such"], "there is no file /no/such"),
        (["--models", str(FAMILY), "--prompts", "x", "--methods", "dspark"], "has no dspark; there are ngram, suffix"),
        (["--models", str(FAMILY), "--prompts", "x", "--k", "3,0"], "'0' is not a positive integer"),
    ],
)
def test_mistakes_are_named(words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(tmp_path)])
    assert stopped.value.code == 2 and complaint in capsys.readouterr().err


def test_prompts_of_ones_own_need_messages_only(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FAMILY / "target")
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "Hello!"}]}\r\n\r\n' + json.dumps(ROWS[1]).encode())
    asked = train_answers.read_prompts(path, tokenizer, 5, 1000)
    assert {domain: len(some) for domain, some in asked.items()} == {"prompts": 1, "json": 1}
    assert asked["prompts"][0].prompt.reference["content"] == "" and asked["json"][0].prompt.reference["content"] == '{"name": "Ada"}'
    path.write_text('{"messages": [{"role": "user", "content": "Hello!"}], "reference": "Hi!"}')
    assert train_answers.read_prompts(path, tokenizer, 5, 1000)["prompts"][0].prompt.reference == {"role": "assistant", "content": "Hi!"}
    for line, words in [
        ('{"prompt": "Hello!"}', "own.jsonl:1: is no object with `messages`"),
        ('{"messages": [{"role": "human", "content": "a"}]}', "own.jsonl:1: message 1: role 'human'"),
        ('{"messages": [{"role": "user", "content": "a"}], "reference": {"role": "assistant", "content": 5}}', "own.jsonl:1: message 2"),
        ("{", "own.jsonl:1: Expecting property name"),
        ("", "own.jsonl: there are no prompts in it"),
    ]:
        path.write_text(line)
        with pytest.raises(DataError, match=words):
            train_answers.read_prompts(path, tokenizer, 5, 1000)
