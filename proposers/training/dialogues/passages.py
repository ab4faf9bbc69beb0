"""Short invented texts about persons, products, orders, events and the like, with the fields they state, and what to ask of them.

Owns the wordings in which JSON is extracted from a text; values are always copied from it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from ..corpus import Conversation, content_key
from .common import fenced, pair
from .vocabulary import CITIES, COLORS, COMPANIES, DAYS, FIRST_NAMES, JOBS, LAST_NAMES, MONTHS, PRODUCTS, STREETS, TOPICS, name_of

NUM_PASSAGES = 4500

ASKED = (
    "{text}\n\nExtract {fields} as JSON.",
    "Extract {fields} from this text as JSON.\n\n{text}",
    "Extract the following fields as JSON: {names}.\n\nText: {text}",
    "Read the text and return a JSON object with the keys {names}.\n\n{text}",
    "{text}\n\nGive me {fields} as a JSON object.",
    "Turn this into JSON with the fields {names}: {text}",
    "From the text below, extract {fields}. Answer with JSON only.\n\n{text}",
    "Text: {text}\nFields: {names}\nFormat: JSON",
)
NULLS = (" Use null for missing fields.", " If something is missing, use null.", " Write null where the text does not say.")
ASKED_FOR_LISTS = (
    "{text}\n\nExtract all {what} as a JSON list with the keys {names}.",
    "Extract every one of the {what} as a JSON array of objects with {names}.\n\n{text}",
    "List the {what} in this text as JSON objects with the fields {names}.\n\n{text}",
    "Return a JSON array with {names} for each of the {what}.\n\nText: {text}",
)


@dataclass(frozen=True)
class Passage:
    """A text, what it says by field, and names of the same kind that can be asked for though it does not say them."""

    text: str
    fields: dict[str, Any]
    others: tuple[str, ...] = ()


def extractions(passage: Passage, chance: Random, key: int | None = None) -> Iterator[Conversation]:
    """One question about `passage`. Its key is that of the text unless given."""
    names = [*passage.fields] if chance.random() < 0.6 else _some(passage.fields, chance)
    missing = [name for name in passage.others if name not in passage.fields]
    with_missing = bool(missing) and chance.random() < 0.2
    if with_missing:
        names.insert(chance.randint(0, len(names)), chance.choice(missing))
    compact = chance.random() < 0.15
    question = chance.choice(ASKED).format(text=passage.text, fields=_in_words(names), names=", ".join(names))
    question += chance.choice(NULLS) if with_missing else " Put it on one line." if compact else ""
    wanted = {name: passage.fields.get(name) for name in names}
    answer = json.dumps(wanted, indent=None if compact else 2, ensure_ascii=False)
    if not compact and chance.random() < 0.05:
        question, answer = f"{question} Use a code block.", fenced("json", answer)
    yield pair(content_key(passage.text) if key is None else key, question, answer)


def object_lists() -> Iterator[Conversation]:
    """Invented passages one by one, and several of a kind in one text, extracted as a list of objects."""
    for number in range(NUM_PASSAGES):
        chance = Random(f"passage {number}")
        kind = number % len(KINDS)
        what, make = KINDS[kind]
        if number % 4:
            yield from extractions(make(chance), chance)
            continue
        several = [make(chance) for _ in range(chance.randint(2, 3))]
        names = _some({name: 0 for name in several[0].fields if all(name in one.fields for one in several)}, chance)[:3]
        text = " ".join(one.text for one in several)
        question = chance.choice(ASKED_FOR_LISTS).format(text=text, what=what, names=", ".join(names))
        answer = [{name: one.fields[name] for name in names} for one in several]
        yield pair(content_key(text), question, json.dumps(answer, indent=2, ensure_ascii=False))


def _some(fields: dict[str, Any], chance: Random) -> list[str]:
    """Some of the names in their own order, at least two if there are two."""
    chosen = set(chance.sample([*fields], k=min(len(fields), chance.randint(2, 4))))
    return [name for name in fields if name in chosen]


def _in_words(names: list[str]) -> str:
    words = [f"the {name.replace('_', ' ')}" for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def person_name(chance: Random) -> str:
    return f"{name_of(FIRST_NAMES, chance)} {name_of(LAST_NAMES, chance)}"


def price(chance: Random) -> float:
    return chance.randint(1, 200) + chance.choice((0.0, 0.5, 0.99, 0.25, 0.75))


def day(chance: Random) -> str:
    return f"{chance.randint(1, 28)} {chance.choice(MONTHS)} {chance.randint(2018, 2027)}"


def _person(chance: Random) -> Passage:
    name, age, job, city = person_name(chance), chance.randint(18, 80), chance.choice(JOBS), name_of(CITIES, chance)
    company = name_of(COMPANIES, chance)
    article = "an" if job[0] in "aeiou" else "a"
    text = chance.choice((
        f"{name} is {article} {job} from {city}. {name.split()[0]} is {age} years old and works for {company}.",
        f"My friend {name} is {age} and lives in {city}, where {name.split()[0]} works as {article} {job} at {company}.",
        f"{company} has hired {name}, {article} {job} from {city} who is {age} years old.",
        f"{name}, {age}, {job} at {company}, lives in {city}."))
    return Passage(text, {"name": name, "age": age, "job": job, "city": city, "company": company}, ("email", "phone", "hobby"))


def _contact(chance: Random) -> Passage:
    name = person_name(chance)
    email = f"{name.lower().replace(' ', '.')}@{chance.choice(('example.com', 'mail.org', 'post.net'))}"
    phone = f"555-{chance.randint(1000, 9999)}"
    street = f"{chance.randint(1, 99)} {chance.choice(STREETS)}"
    city = name_of(CITIES, chance)
    text = chance.choice((
        f"Please write to {name} at {email} or call {phone}. The address is {street}, {city}.",
        f"{name}, {street}, {city}. Phone: {phone}. Email: {email}",
        f"Hi, my name is {name}. I live at {street} in {city}. You can reach me at {phone} or {email}."))
    return Passage(text, {"name": name, "email": email, "phone": phone, "street": street, "city": city}, ("company", "age", "fax"))


def _product(chance: Random) -> Passage:
    product, color, cost = chance.choice(PRODUCTS), chance.choice(COLORS), price(chance)
    company, stock = name_of(COMPANIES, chance), chance.randint(2, 400)
    text = chance.choice((
        f"The {color} {product} by {company} costs {cost:.2f} dollars. There are {stock} in stock.",
        f"{company} sells a {product} in {color} for ${cost:.2f}. {stock} are left.",
        f"New at {company}: a {color} {product} for only {cost:.2f} dollars, {stock} available."))
    return Passage(text, {"product": product, "color": color, "price": cost, "brand": company, "stock": stock},
                   ("weight", "size", "rating"))


def _order(chance: Random) -> Passage:
    name, product, number = person_name(chance), chance.choice(PRODUCTS), chance.randint(2, 20)
    order, when, total = f"{chance.choice('ABCDEFGHK')}{chance.randint(1000, 9999)}", day(chance), price(chance)
    plural = product if product.endswith("s") else f"{product}s"
    text = chance.choice((
        f"Order {order}: {name} bought {number} {plural} on {when} for {total:.2f} dollars.",
        f"On {when}, {name} ordered {number} {plural}. The order number is {order} and the total is ${total:.2f}.",
        f"{name} placed order {order} on {when}: {number} {plural}, {total:.2f} dollars in all."))
    fields = {"order_id": order, "customer": name, "product": plural, "quantity": number, "date": when, "total": total}
    return Passage(text, fields, ("address", "discount", "status"))


def _event(chance: Random) -> Passage:
    topic, city = chance.choice(TOPICS), name_of(CITIES, chance)
    hour, when, place = f"{chance.randint(8, 20)}:{chance.choice(('00', '15', '30', '45'))}", day(chance), chance.choice(STREETS)
    kind = chance.choice(("workshop", "concert", "meeting", "talk", "course", "festival", "party"))
    title = f"{topic} {kind}"
    text = chance.choice((
        f"The {title} takes place on {when} at {hour} in {city}, {place}.",
        f"Join us for the {title} in {city} on {when}! We meet at {hour} at {place}.",
        f"{city}: {title}, {when}, {hour}, {place}."))
    return Passage(text, {"title": title, "date": when, "time": hour, "city": city, "place": place}, ("price", "organizer", "email"))


def _meeting(chance: Random) -> Passage:
    name, weekday, topic = person_name(chance), chance.choice(DAYS), chance.choice(TOPICS)
    hour, room = f"{chance.randint(8, 17)}:{chance.choice(('00', '30'))}", f"room {chance.randint(1, 40)}"
    text = chance.choice((
        f"Let's meet on {weekday} at {hour} in {room}. {name} will talk about {topic}.",
        f"{name} invites you to a meeting about {topic} on {weekday} at {hour}, {room}.",
        f"Reminder: {weekday}, {hour}, {room}: {topic} with {name}."))
    return Passage(text, {"day": weekday, "time": hour, "room": room, "speaker": name, "topic": topic}, ("duration", "phone"))


def _trip(chance: Random) -> Passage:
    name, (start, goal) = person_name(chance), chance.sample(CITIES, k=2)
    flight, when = f"{chance.choice(('LX', 'BA', 'AF', 'QF', 'KL'))}{chance.randint(100, 999)}", day(chance)
    seat = f"{chance.randint(1, 40)}{chance.choice('ABCDEF')}"
    text = chance.choice((
        f"{name} flies from {start} to {goal} on {when} with flight {flight}, seat {seat}.",
        f"Flight {flight} from {start} to {goal}, {when}. Passenger: {name}. Seat: {seat}.",
        f"On {when} {name} takes flight {flight} from {start} to {goal} and sits in seat {seat}."))
    return Passage(text, {"passenger": name, "from": start, "to": goal, "date": when, "flight": flight, "seat": seat}, ("gate", "price"))


KINDS: tuple[tuple[str, Callable[[Random], Passage]], ...] = (
    ("people", _person), ("contacts", _contact), ("products", _product), ("orders", _order), ("events", _event), ("meetings", _meeting),
    ("trips", _trip),
)
