import re

from foretoken.proposers.training.dialogues.text_tasks import THINGS, WORDS, text_tasks

PAIRS = [(dialogue.messages[-2]["content"], dialogue.messages[-1]["content"]) for dialogue in text_tasks(())]


def asked(pattern: str) -> list[tuple[re.Match[str], str]]:
    found = [(match, answer) for question, answer in PAIRS if (match := re.fullmatch(pattern, question, flags=re.S))]
    assert found, pattern
    return found


def test_tasks_are_many_short_and_asked_once():
    assert len(PAIRS) > 6000 and len({question for question, _ in PAIRS}) == len(PAIRS)
    assert all(0 < len(answer) < 400 and "{" not in answer + question for question, answer in PAIRS)
    assert PAIRS == [(dialogue.messages[-2]["content"], dialogue.messages[-1]["content"]) for dialogue in text_tasks(())]


def test_sorted_words_and_numbers_are_sorted():
    for match, answer in asked(r"Sort these words: (.+)"):
        assert answer.split(", ") == sorted(match[1].split(", "))
    for match, answer in asked(r"Sort these numbers: (.+)"):
        assert list(map(int, answer.split(", "))) == sorted(map(int, match[1].split(", ")))
    for match, answer in asked(r"Sort these numbers from largest to smallest: (.+)"):
        assert list(map(int, answer.split(", "))) == sorted(map(int, match[1].split(", ")), reverse=True)


def test_lists_keep_their_items_and_order():
    for match, answer in asked(r"Make a bulleted list of (.+)\."):
        assert [line.removeprefix("- ") for line in answer.splitlines()] == re.split(r", | and ", match[1])
    for match, answer in asked(r"Reverse this list: (.+)"):
        assert answer.split(", ") == match[1].split(", ")[::-1]


def test_a_replaced_word_is_gone_and_nothing_else_changed():
    for match, answer in asked(r'Replace "(\w+)" by "(\w+)" in this text: (.+)'):
        assert answer != match[3] and not re.search(rf"\b{match[1]}\b", answer)
        assert answer == re.sub(rf"\b{match[1]}\b", match[2], match[3])


def test_case_and_punctuation_change_only_case_and_the_full_stop():
    for match, answer in asked(r"Convert to uppercase: (.+)"):
        assert answer == match[1].upper()
    for match, answer in asked(r"Fix the punctuation: (.+)"):
        assert answer.lower() == f"{match[1]}." and answer[0].isupper()


def test_spelling_has_every_letter():
    for match, answer in asked(r"Spell (\w+)\."):
        assert answer.replace("-", "").lower() == match[1]


def test_the_one_who_did_it_is_found_in_the_text():
    for match, answer in asked(r"Read this: (.+)\n\nWho (.+)\?"):
        assert answer in match[1] and answer.endswith(f"{match[2]}.")


def test_counts_are_right():
    for match, answer in asked(r"Count these words: (.+)"):
        assert answer.endswith(f"There are {len(match[1].split(', '))}.")


def test_words_are_there_once():
    assert len(set(WORDS)) == len(WORDS) and set(THINGS) < set(WORDS)
