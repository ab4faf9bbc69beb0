"""Kinds of things that have properties: the schema of each, how a value is drawn, and how a text tells it. Knows no question."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .passages import day, person_name, price
from .vocabulary import (
    CITIES,
    COLORS,
    COMPANIES,
    COUNTRIES,
    DAYS,
    FIRST_NAMES,
    FOODS,
    HOBBIES,
    JOBS,
    LANGUAGES,
    LAST_NAMES,
    PRODUCTS,
    STREETS,
    TOPICS,
    name_of,
)

Schema = dict[str, Any]


@dataclass(frozen=True)
class Property:
    """A field a kind of object may have: its schema, how its value is drawn, and how a text tells it."""

    name: str
    schema: Schema
    draw: Callable[[Random], Any]
    told: str                        # with {value}


@dataclass(frozen=True)
class Kind:
    title: str
    properties: tuple[Property, ...]


def _one_of(name: str, words: tuple[str, ...], told: str) -> Property:
    return Property(name, {"type": "string"}, lambda chance: chance.choice(words), told)


def _named(name: str, names: tuple[str, ...], told: str) -> Property:
    return _string(name, lambda chance: name_of(names, chance), told)


def _string(name: str, draw: Callable[[Random], str], told: str) -> Property:
    return Property(name, {"type": "string"}, draw, told)


def _enum(name: str, words: tuple[str, ...], told: str) -> Property:
    return Property(name, {"type": "string", "enum": list(words)}, lambda chance: chance.choice(words), told)


def _integer(name: str, low: int, high: int, told: str) -> Property:
    return Property(name, {"type": "integer"}, lambda chance: chance.randint(low, high), told)


def _number(name: str, told: str) -> Property:
    return Property(name, {"type": "number"}, price, told)


def _boolean(name: str, told: str) -> Property:
    return Property(name, {"type": "boolean"}, lambda chance: chance.random() < 0.5, told)


def _array(name: str, words: tuple[str, ...], told: str) -> Property:
    return Property(name, {"type": "array", "items": {"type": "string"}}, lambda chance: chance.sample(words, k=chance.randint(2, 4)), told)


def _object(name: str, parts: tuple[Property, ...], told: str) -> Property:
    schema = {"type": "object", "properties": {part.name: part.schema for part in parts}}
    return Property(name, schema, lambda chance: {part.name: part.draw(chance) for part in parts}, told)


def _email(chance: Random) -> str:
    host = chance.choice(("example.com", "mail.org", "post.net"))
    return f"{chance.choice(FIRST_NAMES).lower()}.{chance.choice(LAST_NAMES).lower()}@{host}"


def _phone(chance: Random) -> str:
    return f"555-{chance.randint(1000, 9999)}"


def _time(chance: Random) -> str:
    return f"{chance.randint(7, 21):02}:{chance.choice(('00', '15', '30', '45'))}"


def _code(chance: Random) -> str:
    return f"{chance.choice('ABCDEFGHK')}{chance.randint(1000, 9999)}"


ADDRESS = _object("address", (_one_of("street", STREETS, ""), _named("city", CITIES, "")), "the address is {value}.")

KINDS = (
    Kind("person", (
        _string("name", person_name, "the name is {value}."), _integer("age", 18, 90, "the age is {value}."),
        _one_of("job", JOBS, "the job is {value}."), _named("city", CITIES, "the city is {value}."),
        _string("email", _email, "the email is {value}."),
        _boolean("married", "married: {value}."), _array("hobbies", HOBBIES, "the hobbies are {value}."),
        _array("languages", LANGUAGES, "the languages are {value}."), ADDRESS)),
    Kind("product", (
        _one_of("name", PRODUCTS, "the product is a {value}."), _number("price", "the price is {value}."),
        _one_of("color", COLORS, "the color is {value}."),
        _enum("size", ("small", "medium", "large"), "the size is {value}."), _integer("stock", 0, 500, "there are {value} in stock."),
        _boolean("available", "available: {value}."), _named("brand", COMPANIES, "the brand is {value}."),
        _array("tags", TOPICS, "the tags are {value}."))),
    Kind("order", (
        _string("order_id", _code, "the order is {value}."), _string("customer", person_name, "the customer is {value}."),
        _array("items", PRODUCTS, "the items are {value}."), _integer("quantity", 1, 30, "the quantity is {value}."),
        _number("total", "the total is {value} dollars."), _enum("status", ("open", "paid", "shipped", "cancelled"),
                                                                 "the status is {value}."),
        _string("date", day, "the date is {value}."), _boolean("gift", "gift: {value}."),
        _object("shipping", (_named("city", CITIES, ""), _named("country", COUNTRIES, "")), "shipping to {value}."))),
    Kind("event", (
        _one_of("title", TOPICS, "the event is about {value}."), _named("city", CITIES, "the city is {value}."),
        _string("date", day, "the date is {value}."),
        _string("time", _time, "it starts at {value}."), _integer("guests", 5, 300, "there are {value} guests."),
        _boolean("online", "online: {value}."), _enum("type", ("talk", "workshop", "concert", "party"), "the type is {value}."),
        _array("speakers", FIRST_NAMES, "the speakers are {value}."))),
    Kind("recipe", (
        _one_of("dish", FOODS, "the dish is {value}."), _integer("minutes", 5, 120, "it takes {value} minutes."),
        _integer("servings", 1, 12, "it serves {value}."),
        _array("ingredients", FOODS, "the ingredients are {value}."),
        _enum("difficulty", ("easy", "medium", "hard"), "the difficulty is {value}."),
        _boolean("vegetarian", "vegetarian: {value}."))),
    Kind("book", (
        _one_of("title", TOPICS, "the book is about {value}."), _string("author", person_name, "the author is {value}."),
        _integer("year", 1900, 2026, "the year is {value}."), _integer("pages", 50, 900, "it has {value} pages."),
        _one_of("language", LANGUAGES, "the language is {value}."), _number("price", "the price is {value} dollars."),
        _boolean("borrowed", "borrowed: {value}."), _array("genres", TOPICS, "the genres are {value}."))),
    Kind("company", (
        _named("name", COMPANIES, "the company is {value}."), _named("city", CITIES, "it is in {value}."),
        _integer("employees", 2, 9000, "it has {value} employees."),
        _integer("founded", 1850, 2025, "it was founded in {value}."), _array("products", PRODUCTS, "it sells {value}."),
        _object("contact", (_string("email", _email, ""), _string("phone", _phone, "")), "the contact is {value}."))),
    Kind("task", (
        _one_of("topic", TOPICS, "the task is about {value}."), _named("assignee", FIRST_NAMES, "{value} does it."),
        _enum("priority", ("low", "normal", "high"), "the priority is {value}."), _one_of("due", DAYS, "it is due on {value}."),
        _boolean("done", "done: {value}."), _integer("hours", 1, 40, "it takes {value} hours."),
        _array("people", FIRST_NAMES, "the people are {value}."))),
    Kind("weather report", (
        _named("city", CITIES, "the city is {value}."), _integer("temperature", -15, 40, "the temperature is {value} degrees."),
        _enum("sky", ("sunny", "cloudy", "rainy", "snowy"), "the sky is {value}."), _number("wind_kmh", "the wind is {value} km/h."),
        _integer("humidity", 10, 99, "the humidity is {value} percent."), _boolean("warning", "warning: {value}."))),
)

NOUNS = (
    "animal", "account", "article", "ball", "bird", "boat", "bridge", "camp", "channel", "cloud", "device", "dog", "engine", "farm",
    "flower", "forest",
    "garden", "group", "house", "island", "lake", "letter", "machine", "market", "member", "model", "museum", "note", "park", "plant",
    "player", "pool",
    "road", "school", "server", "ship", "song", "store", "team", "test", "tower", "train", "tree", "user", "village", "vehicle", "zone")
STRINGS = (
    "name", "label", "owner", "category", "region", "code", "brand", "color", "leader", "material", "kind", "place", "style", "source",
    "state", "theme")
WHOLES = ("count", "level", "rank", "score", "seats", "weight", "height", "points", "floors", "votes", "users", "limit", "width", "version",
          "rooms")
NUMBERS = ("ratio", "cost", "rating", "speed", "distance", "amount", "average", "fee")
TRUTHS = ("active", "visible", "enabled", "public", "open", "verified", "new", "locked", "clean", "free")
ARRAYS = ("parts", "labels", "members", "colors", "cities", "keywords", "owners", "options")
WORDS = (*FIRST_NAMES, *CITIES, *COLORS, *COMPANIES, *PRODUCTS, *TOPICS)


def composed_kind(chance: Random) -> Kind:
    """A kind put together from plain nouns, so that names are read off the schema and not known by heart."""
    properties = [
        *(_named(name, WORDS, f"the {name} is {{value}}.") for name in chance.sample(STRINGS, k=3)),
        *(_integer(name, 1, 999, f"the {name} is {{value}}.") for name in chance.sample(WHOLES, k=2)),
        *(_number(name, f"the {name} is {{value}}.") for name in chance.sample(NUMBERS, k=1)),
        *(_boolean(name, f"{name}: {{value}}.") for name in chance.sample(TRUTHS, k=1)),
        *(_array(name, WORDS, f"the {name} are {{value}}.") for name in chance.sample(ARRAYS, k=1)),
    ]
    return Kind(chance.choice(NOUNS), tuple(chance.sample(properties, k=len(properties))))
