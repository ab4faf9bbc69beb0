import ast
import re
from difflib import SequenceMatcher
from itertools import islice

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.edits import PER_FUNCTION, edits
from foretoken.proposers.training.dialogues.python_source import functions_of

FILE = '''
def largest(numbers: list[int], start: int = 0) -> int:
    """Return the largest number."""
    best = start
    for number in numbers:  # one by one
        if number > best:
            best = number
    return best
'''
RECORD = Record("a.py", FILE, (), content_key(FILE))


def code_in(text: str) -> str:
    match = re.search(r"```python\n(.*?)\n```", text, flags=re.S)
    return match[1] if match else ""


def test_every_function_is_edited_in_different_ways_under_its_own_key():
    key = next(iter(functions_of([RECORD]))).key
    mine = [dialogue for dialogue in edits([RECORD]) if dialogue.key == key]
    single = [dialogue for dialogue in mine if len(dialogue.messages) <= 3]
    assert len(single) == PER_FUNCTION and len({dialogue.messages[-2]["content"] for dialogue in single}) == PER_FUNCTION


def test_answers_compile_differ_and_mostly_copy():
    likeness: list[float] = []
    for dialogue in edits([RECORD]):
        turns = [message for message in dialogue.messages if message["role"] != "system"]
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            assert asked["role"] == "user" and answered["role"] == "assistant" and answered["content"].startswith("```python\n")
            before, after = code_in(asked["content"]), code_in(answered["content"])
            ast.parse(after)
            if before:
                assert before != after
                likeness.append(SequenceMatcher(None, before, after, autojunk=False).ratio())
    assert len(likeness) > 1000 and sum(likeness) / len(likeness) > 0.85


def test_code_stands_before_and_after_what_is_asked_with_and_without_a_fence():
    asked = [dialogue.messages[-2]["content"] for dialogue in islice(edits(()), 600)]
    assert any(text.startswith("```") for text in asked) and any(text.endswith("```") for text in asked)
    assert any("```" not in text and "\ndef " in f"\n{text}" for text in asked)


def test_a_second_edit_begins_where_the_first_ended():
    chained = [dialogue for dialogue in edits(()) if sum(m["role"] == "user" for m in dialogue.messages) == 2]
    assert len(chained) > 30
    for dialogue in chained:
        *_, question, first, ask, second = (message["content"] for message in dialogue.messages)
        assert code_in(first) != code_in(second)
        if "ndo" in ask or "back" in ask:
            assert code_in(second) in question


def test_the_same_every_time():
    assert [d.messages for d in edits([RECORD])] == [d.messages for d in edits([RECORD])]
