from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import save_tokenizer

from foretoken.proposers import corpus_files
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.corpus_files import UNFINISHED, CorpusFolder, vocabulary_of


def read(path: Path, vocabulary: str = "v", vocab_size: int = 100) -> dict[str, list[list[int]]]:
    folder = CorpusFolder(path, vocabulary, vocab_size)
    return {corpus_id: [ids.tolist() for ids in responses] for corpus_id, responses in folder.read()}


def written(path: Path, corpus_id: str = "anyone.default", vocabulary: str = "v") -> Path:
    before = {*path.glob("*")}
    CorpusFolder(path, vocabulary, 100).write(corpus_id, [array("i", [1, 2]), array("i", [99])])
    (file,) = {*path.glob("*")} - before
    return file


def test_round_trip(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, "../../etc/passwd\n\0é")
    assert read(tmp_path) == {"anyone.default": [[1, 2], [99]], "../../etc/passwd\n\0é": [[1, 2], [99]]}


def test_a_file_is_its_owners_and_its_name_tells_nothing(tmp_path: Path) -> None:
    file = written(tmp_path / "corpora", "sk-secret.project")
    assert "secret" not in file.name and "project" not in file.name and file.parent == tmp_path / "corpora"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_another_vocabularys_corpora_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = written(tmp_path, vocabulary="other"), written(tmp_path)
    assert theirs != ours and [*read(tmp_path)] == ["anyone.default"]
    assert "1 corpora" in caplog.text and "another vocabulary" in caplog.text
    CorpusFolder(tmp_path, "v", 100).remove("anyone.default")
    assert theirs.exists() and not ours.exists()


def header(**changes: object) -> str:
    known = {"format": "foretoken-corpus", "version": 1, "vocabulary": "v", "corpus_id": "x", "num_responses": 1}
    return json.dumps(known | changes) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{}\n[1]\n",
        b"[" * 100_000,
        header(version=2).encode() + b"[1]\n",
        header(corpus_id=7).encode() + b"[1]\n",
        header(num_responses=2).encode() + b"[1]\n",  # cut off
        header().encode() + b"[1, 2",
        header().encode() + b"[100]\n",  # outside the vocabulary
        header().encode() + b"[-1]\n",
        header().encode() + b"[true]\n",
        header().encode() + b"[1.5]\n",
        header().encode() + b"[]\n",
        header().encode() + b'{"a": 1}\n',
        header().encode() + b"[1" + b"0" * 5000 + b"]\n",
    ],
)
def test_a_damaged_file_is_reported_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    written(tmp_path)
    damaged = tmp_path / "x.corpus.jsonl"
    damaged.write_bytes(content)
    assert [*read(tmp_path)] == ["anyone.default"]
    assert "damaged" in caplog.text and str(damaged) in caplog.text


def test_a_folder_that_cannot_be_used_is_a_mistake_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculativeConfigError, match="cannot be made"):
        CorpusFolder(tmp_path / "file" / "corpora", "v", 100)


WRITER = """
import sys
from array import array
from pathlib import Path
from foretoken.proposers.corpus_files import CorpusFolder
folder, number = CorpusFolder(Path(sys.argv[1]), "v", 100000), 0
while True:
    folder.write("c", [array("i", [number] * 500)] * 400)
    number += 1
    print(number, flush=True)
"""


def test_killed_while_saving_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_files, "LEFT_OVER_S", 0.0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for delay_s in (0.0, 0.003, 0.009):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        responses = read(tmp_path, vocab_size=100_000)["c"]
        assert len(responses) == 400 and len({tuple(ids) for ids in responses}) == 1
        assert not [*tmp_path.glob(f"*{UNFINISHED}")]


def test_servers_that_save_at_once_are_not_in_each_others_way(tmp_path: Path) -> None:
    one = CorpusFolder(tmp_path, "v", 100)

    class Slow(list["array[int]"]):
        def __iter__(self) -> Iterator[array[int]]:
            CorpusFolder(tmp_path, "v", 100).write("x", [array("i", [8])])  # one that starts meanwhile
            return super().__iter__()

    one.write("x", Slow([array("i", [7])]))
    assert read(tmp_path) == {"x": [[7]]}


def test_a_full_disk_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    replaced: Callable[..., None] = full
    monkeypatch.setattr(os, "fsync", replaced)
    with pytest.raises(OSError, match="No space"):
        CorpusFolder(tmp_path, "v", 100).write("anyone.default", [array("i", [5])])
    assert read(tmp_path) == {"anyone.default": [[1, 2], [99]]} and len([*tmp_path.iterdir()]) == 1


def test_a_vocabulary_is_known_by_its_tokens(tmp_path: Path) -> None:
    one, same = save_tokenizer(tmp_path / "a"), save_tokenizer(tmp_path / "b")
    assert vocabulary_of(one) == vocabulary_of(same)
    same.add_tokens(["another"])
    assert vocabulary_of(one) != vocabulary_of(same)
