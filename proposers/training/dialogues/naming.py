"""What a function and its parameters are called in one dialogue: names differ, so that a call must be read off the tools on offer."""

from dataclasses import dataclass
from random import Random
from typing import Any

from ..corpus import Message
from .everyday_actions import Action
from .functions_on_offer import Tool, call, function

OTHER_VERBS = {
    "get": ("fetch", "lookup", "check", "read", "current"), "set": ("start", "create", "make", "change"),
    "search": ("find", "query", "lookup"), "find": ("search", "get", "suggest"), "send": ("write", "post", "deliver"),
    "create": ("add", "new", "make"), "add": ("create", "insert", "put"), "list": ("show", "get", "read"),
    "convert": ("change", "calculate"), "play": ("start", "stream"), "turn": ("switch", "power"), "track": ("trace", "follow"),
    "book": ("reserve", "order"), "define": ("explain", "lookup"), "delete": ("remove", "erase"), "read": ("open", "load"),
    "call": ("dial", "phone"), "calculator": ("calculate", "evaluate", "math", "compute"),
    "translate": ("translator", "translate_text", "to_language"),
}
OTHER_PARAMETERS = {
    "city": ("location", "place", "town"), "query": ("q", "text", "search", "keyword"), "to": ("recipient", "target", "receiver"),
    "path": ("file", "filename", "name"), "minutes": ("duration", "length", "duration_minutes"), "day": ("date", "weekday", "when"),
    "time": ("at", "start_time", "hour"), "body": ("text", "message", "content"), "contact": ("to", "person", "recipient"),
    "text": ("message", "content", "input"), "expression": ("formula", "input", "expr"), "language": ("target_language", "lang", "to"),
    "title": ("name", "subject", "event"), "item": ("product", "name", "food"), "song": ("title", "track", "name"),
    "room": ("location", "place", "area"), "degrees": ("temperature", "value", "celsius"), "company": ("symbol", "name", "firm"),
    "people": ("guests", "persons", "party_size"), "dish": ("food", "cuisine", "meal"), "origin": ("from", "start", "departure"),
    "destination": ("to", "goal", "arrival"), "number": ("id", "code", "no"), "max_price": ("limit", "price", "budget"),
    "country": ("name", "nation", "state"), "word": ("term", "text", "query"), "amount": ("value", "sum", "money"),
    "from": ("source", "from_currency", "base"), "value": ("amount", "number", "quantity"), "units": ("conversion", "from_to"),
    "color": ("colour", "shade"), "owner": ("user", "person"),
}


@dataclass(frozen=True)
class Naming:
    """What an action and its parameters are called in one dialogue, so that names are read in the prompt."""

    function: str
    parameters: dict[str, str]       # by Parameter.name

    def call(self, values: dict[str, Any], number: int = 1) -> Message:
        return call(self.function, {self.parameters[name]: value for name, value in values.items()}, number)

    def tool(self, action: Action, chance: Random) -> Tool:
        """`action` under these names, as one of the tools on offer."""
        described = chance.random() < 0.15
        properties: dict[str, Any] = {}
        for one in action.parameters:
            description = {"description": f"The {one.name}"} if described else {}
            properties[self.parameters[one.name]] = {"type": one.type, **description}
        required = [self.parameters[one.name] for one in action.parameters if one.required]
        return function(self.function, chance.choice(action.descriptions), properties, required)


def naming_of(action: Action, chance: Random) -> Naming:
    """Its own names in half the dialogues, else others that mean the same."""
    own = {one.name: one.name for one in action.parameters}
    if chance.random() < 0.5:
        return Naming(action.name, own)
    verb, *rest = action.name.split("_")
    parts = [chance.choice(OTHER_VERBS.get(verb, (verb,))), *rest]
    name = chance.choice(("_".join(parts), "_".join(parts), parts[0] + "".join(part.capitalize() for part in parts[1:]),
                          "_".join([*rest, verb])))
    names = {one: chance.choice(OTHER_PARAMETERS.get(one, (one,))) for one in own}
    return Naming(name, names if len(set(names.values())) == len(names) else own)
