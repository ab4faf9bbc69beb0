"""What this process has said, by corpus: a bounded store of finished responses that model-free proposers look things up in.

A corpus is a circle of requests that may learn from each other; who belongs to which is the caller's to say (`corpus_id`).
Owns the responses and what becomes of them on disk. Knows no index: suffix trees and n-gram pools follow it by themselves.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .config import NgramConfig, ProposerConfig, SuffixConfig
from .corpus_files import CorpusFolder, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("foretoken.proposers")

MAX_RESPONSES = 10_000
MAX_TOKENS = 1_000_000
"""Of all corpora together: 4 MB here, some 0.3 GB in suffix trees, 0.15 GB per n-gram size in a pool."""
MAX_CORPORA = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """The output of a request that ended well."""

    request_id: str  # "" = of an earlier process
    token_ids: array[int]


class Corpus:
    """Responses in the order they came, numbered without gaps: first <= number < next. Only `Corpora` writes it."""

    def __init__(self, corpus_id: str) -> None:
        self.corpus_id = corpus_id
        self.first = 0
        self.next = 0
        self.num_tokens = 0
        self._responses: dict[int, Response] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def __iter__(self) -> Iterator[Response]:
        """Oldest first."""
        return iter(self._responses.values())

    def __getitem__(self, number: int) -> Response:
        return self._responses[number]

    def add(self, response: Response) -> None:
        self._responses[self.next] = response
        self.next += 1
        self.num_tokens += len(response.token_ids)

    def forget_oldest(self) -> None:
        self.num_tokens -= len(self._responses.pop(self.first).token_ids)
        self.first += 1


class Corpora:
    """All corpora of a process, bounded three ways: the oldest responses go, of a corpus with too many or, if there are too many
    tokens altogether, of the largest corpus; the corpus unused for longest goes if there are too many corpora.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_tokens: int = MAX_TOKENS,
        max_corpora: int = MAX_CORPORA,
        folder: CorpusFolder | None = None,
    ) -> None:
        """max_responses: of one corpus. folder: read now, written by `save`; None = nothing outlives the process."""
        self._max_responses = max_responses
        self._max_tokens = max_tokens
        self._max_corpora = max_corpora
        self._folder: CorpusFolder | None = None  # while it is read, so that what is too much here stays on disk
        self._corpora: OrderedDict[str, Corpus] = OrderedDict()  # least recently used first
        self._unsaved: set[str] = set()
        self._num_tokens = 0
        self.num_deleted = 0  # corpora, since the start: who follows them need look for losses only when it has changed
        if folder is not None:
            self._load(folder)
            self._folder = folder

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def __iter__(self) -> Iterator[Corpus]:
        return iter(self._corpora.values())

    def get(self, corpus_id: str) -> Corpus | None:
        return self._corpora.get(corpus_id)

    def use(self, corpus_id: str) -> Corpus | None:
        """The same, for a request that looks something up: it keeps the corpus from being dropped."""
        if corpus_id in self._corpora:
            self._corpora.move_to_end(corpus_id)
        return self._corpora.get(corpus_id)

    def add(self, corpus_id: str, token_ids: Iterable[int], request_id: str = "") -> None:
        """Keep a response. Whatever must go for it goes."""
        response = Response(request_id, array("i", token_ids))
        if not response.token_ids:
            return
        corpus = self._corpora.get(corpus_id)
        if corpus is None:
            corpus = self._corpora[corpus_id] = Corpus(corpus_id)
            if len(self._corpora) > self._max_corpora:
                self.delete(next(iter(self._corpora)))
        self._corpora.move_to_end(corpus_id)
        corpus.add(response)
        self._num_tokens += len(response.token_ids)
        self._unsaved.add(corpus_id)
        if len(corpus) > self._max_responses:
            self._forget_oldest(corpus)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest(max(self._corpora.values(), key=lambda corpus: corpus.num_tokens))

    def delete(self, corpus_id: str) -> bool:
        """Forget a corpus, here and on disk. False if there is none."""
        corpus = self._corpora.pop(corpus_id, None)
        if corpus is None:
            return False
        self._num_tokens -= corpus.num_tokens
        self.num_deleted += 1
        self._unsaved.discard(corpus_id)
        if self._folder is not None:
            self._folder.remove(corpus_id)
        return True

    def save(self) -> None:
        """Write what has changed since it was read or saved. What cannot be written is reported and changes nothing else."""
        if self._folder is None:
            return
        for corpus_id in sorted(self._unsaved):
            try:
                self._folder.write(corpus_id, [response.token_ids for response in self._corpora[corpus_id]])
                self._unsaved.discard(corpus_id)
            except OSError as error:
                logger.warning("a corpus of %d responses was not saved: %s", len(self._corpora[corpus_id]), error)

    def check(self) -> None:
        """Raise AssertionError if a bound is broken or something is miscounted."""
        assert len(self._corpora) <= self._max_corpora and self._num_tokens <= self._max_tokens, "corpora hold more than they may"
        assert self._num_tokens == sum(corpus.num_tokens for corpus in self), "tokens of corpora are miscounted"
        for corpus in self:
            assert len(corpus) == corpus.next - corpus.first <= self._max_responses, "a corpus has lost count of its responses"
            assert corpus.num_tokens == sum(len(response.token_ids) for response in corpus), "tokens of a corpus are miscounted"

    def _forget_oldest(self, corpus: Corpus) -> None:
        self._num_tokens -= corpus.num_tokens
        corpus.forget_oldest()
        self._num_tokens += corpus.num_tokens
        self._unsaved.add(corpus.corpus_id)
        if not len(corpus):
            self.delete(corpus.corpus_id)

    def _load(self, folder: CorpusFolder) -> None:
        num_skipped = 0
        for corpus_id, responses in folder.read():
            if len(self._corpora) == self._max_corpora and corpus_id not in self._corpora:
                num_skipped += 1  # not dropped, as one of this process would be: its file may be wanted by a larger one
                continue
            for token_ids in responses:
                self.add(corpus_id, token_ids)
        for corpus_id in [*self._corpora]:  # they came the latest first
            self._corpora.move_to_end(corpus_id, last=False)
        self._unsaved.clear()
        if num_skipped:
            message = "%d more corpora in %s than the %d that are kept: they are not used"
            logger.warning(message, num_skipped, folder.path, self._max_corpora)


def open_corpora(
    proposers: Sequence[ProposerConfig], directory: str | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Corpora | None:
    """The corpora that these proposers look in, those of the directory among them; None if none of them looks in any.

    vocab_size: the target's. Raises SpeculativeConfigError for a directory that cannot be used.
    """
    wanted = [config.max_cached_requests for config in proposers if isinstance(config, SuffixConfig)]
    wanted += [MAX_RESPONSES for config in proposers if isinstance(config, NgramConfig) and config.shared_pool]
    if not any(wanted):
        return None
    folder = CorpusFolder(Path(directory), vocabulary_of(tokenizer), vocab_size) if directory is not None else None
    return Corpora(max(wanted), folder=folder)
