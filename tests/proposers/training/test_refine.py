import pytest

from foretoken.proposers.training.encoding import Prompt
from foretoken.proposers.training.refine import Candidate, chosen, goes_in_circles, is_good

SQUARE = "```python\ndef square(x: int) -> int:\n    return x * x\n```"
END = 2


def code_prompt(asked: str) -> Prompt:
    return Prompt([{"role": "user", "content": asked}], [], {"role": "assistant", "content": SQUARE})


def candidate(text: str, asked: str = "Write square in Python.", ended: bool = True) -> Candidate:
    """One token a character is as good as any other tokens."""
    return Candidate(code_prompt(asked), [ord(letter) for letter in asked], [*map(ord, text), END], text, ended)


@pytest.mark.parametrize(("text", "good"), [
    (SQUARE, True),
    (SQUARE.replace("square", "second_power"), True),                    # the name was not asked for
    (SQUARE.replace("x * x", "x * x)"), False),
    ("def square(x): return x * x", False),                              # no block
    ("```python\ntotal = 0\n" + "total = total + 1 - 1\n" * 3 + "```", False),
])
def test_code_must_compile_and_not_repeat_itself(text: str, good: bool) -> None:
    assert is_good(candidate(text)) is good


def test_an_answer_that_was_cut_off_is_never_good() -> None:
    assert not is_good(candidate(SQUARE, ended=False))


def test_a_signature_that_was_asked_for_must_be_kept() -> None:
    asked = "Write the function `square(x: int) -> int`."
    assert is_good(candidate(SQUARE, asked))
    assert not is_good(candidate(SQUARE.replace("x", "n"), asked))


def test_json_must_parse_and_its_list_must_not_run_in_circles() -> None:
    prompt = Prompt([{"role": "user", "content": "As JSON, please."}], [], {"role": "assistant", "content": "[1]"})
    rows, circles = '[{"size": 1}, {"size": 2}, {"size": 3}]', '["tree"' + ', "leaf"' * 5 + "]"
    for text, good in ((rows, True), (rows[:-1], False), (circles, False)):
        assert is_good(Candidate(prompt, [1], [*map(ord, text), END], text, ended=True)) is good


def test_at_most_so_many_different_answers_to_a_prompt() -> None:
    other, third = SQUARE.replace("x * x", "x ** 2"), SQUARE.replace("x * x", "pow(x, 2)")
    answers = [candidate(text) for text in ("no code", SQUARE, SQUARE, other, third)]
    elsewhere = candidate(SQUARE, "Python code for square, please.")
    assert list(chosen([*answers, elsewhere], most=2)) == [1, 3, 5]


@pytest.mark.parametrize(("token_ids", "circles"), [
    ([5, 6, 7, 8] * 4, True),
    ([1, 2, 3, *[5, 6, 7, 8, 9] * 4, 2], True),
    ([7] * 13, True),
    ([7] * 8, False),                                                    # a rule of dashes
    ([*range(20, 40)] * 2, False),                                       # said twice: an edit beside what was there before
    (list(range(60)), False),
    ([], False),
])
def test_what_goes_in_circles(token_ids: list[int], circles: bool) -> None:
    assert goes_in_circles(token_ids) is circles
