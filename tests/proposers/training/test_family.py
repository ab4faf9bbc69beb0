"""The family's recipe: what it says, and that its text is mixed, cut into stages and kept apart as it says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.proposers.training.corpus import Record, pieces, read_records
from foretoken.proposers.training.encoding import AnyDocument
from foretoken.proposers.training.family import Family
from foretoken.proposers.training.mixture import CHATS, SOURCES, Source, Streams, by_source, plain, weights
from foretoken.proposers.training.tokenizer import train_tokenizer


def test_the_shipped_recipe_names_what_there_is() -> None:
    family = Family.load()
    domains = {source.domain for source in SOURCES}
    assert sum(stage.share for stage in family.stages) == pytest.approx(1.0)
    for stage in family.stages:
        assert stage.domains.keys() <= domains
        assert sum(weights(SOURCES, stage.domains).values()) == pytest.approx(1.0)
    assert {source.domain for source in CHATS} <= family.stages[-1].domains.keys()
    assert set(family.members) == {"draft_model", "eagle3", "eagle", "medusa", "mlp_speculator", "mtp", "pard", "dflash", "ngram_cache"}
    assert [name for name, member in family.members.items() if member.training is None] == ["ngram_cache"]
    with torch.device("meta"):
        assert family.shape.build(family.vocab_size).num_parameters() <= 8_000_000


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "family.toml"
    text = (Path(__file__).parents[3] / "proposers" / "training" / "family.toml").read_text()
    recipe.write_text(text.replace("read_weight", "reed_weight"))
    with pytest.raises(ValueError, match="reed_weight"):
        Family.load(recipe)


def test_missing_corpora_are_named(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.jsonl").write_text(json.dumps({"id": "1", "text": "x"}) + "\n")
    sources = [Source("a", "code", 1, ("code/a",), plain), Source("b", "code", 1, ("code/b", "code/c"), plain)]
    with pytest.raises(FileNotFoundError, match=r"lacks code/b, code/c .*fetch-data"):
        by_source(tmp_path, sources, 0)
    assert [record for record in by_source(tmp_path, sources[:1], 0)["a"]]


def test_repeated_records_come_once_and_long_ones_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "word " * 30 + "\n\n" + "more " * 30
    path.write_text(f"{json.dumps({'text': text})}\n" * 2)
    (record,) = read_records(path)
    parts = list(pieces(record, limit=200))
    assert "".join(part.text for part in parts) == text and all(len(part.text) <= 200 for part in parts)


def test_mixture_keeps_to_its_weights_throughout() -> None:
    """Documents of any length, a source that must repeat: after every tenth of the stream the shares are right."""
    tokenizer = train_tokenizer(["abc " * 50], 300)
    share = {"x": 0.6, "y": 0.1, "z": 0.3}
    chance = np.random.default_rng(0)
    longest = {"x": 90, "y": 50, "z": 4}
    texts: dict[str, list[AnyDocument]] = {
        name: [Record("", name * int(chance.integers(1, longest[name])), key=1) for _ in range(20)] for name in share
    }
    documents = list(Streams(texts, tokenizer, 0).mix(share, 10_000))
    names = {tokenizer(name)["input_ids"][0]: name for name in share}
    given = dict.fromkeys(share, 0)
    for document in documents:
        given[names[int(document.token_ids[0])]] += len(document)
        total = sum(given.values())
        if total > 1000:
            assert all(abs(given[name] / total - share[name]) < (0.1 if total < 3000 else 0.02) for name in share)
    assert sum(given.values()) >= 10_000


def test_weights_need_not_add_up() -> None:
    sources = [Source("a", "chat", 3, (), plain), Source("b", "chat", 1, (), plain), Source("c", "code", 1, (), plain)]
    assert weights(sources, {"chat": 1.0, "code": 1.0}) == pytest.approx({"a": 0.375, "b": 0.125, "c": 0.5})
    assert weights(sources, {"chat": 1.0}) == pytest.approx({"a": 0.75, "b": 0.25})
