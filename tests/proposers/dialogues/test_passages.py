"""JSON extraction from invented texts: the keys asked for in their order, values found in the text, null only where it is silent."""

import json
from random import Random

from foretoken.proposers.training.dialogues.passages import KINDS, Passage, extractions, object_lists


def test_every_kind_states_its_fields():
    for _, make in KINDS:
        for seed in range(30):
            passage = make(Random(seed))
            for value in passage.fields.values():
                shown = f"{value:.2f}" if isinstance(value, float) else str(value)
                assert shown in passage.text
            assert not set(passage.others) & passage.fields.keys()


def test_missing_fields_are_null_and_others_are_copied():
    passage = Passage("Anna is 31.", {"name": "Anna", "age": 31}, ("email",))
    answers = [next(extractions(passage, Random(seed))).messages[-1]["content"].strip("`").removeprefix("json") for seed in range(80)]
    seen = [json.loads(answer) for answer in answers]
    assert all(answer.get("name") == "Anna" and answer.get("age") == 31 for answer in seen)
    with_missing = [answer for answer in seen if "email" in answer]
    assert 3 <= len(with_missing) < 40
    assert all(answer["email"] is None for answer in with_missing)


def test_lists_hold_one_object_for_each_thing():
    lists = 0
    for each in object_lists():
        answer = json.loads(each.messages[-1]["content"].strip("`").removeprefix("json"))
        if isinstance(answer, list):
            lists += 1
            assert len(answer) in (2, 3)
            assert len({tuple(one) for one in answer}) == 1 and answer[0], "the same keys in each"
    assert lists > 500
