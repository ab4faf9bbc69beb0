import ast
import re
from random import Random

import pytest

from foretoken.proposers.training.dialogues.refactorings import (
    Edit,
    comments,
    docstring,
    parameter,
    prints,
    quotes,
    rename,
    statement,
    type_hints,
    value,
    without_hints,
)

SOURCE = '''def best(scores: list[int], limit: int = 10, mode="fast") -> int:
    """Return the best score."""
    print("start", 'now')  # tell it
    winner = 0
    for score in scores:
        # only these count
        if score > winner and score < limit:
            winner = score
            print(score)
    print(
        winner
    )
    return winner'''


def all_edits(make, source: str = SOURCE) -> list[Edit]:
    edits = [edit for seed in range(80) if (edit := make(source, Random(seed))) is not None]
    assert edits and len({edit.ask for edit in edits}) > 2
    assert all(edit.before != edit.after for edit in edits)
    for edit in edits:
        ast.parse(edit.after)
    return edits


def call(source: str, *arguments: object) -> object:
    space: dict[str, object] = {"print": lambda *_: None}
    exec(source, space)
    function = space[ast.parse(source).body[0].name]  # type: ignore[attr-defined]
    assert callable(function)
    return function(*arguments)


def test_a_renamed_function_does_what_it_did():
    for edit in all_edits(rename):
        names = re.findall(r"\w+", edit.ask)
        assert edit.before == SOURCE and any(re.search(rf"\b{name}\b", edit.after) and name not in SOURCE for name in names)
        assert call(edit.after, [3, 7, 12]) == 7
        assert edit.after.count("\n") == SOURCE.count("\n")


def test_the_old_name_is_gone_and_texts_and_comments_keep_their_words():
    for edit in all_edits(rename):
        if match := re.fullmatch(r"Rename `(\w+)` to `(\w+)`\.", edit.ask):
            assert not re.search(rf"\b{match[1]}\b", edit.after)
            assert edit.after == re.sub(rf"\b{match[1]}\b", match[2], SOURCE)
        assert "# only these count" in edit.after and '"""Return the best score."""' in edit.after


@pytest.mark.parametrize("source", [
    "def f(name):\n    return name.name",                              # an attribute
    "def f(name):\n    return dict(name=name)",                        # a keyword
    'def f(name):\n    return f"the name {name}"',                     # a text
    "def f(name):\n    global counter\n    counter = name",
])
def test_names_that_mean_something_else_too_are_left_alone(source: str):
    edits = [edit for seed in range(40) if (edit := rename(source, Random(seed)))]
    assert all(re.search(r"\bname\b", edit.after) for edit in edits)


def test_type_hints_go_and_come_back():
    bare = SOURCE.replace(": list[int]", "").replace("limit: int = 10", "limit = 10").replace(" -> int", "")
    assert without_hints(SOURCE) == bare and without_hints(bare) is None
    for edit in all_edits(type_hints):
        assert (edit.before, edit.after) == ((bare, SOURCE) if re.search("[Aa]dd|Annotate", edit.ask) else (SOURCE, bare))


def test_docstrings_go_and_come_back_in_the_words_that_were_given():
    for edit in all_edits(docstring):
        without, whole = sorted((edit.before, edit.after), key=len)
        assert whole == SOURCE and '"""' not in without
        assert (edit.after == without) == bool(re.match("Remove|Delete|Drop", edit.ask))
        if '"' in edit.ask:
            assert "Return the best score." in edit.ask


def test_comments_go():
    for edit in all_edits(comments):
        assert "#" not in edit.after and edit.after == SOURCE.replace("  # tell it", "").replace("        # only these count\n", "")


def test_prints_go_unless_a_block_has_nothing_else():
    for edit in all_edits(prints):
        assert "print" not in edit.after and call(edit.after, [3, 7, 12]) == 7
    assert prints("def f(a):\n    if a:\n        print(a)\n    return a", Random(0)) is None


def test_values_change_to_what_was_said_and_nothing_else_does():
    for edit in all_edits(value):
        before, after = edit.before.splitlines(), edit.after.splitlines()
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        assert len(changed) == 1
        said = re.findall(r'"[^"]*"|\'[^\']*\'|\b\d+\b|True|False|None', edit.ask)
        assert any(word in changed[0] for word in said), edit.ask


def test_the_new_parameter_has_its_default():
    for edit in all_edits(parameter):
        new = ast.parse(edit.after).body[0]
        assert isinstance(new, ast.FunctionDef) and [argument.arg for argument in new.args.args][:3] == ["scores", "limit", "mode"]
        assert new.args.args[3].arg in edit.ask and ast.unparse(new.args.defaults[-1]).strip("'") in edit.ask
        assert new.returns is not None and call(edit.after, [3, 7, 12]) == 7


def test_added_statements_do_what_was_asked():
    for edit in all_edits(statement):
        if "rint" in edit.ask:
            assert edit.after == SOURCE.replace("    return winner", "    print(winner)\n    return winner")
        elif "empty" in edit.ask and "`scores`" in edit.ask and "ValueError" in edit.ask:
            with pytest.raises(ValueError, match="scores is missing"):
                call(edit.after, [])
        assert call(edit.after, [3, 7, 12]) == 7


def test_quotes_turn_and_texts_keep_their_words():
    for edit in all_edits(quotes):
        old = "'" if "double" in edit.ask else '"'
        assert ast.unparse(ast.parse(edit.after)) == ast.unparse(ast.parse(SOURCE))
        assert edit.after.replace('"""', "").count(old) == 0
