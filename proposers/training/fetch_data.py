"""The manifest of the embedded family's training text: where each corpus comes from, under which licence, and whether it is there.

The texts themselves are not part of this repository. Each corpus is one jsonl file, perhaps compressed with xz, made from the files
of one published repository at one commit; the sum is that of the decompressed file.
"""

import hashlib
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, cast

CHUNK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """One file of training text and its source."""

    name: str                        # of the file under the data folder, without .jsonl
    repository: str                  # on GitHub
    commit: str
    files: str                       # which of its files the corpus is made from, and how
    licence: str
    records: int
    sha256: str                      # of the decompressed jsonl

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/tree/{self.commit}"


EACH = "one record {\"id\": path, \"text\": content} for each of "
CHATS = "one record {\"id\", \"messages\"} for each dialogue of "

CORPORA = (
    Corpus("books/children", "mlschmitt/classic-books-markdown", "9448822", EACH + "44 children's classics (*.md)",
           "public domain", 44, "64607bcc8f57d5b6f2e68b2db0425767682ea766a0761fcfa5478160c8c84b2f"),
    Corpus("books/general", "mlschmitt/classic-books-markdown", "9448822", EACH + "62 novels (*.md)",
           "public domain", 62, "5db85453eeb15cbee866aae1d0baa816b9c99b3d7d98d1c6e8bd9548dc2081be"),
    Corpus("chat/chatterbot", "gunthercox/chatterbot-corpus", "a01efec", CHATS + "chatterbot_corpus/data/english/*.yml",
           "BSD-3-Clause", 2026, "195b6c5b7fb01be6cf170f0403b6b5cc9c17f20795d63386f674ebd9ecae63af"),
    Corpus("chat/gsm8k-train", "openai/grade-school-math", "3101c7d", CHATS + "the training problems",
           "MIT", 7473, "76ea6dde2bdd0d82e9642fdd3253bb8d440b8c77c3bff50d601ff769a432666b"),
    Corpus("chat/oasst-octopack", "bigcode-project/octopack", "e17a8f6", CHATS + "dataset/oasst",
           "MIT; OpenAssistant text Apache-2.0", 1329, "184b8d09cc944b77d153ed8e2fecb8fc72dd667b88e5369b42e47cc57884af99"),
    Corpus("chat/synthetic-persona-chat", "google-research-datasets/Synthetic-Persona-Chat", "1f367a0", CHATS + "data/*.csv",
           "CC-BY-4.0", 1962, "6c3d4297ffe00f14b90e46f2c0bc04677514c5f99fd5d6cd05e07655b31bd103"),
    Corpus("chat/taskmaster4-tools", "google-research-datasets/Taskmaster", "d92cb6a", CHATS + "TM-4-2024/data, calls as tool_calls",
           "CC-BY-4.0", 3560, "7dfe5aa0505696b8175d48219248ba3bcfde5fe216197b37d402efa0b39de2b0"),
    Corpus("code/exercism-python", "exercism/python", "9eb657d", EACH + "its *.py and *.md",
           "MIT", 1268, "8cae20bdddc1f2c58b3659fd1697568282ceebefb21fb757706a703deaf4fde1"),
    Corpus("code/geekcomputers-python", "geekcomputers/Python", "bfd7138", EACH + "its *.py",
           "MIT", 780, "b9fa29ce5748c10a5496656faff98b816e3d89d10e1b7dddb0501d0fa2518d55"),
    Corpus("code/keon-algorithms", "keon/algorithms", "a1bf1f3", EACH + "its *.py",
           "MIT", 429, "5a5c9d247484de24bb57e35a6d35ec9fb9e6047413aa818d67fc21beb8a1c545"),
    Corpus("code/python-stdlib", "python/cpython", "3.11", EACH + "Lib/**/*.py of an installed CPython 3.11",
           "PSF-2.0", 1496, "6b03f2ee235d25f0cdd123cdb1df45d21df4251b5a052100070bcb6348904813"),
    Corpus("code/thealgorithms-python", "TheAlgorithms/Python", "f5988cc", EACH + "its *.py",
           "MIT", 1164, "e183c69d4a139a3dd26eb2b96cb59cdba64100abf5bd21e4eec6ac1440b6d9ec"),
    Corpus("docs/python-peps", "python/peps", "ba4deeb", EACH + "peps/*.rst",
           "public domain / CC0-1.0", 736, "eab93421e1a40f7279f7e76bbe81c30e3f117c39ef1f83f4cd1cdede6cb43100"),
    Corpus("docs/react-docs", "reactjs/react.dev", "12d692d", EACH + "src/content/**/*.md",
           "CC-BY-4.0", 223, "a03c5d14f6ffe296306804f1a4708b34e711334ccdde9872a18a6da05017f09a"),
    Corpus("docs/rust-book", "rust-lang/book", "9175444", EACH + "src/*.md",
           "MIT OR Apache-2.0", 112, "621800d589ff78a40d5d64ceb28649336a2869e2b710ed0479b3dcd48923bd67"),
    Corpus("docs/rust-rfcs", "rust-lang/rfcs", "354518a", EACH + "text/*.md",
           "MIT OR Apache-2.0", 648, "fb7fee9039fd97f2236518e4d63b2a1f74f815b998e4fb66460170681c809a87"),
    Corpus("docs/tldr-en", "tldr-pages/tldr", "08e345f", EACH + "pages/**/*.md",
           "CC-BY-4.0", 7425, "ffbccc18ddb478ea8a58632dcff851eaf84d973298fe06e3e187fba4196ad631"),
    Corpus("json/corpora", "dariusk/corpora", "cf30ca2", EACH + "data/**/*.json",
           "CC0-1.0", 346, "7a8ed0d27289eda53c9af373896f584c804170a5cbcc2588a4618a86940aa81a"),
    Corpus("json/factbook", "factbook/factbook.json", "8662a8b", EACH + "its country files (*.json)",
           "public domain", 262, "f8af3ac73367a5f1465ef544e7330dafeaaba096bc013b017625ca00a92755e0"),
)


class State(StrEnum):
    """Of a corpus under a data folder."""

    OK = "ok"                        # there, and the very text that the recipe was made with
    CHANGED = "changed"              # there, but another text: it trains, to other weights
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """What was found of a corpus."""

    corpus: Corpus
    state: State
    path: Path | None
    records: int = 0


def check(data: Path, corpora: Sequence[Corpus] = CORPORA) -> Iterator[Finding]:
    """Look at each corpus's file in turn, NAME.jsonl before NAME.jsonl.xz, and hash what it holds."""
    for corpus in corpora:
        present = [path for ending in (".jsonl", ".jsonl.xz") if (path := data / f"{corpus.name}{ending}").is_file()]
        if not present:
            yield Finding(corpus, State.MISSING, None)
            continue
        sha256, records = measure(present[0])
        yield Finding(corpus, State.OK if sha256 == corpus.sha256 else State.CHANGED, present[0], records)


def measure(path: Path) -> tuple[str, int]:
    """(SHA-256, number of lines) of a file, decompressed. A damaged .xz counts as far as it can be read."""
    digest, lines = hashlib.sha256(), 0
    with cast("IO[bytes]", lzma.open(path) if path.suffix == ".xz" else path.open("rb")) as file:
        try:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                lines += chunk.count(b"\n")
        except (lzma.LZMAError, EOFError):
            digest.update(b"damaged")
    return digest.hexdigest(), lines


def licence_table() -> str:
    """Markdown, for model cards: these texts keep their authors' licences."""
    rows = (f"| {c.name} | [{c.repository}]({c.url}) | {c.commit} | {c.licence} |" for c in CORPORA)
    return "\n".join(["| corpus file | source repository | commit | licence |", "|---|---|---|---|", *rows])
