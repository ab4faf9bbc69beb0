"""JSON schemas of many kinds, each decided by one seed. Small enough that a model which says anything fills one in a few hundred tokens."""

import random
from typing import Any

KEYS = ["name", "id", "größe", "价格", "is ok", 'a "quoted" key', "tags", "x", "émoji 😀", "kind", "next", "value"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]{0,4}( [A-Z])?$", r"^\d{3}-\d{2}$", "^(red|green|blue)$", "^0x[0-9a-f]{1,4}$", "^[äöü]{1,3}$"]
CONSTANTS: list[Any] = [None, True, 7, -2.5, "on", "größer 😀", [1, "two"], {"deep": {"er": [None]}}, "", 'quote " and \\ back']


def json_schema(seed: int) -> dict[str, Any]:
    """A closed schema: whatever is not described is forbidden, unless a small additional value is allowed."""
    dice = random.Random(seed)
    kind = seed % 6
    if kind == 0:
        return _recursive(dice)
    if kind == 1:
        return _with_definitions(dice)
    if kind == 2:
        return _array(dice, 2)
    if kind == 3:
        return {"anyOf": [_object(dice, 2), _object(dice, 1), _leaf(dice)]}
    return _object(dice, 2)


def _any(dice: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and dice.random() < 0.5:
        return _object(dice, depth - 1) if dice.random() < 0.6 else _array(dice, depth - 1)
    if dice.random() < 0.15:
        return {"anyOf": [_leaf(dice), _leaf(dice)]}
    return _leaf(dice)


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    keys = dice.sample(KEYS, dice.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {key: _any(dice, depth) for key in keys}}
    schema["required"] = [key for key in keys if dice.random() < 0.6]
    schema["additionalProperties"] = False
    if dice.random() < 0.15:  # a map
        schema = {"type": "object", "additionalProperties": _leaf(dice), "maxProperties": 2}
    return schema


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _any(dice, depth), "minItems": low, "maxItems": low + dice.randint(0, 2)}
    if dice.random() < 0.25:
        first = [_leaf(dice) for _ in range(dice.randint(1, 2))]
        schema = {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    return schema


def _leaf(dice: random.Random) -> dict[str, Any]:
    match dice.randrange(9):
        case 0:
            low = dice.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)}
        case 1:
            low = dice.choice([-1.5, 0, 0.25])
            return {"type": "number", "minimum": low, dice.choice(["maximum", "exclusiveMaximum"]): low + dice.choice([0.75, 10, 1e3])}
        case 2:
            return {"type": "boolean"} if dice.random() < 0.6 else {"type": ["boolean", "null"]}
        case 3:
            return {"enum": dice.sample(CONSTANTS, dice.randint(1, 4))}
        case 4:
            return {"const": dice.choice(CONSTANTS)}
        case 5:
            return {"type": "string", "pattern": dice.choice(PATTERNS)}
        case 6:
            return {"type": "string", "format": dice.choice(FORMATS)}
        case 7:
            low = dice.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + dice.randint(0, 8)}
        case _:
            return {"type": "null"}


def _recursive(dice: random.Random) -> dict[str, Any]:
    """A list or tree of itself; it may end at once."""
    node = _object(dice, 0)
    if "properties" not in node:
        node = {"type": "object", "properties": {"value": _leaf(dice)}, "additionalProperties": False}
    node["properties"]["next"] = dice.choice([{"$ref": "#"}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}])
    if dice.random() < 0.3:
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    node["required"] = [key for key in node.get("required", []) if key != "next"]
    return node


def _with_definitions(dice: random.Random) -> dict[str, Any]:
    schema = _object(dice, 1)
    names = list(schema.get("properties", {}))
    for name in names[:2]:
        schema["properties"][name] = {"$ref": "#/$defs/part"}
    return schema | {"$defs": {"part": _any(dice, 1)}}
