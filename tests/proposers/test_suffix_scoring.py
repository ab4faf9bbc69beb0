import random
from array import array
from collections.abc import Sequence

import pytest
from steps import count_lines
from suffix_texts import KINDS, texts_of

from foretoken.proposers.suffix_scoring import Scoring, SuffixGuess
from foretoken.proposers.suffix_tree import SuffixTree, Text


class Counter:
    """The scoring rule read off the texts, phrase by phrase: counts by looking everywhere, no tree."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.texts: list[list[int]] = []
        self._ends: list[tuple[int, ...]] = []  # the last tokens up to each token of any text, in the order they came
        self.ties = 0  # choices between equally frequent tokens

    def append(self, text: int, token: int) -> None:
        self.texts[text].append(token)
        self._ends.append(tuple(self.texts[text][-self.max_depth :]))

    def count(self, phrase: tuple[int, ...]) -> int:
        return sum(end[-len(phrase) :] == phrase for end in self._ends)

    def last(self, phrase: tuple[int, ...]) -> int:
        return max(when for when, end in enumerate(self._ends) if end[-len(phrase) :] == phrase)

    def following(self, phrase: tuple[int, ...]) -> list[tuple[int, int]]:
        """(count, token) of what comes next, most frequent first, then the latest."""
        if len(phrase) >= self.max_depth:
            return []
        tokens = {end[-1] for end in self._ends}
        counted = [(count, self.last((*phrase, token)), token) for token in tokens if (count := self.count((*phrase, token)))]
        return [(count, token) for count, _, token in sorted(counted, reverse=True)]

    def best(self, context: Sequence[int], max_tokens: int, scoring: Scoring) -> SuffixGuess:
        best = SuffixGuess([], [], [], 0.0, 0)
        for m in range(1, len(context)):
            phrase = tuple(context[-m:])
            if not self.count(phrase):
                break
            limit = min(max_tokens, int(m * scoring.max_factor + 1e-6))
            tokens, probs = (self.branches if scoring.use_tree else self.path)(phrase, limit, scoring.min_prob)
            if sum(probs) >= best.score - 1e-9 and tokens:
                best = SuffixGuess(tokens, [], probs, sum(probs), m)
        return best

    def path(self, phrase: tuple[int, ...], limit: int, min_prob: float) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        probs: list[float] = []
        prob = 1.0
        while len(tokens) < limit and (following := self.following(phrase)):
            self.ties += len(following) > 1 and following[0][0] == following[1][0]
            prob *= following[0][0] / self.count(phrase)
            if prob < min_prob:
                break
            phrase = (*phrase, following[0][1])
            tokens.append(following[0][1])
            probs.append(prob)
        return tokens, probs

    def branches(self, phrase: tuple[int, ...], limit: int, min_prob: float) -> tuple[list[int], list[float]]:
        """All phrases behind this one, likeliest first: as probabilities only fall on the way down, that is the queue's result."""
        found: list[tuple[float, int]] = []
        open_phrases = [(phrase, 1.0)]
        while open_phrases:
            longer, prob = open_phrases.pop()
            for count, token in self.following(longer):
                child = prob * count / self.count(longer)
                if child >= min_prob:
                    found.append((child, token))
                    open_phrases.append(((*longer, token), child))
        found.sort(reverse=True)
        return [token for _, token in found[:limit]], [prob for prob, _ in found[:limit]]


def random_case(dice: random.Random, max_depth: int, num_symbols: int, size: int) -> tuple[Counter, SuffixTree, list[Text]]:
    counter, tree, texts = Counter(max_depth), SuffixTree(max_depth), [Text() for _ in range(3)]
    counter.texts = [[] for _ in texts]
    for _ in range(size):
        number = dice.randrange(3)
        source = counter.texts[dice.randrange(3)]
        copied = source[(first := dice.randrange(len(source))) : first + 5] if source and dice.random() < 0.6 else []
        for token in copied or [dice.randrange(num_symbols)]:
            counter.append(number, token)
            tree.append(texts[number], token)
    return counter, tree, texts


def is_a_walk(guess: SuffixGuess, context: Sequence[int], counter: Counter) -> bool:
    """Whether parents stand before children and each prob is that of the path's counts."""
    phrases: list[tuple[int, ...]] = []
    start = tuple(context[-guess.match_length :])
    for token, parent, prob in zip(guess.token_ids, guess.parents, guess.probs, strict=True):
        if not -1 <= parent < len(phrases):
            return False
        phrases.append((*(start if parent < 0 else phrases[parent]), token))
        if abs(prob - counter.count(phrases[-1]) / counter.count(start)) > 1e-9:
            return False
    return len(set(phrases)) == len(phrases)


@pytest.mark.parametrize("seed", range(250))
def test_equals_counting_by_hand(seed: int) -> None:
    dice = random.Random(seed)
    max_depth, num_symbols = dice.randint(2, 8), dice.choice([2, 3, 6])
    counter, tree, _ = random_case(dice, max_depth, num_symbols, dice.randint(1, 30))
    for _ in range(6):
        context = (dice.choice(counter.texts) if dice.random() < 0.7 else [dice.randrange(num_symbols) for _ in range(9)])[-max_depth:]
        factor, min_prob, max_tokens = dice.choice([0.5, 1.0, 1.5, 4.0]), dice.choice([0.0, 0.13, 0.41]), dice.randint(1, 8)
        path = Scoring(factor, min_prob, use_tree=False)
        got, wanted = path.best(tree, array("i", context), max_tokens), counter.best(context, max_tokens, path)
        assert (got.token_ids, got.match_length if got else 0) == (wanted.token_ids, wanted.match_length)
        assert got.probs == pytest.approx(wanted.probs) and got.score == pytest.approx(wanted.score)
        assert got.parents == list(range(-1, len(got.token_ids) - 1))

        tree_mode = Scoring(factor, min_prob, use_tree=True)
        got, wanted = tree_mode.best(tree, array("i", context), max_tokens), counter.best(context, max_tokens, tree_mode)
        assert got.match_length == wanted.match_length and sorted(got.probs) == pytest.approx(sorted(wanted.probs))
        assert is_a_walk(got, context, counter)


def test_the_longest_match_wins_among_equal_scores_and_more_context_allows_more() -> None:
    tree = SuffixTree(24)
    tree.extend(Text(), [1, 2, 3, 4, 5, 6, 7, 8])
    path = Scoring(1.0, 0.1, use_tree=False)
    assert path.best(tree, array("i", [9, 3, 4]), 24).token_ids == [5, 6]
    assert path.best(tree, array("i", [9, 4]), 24).token_ids == [5]
    assert path.best(tree, array("i", [9, 3, 4]), 1).match_length == 2
    assert not path.best(tree, array("i", [4, 9]), 24)
    assert not path.best(tree, array("i", [4]), 24)  # a match is shorter than the context


def test_the_least_probability_ends_a_path() -> None:
    tree = SuffixTree(24)
    for following in ([5, 5], [5, 6], [7, 7], [8, 8]):
        tree.extend(Text(), [1, 2, *following])
    context = array("i", [0, 1, 2])
    assert Scoring(1.0, 0.1, False).best(tree, context, 8).probs == [0.5, 0.25]
    assert Scoring(1.0, 0.3, False).best(tree, context, 8).token_ids == [5]
    assert not Scoring(1.0, 0.6, False).best(tree, context, 8)
    assert Scoring(2.0, 0.1, True).best(tree, context, 8).probs == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("use_tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_guess_does_not_grow_with_the_tree(kind: str, use_tree: bool) -> None:
    def lines(num_texts: int) -> int:
        texts = texts_of(kind, num_texts, stem=(5, 6, 7))
        tree = SuffixTree(12)
        for text in texts:
            tree.extend(Text(), text)
        scoring = Scoring(1.0, 0.0, use_tree)
        contexts = [array("i", [3, *text[:last]])[-12:] for text in texts[:20] for last in (3, len(text))]
        return max(count_lines(lambda c=context: scoring.best(tree, c, 12)) for context in contexts)

    # Small trees know less of a context, so they have less to weigh: the bound is the depth's, and it holds at any size.
    assert max(lines(300), lines(3000)) <= 20 * 12**2


def test_equals_arctic_inference() -> None:
    """Snowflake's own trees. Where tokens are equally frequent it has no rule, so a path may be another one there."""
    pytest.importorskip("arctic_inference")
    from arctic_inference.suffix_decoding._C import SuffixTree as ArcticTree  # pyright: ignore[reportMissingImports]

    num_compared = 0
    for seed in range(150):
        dice = random.Random(seed)
        max_depth, num_symbols = dice.randint(2, 10), dice.choice([3, 6])
        counter, tree, _ = random_case(dice, max_depth, num_symbols, dice.randint(5, 40))
        arctic = ArcticTree(max_depth)
        for number, text in enumerate(counter.texts):
            arctic.extend(number, text)
        for _ in range(8):
            context = (dice.choice(counter.texts) if dice.random() < 0.7 else [dice.randrange(num_symbols) for _ in range(9)])[-max_depth:]
            # Probabilities that no ratio of small counts equals: Arctic computes in float32.
            factor, min_prob, max_tokens = dice.choice([0.5, 1.0, 3.0]), dice.choice([0.0, 0.0917, 0.3119]), dice.randint(1, 8)
            for use_tree in (False, True):
                counter.ties = 0
                scoring = Scoring(factor, min_prob, use_tree)
                wanted = counter.best(context, max_tokens, scoring)
                if counter.ties:
                    continue
                theirs = arctic.speculate(context, max_tokens, factor, 0.0, min_prob, use_tree)
                ours = scoring.best(tree, array("i", context), max_tokens)
                assert ours.score == pytest.approx(theirs.score, abs=1e-5) == pytest.approx(wanted.score, abs=1e-5)
                if not use_tree:
                    assert sum(ours.probs) == pytest.approx(sum(theirs.probs), abs=1e-5) and len(ours.probs) == len(theirs.probs)
                num_compared += bool(ours)
    assert num_compared > 500
