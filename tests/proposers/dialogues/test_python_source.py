import ast

from foretoken.proposers.training.corpus import Record, content_key
from foretoken.proposers.training.dialogues.python_source import (
    compiles,
    function_in,
    functions_of,
    replaced,
    summary_of,
    with_lines,
    without_comments,
)

FILE = '''
import math
from collections import Counter as Count, deque
import numpy as np


def circle(radius):
    """
    Return the area of a circle.

    >>> circle(0)
    0.0
    """
    return math.pi * radius ** 2


def most_common(items):
    counts = Count(items)  # all of them
    # the first is the most common
    return counts.most_common(1)[0]


def helped(value):
    total = circle(value)
    return total


def scaled(values):
    array = np.array(values)
    return array


def _private(value):
    other = value
    return other


def stub(value):
    """Do what nobody has written."""
    pass


def test_circle():
    area = circle(0)
    assert area == 0


class Shape:
    def area(self):
        side = self.side
        return side ** 2
'''


def found(text: str = FILE):
    return {function.name: function for function in functions_of([Record("a.py", text, (), content_key(text))])}


def test_public_functions_at_the_top_are_found_without_stubs_and_tests():
    assert list(found()) == ["circle", "most_common", "helped", "scaled"]


def test_the_docstring_becomes_one_sentence_without_doctest():
    circle = found()["circle"]
    assert circle.summary == "Return the area of a circle."
    assert circle.source == 'def circle(radius):\n    """Return the area of a circle."""\n    return math.pi * radius ** 2'
    assert circle.head == 'def circle(radius):\n    """Return the area of a circle."""'
    assert circle.signature == "circle(radius)"


def test_a_program_has_the_imports_it_needs_and_nothing_foreign():
    functions = found()
    assert functions["circle"].program == f"import math\n\n\n{functions['circle'].source}"
    program = functions["most_common"].program
    assert program is not None and program.startswith("from collections import Counter as Count\n\n\ndef most_common")
    space: dict[str, object] = {}
    exec(f"{program}\nfirst = most_common('abbc')", space)
    assert space["first"] == ("b", 2)
    assert functions["helped"].program is None and functions["helped"].foreign == ["circle"]
    assert functions["scaled"].program is None            # numpy is not part of Python


def test_the_same_function_has_the_same_key_in_any_file_and_comes_once():
    circle = found()["circle"]
    again = found("import math\n" + FILE.replace("    return math.pi", "\n    return math.pi"))["circle"]
    assert again.key == circle.key and again.source != circle.source
    records = [Record("a.py", FILE, (), 1), Record("b.py", FILE + "\n", (), 2)]
    assert len(list(functions_of(records))) == 4


def test_what_is_no_python_is_passed_over():
    assert list(functions_of([Record("a.md", "# Title\n\nthis is text", (), 1)])) == []
    assert compiles("a = 1") and not compiles("a = = 1")


def test_summaries_are_plain_sentences():
    assert summary_of("Add two\n    numbers. And more.") == "Add two numbers."
    assert summary_of(">>> add(1, 2)") == "" and summary_of(":param a: one of two") == "" and summary_of('Say "no" to it.') == ""


def test_tokens_are_replaced_where_they_stand_and_nowhere_in_texts():
    source = 'def f(a):\n    b = "a"  # a\n    return [a,  b]'
    assert replaced(source, lambda token: "long_name" if token.string == "a" else None) == (
        'def f(long_name):\n    b = "a"  # a\n    return [long_name,  b]')


def test_comments_go_and_texts_with_a_hash_stay():
    source = 'def f(a):\n    # first\n    b = "# no"  # second\n    """\n    # text\n    """\n    return b'
    assert without_comments(source) == 'def f(a):\n    b = "# no"\n    """\n    # text\n    """\n    return b'


def test_lines_are_exchanged_and_inserted():
    assert with_lines("a\nb\nc", 2, 2, ["x", "y"]) == "a\nx\ny\nc"
    assert with_lines("a\nb", 2, 1, ["x"]) == "a\nx\nb" and with_lines("a\nb", 1, 1, []) == "b"


def test_the_function_is_found_below_its_imports():
    function = function_in("import os\n\n\ndef f():\n    return os.sep")
    assert isinstance(function, ast.FunctionDef) and function.name == "f"
