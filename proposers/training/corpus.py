"""Training text on disk: folders of jsonl or jsonl.xz files, one record a line. Knows no tokens and no weights."""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

Message = dict[str, Any]             # OpenAI shape: role, content, and tool_calls of an assistant

PIECE_CHARS = 3200                   # long texts are cut so that one book cannot fill a whole batch
HELD_OUT_ONE_IN = 64                 # of all records, for evaluation only


@dataclass(frozen=True)
class Record:
    """One line of a corpus file: either plain text or a conversation."""

    origin: str                      # the author's own name for it, often a path; may repeat
    text: str = ""
    messages: tuple[Message, ...] = ()
    key: int = 0                     # hash of the content: the same text is always on the same side of the split

    @property
    def held_out(self) -> bool:
        return self.key % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Conversation:
    """A chat to be rendered by the tokenizer's own template. `key` is that of the record it was made from."""

    messages: list[Message]
    key: int
    tools: list[Any] = field(default_factory=list)     # JSON schemas of the functions on offer

    @property
    def held_out(self) -> bool:
        return self.key % HELD_OUT_ONE_IN == 0


def read_records(path: Path) -> Iterator[Record]:
    """Records of one file in file order. Exact repetitions within the file come once."""
    opener = lzma.open if path.suffix == ".xz" else open
    seen: set[int] = set()
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            raw = json.loads(line)
            text, messages = raw.get("text", "").replace("\r\n", "\n"), raw.get("messages", [])
            key = content_key(text or json.dumps(messages, sort_keys=True))
            if key not in seen:
                seen.add(key)
                yield Record(raw.get("id", ""), text, tuple(messages), key)


def corpus_files(data: Path) -> dict[str, Path]:
    """Every corpus file under `data` by its short name: data/chat/gsm8k.jsonl.xz -> "chat/gsm8k"."""
    found = sorted([*data.glob("*/*.jsonl"), *data.glob("*/*.jsonl.xz")])
    return {f"{path.parent.name}/{path.name.split('.jsonl')[0]}": path for path in found}


def pieces(record: Record, limit: int = PIECE_CHARS) -> Iterator[Record]:
    """Cut a long text at paragraph ends into pieces of about `limit` characters, each with a key of its own."""
    if len(record.text) <= limit:
        yield record
        return
    start = 0
    while start < len(record.text):
        end = len(record.text)
        if end - start > limit:
            cut = record.text.rfind("\n\n", start + limit // 2, start + limit)
            end = cut + 2 if cut >= 0 else start + limit
        text = record.text[start:end]
        yield Record(record.origin, text, (), content_key(text))
        start = end


def content_key(text: str) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"))
