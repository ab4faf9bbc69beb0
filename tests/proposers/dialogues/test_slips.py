import ast
import re
from random import Random

import pytest

from foretoken.proposers.training.dialogues import slips
from foretoken.proposers.training.dialogues.slips import MAKERS, fix

SOURCE = '''def count_small(numbers, limit):
    counter = 0
    name = "small"
    for number in numbers:
        if number == limit:
            counter += 1
        elif number < limit:
            counter += 2
    return counter'''

REFUSED = {slips.no_colon, slips.no_parenthesis, slips.no_quote, slips.assigned, slips.not_indented}
WITH_CALL = SOURCE.replace("in numbers:", "in list(numbers):")


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_the_answer_is_the_good_function_and_one_line_of_the_question_is_wrong():
    edits = [fix(WITH_CALL, Random(seed)) for seed in range(200)]
    for edit in edits:
        assert edit is not None and edit.after == WITH_CALL
        wrong = [new for old, new in zip(edit.after.splitlines(), edit.before.splitlines(), strict=True) if old != new]
        assert len(wrong) == 1
    assert len({edit.before for edit in edits if edit}) > 25
    assert 40 < sum(not parses(edit.before) for edit in edits if edit) < 160


@pytest.mark.parametrize("make", dict.fromkeys(MAKERS), ids=lambda make: make.__name__)
def test_each_slip_breaks_the_function_as_it_says(make):
    made = [slip for seed in range(20) if (slip := make(WITH_CALL, Random(seed)))]
    assert made
    for broken, remark, _ in made:
        assert broken != WITH_CALL and remark.endswith(".")
        assert make not in REFUSED or not parses(broken)
        line = next(right for right, wrong in zip(WITH_CALL.splitlines(), broken.splitlines(), strict=True) if right != wrong)
        quoted = re.findall(r"`([^`]+)`", remark)
        assert any(part in line for part in quoted) or quoted == ["return"]


def test_a_misspelled_name_is_told_as_python_tells_it():
    for seed in range(60):
        slip = slips.misspelled(SOURCE, Random(seed))
        assert slip is not None
        if told := re.search(r"name '(\w+)' is not defined", slip[2][0]):
            assert told[1] in slip[0] and told[1] not in SOURCE


def test_what_was_wrong_is_explained_to_those_who_ask():
    for seed in range(100):
        edit = fix(SOURCE, Random(seed))
        assert edit is not None
        assert bool(edit.remark) == (edit.ask in slips.EXPLAIN or edit.ask.startswith("Why"))
