import hashlib
import lzma
from dataclasses import replace
from pathlib import Path

from foretoken.proposers.training.fetch_data import CORPORA, State, check, licence_table, measure
from foretoken.proposers.training.mixture import RAW_CHATS, TEXTS

TEXT = b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'


def test_the_manifest_names_every_corpus_that_the_recipe_reads() -> None:
    names = [corpus.name for corpus in CORPORA]
    assert len(set(names)) == len(names)
    assert {name for source in (*TEXTS, *RAW_CHATS) for name in source.files} <= set(names)
    for corpus in CORPORA:
        assert len(corpus.sha256) == 64 and corpus.records > 0 and corpus.licence and corpus.commit in corpus.url
        assert f"| {corpus.name} | [{corpus.repository}]" in licence_table()


def test_there_changed_and_missing(tmp_path: Path) -> None:
    known = replace(CORPORA[0], sha256=hashlib.sha256(TEXT).hexdigest(), records=2)
    corpora = [replace(known, name=name) for name in ("a/plain", "a/packed", "a/changed", "a/damaged", "a/missing")]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plain.jsonl").write_bytes(TEXT)
    (tmp_path / "a" / "packed.jsonl.xz").write_bytes(lzma.compress(TEXT))
    (tmp_path / "a" / "changed.jsonl").write_bytes(TEXT + TEXT)
    (tmp_path / "a" / "damaged.jsonl.xz").write_bytes(lzma.compress(TEXT)[:-9])
    found = list(check(tmp_path, corpora))
    assert [finding.state for finding in found] == [State.OK, State.OK, State.CHANGED, State.CHANGED, State.MISSING]
    assert [finding.records for finding in found[:3]] == [2, 2, 4]
    assert measure(tmp_path / "a" / "packed.jsonl.xz") == (known.sha256, 2)
