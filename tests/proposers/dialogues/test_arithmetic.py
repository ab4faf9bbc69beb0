import re
from fractions import Fraction

from foretoken.proposers.training.corpus import Record
from foretoken.proposers.training.dialogues.arithmetic import arithmetic, word_problems


def test_every_equation_in_the_exercises_is_true():
    checked = 0
    for dialogue in arithmetic(()):
        for left, right in re.findall(r"([$\d.]+(?: [-+*/] [$\d.]+)+) = ([$\d.]*\d)", dialogue.messages[-1]["content"]):
            left = re.sub(r"(\d+(?:\.\d+)?)", r'Fraction("\1")', left.replace("$", ""))
            assert eval(left, {"Fraction": Fraction}) == Fraction(right.replace("$", "")), dialogue.messages
            checked += 1
    assert checked > 8000


def test_exercises_are_many_short_and_asked_once():
    dialogues = list(arithmetic(()))
    questions = [dialogue.messages[-2]["content"] for dialogue in dialogues]
    assert len(dialogues) > 6000 and len(set(questions)) == len(questions)
    assert all(dialogue.messages[-1]["content"].endswith(".") and len(dialogue.messages[-1]["content"]) < 300 for dialogue in dialogues)
    assert dialogues == list(arithmetic(()))


def test_last_sentence_repeats_the_result_of_the_last_step():
    for dialogue in arithmetic(()):
        answer = dialogue.messages[-1]["content"]
        if final := re.search(r"The answer is \$?(\d+(?:\.\d+)?)", answer):
            assert re.findall(r"= \$?(\d+(?:\.\d+)?)", answer)[-1] == final[1]


def solved(solution: str, question: str = "How many?") -> list[str]:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": solution})
    return [dialogue.messages[-1]["content"] for dialogue in word_problems([Record("", "", messages, 5)])]


def test_word_problems_lose_calculator_marks_and_end_in_a_sentence():
    assert solved("She has 3+4=<<3+4=7>>7 eggs\nSo 7*2 = <<7*2=14>>14.\n#### 14") == [
        "She has 3+4=7 eggs.\nSo 7*2 = 14.\nThe answer is 14."]


def test_long_or_unfinished_word_problems_are_left_out():
    assert solved("One step. " * 100 + "\n#### 1") == []
    assert solved("No result.") == []
    assert solved("A step.\n#### 1", question="word " * 100) == []
