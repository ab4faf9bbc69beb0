"""Prompt lookup: the longest recent n-gram that occurred before says what comes next. No weights, no target state.

Owns an n-gram index per request, extended by new tokens only, and one per corpus in use if there is a shared pool.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ..kernels.growing_text import GrowingText, repeats
from .base import ChainsAhead, Draft, DraftContext, DraftRow, Feedback, KnownRow, Needs, UnderWay
from .config import NgramConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS
from .corpus import Corpora, Corpus
from .early_lookup import EarlyLookups
from .ngram_index import NgramIndex
from .token_tree import TokenTree

MAX_PLACES = 32
"""Of earlier places looked at for the branches of one draft."""
_BREAK = -1
MAX_POOLED_A_CALL = 4096
"""Tokens of earlier answers taken into pools per call: some 10 ms."""


class NgramProposer:
    """Prompt lookup decoding (Saxena 2023) with vLLM's choice among matches.

    The longest n in [prompt_lookup_min, prompt_lookup_max] whose last n tokens occurred earlier wins; among its earlier
    occurrences the earliest, or the latest by option. They may overlap the end of the text. The draft is what followed.
    With num_branches B > 1 the walk goes on, to further occurrences and then to smaller n, until there are B different
    continuations, each up to num_speculative_tokens; merged where they begin alike, they are a tree whose first path is the
    chain. With a shared pool, earlier answers of the row's corpus are looked in too: for each n after the row's own text, the
    latest first.

    A row costs a few dictionary lookups per new token and n, whatever the length of its context and the size of the pool.
    """

    needs = Needs(hears="nothing")

    def __init__(self, config: NgramConfig, name: str = "ngram", corpora: Corpora | None = None, places_ahead: int = 0) -> None:
        """corpora: of the shared pool; without them there is none. places_ahead: of the target's cache, where steps are begun before the
        one before them has ended; 0 = they are not."""
        self.name = name
        self.max_tokens = min(config.num_speculative_tokens * config.num_branches, MAX_NUM_SPECULATIVE_TOKENS)
        self._config = config
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._corpora = corpora if config.shared_pool else None
        self._indices: dict[str, NgramIndex] = {}
        self._texts: dict[str, GrowingText] = {}
        self._pools: dict[str, _Pool] = {}
        self._num_deleted = 0
        self._early = EarlyLookups(config, places_ahead) if places_ahead and self.lookup is not None else None
        self._guessed: dict[str, int] = {}  # guesses that rows were asked for in the latest step, of those that got some

    @property
    def num_places_ahead(self) -> int:
        return 0 if self._early is None else self._early.num_places_ahead

    @property
    def lookup(self) -> NgramConfig | None:
        """How it looks in a row's own text; None if it does more than that."""
        return self._config if self._corpora is None and self._config.num_branches == 1 else None

    def propose(self, context: DraftContext) -> Draft:
        self._follow_corpora({row.corpus_id for row in context.rows})
        draft = Draft([], [0], [], [])
        for row in context.rows:
            index = self._index(row)
            if row.ceiling:
                self._add(draft, row, index)
            draft.start_loc.append(len(draft.token_ids))
        if self._early is not None:
            found = zip(context.rows, draft.start_loc, draft.start_loc[1:], strict=False)
            self._guessed = {row.request_id: row.ceiling for row, start, end in found if end > start}
        return draft

    def begin(self, step: UnderWay) -> ChainsAhead | None:
        """Where the text that is repeated goes on, guesses will be wanted again."""
        return self._early.begin(step, self._guessed) if self._early is not None and self._guessed else None

    def has_guess(self, row: KnownRow) -> bool:
        return self.have_guesses([row])[0]

    def have_guesses(self, rows: Sequence[KnownRow]) -> list[bool]:
        """Texts are read for it, some microseconds for each 10,000 tokens; the index is kept up when there is something to look up."""
        mine = self._texts
        texts: list[GrowingText] = []
        for row in rows:
            text = mine.get(row.request_id)
            if text is None:
                text = mine[row.request_id] = GrowingText()
            text.follow(row.token_ids)
            texts.append(text)
        found = repeats(texts, self._sizes[-1])
        if self._corpora is not None:
            self._follow_corpora({row.corpus_id for row in rows})
            found = [own or self._is_in_pool(row) for row, own in zip(rows, found, strict=True)]
        return found

    def _is_in_pool(self, row: KnownRow) -> bool:
        pool, index = self._pools.get(row.corpus_id), self._index(row)
        return pool is not None and any(pool.knows(i, index.tail(n)) for i, n in enumerate(self._sizes))

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
        self._texts.pop(request_id, None)
        if self._early is not None:
            self._early.forget(request_id)

    def check(self) -> None:
        for index in self._indices.values():
            index.check()
        for pool in self._pools.values():
            pool.check()

    def close(self) -> None:
        """Corpora are saved by whoever made them."""

    def _index(self, row: KnownRow) -> NgramIndex:
        """Of all that is known of the row."""
        index = self._indices.get(row.request_id)
        if index is None:
            index = NgramIndex(self._sizes, self._config.match == "latest", linked=self._config.num_branches > 1)
            self._indices[row.request_id] = index
        if index.num_tokens < len(row.token_ids):
            index.extend(row.token_ids[index.num_tokens :])
        return index

    def _add(self, draft: Draft, row: DraftRow, index: NgramIndex) -> None:
        """Merge the continuations found into a trie: a row of the draft."""
        if self._config.num_branches == 1:
            continuation = next(self._continuations(row, index), ())
            draft.token_ids.extend(continuation)
            draft.parents.extend(range(-1, len(continuation) - 1))
            draft.source.extend([0] * len(continuation))
            return
        room, num_branches = min(row.ceiling, self.max_tokens), self._config.num_branches
        tree = TokenTree(room)
        for continuation in islice(self._continuations(row, index), MAX_PLACES):
            before = len(tree)
            tree.add(-1, continuation)
            num_branches -= len(tree) > before
            if num_branches == 0 or len(tree) == room:
                break
        draft.token_ids.extend(tree.token_ids)
        draft.parents.extend(tree.parents)
        draft.source.extend([0] * len(tree))

    def _continuations(self, row: DraftRow, index: NgramIndex) -> Iterator[Sequence[int]]:
        """What followed the row's last tokens before, best first."""
        size = min(self._config.num_speculative_tokens, row.ceiling)
        pool = self._pools.get(row.corpus_id)
        for i, n in enumerate(self._sizes):
            for place in index.earlier(i):
                yield row.token_ids[place : place + size]
            if pool is not None:
                yield from pool.continuations(i, index.tail(n), size)

    def _follow_corpora(self, corpus_ids: Iterable[str]) -> None:
        """Pools take in what these corpora have gained; those of corpora that are no more give their memory back."""
        if self._corpora is None:
            return
        if self._num_deleted != self._corpora.num_deleted:
            self._num_deleted = self._corpora.num_deleted
            self._pools = {corpus_id: pool for corpus_id, pool in self._pools.items() if pool.corpus is self._corpora.get(corpus_id)}
        budget = MAX_POOLED_A_CALL
        for corpus_id in corpus_ids:
            if (corpus := self._corpora.use(corpus_id)) is not None:
                if corpus_id not in self._pools:
                    self._pools[corpus_id] = _Pool(corpus, self._sizes, linked=self._config.num_branches > 1)
                budget -= self._pools[corpus_id].follow(budget)


class _Pool:
    """The responses of one corpus, one behind the other with a break after each, and where each n-gram occurs in them."""

    def __init__(self, corpus: Corpus, sizes: Sequence[int], linked: bool) -> None:
        self.corpus = corpus
        self._index = NgramIndex(sizes, latest=True, linked=linked)
        self._tokens = array("i")
        self._sizes: dict[int, int] = {}  # tokens of each response that is in the index, by its number, oldest first
        self._num_dropped = 0  # places before those in _tokens
        self._next = corpus.first

    def follow(self, budget: int) -> int:
        """Take in what the corpus has gained and out what it has lost, until some `budget` tokens are done. Returns how many."""
        num_done = 0
        while num_done < budget and self._sizes and (oldest := next(iter(self._sizes))) < self.corpus.first:
            size = self._sizes.pop(oldest)
            self._index.forget(self._tokens[: size - 1], 2)
            del self._tokens[: size + 1]
            self._num_dropped += size + 1
            num_done += size
        self._next = max(self._next, self.corpus.first)
        while num_done < budget and self._next < self.corpus.next:
            token_ids = self.corpus[self._next].token_ids
            self._index.extend(token_ids[:-1])
            self._index.skip(2)  # the last token, which has nothing behind it, and the break
            self._tokens.extend(token_ids)
            self._tokens.append(_BREAK)
            self._sizes[self._next] = len(token_ids)
            self._next += 1
            num_done += len(token_ids)
        return num_done

    def continuations(self, i: int, tail: int | None, size: int) -> Iterator[Sequence[int]]:
        for place in self._index.places(i, tail):
            first = place - self._num_dropped
            following = self._tokens[first : first + size].tolist()
            yield following[: following.index(_BREAK)] if _BREAK in following else following

    def knows(self, i: int, tail: int | None) -> bool:
        return any(True for _ in self._index.places(i, tail))

    def check(self) -> None:
        self._index.check()
        num_tokens = sum(self._sizes.values()) + len(self._sizes)
        assert len(self._tokens) == num_tokens == self._index.num_tokens - self._num_dropped, "a pool is miscounted"
