"""Where each n-gram of a growing text occurred, for several n at once. Knows positions only, not what is done with them."""

from array import array
from collections.abc import Iterator, Sequence

_TOKEN_BITS = 32


class NgramIndex:
    """The first or the last place of every n-gram and, if wanted, all others behind it.

    A place is the number of tokens up to the n-gram's end, 1 and up. One more token costs a few dictionary lookups per n,
    however long the text; the index holds at most one entry per token and n. What is passed over is in no n-gram.
    """

    def __init__(self, sizes: Sequence[int], latest: bool, linked: bool) -> None:
        """sizes: the n, descending. latest: start from an n-gram's last place, else from its first. linked: all places are kept."""
        self.sizes = tuple(sizes)
        self.num_tokens = 0
        # An n-gram is one integer, the newest token lowest: a rolling key, exact, made without touching earlier tokens.
        self._masks = [(1 << _TOKEN_BITS * n) - 1 for n in sizes]
        self._key = 0
        self._run = 0  # tokens since the last break
        self._latest = latest
        self._linked = linked
        self._heads: list[dict[int, int]] = [{} for _ in sizes]  # n-gram -> the place to start from
        self._lasts: list[dict[int, int]] = [{} for _ in sizes]  # n-gram -> its last place, only to link first ones forward
        self._links = [array("q", [0]) for _ in sizes]  # place - forgotten -> the next place to look at, 0 = none
        self._forgotten = 0  # places that are no more, and not in the links
        self._before = [0] * len(self.sizes)  # where the last tokens' own n-grams were first or last before now

    def extend(self, token_ids: Sequence[int]) -> None:
        if not self.num_tokens and not self._linked and len(token_ids) > self.sizes[0]:
            self._begin(token_ids)
            return
        heads, lasts, links, before = self._heads, self._lasts, self._links, self._before
        for token in token_ids:
            self.num_tokens += 1
            self._run += 1
            self._key = (self._key << _TOKEN_BITS | token) & self._masks[0]
            place = self.num_tokens
            for i, (n, mask) in enumerate(zip(self.sizes, self._masks, strict=True)):
                earlier = link = 0
                if n <= self._run:
                    key = self._key & mask
                    earlier = heads[i].get(key, 0)
                    if self._latest or not earlier:
                        heads[i][key] = place
                    if self._linked and self._latest:
                        link = earlier
                    elif self._linked:
                        if earlier:
                            links[i][lasts[i][key] - self._forgotten] = place
                        lasts[i][key] = place
                if self._linked:
                    links[i].append(link)
                before[i] = earlier

    def _begin(self, token_ids: Sequence[int]) -> None:
        """As one token after the other, for a whole first text: several times as fast."""
        keys = list(token_ids)
        by_size = {1: keys}
        for n in range(2, self.sizes[0] + 1):
            keys = by_size[n] = [key << _TOKEN_BITS | token for key, token in zip(keys, token_ids[n - 1 :], strict=False)]
        self.num_tokens = self._run = len(token_ids)
        self._key = keys[-1]
        for i, n in enumerate(self.sizes):
            keys, heads = by_size[n], self._heads[i]
            last = keys.pop()
            if self._latest:
                heads.update(zip(keys, range(n, self.num_tokens), strict=True))
            else:
                heads.update(zip(reversed(keys), range(self.num_tokens - 1, n - 1, -1), strict=True))
            self._before[i] = heads.get(last, 0)
            if self._latest or last not in heads:
                heads[last] = self.num_tokens

    def skip(self, num_places: int) -> None:
        """Pass over places that are in no n-gram; what comes now is another text."""
        self._run = 0
        self.num_tokens += num_places
        for i, links in enumerate(self._links):
            self._before[i] = 0
            if self._linked:
                links.extend([0] * num_places)

    def tail(self, n: int) -> int | None:
        """The text's last n tokens as `places` wants them; None if there are fewer."""
        return self._key & ((1 << _TOKEN_BITS * n) - 1) if n <= self._run else None

    def earlier(self, i: int) -> Iterator[int]:
        """Places before now of the last sizes[i] tokens, in order of preference."""
        return self._linked_from(i, self._before[i])

    def places(self, i: int, tail: int | None) -> Iterator[int]:
        """Places of another text's last sizes[i] tokens."""
        return self._linked_from(i, 0 if tail is None else self._heads[i].get(tail, 0))

    def forget(self, token_ids: Sequence[int], num_skipped: int) -> None:
        """Its first tokens, up to places passed over, and these are no more. Only for an index of last places."""
        assert self._latest
        key, forgotten = 0, self._forgotten
        for run, token in enumerate(token_ids, 1):
            key = (key << _TOKEN_BITS | token) & self._masks[0]
            for i, (n, mask) in enumerate(zip(self.sizes, self._masks, strict=True)):
                if n <= run and self._heads[i].get(key & mask) == forgotten + run:
                    del self._heads[i][key & mask]
        num_places = len(token_ids) + num_skipped
        self._forgotten += num_places
        if self._linked:
            for links in self._links:
                del links[1 : num_places + 1]

    def _linked_from(self, i: int, place: int) -> Iterator[int]:
        while self._forgotten < place < self.num_tokens:  # what ends with the text has nothing behind it
            yield place
            place = self._links[i][place - self._forgotten] if self._linked else 0

    def check(self) -> None:
        """Raise AssertionError if a place is outside the text or there are more n-grams than places."""
        num_places = self.num_tokens - self._forgotten
        for n, heads, links in zip(self.sizes, self._heads, self._links, strict=True):
            assert len(heads) <= max(num_places - n + 1, 0), "more n-grams than the text has places"
            assert all(self._forgotten < place <= self.num_tokens for place in heads.values()), "an n-gram ends outside the text"
            assert len(links) == (num_places + 1 if self._linked else 1), "links were lost"
