import ast
import re

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.exercises import exercises

INSTRUCTIONS = """# Instructions

Return the number of seconds in some minutes, see [time][link].

~~~~exercism/note
Nobody needs this.
~~~~

[link]: https://example.com/time
"""
SOLUTION = '''"""A solution."""


# how it is done
def seconds(minutes):
    """Return the seconds."""
    return minutes * 60


if __name__ == "__main__":
    print(seconds(1))
'''
PROGRAM = '''
from math import sqrt


def square_root(number):
    """Return the square root of a positive number."""
    if number < 0:  # not allowed
        raise ValueError("negative number")
    return sqrt(number)


def needs_others(number):
    """Return what others say about it."""
    first = unknown(number)
    return first


def main():
    """Run the whole program here."""
    number = 2
    print(number)
'''


def record(origin: str, text: str) -> Record:
    return Record(origin, text, (), content_key(text))


RECORDS = [
    record("exercises/practice/time/.docs/instructions.md", INSTRUCTIONS),
    record("exercises/practice/time/.meta/example.py", SOLUTION),
    record("exercises/practice/alone/.docs/instructions.md", "# Instructions\n\nThere is no solution."),
    record("maths/square_root.py", PROGRAM),
]


def test_instructions_and_solution_without_what_belongs_to_the_site():
    first = next(exercises(RECORDS))
    question, answer = (message["content"] for message in first.messages[-2:])
    assert "Return the number of seconds in some minutes, see time." in question
    assert not re.search("Nobody|exercism|link|https|#", question) and first.key == RECORDS[0].key
    assert answer == "```python\ndef seconds(minutes):\n    return minutes * 60\n```"


def test_functions_that_stand_alone_are_asked_for_by_sentence_and_by_name():
    found = [[message["content"] for message in dialogue.messages[-2:]] for dialogue in exercises(RECORDS[3:])]
    assert len(found) == 2
    assert "Return the square root of a positive number." in found[0][0] and "square root" in found[1][0]
    for _, answer in found:
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        space: dict[str, object] = {}
        exec(f"{code}\nresult = square_root(9)", space)
        assert space["result"] == 3 and "#" not in code


def test_a_long_solution_is_left_out():
    long = record("exercises/practice/time/.meta/example.py", "\n".join(f"value_{n} = {n}" for n in range(60)))
    ast.parse(long.text)
    assert list(exercises([RECORDS[0], long])) == []


def test_the_same_every_time():
    assert [d.messages for d in exercises(RECORDS)] == [d.messages for d in exercises(RECORDS)]
