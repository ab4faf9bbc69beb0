"""JSON schemas as pydantic, zod and OpenAPI write them, in the words that the grammar library enforces, which knows fewer.

What is said stays the same, or becomes narrower where the library is too kind: its dates have a year 0, 29 February of any year and a
61st second, which no client's date type reads.
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any
from urllib.parse import quote, unquote

from .errors import InvalidGrammar

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-fA-F]"
_UUID = f"^{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-%s{_HEX}{{3}}-{_HEX}{{12}}$"
_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$", "uuid": _UUID % (_HEX, _HEX)}
_PATTERNS |= {f"uuid{version}": _UUID % (version, "[89abAB]") for version in range(1, 9)}  # pydantic's
_FORMATS = frozenset(
    "date time date-time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference uri-template uuid "
    "json-pointer relative-json-pointer regex".split()
)
"""Those of JSON Schema. Others (password, path, int64) are hints for people and programs, which nothing checks."""
_CONSTANTS = frozenset(("const", "enum"))
_NO_SCHEMAS = _CONSTANTS | {"default", "examples", "example"}
_BY_NAME = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
_HINTS = frozenset("type title description default examples $comment deprecated".split())
_PATTERN_PART = re.compile(r"\\(?P<escape>.)|\[(?:\\.|[^\]\\])*\]?|(?P<around>\(\?<?[=!])", re.DOTALL)
_OUTSIDE = frozenset("$defs definitions $id $schema".split())
"""They stay where they are when a schema is moved."""
_ASIDE = "$moved"
_MAX_REFS = 16
_MAX_NAMES = 10_000
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LEAST, _MOST = 1024 - 2**63, 2**63 - 1
"""The widest bounds of integers that the library can write."""
_EXACT = 2**53
"""Integers from here on are not all numbers to the library: it has doubles, and rounds."""
_UP, _DOWN = Context(15, ROUND_CEILING), Context(15, ROUND_FLOOR)
"""With as many digits as come back from a double."""
_LITTLE = Decimal("1e-15")


def enforceable(schema: Any, strict: bool, param: str = "grammar", root: Any = None) -> Any:
    """A schema in its new words. strict: False drops patterns and numbers that no grammar can follow instead of having them refused.

    schema: nested at most as deep as GrammarSpec lets through. param: for errors. root: the document that it stands in, if that is
    another. Raises InvalidGrammar.
    """
    if isinstance(schema, bool):
        return {} if schema else {"allOf": [False]}
    try:
        return _Document(schema if root is None else root, strict).whole(schema)
    except ValueError as error:
        raise InvalidGrammar(str(error), param) from None


def referred(ref: str, root: Any) -> Any:
    """What a reference to a place of its own document, as "#/$defs/point", refers to; None if there is nothing."""
    found = root
    for part in unquote(ref).split("/")[1:]:
        match found:
            case dict():
                found = found.get(part.replace("~1", "/").replace("~0", "~"))
            case list() if part.isdecimal() and len(part) < 10:
                found = next(iter(found[int(part) :]), None)
            case _:
                return None
    return found


class _Document:
    """A schema and what its references mean."""

    def __init__(self, root: Any, strict: bool) -> None:
        self._root, self._strict = root, strict
        name = root.get("$id") if isinstance(root, dict) else None
        self._name = name.rstrip("#") if isinstance(name, str) else ""
        self._new: dict[int, Any] = {}  # by the old one's identity
        self._referring: list[dict[str, Any]] = []  # whose $ref is still the old one
        self._aside: dict[int, tuple[str, Any]] = {}  # schemas that do not stand where they are referred to
        self._num_names = 0

    def whole(self, schema: Any) -> Any:
        new = self.rewritten(schema)
        for referring in self._referring:  # which may grow
            ref = referring["$ref"]
            if (found := self._found(ref, self._root)) is not None:
                target = self._new[id(found)] if id(found) in self._new else self.rewritten(found)
                ref = ref if self._found(ref, new) is target else self._put_aside(target)
            referring["$ref"] = quote(ref, safe="!#$%&'()*+,/:;=?@~")
        return new | {_ASIDE: dict(self._aside.values())} if self._aside else new

    def _found(self, ref: str, root: Any) -> Any:
        """What stands there; None if that is nothing of this document."""
        place = ref.removeprefix(self._name)
        return referred(place, root) if place[:2] in ("", "#", "#/") else None

    def _put_aside(self, target: Any) -> str:
        """The reference to a new schema there."""
        name, _ = self._aside.setdefault(id(target), (str(len(self._aside)), target))
        return f"#/{_ASIDE}/{name}"

    def rewritten(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.rewritten(entry) for entry in schema]
        if not isinstance(schema, dict):
            return schema
        new = {key: self._value(key, value) for key, value in schema.items()}
        if new.get("uniqueItems") is False:
            del new["uniqueItems"]
        if isinstance(new.get("$ref"), str):
            self._referring.append(new)
        _write_bounds(new)
        self._write_constants(new)
        self._write_text(new)
        if isinstance(new.get("oneOf"), list):
            self._write_choice(new)
        if "propertyNames" in new:
            self._write_names(new, self._meant(new["propertyNames"]))
        self._new[id(schema)] = new = _with_null(new) if new.pop("nullable", False) is True else new
        return new

    def _value(self, key: str, value: Any) -> Any:
        if key in _BY_NAME and isinstance(value, dict):
            return {name: self.rewritten(inner) for name, inner in value.items()}
        return value if key in _NO_SCHEMAS else self.rewritten(value)

    def _write_constants(self, new: dict[str, Any]) -> None:
        """Without those that the library would round: an id of many digits would become another one."""
        for key in _CONSTANTS & new.keys():
            if (number := _inexact(new[key])) is not None:
                if self._strict:
                    raise ValueError(f"{number} has more digits than {key} can ask for; make it a string")
                del new[key]

    def _write_text(self, new: dict[str, Any]) -> None:
        """Formats and patterns of strings."""
        if isinstance(named := new.get("format"), str):
            if named in _PATTERNS and "pattern" not in new:
                new["pattern"] = _PATTERNS[named]
                del new["format"]
            elif named not in _FORMATS:
                del new["format"]
        if not self._strict and isinstance(pattern := new.get("pattern"), str) and _looks_around(pattern):
            del new["pattern"]

    def _write_choice(self, new: dict[str, Any]) -> None:
        """oneOf, so that at most one of its schemas can hold: by the key that OpenAPI tells them apart by, or by their types."""
        match new.get("discriminator"):
            case {"propertyName": str(key)}:
                for schema in new["oneOf"]:
                    _require(schema, key)
            case _:
                kinds = [self._kinds(schema) for schema in new["oneOf"]]
                if "anyOf" not in new and sum(map(len, kinds)) == len(frozenset().union(*kinds)) and all(kinds):
                    new["anyOf"] = new.pop("oneOf")

    def _write_names(self, new: dict[str, Any], names: Any) -> None:
        """Properties in place of propertyNames, where those say the same."""
        if names is True or (isinstance(names, dict) and names.keys() <= _HINTS and names.get("type", "string") == "string"):
            del new["propertyNames"]
            return
        if not isinstance(names, dict) or "patternProperties" in new:
            return
        described, others = new.get("properties", {}), new.get("additionalProperties", True)
        keys = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(keys, list) and isinstance(described, dict):
            self._num_names += len(keys)
            if self._num_names > _MAX_NAMES:
                raise ValueError(f"propertyNames list more than {_MAX_NAMES:,} names")
            if isinstance(others, dict):
                others = {"$ref": self._put_aside(others)}
            new["properties"] = {key: described.get(key, others) for key in keys if isinstance(key, str)}
        elif "properties" not in new and (pattern := _pattern_of(names)):
            new["patternProperties"] = {pattern: others}
        else:
            return
        new["additionalProperties"] = False
        del new["propertyNames"]

    def _kinds(self, schema: Any) -> frozenset[str]:
        """The JSON types that a schema allows; none if that is not plain."""
        meant = self._meant(schema)
        kinds = meant.get("type") if isinstance(meant, dict) else None
        named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        return frozenset("number" if kind == "integer" else str(kind) for kind in named)

    def _meant(self, schema: Any) -> Any:
        """What a schema that is a reference refers to."""
        for _ in range(_MAX_REFS):
            match schema:
                case {"$ref": str(ref)} if "type" not in schema:
                    schema = self._found(ref, self._root)
                case _:
                    break
        return schema


def _write_bounds(new: dict[str, Any]) -> None:
    """Bounds of numbers a little further in, where the library would let others pass. Raises ValueError for those beyond its integers."""
    for inclusive, exclusive in (_LOW, _HIGH):
        if isinstance(excluded := new.get(exclusive), bool):  # as OpenAPI 3.0 has it
            del new[exclusive]
            if excluded and inclusive in new:
                new[exclusive] = new.pop(inclusive)
    bounds = {name: new[name] for name in (*_LOW, *_HIGH) if name in new}
    if not all(map(_is_number, bounds.values())):
        return  # which the library refuses
    kinds = new.get("type")
    is_integer = isinstance(kinds, (str, list)) and "integer" in kinds and "number" not in kinds
    for names, opposite, up in ((_LOW, _HIGH, True), (_HIGH, _LOW, False)):
        inclusive, exclusive = names
        across = [bounds[name] for name in opposite if name in bounds]
        for name in names:
            if name in bounds:
                bound, strictly = bounds[name], name == exclusive
                first = _first_integer(bound, up, strictly) if is_integer else _first_number(bound, up, strictly, across)
                if first != bound:
                    del new[name]
                    new[inclusive] = (max if up else min)(first, new.get(inclusive, first))


def _inexact(value: Any) -> float | None:
    """A whole number in a value that comes out of the library as another one, if there is any."""
    match value:
        case dict() | list():
            inner = value.values() if isinstance(value, dict) else value
            return next((found for one in inner if (found := _inexact(one)) is not None), None)
        case int() | float() if abs(value) > _MOST or (abs(value) >= _EXACT and int(float(value)) != value):
            return value
        case _:
            return None


def _is_number(bound: Any) -> bool:
    return math.isfinite(bound) if isinstance(bound, float) else isinstance(bound, int) and not isinstance(bound, bool)


def _first_integer(bound: float, up: bool, strictly: bool) -> float:
    """The first one within a bound that is a double, too; the bound itself where that is near enough to 0 to be one."""
    if abs(bound) < _EXACT:
        return bound
    first = (math.floor(bound) + 1 if strictly else math.ceil(bound)) if up else (math.ceil(bound) - 1 if strictly else math.floor(bound))
    if up and first > _MOST:
        raise ValueError(f"no integer above {_MOST} can be asked for")
    if not _LEAST < first < _MOST:
        return max(first, _LEAST) if up else min(first, _MOST)
    double = float(first)
    if (double < first) if up else (double > first):
        double = math.nextafter(double, math.inf if up else -math.inf)
    return int(double)


def _first_number(bound: float, up: bool, strictly: bool, across: Sequence[float]) -> float:
    """The first one within a bound that has as many digits as come back from a double; the bound itself where it has no more.

    Behind a whole number that is excluded it is the next one, if the bound across is less than 1 away: the library would let it in.
    """
    widest = _LEAST if up else -_LEAST
    if (bound < widest) if up else (bound > widest):
        return widest
    exact, inward = Decimal(repr(bound)), _UP if up else _DOWN
    if strictly and exact == int(exact) and any(abs(Decimal(repr(other)) - exact) < 1 for other in across):
        exact += _LITTLE if up else -_LITTLE
    first = inward.plus(exact)
    return bound if first == Decimal(repr(bound)) else float(first)


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """What OpenAPI 3.0 means by nullable. Within the schema where that can be said."""
    null = {"type": "null"}
    for key, added in (("enum", None), ("anyOf", null), ("type", "null")):
        choices = [schema[key]] if isinstance(schema.get(key), str) else schema.get(key)
        if isinstance(choices, list) and added not in choices:
            schema[key] = [*choices, added]
    if not schema.keys() & {"$ref", "allOf", "oneOf", "const"}:
        return schema
    return {key: schema.pop(key) for key in _OUTSIDE & schema.keys()} | {"anyOf": [schema, null]}


def _require(schema: Any, key: str) -> None:
    required = schema.get("required", []) if isinstance(schema, dict) else None
    if isinstance(required, list) and key not in required:
        schema["required"] = [*required, key]


def _pattern_of(names: Mapping[str, Any]) -> str:
    """What strings of a schema look like, if a pattern, a format or their length alone says it; else ""."""
    match {key: value for key, value in names.items() if key not in _HINTS}:
        case {"pattern": str(pattern), **rest} if not rest:
            return pattern
        case {**said} if said and said.keys() <= {"minLength", "maxLength"} and all(isinstance(length, int) for length in said.values()):
            return f"^[\\s\\S]{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$"
        case _:
            return ""


def _looks_around(pattern: str) -> bool:
    """Whether a pattern looks at text that it does not take, or back at what it took: no finite automaton does."""
    return any(part["around"] or (part["escape"] or "x") in "bBk123456789" for part in _PATTERN_PART.finditer(pattern))
