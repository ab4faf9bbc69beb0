import json
import logging
import lzma
from pathlib import Path
from typing import Any

import pytest

from foretoken.proposers.training.corpus import Conversation, Record
from foretoken.proposers.training.reading import DataError, parse_record, read_data

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_folder_of_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "a.jsonl", {"text": "one", "id": "first"}, "", {"messages": CHAT, "tools": [{"type": "function"}]})
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"two\r\nlines"))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(b'{"text": "three"}\n{"text": "one"}\n'))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.py").write_text("print()")
    (tmp_path / "deep" / "empty.py").write_text("")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "e.txt").write_text("hidden")
    with caplog.at_level(logging.WARNING, "foretoken.train"):
        found = list(read_data([tmp_path]))
    assert [document.text for document in found if isinstance(document, Record)] == ["one", "two\nlines", "three", "print()"]
    [chat] = [document for document in found if isinstance(document, Conversation)]
    assert chat.messages == CHAT and chat.tools == [{"type": "function"}]
    assert found[0] == next(read_data([tmp_path / "a.jsonl"])) and isinstance(found[0], Record) and found[0].origin == "first"
    assert "left out" in caplog.text and ".png" in caplog.text


def test_a_file_that_is_named_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("free")
    [record] = read_data([tmp_path / "LICENSE"])
    assert isinstance(record, Record) and record.text == "free"


def test_messages_are_brought_into_one_form() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": "é"}}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse_record({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]}, "")
    assert isinstance(found, Conversation)
    assert found.messages[0]["content"] == "a\nb" and found.messages[1]["content"] is None
    assert found.messages[1]["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": '{"x": "é"}'}}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON: .* at column"),
        ("[1]", "is a list, not an object"),
        ({"prompt": "a", "answer": "b"}, "neither `text` nor `messages`, only `prompt`, `answer`"),
        ({"text": 5}, "`text` is a number, not a string"),
        ({"text": " "}, "`text` is empty"),
        ({"text": "a", "messages": CHAT}, "both"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": "hi"}, "`messages` is a string, not a list"),
        ({"messages": [{"content": "a"}]}, "message 1 has no `role`"),
        ({"messages": [*CHAT, {"role": "bot", "content": "a"}]}, "message 3: role 'bot' is not one of system"),
        ({"messages": [{"role": "user"}]}, "message 1 has no `content`"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "message 1: `content` is an object, not a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of `content` is not text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "a tool call is not"),
        ({"messages": CHAT, "tools": {"f": 1}}, "`tools` is not a list"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"text": "good"}, line, {"text": "good too"})
    with pytest.raises(DataError, match=f"^{file}:2: .*{message}"):
        list(read_data([file]))


def test_files_that_are_not_what_they_seem(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    (tmp_path / "b.txt").write_bytes(b"one\ntwo \xff\n")
    whole = lzma.compress(b"text" * 1000)
    (tmp_path / "c.txt.xz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "d.txt.xz").write_bytes(b"no archive")
    (tmp_path / "e.txt").write_text(" \n")
    for name, message in [
        ("a.jsonl", "a.jsonl:2: not UTF-8 at byte 11"), ("b.txt", "b.txt:2: not UTF-8"), ("c.txt.xz", "c.txt.xz: damaged"),
        ("d.txt.xz", "d.txt.xz: damaged"), ("e.txt", "e.txt: there is no text in it"), ("f.txt", "f.txt: there is no such file"),
    ]:
        with pytest.raises(DataError, match=message):
            list(read_data([tmp_path / name]))


def test_records_in_a_file_called_json_are_records(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"messages": CHAT}]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    write_lines(tmp_path / "lines.json", *rows)
    (tmp_path / "single.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows[0], indent=1).encode())
    expected = [document.key for document in read_data([write_lines(tmp_path / "rows.jsonl", *rows)])]
    for name, count in (("array.json", 2), ("lines.json", 2), ("single.json", 1)):
        assert [document.key for document in read_data([tmp_path / name])] == expected[:count], name
    for name, content in (("package.json", '{"name": "text"}'), ("numbers.json", "[1, 2]"), ("broken.json", '{"a":\n')):
        (tmp_path / name).write_text(content)
        (document,) = read_data([tmp_path / name])
        assert isinstance(document, Record) and document.text == content
    (tmp_path / "bad.json").write_text(json.dumps([*rows, {"txt": "three"}]))
    with pytest.raises(DataError, match="bad.json: record 3: has neither `text` nor `messages`"):
        list(read_data([tmp_path / "bad.json"]))


@pytest.mark.parametrize("record", [{"text": "a \ud83d b"}, {"messages": [{"role": "user", "content": "\udc00"}]}])
def test_half_characters_are_refused_where_they_stand(tmp_path: Path, record: Any) -> None:
    """No tokenizer takes them, and it would not say where they are."""
    file = write_lines(tmp_path / "data.jsonl", {"text": "whole \U0001f600"}, record)
    with pytest.raises(DataError, match=r"data.jsonl:2: holds half a character, a lone surrogate: '\\ud"):
        list(read_data([file]))
