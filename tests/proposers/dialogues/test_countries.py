"""Facts out of factbook pages: clean values, answers that agree with the notes in the prompt, JSON that parses."""

import json
import re
from typing import Any

from foretoken.proposers.training.corpus import Conversation, Record, content_key
from foretoken.proposers.training.dialogues.countries import countries, extraction


def page(name: str, capital: str, area: str, population: str, borders: str) -> Record:
    def text(value: str) -> dict[str, str]:
        return {"text": value}

    whole: dict[str, Any] = {
        "Introduction": {"Background": text(f"{name} was founded by two old kings who liked the sea. It has been quiet since.")},
        "Geography": {
            "Location": text("Northern Europe, bordering the Grey Sea, east of nowhere; note - hard to find"),
            "Climate": text("varies from mild to cold (in winter)"),
            "Area": {"total ": text(f"{area} sq km (2020 est.)")},
            "Land boundaries": {"border countries": text(borders)},
        },
        "People and Society": {
            "Population": {"total": text(f"{population} (2025 est.)")},
            "Languages": {"Languages": text("English (official) 48.3%, Old Norse 29%, other 22%")},
        },
        "Government": {
            "Country name": {"conventional short form": text(name)},
            "Capital": {"name": text(f"{capital} <strong>(new)</strong>")},
            "Government type": text("absolute monarchy"),
        },
    }
    return Record(name, json.dumps(whole), (), content_key(name))


RECORDS = (
    page("Norland", "Nor", "5,100", "40,000", "Bosnia and Herzegovina 55 km; Sudland (exclave) 3.5 km"),
    page("The Sudlands", "Sud", "1.5 million", "90,000", "Norland 3.5 km"),
)


def asked(conversation: Conversation) -> tuple[str, str]:
    question, answer = (message["content"] for message in conversation.messages[-2:])
    return question, answer


def test_facts_are_told_clean():
    answers = {asked(each)[1] for each in countries(RECORDS)}
    assert "The capital of Norland is Nor." in answers
    assert "The climate of Norland varies from mild to cold." in answers
    assert "The government of Norland is an absolute monarchy." in answers
    assert "Norland is in Northern Europe, bordering the Grey Sea." in answers
    assert "People in Norland speak English and Old Norse." in answers
    assert "Norland borders Bosnia and Herzegovina and Sudland." in answers
    assert "The capital of the Sudlands is Sud." in answers


def test_every_dialogue_keeps_the_key_of_its_country():
    keys = {record.key for record in RECORDS}
    assert {each.key for each in countries(RECORDS)} == keys
    for each in countries(RECORDS):
        if "Which" not in asked(each)[0]:          # a comparison names both
            wanted = RECORDS[0] if "Norland" in asked(each)[0].splitlines()[0] else RECORDS[1]
            assert each.key == wanted.key


def test_a_comparison_names_the_larger_number():
    compared = [asked(each) for each in countries(RECORDS) if "Which country has more people?" in asked(each)[0]]
    assert all(answer.startswith("The Sudlands has more people") for _, answer in compared)
    assert not any("Which is larger" in asked(each)[0] for each in countries(RECORDS)), "1.5 million must not be read as 1"


def test_extracted_json_parses_and_copies_the_text():
    extracted = list(extraction(RECORDS))
    about_countries = [asked(each) for each in extracted if each.key in {record.key for record in RECORDS}]
    assert len(about_countries) >= 20
    borders: list[Any] = []
    for question, answer in about_countries:
        wanted = json.loads(re.sub(r"^```json|```$", "", answer))
        for value in wanted.values():
            parts = value if isinstance(value, list) else [f"{value:,}" if isinstance(value, int) else value]
            assert all(part is None or part.lower() in question.lower() for part in parts)
        borders.append(wanted.get("borders"))
    assert ["Bosnia and Herzegovina", "Sudland"] in borders


def test_the_same_records_make_the_same_dialogues():
    assert list(countries(RECORDS)) == list(countries(RECORDS))
    assert list(extraction(RECORDS)) == list(extraction(RECORDS))
