"""What the factbook says about a country, as short clean facts: how each is read from a page, asked for and told. Knows no dialogue."""

import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..corpus import Record


@dataclass(frozen=True)
class Fact:
    """One thing to know about a country: where it stands in a factbook page, how it is asked for, how it is told."""

    name: str                        # also its JSON field
    path: tuple[str, ...]
    questions: tuple[str, ...]       # with {country}
    sentence: str                    # with {country} and {value}


CAPITAL, AREA, POPULATION = "capital", "area", "population"

FACTS = (
    Fact(CAPITAL, ("Government", "Capital", "name"),
         ("What is the capital of {country}?", "Which city is the capital of {country}?", "Name the capital of {country}.",
          "Tell me the capital of {country}.", "Do you know the capital of {country}?", "What's the capital city of {country}?"),
         "The capital of {country} is {value}."),
    Fact("location", ("Geography", "Location"),
         ("Where is {country}?", "Where is {country} located?", "Where can I find {country} on a map?",
          "In which part of the world is {country}?",
          "Tell me where {country} is."),
         "{country} is in {value}."),
    Fact("climate", ("Geography", "Climate"),
         ("What is the climate of {country}?", "What is the weather like in {country}?", "What kind of climate does {country} have?",
          "Describe the climate of {country}.", "How is the climate in {country}?"),
         "The climate of {country} is {value}."),
    Fact("government", ("Government", "Government type"),
         ("What type of government does {country} have?", "How is {country} governed?", "What is the government of {country}?",
          "What kind of state is {country}?"),
         "The government of {country} is a {value}."),
    Fact(AREA, ("Geography", "Area", "total "),
         ("What is the area of {country}?", "How large is {country}?", "How big is {country}?",
          "How many square kilometres does {country} have?",
          "What is the size of {country}?"),
         "The area of {country} is {value}."),
    Fact(POPULATION, ("People and Society", "Population", "total"),
         ("What is the population of {country}?", "How many people live in {country}?", "How many inhabitants does {country} have?",
          "How big is the population of {country}?"),
         "The population of {country} is {value}."),
    Fact("languages", ("People and Society", "Languages", "Languages"),
         ("Which languages are spoken in {country}?", "What language do people speak in {country}?", "What are the languages of {country}?",
          "What do they speak in {country}?"),
         "People in {country} speak {value}."),
    Fact("currency", ("Economy", "Exchange rates", "Currency"),
         ("What is the currency of {country}?", "What money do they use in {country}?", "Which currency is used in {country}?",
          "How do I pay in {country}?"),
         "In {country} people pay with {value}."),
    Fact("borders", ("Geography", "Land boundaries", "border countries"),
         ("Which countries border {country}?", "What are the neighbours of {country}?", "Which countries are next to {country}?",
          "Who are the neighbours of {country}?", "What countries does {country} share a border with?"),
         "{country} borders {value}."),
    Fact("terrain", ("Geography", "Terrain"),
         ("What is the terrain of {country}?", "What does the land look like in {country}?", "Describe the terrain of {country}."),
         "The terrain of {country} is {value}."),
    Fact("highest_point", ("Geography", "Elevation", "highest point"),
         ("What is the highest point of {country}?", "What is the highest mountain in {country}?",
          "How high is the highest point of {country}?"),
         "The highest point of {country} is {value}."),
    Fact("coastline", ("Geography", "Coastline"),
         ("How long is the coastline of {country}?", "What is the length of the coast of {country}?",
          "How long is the coast of {country}?"),
         "The coastline of {country} is {value} long."),
    Fact("resources", ("Geography", "Natural resources"),
         ("What natural resources does {country} have?", "What are the natural resources of {country}?",
          "Which resources are found in {country}?"),
         "The natural resources of {country} are {value}."),
    Fact("crops", ("Economy", "Agricultural products"),
         ("What do farmers grow in {country}?", "What are the agricultural products of {country}?",
          "Which farm products come from {country}?"),
         "Farmers in {country} produce {value}."),
    Fact("industries", ("Economy", "Industries"),
         ("What are the main industries of {country}?", "Which industries does {country} have?", "What does {country} make?"),
         "The main industries of {country} are {value}."),
    Fact("flag_colors", ("Government", "National color(s)"),
         ("What are the national colors of {country}?", "Which colors stand for {country}?", "What colors does {country} use?"),
         "The national colors of {country} are {value}."),
    Fact("symbol", ("Government", "National symbol(s)"),
         ("What is the national symbol of {country}?", "Which symbol stands for {country}?", "Does {country} have a national symbol?"),
         "The national symbol of {country} is the {value}."),
    Fact("nationality", ("People and Society", "Nationality", "adjective"),
         ("What do you call people from {country}?", "What is the nationality of people from {country}?",
          "What is the adjective for {country}?"),
         "People from {country} are {value}."),
    Fact("internet_code", ("Communications", "Internet country code"),
         ("What is the internet country code of {country}?", "Which internet domain belongs to {country}?",
          "What is the top-level domain of {country}?"),
         "The internet country code of {country} is {value}."),
)
LISTED = ("languages", "borders", "resources", "crops", "industries", "flag_colors")
MOST_LISTED = 5
FULL_NAMES = {"The Dominican": "the Dominican Republic", "DRC": "the Democratic Republic of the Congo"}
LONGEST_VALUE = 110                  # characters; more is beyond a small model's memory


@dataclass(frozen=True)
class Country:
    """A country's name, with its article, and what is known of it."""

    record: Record
    name: str
    facts: dict[str, str]            # by Fact.name, each short enough for one sentence
    background: str


def read_countries(records: Iterable[Record]) -> Iterator[Country]:
    """The countries among factbook pages, by the name people use: "the Netherlands", "France"."""
    for record in records:
        page = json.loads(record.text)
        name = _text(page, ("Government", "Country name", "conventional short form"))
        name = FULL_NAMES.get(name, name)
        if name and name.lower() != "none" and not re.search("[(,]", name) and len(name) < 30:
            name = re.sub(r"^The ", "the ", name)
            if name.startswith(("United ", "Isle ")) or name.endswith(("Islands", "Netherlands", "Philippines", "Maldives")):
                name = f"the {name}"
            values = {fact.name: _clean(fact.name, _text(page, fact.path)) for fact in FACTS}
            facts = {key: value for key, value in values.items() if value and len(value) <= LONGEST_VALUE}
            yield Country(record, name, facts, _text(page, ("Introduction", "Background")))


def _text(page: Any, path: tuple[str, ...]) -> str:
    for step in (*path, "text"):
        page = page.get(step, {}) if isinstance(page, dict) else {}
    return html.unescape(re.sub(r"<[^>]+>", "", page)).strip() if isinstance(page, str) else ""


def _clean(name: str, value: str) -> str:
    """The first plain statement of a factbook entry: no remarks, no brackets, no years of estimates, no shares in percent."""
    value = re.sub(r"^(metropolitan|mainland|total|note|conventional)[\w ]*: ?", "", value)
    value = re.sub(r"\s*\([^)]*\)", "", value)
    if name == "borders":
        return _joined(re.sub(r"\s*\d[\d.,]* km.*", "", part).strip() for part in value.split(";"))
    if name == "location":
        value = re.sub("^(Caribbean|Middle East)", r"the \1", ",".join(value.split(";")[0].split(",")[:2]))
    if name == "currency":
        value = re.split(r" per | -", value)[0]
    if name == "highest_point":
        value = re.sub(r"(\d)$", r"\1 m", value)
    value = re.split(r"[;:]| - |\bnote\b", value)[0].strip(" ,-" if name == "internet_code" else " .,-")
    if name in LISTED:
        value = _joined(re.sub(r"\s+[\d.<>]+%?$", "", part).strip() for part in value.split(","))
    if value.startswith(("0 km", "continent")):
        return ""
    if name in (AREA, "coastline", POPULATION) and not value[:1].isdigit():
        return ""
    if name in ("climate", "terrain", "government") and not value[:1].islower():
        value = value[:1].lower() + value[1:]
    return value if value.lower() not in ("none", "na", "n/a", "negl", "negligible", "unknown", "other", "landlocked", "") else ""


def _joined(parts: Iterable[str]) -> str:
    vague = ("other", "unspecified", "none", "numerous")
    some = [re.sub(r"^and ", "", part) for part in parts if part and not part.lower().startswith(vague)]
    return ", ".join(some[:MOST_LISTED])


def tell(fact: Fact, country: Country) -> str:
    """The fact in a sentence."""
    value = country.facts[fact.name]
    if fact.name in LISTED:
        value = " and ".join(value.rsplit(", ", 1))
    sentence = fact.sentence.format(country=country.name, value=value)
    sentence = re.sub(r" is (varies|ranges)\b", r" \1", re.sub(r" the (a|an|the) ", r" \1 ", sentence))
    sentence = re.sub(r"\ba (?=[aeio])", "an ", sentence)
    return capitalised(sentence)


def capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def json_value(name: str, value: str) -> str | list[str] | int:
    """The fact as JSON has it: a list where there are several, a number for people."""
    if name in LISTED:
        return value.split(", ")
    if name == POPULATION and re.fullmatch(r"[\d,]+", value):
        return int(value.replace(",", ""))
    return value
