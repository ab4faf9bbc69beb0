import ast
import re

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.functions import functions

FILE = '''
def double(number):
    """Return twice the number.

    >>> double(2)
    4
    """
    # simple
    return number * 2


def guessed(number):
    """Do something with the help of others."""
    first = one(number)
    return two(first)


def silent(number):
    first = number
    return first
'''


def dialogues():
    return [dialogue.messages[-2:] for dialogue in functions([Record("a.py", FILE, (), content_key(FILE))])]


def test_the_answer_is_the_whole_function_without_doctest_and_comments():
    answers = [answer["content"] for _, answer in dialogues()]
    assert '```python\ndef double(number):\n    """Return twice the number."""\n    return number * 2\n```' in answers


def test_functions_without_docstring_or_with_unknown_helpers_are_left_out():
    assert not any("def guessed" in answer["content"] or "def silent" in answer["content"] for _, answer in dialogues())


def test_questions_give_the_head_or_the_signature_with_its_sentence():
    kinds: set[str] = set()
    for question, answer in dialogues():
        code = re.fullmatch(r"```python\n(.*)\n```", answer["content"], flags=re.S)
        assert code is not None
        function = next(node for node in ast.parse(code[1]).body if isinstance(node, ast.FunctionDef))
        summary = ast.get_docstring(function)
        assert summary is not None and summary in question["content"] and f"{function.name}(" in question["content"]
        if head := re.search(r"```python\n(.*)\n```", question["content"], flags=re.S):
            assert code[1].startswith(head[1]) and len(head[1]) < len(code[1])
        kinds.add("head" if head else "signature")
    assert kinds == {"head", "signature"}


def test_no_function_comes_twice():
    answers = [answer["content"] for _, answer in dialogues()]
    assert len(set(answers)) == len(answers) > 200
