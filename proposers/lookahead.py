"""Lookahead decoding (Fu et al. 2024): the target's own passes guess far ahead beside what they verify. No weights, no drafter.

https://arxiv.org/abs/2402.02057. Owns each row's window and n-grams. Knows no network: what the target says about guesses that were
refused comes with the feedback.
"""

from collections.abc import Sequence

from ..kernels.started import to_lists
from .base import Draft, DraftContext, DraftRow, Feedback, Needs
from .config import LookaheadConfig
from .token_tree import TokenTree

MAX_READ_TOKENS = 4096
"""Of a text, its last ones, whose n-grams a row has."""

MAX_TOKENS_A_CALL = 1024
"""That are read, over all rows: some 4 ms. Prompts that are longer take several steps."""

MAX_KEYS = 4096
"""Tokens for which a row has n-grams: those that something was last found for. Some 4 MB."""


class LookaheadProposer:
    """Guesses a tree with two parts: a window, and n-grams that begin with the last known token.

    The window has columns. Column c stands for the text from place c behind the last known token on, in ngram_size - 1 tokens that the
    target itself has said one step after the other: each was its best guess behind those above it in the column, and behind the first
    tokens of the columns to the left (Jacobi iteration). A pass over all of them gives each column one token more: it is an n-gram
    then, which is kept for when its first token turns up, and the column goes on one place later. As a tree the first tokens of all
    columns are a chain, from each of which its column branches off.

    What the target accepts of the tree is the verifier's business, as with any other: the output is the target's.
    """

    needs = Needs(hears="own steps", argmax=True, is_whole=True)

    def __init__(self, config: LookaheadConfig, name: str = "lookahead") -> None:
        self.name = name
        self.max_tokens = config.num_nodes
        self._config = config
        self._rows: dict[str, _Row] = {}

    def propose(self, context: DraftContext) -> Draft:
        draft = Draft([], [0], [], [])
        to_read = MAX_TOKENS_A_CALL
        for row in context.rows:
            own = self._rows.get(row.request_id)
            if own is None:
                own = self._rows[row.request_id] = _Row(self._config, row)
            to_read -= own.read(row.token_ids, to_read)
            tree = own.guess(row.token_ids, min(row.ceiling, self.max_tokens))
            draft.token_ids.extend(tree.token_ids)
            draft.parents.extend(tree.parents)
            draft.source.extend([0] * len(tree.token_ids))
            draft.start_loc.append(len(draft.token_ids))
        return draft

    def observe(self, feedback: Feedback) -> None:
        nodes, best = feedback.nodes, list[int]()
        assert nodes is not None
        for i, request_id in enumerate(feedback.request_ids):
            row, first = self._rows.get(request_id), nodes.first[i]
            if row is None or not row.has_guessed or first < 0:
                continue
            if not best:
                (best,) = to_lists(nodes.argmax)
            verified = nodes.token_ids[i], nodes.parents[i]
            row.learn(*verified, best[first : first + 1 + len(verified[0])], len(feedback.emitted[i]), feedback.token_ids[i])

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def check(self) -> None:
        for row in self._rows.values():
            row.check()

    def close(self) -> None:
        """Nothing outlives the process."""


class _Row:
    """One running request."""

    def __init__(self, config: LookaheadConfig, row: DraftRow) -> None:
        self._size, self._most = config.max_ngram_size, config.max_verification_set_size
        self._found: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> what came behind it, the latest last
        self._num_read = 0  # of the text
        self._columns = [self._some(row.token_ids, c) for c in range(config.max_window_size)]
        self._tree: TokenTree | None = None  # the latest, if nobody has said what became of it
        self._ends: list[int] = []  # of its columns: the nodes of their last tokens

    @property
    def has_guessed(self) -> bool:
        return self._tree is not None

    def read(self, text: Sequence[int], most: int) -> int:
        """Take in n-grams of the text that are new, so many at most. Returns how many that were."""
        first = max(self._num_read, len(text) - MAX_READ_TOKENS)
        self._num_read = max(first, min(len(text) - self._size + 1, first + most))
        for start in range(first, self._num_read):
            self._keep(text[start : start + self._size])
        return self._num_read - first

    def guess(self, text: Sequence[int], room: int) -> TokenTree:
        """At most `room` nodes. A window of fewer columns where there is less room."""
        size, width = self._size, len(self._columns)
        tree = TokenTree(room)
        self._columns[0][0] = text[-1]
        columns = (room + 1) * width // ((width + self._most) * (size - 1))
        first, self._ends = -1, []
        for column in self._columns[:columns]:
            if self._ends:
                first = tree.add(first, column[:1])
            self._ends.append(tree.add(first, column[1:]))
        for ngram in reversed(self._found.get(text[-1], ())):
            tree.add(-1, ngram)
        self._tree = tree if len(tree) else None
        return tree

    def learn(
        self, token_ids: Sequence[int], parents: Sequence[int], best: Sequence[int], ahead: int, text: Sequence[int]
    ) -> None:
        """Of the tree, these nodes were verified, behind tokens of a form perhaps; best: the target's best token behind the last known one
        and behind each of them. ahead: tokens that the text has grown by."""
        tree, self._tree = self._tree, None
        assert tree is not None
        places = tree.places(token_ids, parents)
        moved: dict[int, list[int]] = {}  # by places behind the text
        for c, column in enumerate(self._columns):
            place = places.get(self._ends[c]) if c < len(self._ends) else None
            if place is None:
                moved.setdefault(c - ahead, column)
            else:
                ngram = [*column, best[1 + place]]
                self._keep(ngram)
                moved[c + 1 - ahead] = ngram[1:]
        width, columns = len(self._columns), [moved.get(0) or self._some(text)]
        for c in range(1, width):  # one that is new goes on where the one before does, and then anyhow
            columns.append(moved.get(c) or [*columns[-1][1:], text[17 * c % len(text)]])
        self._columns = columns

    def check(self) -> None:
        assert len(self._found) <= MAX_KEYS and all(0 < len(ngrams) <= self._most for ngrams in self._found.values()), "too many n-grams"
        assert all(len(column) == self._size - 1 for column in self._columns), "a column has another length"

    def _keep(self, ngram: Sequence[int]) -> None:
        key, rest = ngram[0], tuple(ngram[1:])
        ngrams = self._found.pop(key, {})
        ngrams.pop(rest, None)
        ngrams[rest] = None
        if len(ngrams) > self._most:
            del ngrams[next(iter(ngrams))]
        self._found[key] = ngrams
        if len(self._found) > MAX_KEYS:
            del self._found[next(iter(self._found))]

    def _some(self, text: Sequence[int], first: int = 0) -> list[int]:
        """What a column begins with: any tokens of the text."""
        return [text[(17 * first + 7 * i) % len(text)] for i in range(self._size - 1)]
