"""Suffix decoding: what came next the last times that the end of this text occurred, in it or in earlier answers, is guessed again.

Owns a suffix tree for each running request and one for each corpus in use. Knows no network.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .base import Draft, DraftContext, DraftRow, Feedback, Needs
from .config import SuffixConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS
from .corpus import Corpora, Corpus
from .suffix_scoring import NO_GUESS, Scoring, SuffixGuess
from .suffix_tree import TOKEN_TYPE, SuffixTree, Text

MAX_LOCAL_TOKENS = 32_768
"""Of a prompt, its last ones, that a request's own tree holds: some 7 MB."""
MAX_TOKENS_A_CALL = 1024
"""Tokens taken into trees per call, over all rows: 10 to 20 ms. Longer prompts, and corpora just loaded, take several steps."""


class SuffixProposer:
    """Suffix decoding (Oliaro et al. 2025) as in Arctic Inference: its trees, scores and `suffix_decoding_*` settings.

    A row is looked up in a tree of its own, which holds prompt and output, and in its corpus's tree, which holds the outputs of
    its corpus's requests: of running ones as they grow, of finished ones as long as the corpus keeps them. An output that is
    aborted or fails is taken out again. The guess expected to have more tokens accepted wins, the own tree's among equals;
    nothing is guessed where nothing matches. Rows see no corpus but their own.
    """

    needs = Needs(hears="ends")

    def __init__(self, config: SuffixConfig, name: str = "suffix", corpora: Corpora | None = None) -> None:
        """corpora: None, or max_cached_requests 0 = only a request's own text is looked at."""
        self.name = name
        self.max_tokens = min(config.num_speculative_tokens or config.max_tree_depth, MAX_NUM_SPECULATIVE_TOKENS)
        self._depth = config.max_tree_depth
        self._scoring = Scoring(config.max_spec_factor, config.min_token_prob, config.use_tree)
        self._corpora = corpora if config.max_cached_requests else None
        self._rows: dict[str, _Row] = {}
        self._shared: dict[str, _CorpusTree] = {}
        self._num_deleted = 0

    def propose(self, context: DraftContext) -> Draft:
        self._drop_deleted()
        budget = Budget(MAX_TOKENS_A_CALL)
        draft = Draft([], [0], [], [], [])
        assert draft.confidence is not None
        for row in context.rows:
            guess = self._guess(row, budget) if row.ceiling else NO_GUESS
            draft.token_ids.extend(guess.token_ids)
            draft.parents.extend(guess.parents)
            draft.confidence.extend(guess.probs)
            draft.source.extend([0] * len(guess.token_ids))
            draft.start_loc.append(len(draft.token_ids))
        for corpus_id in {row.corpus_id for row in context.rows}:  # what a corpus has is worth less than what a row has just said
            if corpus_id in self._shared:
                self._shared[corpus_id].follow(budget)
        return draft

    def observe(self, feedback: Feedback) -> None:
        """Finished answers change from what may be taken out again into what stays."""
        budget = Budget(MAX_TOKENS_A_CALL)
        for corpus_id in {ended.corpus_id for ended in feedback.ended}:
            if corpus_id in self._shared:
                self._corpus_tree(corpus_id).follow(budget)

    def forget(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None and (shared := self._shared.get(row.corpus_id)) is not None:
            shared.abandon(request_id)
            if shared.corpus is None and not shared.growing:
                del self._shared[row.corpus_id]

    def check(self) -> None:
        for row in self._rows.values():
            row.check()
        for shared in self._shared.values():
            shared.check()

    def close(self) -> None:
        """Corpora are saved by whoever made them."""

    def _guess(self, row: DraftRow, budget: Budget) -> SuffixGuess:
        own = self._rows.get(row.request_id)
        if own is None:
            own = self._rows[row.request_id] = _Row(self._depth, row)
        context = array(TOKEN_TYPE, row.token_ids[-self._depth :])
        max_tokens = min(row.ceiling, self.max_tokens)
        local = own.guess(row.token_ids, context, max_tokens, self._scoring, budget)
        if self._corpora is None:
            return local
        shared = self._corpus_tree(row.corpus_id)
        shared.grow(row, budget)
        common = self._scoring.best(shared.tree, context, max_tokens)
        return local if local.score >= common.score else common

    def _corpus_tree(self, corpus_id: str) -> _CorpusTree:
        assert self._corpora is not None
        shared = self._shared.get(corpus_id)
        if shared is None:
            shared = self._shared[corpus_id] = _CorpusTree(self._depth)
        shared.corpus = shared.corpus or self._corpora.use(corpus_id)
        return shared

    def _drop_deleted(self) -> None:
        """Trees of corpora that are no more give their memory back."""
        if self._corpora is not None and self._num_deleted != self._corpora.num_deleted:
            self._num_deleted = self._corpora.num_deleted
            for corpus_id, shared in [*self._shared.items()]:
                if shared.corpus is not None and shared.corpus is not self._corpora.get(corpus_id):
                    del self._shared[corpus_id]


class Budget:
    """Tokens that may still be taken into trees in this call."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def append(self, tree: SuffixTree, text: Text, token_ids: Sequence[int], first: int) -> bool:
        """Bring the text up to token_ids[first:], as far as the budget goes; whether it has got there."""
        begin = first + len(text.token_ids)
        end = min(len(token_ids), begin + self.left)
        tree.extend(text, token_ids[begin:end])
        self.left -= end - begin
        return end == len(token_ids)


class _Row:
    """One running request's own tree."""

    def __init__(self, depth: int, row: DraftRow) -> None:
        self.corpus_id = row.corpus_id
        self._tree = SuffixTree(depth)
        self._text = Text()
        self._first = max(0, row.num_prompt_tokens - MAX_LOCAL_TOKENS)  # of the row's tokens that the tree has

    def guess(self, token_ids: Sequence[int], context: array[int], max_tokens: int, scoring: Scoring, budget: Budget) -> SuffixGuess:
        """Nothing until the tree has caught up with the row."""
        if not budget.append(self._tree, self._text, token_ids, self._first):
            return NO_GUESS
        return scoring.best(self._tree, context, max_tokens)

    def check(self) -> None:
        self._tree.check([self._text])


class _CorpusTree:
    """One corpus's tree: its finished responses, followed as they come and go, and the outputs of its running requests."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.corpus: Corpus | None = None  # None = nothing has finished yet
        self.growing: dict[str, Text] = {}  # by request id: may yet be abandoned
        self._finished: dict[int, Text] = {}  # by number: the corpus's responses from the oldest that is left on
        self._next = 0  # the first response that is not, or not wholly, in the tree

    def follow(self, budget: Budget) -> None:
        """Take in what the corpus has gained and out what it has lost."""
        if self.corpus is None:
            return
        while self._finished and (oldest := next(iter(self._finished))) < self.corpus.first and budget.left > 0:
            text = self._finished.pop(oldest)
            budget.left -= len(text.token_ids)
            self.tree.remove(text)
        self._next = max(self._next, self.corpus.first)
        while self._next < self.corpus.next and budget.left > 0:
            response = self.corpus[self._next]
            if self._next not in self._finished:  # else it is half in
                self._finished[self._next] = self.growing.pop(response.request_id, None) or Text()
            if budget.append(self.tree, self._finished[self._next], response.token_ids, 0):
                self._next += 1

    def grow(self, row: DraftRow, budget: Budget) -> None:
        text = self.growing.get(row.request_id)
        if text is None:
            text = self.growing[row.request_id] = Text()
        budget.append(self.tree, text, row.token_ids, row.num_prompt_tokens)

    def abandon(self, request_id: str) -> None:
        """Unless it has become a finished response."""
        text = self.growing.pop(request_id, None)
        if text is not None:
            self.tree.remove(text)

    def check(self) -> None:
        self.tree.check([*self.growing.values(), *self._finished.values()])
