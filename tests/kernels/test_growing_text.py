import random

import pytest

from foretoken.kernels import growing_text
from foretoken.kernels.growing_text import GrowingText, ends_with_repeat, repeats


def by_the_rule(tokens: list[int], n: int) -> bool:
    return any(tokens[end - n : end] == tokens[len(tokens) - n :] for end in range(n, len(tokens)))


def texts_of(lists: list[list[int]]) -> list[GrowingText]:
    texts = [GrowingText() for _ in lists]
    for text, tokens in zip(texts, lists, strict=True):
        text.follow(tokens)
    return texts


@pytest.mark.parametrize("seed", range(40))
def test_repeats_are_those_of_the_rule(seed: int) -> None:
    dice = random.Random(seed)
    n, num_kinds = dice.randint(1, 5), dice.choice([1, 2, 5, 40, 1000])
    lists = [[dice.randrange(num_kinds) for _ in range(dice.choice([0, 1, 2, 3, 5, 63, 64, 65, 66, 130, 300]))] for _ in range(9)]
    expected = [by_the_rule(tokens, n) for tokens in lists]
    texts = texts_of(lists)
    assert repeats(texts, n) == expected
    assert [repeats([text], n)[0] for text in texts] == expected
    assert [ends_with_repeat(text.as_array(), n) for text in texts] == expected


@pytest.mark.parametrize("distance", [1, 2, 62, 63, 64, 65, 127, 128, 129, 500])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_single_repeat_is_found_at_any_distance(distance: int, n: int) -> None:
    tokens = list(range(1000, 1600))
    for i in range(n):  # the last ones first: where the two overlap, the text is one token again and again
        tokens[-1 - i - distance] = tokens[-1 - i]
    if distance < n:
        tokens[-n - distance :] = [7] * (n + distance)
    assert by_the_rule(tokens, n) and repeats(texts_of([tokens]), n) == [True]
    assert repeats(texts_of([list(range(600))]), n) == [False]


def test_without_native_code_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of([[1, 2, 3, 1, 2], [1, 2, 3, 4], []])
    with_library = repeats(texts, 2)
    monkeypatch.setattr(growing_text, "_native", lambda: None)
    assert repeats(texts, 2) == with_library == [True, False, False]


def test_a_text_follows_what_grows_and_drops_what_was_not_kept() -> None:
    text, tokens = GrowingText(room=3), [5, 6]
    text.follow(tokens)
    before = text.address
    memory = text.as_array()
    assert memory.tolist() == [5, 6] and memory.ctypes.data == before
    del memory
    tokens.append(7)
    text.follow(tokens)
    assert text.address == before and text.as_array().tolist() == [5, 6, 7]
    for token in range(1000):
        tokens.append(token)
        text.follow(tokens)
    assert text.as_array().tolist() == tokens and text.as_array().ctypes.data == text.address

    in_place = GrowingText(room=4)
    in_place.follow([5, 6])
    assert in_place.taken(2) == [0, 0] and in_place.num_tokens == 4  # as native code would leave it
    in_place.follow([5, 6, 0])
    assert in_place.as_array().tolist() == [5, 6, 0]
    in_place.follow([5, 6, 0, 9])
    assert in_place.as_array().tolist() == [5, 6, 0, 9]
