import random
from array import array

import pytest
from steps import count_lines
from suffix_texts import KINDS, texts_of

from foretoken.proposers.suffix_tree import SuffixTree, Text


def grown(texts: list[list[int]], max_depth: int) -> tuple[SuffixTree, list[Text]]:
    tree, handles = SuffixTree(max_depth), [Text() for _ in texts]
    for handle, text in zip(handles, texts, strict=True):
        tree.extend(handle, text)
    return tree, handles


@pytest.mark.parametrize("seed", range(80))
def test_texts_that_grow_by_turns_and_go_in_any_order(seed: int) -> None:
    dice = random.Random(seed)
    tree, texts = SuffixTree(dice.randint(1, 7)), [Text()]
    num_symbols = dice.choice([1, 2, 3, 5])
    for _ in range(50):
        if dice.random() < 0.2:
            texts.append(Text())
        text = dice.choice(texts)
        if dice.random() < 0.12 and len(texts) > 1:
            texts.remove(text)
            tree.remove(text)
        elif len(source := dice.choice(texts).token_ids) > 3 and dice.random() < 0.4:  # a repetition
            first = dice.randrange(len(source))
            tree.extend(text, source[first : first + 6])
        else:
            tree.extend(text, [dice.randrange(num_symbols) for _ in range(dice.randint(1, 5))])
        tree.check(texts)
        assert tree.num_nodes <= 2 * tree.num_tokens
    for text in texts:
        tree.remove(text)
    tree.check([])
    assert tree.num_nodes == tree.num_tokens == 0


def test_a_phrase_is_found_if_and_only_if_a_text_has_it() -> None:
    dice = random.Random(3)
    texts = [[dice.randrange(3) for _ in range(40)] for _ in range(4)]
    tree, _ = grown(texts, 5)
    windows = {tuple(text[first : first + n]) for text in texts for n in range(1, 6) for first in range(41 - n)}
    for _ in range(500):
        phrase = [dice.randrange(3) for _ in range(dice.randint(1, 5))]
        found = tree.find(array("i", phrase), 0)
        assert (found is not None) == (tuple(phrase) in windows)


def test_memory_comes_back() -> None:
    """Columns do not grow while as much goes as comes."""
    dice = random.Random(0)
    tree, texts = grown([[dice.randrange(30) for _ in range(100)] for _ in range(5)], 12)
    sizes: list[int] = []
    for _ in range(40):
        tree.remove(texts.pop(0))
        texts.append(Text())
        tree.extend(texts[-1], [dice.randrange(30) for _ in range(100)])
        sizes.append(len(tree.count))
    tree.check(texts)
    assert max(sizes) <= 2 * 600 + 1


def test_the_largest_ids_of_tokens() -> None:
    large = 2**31 - 1
    tree, texts = grown([[large, 0, large, 0]], 4)
    tree.check(texts)
    assert tree.find(array("i", [large, 0]), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow_with_the_tree(kind: str) -> None:
    def lines(num_texts: int) -> int:
        texts = texts_of(kind, num_texts, stem=(7,))
        tree, _ = grown(texts, 12)
        return max(count_lines(lambda text=text: tree.extend(Text(), text)) for text in texts[:10]) // len(texts[0])

    assert lines(2000) <= 1.6 * lines(100)
