from random import Random

from foretoken.proposers.training.dialogues.knowledge import DAYS, OPPOSITES, fact


def test_facts_are_right_where_they_can_be_looked_up():
    seen: set[str] = set()
    for question, answer in (fact(Random(seed)) for seed in range(2000)):
        assert answer and "{" not in question + answer
        if question.startswith("Which day comes after ") and question not in seen:
            seen.add(question)
            day = question.removeprefix("Which day comes after ").rstrip("?")
            assert answer == f"{DAYS[(DAYS.index(day) + 1) % 7]} comes after {day}."
        if question.startswith("Opposite of "):
            word = question.removeprefix("Opposite of ").rstrip("?")
            assert answer == f"The opposite of {word} is {OPPOSITES[word]}."
        if question.startswith("Name the days of the week"):
            assert answer.splitlines() == [f"{number}. {name}" for number, name in enumerate(DAYS, 1)]
    assert len(seen) == 7
