"""How values that fit a schema are written in formats whose texts have no quotes of JSON: rules of grammars."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...engine.json_dialects import referred

MAX_COUNTED = 1_000
"""Characters of a text that a grammar counts."""


class ValueRules(ABC):
    """Expressions of values for one function, whose schema is `root`. The rules that they need are added to `rules`."""

    def __init__(self, root: Mapping[str, Any], rules: list[str]) -> None:
        self.root = root
        self._rules = rules
        self._of_place: dict[str, str] = {}

    @abstractmethod
    def text(self, length: str) -> str:
        """Of a text of so many characters, as a regular expression says it."""

    @abstractmethod
    def constant(self, value: Any) -> str: ...

    @abstractmethod
    def typed(self, schema: Mapping[str, Any], kind: str) -> str:
        """Of a value of this type, which is not string."""

    @abstractmethod
    def anything(self) -> str: ...

    def value(self, schema: Any) -> str:
        match schema:
            case {"nullable": bool(nullable), **rest}:
                return self._one_of(self.value, [rest, {"type": "null"}] if nullable else [rest])
            case {"enum": [_, *_] as choices}:
                return self._one_of(self.constant, choices)
            case {"const": value}:
                return self.constant(value)
            case {"anyOf": [_, *_] as options} | {"oneOf": [_, *_] as options} | {"allOf": [_] as options}:
                return self._one_of(self.value, options)
            case {"type": [_, *_] as kinds}:
                return self._one_of(lambda kind: self.value({**schema, "type": kind}), list(dict.fromkeys(map(str, kinds))))
            case {"$ref": str(place)} if place == "#" or place.startswith("#/"):
                if place not in self._of_place:
                    self._of_place[place] = name = self.add("")
                    number = int(name.removeprefix("value_"))
                    self._rules[number] = f"{name}: {self.value(referred(place, self.root))}"
                return self._of_place[place]
            case {"type": "string"}:
                return self.text(_lengths(schema))
            case {"type": str(kind)}:
                return self.typed(schema, kind)
            case _:
                return self.anything()

    def add(self, expression: str) -> str:
        """The name of a rule of this expression."""
        name = f"value_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _one_of(self, written: Callable[[Any], str], options: Sequence[Any]) -> str:
        return f"({' | '.join(map(written, options))})"


def text_rules(name: str, length: str, marker: str, end: str, barred: Sequence[str] = ()) -> str:
    """Rules of a text and its end, which the first `marker` in it makes one. end: how the grammar writes it. barred: what else is
    none of the text's."""
    free = f"{name.upper()}_FREE"
    spelled = end.startswith('"')  # else a token begins it, which is none of the text's
    ending = f"{name}: {name.upper()}_ALL\n{name.upper()}_ALL: {free} {end}\n" if spelled else f"{name}: {free} {end}\n"
    return f"{ending}{free}: {without((marker, *barred), length)}\n"


def without(markers: Sequence[str], length: str = "*") -> str:
    """An expression of texts in which none of these stands."""
    words = "|".join(re.escape(marker).replace("/", r"\/") for marker in markers)
    return f"/(?s:.{length})/ & ~/(?s:.*)({words})(?s:.*)/"


def _lengths(schema: Mapping[str, Any]) -> str:
    """How many characters a text may have, as regular expressions say it: "*" for any number, and where it takes long to count."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if type(least) is int and least > 0 else 0
    if type(most) is int and least <= most <= MAX_COUNTED:
        return f"{{{least},{most}}}"
    return f"{{{least},}}" if 0 < least <= MAX_COUNTED else "*"
