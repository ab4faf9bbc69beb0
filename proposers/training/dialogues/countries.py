"""Dialogues about countries: facts asked singly, read from notes, compared, described, and extracted as JSON."""

import json
import re
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from ..corpus import Conversation, Record
from .common import pair
from .country_facts import AREA, CAPITAL, FACTS, POPULATION, Country, capitalised, json_value, read_countries, tell
from .passages import Passage, extractions, object_lists


def countries(records: Iterable[Record]) -> Iterator[Conversation]:
    """Each fact asked in several wordings, from memory or with notes given; descriptions; comparisons with the facts given."""
    known = list(read_countries(records))
    for country in known:
        chance = Random(country.record.key)
        for fact in FACTS:
            if fact.name in country.facts:
                answer = tell(fact, country)
                for question in chance.sample(fact.questions, k=2):
                    yield pair(country.record.key, question.format(country=country.name), answer)
        yield from _from_notes(country, chance)
        yield from _descriptions(country, chance)
        yield from _as_json(country, chance)
    for first in known:
        chance = Random(first.record.key + 1)
        for second in chance.sample(known, k=min(4, len(known))):
            if second is not first:
                yield from _comparison(first, second, chance)


def extraction(records: Iterable[Record]) -> Iterator[Conversation]:
    """A paragraph and the fields wanted from it: the answer is JSON, values copied, null for what the paragraph lacks."""
    for country in read_countries(records):
        chance = Random(country.record.key + 2)
        told = [fact for fact in FACTS if fact.name in country.facts]
        for _ in range(10):
            chosen = chance.sample(told, k=min(len(told), chance.randint(2, 5)))
            text = " ".join(tell(fact, country) for fact in chosen)
            if chance.random() < 0.25:
                notes = (f"{fact.name.replace('_', ' ')}: {country.facts[fact.name]}" for fact in chosen)
                text = "\n".join([country.name.removeprefix("the "), *notes])
            fields: dict[str, Any] = {"country": country.name.removeprefix("the "),
                                      **{fact.name: json_value(fact.name, country.facts[fact.name]) for fact in chosen}}
            yield from extractions(Passage(text, fields, tuple(fact.name for fact in FACTS)), chance, country.record.key)
    yield from object_lists()


def _from_notes(country: Country, chance: Random) -> Iterator[Conversation]:
    """A few facts as notes before the question, so that the answer is in the prompt."""
    told = [fact for fact in FACTS if fact.name in country.facts]
    if len(told) < 4:
        return
    for _ in range(4):
        chosen = chance.sample(told, k=min(len(told), chance.randint(3, 5)))
        asked = chance.choice(chosen)
        lines = "\n".join(f"{fact.name.replace('_', ' ')}: {country.facts[fact.name]}" for fact in chosen)
        question = chance.choice(asked.questions).format(country=country.name)
        prompt = chance.choice((
            f"{country.name}\n{lines}\n\n{question}", f"Facts about {country.name}:\n{lines}\n\n{question}",
            f"{question}\n\nUse these facts about {country.name}:\n{lines}"))
        yield pair(country.record.key, prompt, tell(asked, country))


def _descriptions(country: Country, chance: Random) -> Iterator[Conversation]:
    told = [fact for fact in FACTS if fact.name in country.facts and fact.name in (CAPITAL, "location", AREA, POPULATION, "languages")]
    short = " ".join(tell(fact, country) for fact in told)
    if len(told) > 1:
        asked = ("Describe {} in a few sentences.", "Give me a short description of {}.", "What should I know about {}?",
                 "Write a short text about {}.")
        for question in chance.sample(asked, k=2):
            yield pair(country.record.key, question.format(country.name), short)
    history = " ".join(re.split(r"(?<=[a-z)]\.)\s+", country.background)[:2])
    if 60 < len(history) < 420:
        asked = ("Tell me about {}.", "What is the history of {}?", "Tell me something about the history of {}.", "What happened in {}?")
        for question in chance.sample(asked, k=2):
            yield pair(country.record.key, question.format(country.name), history)


def _as_json(country: Country, chance: Random) -> Iterator[Conversation]:
    for _ in range(2):
        names = chance.sample(sorted(country.facts), k=min(len(country.facts), chance.randint(2, 4)))
        wanted = ", ".join(name.replace("_", " ") for name in names[:-1]) + f" and {names[-1].replace('_', ' ')}"
        asked = ("Give me the {0} of {1} as JSON.", "Return the {0} of {1} as a JSON object.", "I need the {0} of {1} in JSON format.")
        fields = {"country": country.name.removeprefix("the "), **{name: json_value(name, country.facts[name]) for name in names}}
        if len(names) > 1:
            question = chance.choice(asked).format(wanted, country.name)
            yield pair(country.record.key, question, json.dumps(fields, indent=2, ensure_ascii=False))


def _comparison(first: Country, second: Country, chance: Random) -> Iterator[Conversation]:
    """Which of two has more, with both numbers in the prompt."""
    name, unit, more, less = chance.choice(((AREA, " sq km", "larger", "smaller"), (POPULATION, " people", "more people", "fewer people")))
    numbers = [re.fullmatch(r"([\d,]+)(?: sq km)?", country.facts.get(name, "")) for country in (first, second)]
    if not numbers[0] or not numbers[1]:
        return
    values = [match[1] for match in numbers if match]
    sizes = [int(value.replace(",", "")) for value in values]
    if sizes[0] == sizes[1]:
        return
    bigger = sizes[0] > sizes[1]
    asks_more = chance.random() < 0.7
    winner, other = (first, second) if bigger == asks_more else (second, first)
    word = more if asks_more else less
    facts = f"{capitalised(first.name)} has {values[0]}{unit}. {capitalised(second.name)} has {values[1]}{unit}."
    asked = f"Which is {word}, {first.name} or {second.name}?" if name == AREA else f"Which country has {word}?"
    verb = "is" if name == AREA else "has"
    by_name = {first.name: values[0], second.name: values[1]}
    told = f"{capitalised(winner.name)} {verb} {word}: it has {by_name[winner.name]}{unit}, and {other.name} {by_name[other.name]}{unit}."
    key = next((country.record.key for country in (first, second) if country.record.held_out), first.record.key)
    question = chance.choice((f"{facts} {asked}", f"{asked} {facts}", f"{facts}\n\n{asked}"))
    yield pair(key, question, told)


