"""JSON that follows a schema in the prompt, filled from a text or as an example; and lists of things, as JSON or as lines."""

import json
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from random import Random
from typing import Any

from ..corpus import Conversation, Record, content_key
from .common import pair
from .kinds import KINDS, Kind, Property, Schema, composed_kind

NUM_SCHEMAS = 8000
LISTS_PER_KEY = 30
LONGEST_ITEM = 30                    # characters

FROM_TEXT = (
    "{schema}\n\nFill this JSON schema from the text: {text}",
    "Return JSON that matches this schema:\n{schema}\n\nText: {text}",
    "Text: {text}\n\nWrite it as JSON with this schema:\n{schema}",
    "Convert the text to JSON. Follow the schema.\n\nSchema:\n{schema}\n\nText:\n{text}",
    "{text}\n\nAnswer with JSON that follows this schema:\n{schema}",
    "Use this JSON schema:\n{schema}\n\nInput: {text}",
)
EXAMPLES = (
    "Give me an example of JSON that matches this schema:\n{schema}",
    "Generate a JSON object that follows this schema.\n\n{schema}",
    "Write an example {title} as JSON for this schema:\n{schema}",
    "{schema}\n\nMake up a {title} that fits this schema. Answer with JSON only.",
    "Create sample data for this JSON schema:\n{schema}",
)



# Lists of the corpus that are words anybody may ask for, by file and key, and what they are called.
LISTS = {
    "cats/cats": "cat breeds", "common/animals": "animals", "dinosaurs/dinosaurs": "dinosaurs", "dog_names/dog_names": "dog names",
    "dogs/dogs": "dog breeds", "horses/horses": "horse breeds", "ponies/ponies": "pony breeds", "rabbits/rabbits": "rabbit breeds",
    "rooms/rooms": "rooms", "isms/isms": "art movements", "academic_subjects/subjects": "school subjects", "cars/cars": "car brands",
    "fortune500/companies": "companies", "industries/industries": "industries", "newspapers/newspapers": "newspapers",
    "tv_shows/tv_shows": "TV shows",
    "popular-movies/popular-movies": "movies", "apple_cultivars/cultivars": "apple varieties", "breads_and_pastries/breads": "breads",
    "breads_and_pastries/pastries": "pastries", "condiments/condiments": "condiments", "fish/fish": "fish", "fruits/fruits": "fruits",
    "herbs_n_spices/herbs": "herbs", "herbs_n_spices/spices": "spices", "iba_cocktails/cocktails": "cocktails",
    "menuItems/menuItems": "dishes",
    "pizzaToppings/pizzaToppings": "pizza toppings", "sausages/sausages": "sausages", "tea/teas": "teas",
    "vegetables/vegetables": "vegetables",
    "board_games/games": "board games", "canada_provinces_and_territories/provinces": "Canadian provinces",
    "countries/countries": "countries",
    "english_towns_cities/towns": "English towns", "english_towns_cities/cities": "English cities",
    "nationalities/nationalities": "nationalities",
    "winds/winds": "winds", "governmentForms/governmentForms": "forms of government", "authors/authors": "authors",
    "bodyParts/bodyParts": "body parts",
    "famousDuos/famousDuos": "famous duos", "firstNames/firstNames": "first names", "lastNames/lastNames": "last names",
    "moods/moods": "moods",
    "occupations/occupations": "jobs", "scientists/scientists": "scientists", "building-materials/building materials": "building materials",
    "fabrics/fabrics": "fabrics", "gemstones/gemstones": "gemstones", "metals/metals": "metals", "symptoms/symptoms": "symptoms",
    "genres/genres": "music genres", "instruments/instruments": "instruments", "greek_gods/greek_gods": "Greek gods",
    "greek_titans/greek_titans": "Greek titans", "roman_deities/roman_deities": "Roman gods", "monsters/names": "monsters",
    "clothing/clothes": "clothes",
    "containers/containers": "containers", "objects/objects": "objects", "flowers/flowers": "flowers",
    "weather_conditions/conditions": "weather conditions",
    "sports/sports": "sports", "appliances/appliances": "appliances", "knots/knots": "knots",
    "new_technologies/technologies": "technologies",
    "programming_languages_popular/programming_languages_popular": "programming languages", "adjs/adjs": "adjectives",
    "adverbs/adverbs": "adverbs",
    "nouns/nouns": "nouns", "prepositions/prepositions": "prepositions", "units_of_time/formal_time_units": "units of time",
}


def json_schema(records: Iterable[Record]) -> Iterator[Conversation]:
    """Objects with two to seven properties, nested ones and arrays of objects among them, in the schema's order. Needs no records."""
    del records
    for number in range(NUM_SCHEMAS):
        chance = Random(f"schema {number}")
        kind = KINDS[number % len(KINDS)] if chance.random() < 0.6 else composed_kind(chance)
        several = chance.random() < 0.1
        chosen = chance.sample(kind.properties, k=chance.randint(2, 3 if several else min(7, len(kind.properties))))
        if chance.random() < 0.7:
            chosen.sort(key=kind.properties.index)
        things = [{one.name: one.draw(chance) for one in chosen} for _ in range(chance.randint(2, 3) if several else 1)]
        schema = _schema(kind, chosen, chance)
        text = " ".join(_text(chosen, thing, chance) for thing in things)
        shown = json.dumps({"type": "array", "items": schema} if several else schema,
                           indent=2 if chance.random() < 0.3 and len(chosen) < 5 else None)
        asked = chance.choice(FROM_TEXT if chance.random() < 0.75 else EXAMPLES)
        question = asked.format(schema=shown, text=text, title=f"list of {kind.title}s" if several else kind.title)
        compact = chance.random() < 0.12
        if compact:
            question += chance.choice((" Use compact JSON.", " Put it on one line.", " No line breaks."))
        answer = json.dumps(things if several else things[0], indent=None if compact else 2)
        yield pair(content_key(question), question, answer)


def lists(records: Iterable[Record]) -> Iterator[Conversation]:
    """Some things of a corpus list, as a JSON array or in lines; or things given in the question, brought into another form."""
    for record in records:
        stem = PurePosixPath(record.origin).stem
        if not any(known.startswith(f"{stem}/") for known in LISTS):
            continue
        page = json.loads(record.text)
        for name, items in page.items() if isinstance(page, dict) else ():
            clean = [item.strip() for item in items if isinstance(item, str)] if isinstance(items, list) else []
            clean = [item for item in clean if 1 < len(item) <= LONGEST_ITEM and item.isascii() and "," not in item]
            if f"{stem}/{name}" in LISTS and len(clean) >= 8:
                yield from _lists_of(LISTS[f"{stem}/{name}"], clean, record.key)


def _schema(kind: Kind, chosen: list[Property], chance: Random) -> Schema:
    schema: Schema = {"type": "object", "properties": {one.name: one.schema for one in chosen}}
    if chance.random() < 0.75:
        schema["required"] = [one.name for one in chosen]
    return {"title": kind.title.capitalize(), **schema} if chance.random() < 0.2 else schema


def _text(chosen: list[Property], values: dict[str, Any], chance: Random) -> str:
    """What the values are, in sentences, or as notes in one line."""
    if chance.random() < 0.25:
        return ", ".join(f"{one.name.replace('_', ' ')}: {_spoken(values[one.name])}" for one in chosen) + "."
    order = chance.sample(chosen, k=len(chosen)) if chance.random() < 0.3 else chosen
    sentences = (one.told.format(value=_spoken(values[one.name])) for one in order)
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " and ".join([", ".join(value[:-1]), value[-1]]) if len(value) > 1 else value[0]
    if isinstance(value, dict):
        return ", ".join(f"{key} {_spoken(part)}" for key, part in value.items())
    return str(value)


def _lists_of(what: str, items: list[str], key: int) -> Iterator[Conversation]:
    for draw in range(LISTS_PER_KEY):
        chance = Random(f"{key} {what} {draw}")
        some = chance.sample(items, k=chance.randint(3, 8))
        array = json.dumps(some, indent=2 if chance.random() < 0.5 else None)
        numbered = "\n".join(f"{number}. {item}" for number, item in enumerate(some, 1))
        bullets = "\n".join(f"- {item}" for item in some)
        questions, answer = ASKED_OF_LISTS[draw % len(ASKED_OF_LISTS)]
        forms = {"listed": ", ".join(some), "array": array, "numbered": numbered, "bullets": bullets, "n": len(some), "what": what}
        yield pair(key, chance.choice(questions).format(**forms), answer.format(**forms))


ASKED_OF_LISTS = (
    (("Give me a JSON list of {n} {what}.", "Return {n} {what} as a JSON array.", "{n} {what} as JSON, please.",
      "Write a JSON array with {n} {what}.",
      "I need {n} {what} as a JSON list."), "{array}"),
    (("Name {n} {what}.", "List {n} {what}.", "Give me {n} {what}.", "Tell me {n} {what}.", "Can you list {n} {what}?"), "{numbered}"),
    (("Write this as a JSON array: {listed}", "Turn this list into JSON: {listed}", "Make a JSON list of: {listed}",
      "{listed}\n\nConvert this to a JSON array.", "Convert these {what} to JSON:\n{bullets}", "Turn this into a JSON array:\n{numbered}"),
      "{array}"),
    (("Write this as a numbered list: {listed}", "Number these {what}: {listed}", "Make a numbered list out of this:\n{array}",
      "Turn these {what} into a numbered list:\n{bullets}"), "{numbered}"),
    (("Write these {what} as bullet points: {listed}", "Make a bullet list: {listed}", "Turn this into bullet points:\n{array}"),
     "{bullets}"),
)
