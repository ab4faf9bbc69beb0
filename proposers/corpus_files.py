"""Corpora on disk: one file of JSON lines each, written whole or not at all, read only by a server of the same vocabulary.

Line 1 is a header, every further line the token ids of one response, oldest first. Files are named by a hash: a corpus id tells
who asked. Knows no bounds; what is kept is corpus.py's to say.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config_entry import SpeculativeConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("foretoken.proposers")

FORMAT = "foretoken-corpus"
VERSION = 1
SUFFIX, UNFINISHED = ".corpus.jsonl", ".corpus.tmp"
LEFT_OVER_S = 3600.0
"""So old is nobody's file that is being written."""


class CorpusFolder:
    """The folder where the corpora of one vocabulary are kept; it may hold those of others besides."""

    def __init__(self, path: Path, vocabulary: str, vocab_size: int) -> None:
        """vocabulary: see `vocabulary_of`. Makes the folder, for its owner alone. Raises SpeculativeConfigError if it cannot be used."""
        self.path = path
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SpeculativeConfigError(f"the corpus folder {path} cannot be made: {error.strerror}") from None
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise SpeculativeConfigError(f"the corpus folder {path} cannot be read and written by this process")
        for left_over in path.glob(f"*{UNFINISHED}"):  # of a process that was killed while saving
            with suppress(FileNotFoundError):  # or of one that has just saved
                if time.time() - left_over.stat().st_mtime > LEFT_OVER_S:
                    left_over.unlink()

    def read(self) -> Iterator[tuple[str, list[array[int]]]]:
        """(corpus id, its responses), the latest saved first. Foreign and damaged files are reported and skipped."""
        num_foreign = 0
        for file in sorted(self.path.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True):
            try:
                with file.open(encoding="utf-8") as lines:
                    header = _header(lines.readline())
                    if header["vocabulary"] != self._vocabulary:
                        num_foreign += 1
                        continue
                    responses = [self._tokens(line) for line in lines]
                if len(responses) != header["num_responses"]:
                    raise ValueError(f"{len(responses)} of {header['num_responses']} responses")
                yield header["corpus_id"], responses
            except (OSError, ValueError, OverflowError, RecursionError) as error:  # what json and utf-8 raise are ValueErrors
                logger.warning("the corpus file %s is damaged and not used: %s", file, error)
        if num_foreign:
            logger.warning("%d corpora in %s are of a model with another vocabulary and not used", num_foreign, self.path)

    def write(self, corpus_id: str, responses: Sequence[array[int]]) -> None:
        """Put them in place of what there was, in one step: a crash leaves the old or the new. Raises OSError."""
        file = self._file(corpus_id)
        header = {
            "format": FORMAT, "version": VERSION, "vocabulary": self._vocabulary, "corpus_id": corpus_id,
            "num_responses": len(responses),
        }
        descriptor, name = tempfile.mkstemp(UNFINISHED, dir=self.path)  # servers may share a folder
        unfinished = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8") as lines:
                lines.write(json.dumps(header) + "\n")
                for token_ids in responses:
                    lines.write(json.dumps(token_ids.tolist(), separators=(",", ":")) + "\n")
                lines.flush()
                os.fsync(descriptor)
            os.replace(unfinished, file)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def remove(self, corpus_id: str) -> None:
        try:
            self._file(corpus_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a corpus file was not removed: %s", error)

    def _file(self, corpus_id: str) -> Path:
        return self.path / (hashlib.sha256(f"{self._vocabulary}\n{corpus_id}".encode()).hexdigest()[:40] + SUFFIX)

    def _tokens(self, line: str) -> array[int]:
        """Raises ValueError or OverflowError for what are no token ids of this vocabulary."""
        values = json.loads(line)
        if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
            raise ValueError("a line is no list of token ids")
        if not 0 <= min(values) <= max(values) < self._vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        return array("i", values)


def _header(line: str) -> dict[str, Any]:
    """Raises ValueError."""
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it has no header of ours")
    if header.get("version") != VERSION:
        raise ValueError(f"its version is {header.get('version')!r}, this one reads {VERSION}")
    kinds = {"vocabulary": str, "corpus_id": str, "num_responses": int}
    if any(type(header.get(key)) is not kind for key, kind in kinds.items()):
        raise ValueError("its header is incomplete")
    return header


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint: equal if and only if all token ids mean the same."""
    tokens = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
