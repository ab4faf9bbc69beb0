"""What every format of tool calls is: a scanner, the markers it looks for, ids, and a grammar for calls that must come.

Also reads one call that is spelled as a JSON object, which most formats hold in some frame.
"""

import json
import secrets
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...engine.errors import InvalidGrammar
from ...engine.grammar_spec import MAX_TRUSTED_BYTES
from ...engine.json_dialects import enforceable
from .scanner import MAX_HELD, Arguments, CallBegun, Content, Scanner, Waiting

MAX_NAME = 256
MAX_KEY = 64
MAX_PARALLEL_CALLS = 16
"""Calls that a grammar lets a model write in one answer."""

Tool = dict[str, Any]
"""A function on offer, as the model's template takes it: {"type": "function", "function": {name, description?, parameters?}}."""


class ToolParser(Scanner):
    """A format. One parser reads one answer; `tools` are the functions on offer."""

    markers: ClassVar[tuple[str, ...]]
    """The frame's words. A tokenizer may have them as special tokens."""
    opening: ClassVar[str] = ""
    """The marker that every call, or the first of several, begins with; "" if there may be none."""
    other: ClassVar[tuple[str, ...]] = ()
    """Markers that some write instead of `opening`."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self.tools = tools

    @staticmethod
    def new_id() -> str:
        """An id for a call, such as templates of this format take back."""
        return "call_" + secrets.token_hex(12)

    @classmethod
    @abstractmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        """Rules, in llguidance's variant of Lark, whose `calls` is one or more calls of these tools.

        spell(marker) is how the grammar writes a marker: a quoted text, or a special token.
        """

    @classmethod
    def written(cls, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments, as a model of this format writes them; "" where no template leaves them out."""
        return ""

    def reject(self, marker: str) -> None:
        """What the marker in front of the held text begins is no call: it comes out as content, and reading goes on behind it.

        Nothing comes of a call that was cut before it was known to be one.
        """
        if self._cut and self._ran_out and marker in self.markers:
            self._at = len(self._text)
            self.settle()
        else:
            self._at = self._text.index(marker, self._mark) + len(marker)
            self.give(Content)

    def read_again(self) -> None:
        """What is held, behind a call or a part of one, is none of it. Nothing comes of it where the answer was cut: it was to be one."""
        self._at = len(self._text) if self._cut and self._ran_out else self._mark
        self.settle()

    def listed(self, call: Callable[[], Waiting[bool]] | None = None) -> Waiting[bool]:
        """Read calls, in a list or one behind the other. False, with the text still held, if there is none.

        call: reads one; None for those that are spelled as objects.
        """
        call = call or self.object_call
        in_list = yield from self.skip("[")
        found = False
        while True:
            yield from self.space()
            if not (yield from call()):
                break
            found = True
            yield from self.space()
            yield from self.skip(",")
        if found:
            self.read_again()
            if in_list:
                yield from self.close("]")
        return found

    def object_call(
        self, argument_keys: tuple[str, ...] = ("arguments", "parameters"), only_on_offer: bool = False, inner: bool = False
    ) -> Waiting[bool]:
        """Read {"name": ..., "arguments": {...}} and give it out, the arguments as they come. False, with the text still held, if
        it is none. Once the name is known it is a call, even if the object breaks off.

        inner: whether it stands in another object, as "function"; then none stands in it.
        """
        begun, given, before = False, False, ""  # before: arguments that came before the name
        if not (yield from self.skip("{")):
            return False
        while True:
            yield from self.space()
            key = yield from self.string(MAX_KEY)
            yield from self.space()
            if key is None or not (yield from self.skip(":")):
                break
            yield from self.space()
            if key == "name" and not begun:
                name = yield from self.string(MAX_NAME)
                if not name or not name.isprintable() or (only_on_offer and name not in map(name_of, self.tools)):
                    return False
                begun = True
                self.settle(CallBegun(name), *([Arguments(before)] if before else []))
            elif key in argument_keys and not given:
                given = True
                if begun:
                    yield from self.arguments()
                elif not (before := (yield from self._held_arguments())):
                    return False
            elif key == "function" and not (begun or given or inner) and (yield from self.peek()) == "{":
                if not (yield from self.object_call(argument_keys, only_on_offer, inner=True)):
                    return False
                begun = given = True
            elif not begun and key not in ("type", "id"):
                return False
            elif not (yield from self.value(MAX_HELD)):
                break
            yield from self.space()
            if not (yield from self.skip(",")):
                closed = yield from self.skip("}")  # models forget it, or the answer was cut here
                if begun:
                    none_come = not given and (closed or (yield from self.more()))
                    self.settle(*([Arguments("{}")] if none_come else []))
                return begun
        if begun:
            if (yield from self.more()):
                self._at = self._mark  # what broke it is text
            else:
                self.settle()
        return begun

    def arguments(self) -> Waiting[None]:
        """Read a call's arguments and give them out: an object as it comes, anything else once it is whole."""
        self.settle()
        held = "" if (yield from self.peek()) == "{" else (yield from self._held_arguments())
        if held:
            self.settle(Arguments(held))
        else:
            self._at = self._mark
            yield from self.value(piece=Arguments)

    def close(self, word: str) -> Waiting[None]:
        """Read the frame's end, if there is one, and the white space around it. A text that ends inside of it ends the frame too."""
        yield from self.space()
        if not (yield from self.skip(word)) and self._ended and word.startswith(self._text[self._at :]):
            self._at = len(self._text)
        yield from self.space()
        self.settle()

    def _held_arguments(self) -> Waiting[str]:
        """Read arguments whole. "" if they are too long, or no JSON value."""
        start = self._at - self._mark
        if (yield from self.peek()) == '"':  # a text that says what the object is
            said = yield from self.string(MAX_HELD)
            return "" if said is None else said.strip() or "{}"
        if not (yield from self.value(MAX_HELD)):
            return ""
        raw = self._text[self._mark + start : self._at]
        return "{}" if raw in ("", "null") else raw


def alphanumeric_id() -> str:
    """Nine letters and digits: the only ids that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def object_rules(tools: Sequence[Tool], key: str) -> str:
    """`call`: {"name": ..., "<key>": {...}} of one of the tools, spaced as Python's json does."""
    calls = [quoted(f'{{"name": {json.dumps(name_of(tool))}, "{key}": ') + f" arguments_{i} " + quoted("}") for i, tool in enumerate(tools)]
    return f"call: {' | '.join(calls)}\n" + argument_rules(tools)


def argument_rules(tools: Sequence[Tool]) -> str:
    """`arguments_0`, `arguments_1`, ...: the parameters of each tool. Each is a document of its own, so that its $refs hold."""
    return "".join(f"arguments_{i}: {json_rule(schema_of(tool))}\n" for i, tool in enumerate(tools))


def json_rule(schema: Any, root: Any = None) -> str:
    """JSON that fits a schema, of `root` if that is given, as Python's json spaces it. What cannot be enforced is the caller's to check."""
    options = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", ", "lenient": True}
    schema = enforceable(schema, strict=False, param="tools", root=root)
    return f"%json {json.dumps(schema | {'x-guidance': options} if isinstance(schema, dict) else schema)}"


def property_rule(described: Any, root: Mapping[str, Any], rules: Sequence[str]) -> str:
    """JSON that fits the description of a property. Raises InvalidGrammar if the rules are too long."""
    rule = json_rule(described, root)
    if len(rule) > 1000 and sum(map(len, rules)) > MAX_TRUSTED_BYTES:  # each property brings what it refers to
        raise InvalidGrammar(f"simplify the schemas: their grammar has over {MAX_TRUSTED_BYTES:,} bytes", "tools")
    return rule


def several(rule: str, separator: str, parallel: bool) -> str:
    """One `rule`, or some with a separator."""
    return f"{rule} ({separator} {rule}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else rule


def in_order(members: Sequence[tuple[str, bool]], comma: str, add: Callable[[str], str]) -> str:
    """Members, each an expression and whether it must be there, with a comma before each but the first that is there.

    add(expression) -> the name of a rule that it becomes.
    """
    ways, others = list[str](), '""'
    for expression, required in reversed(members):
        member = add(expression)
        ways = [f"{member} {others}", *([] if required else ways)]
        others = add(f"{comma} {member} {others}" if required else f"({comma} {member})? {others}")
    return f"({' | '.join(ways)}){'' if any(required for _, required in members) else '?'}" if ways else ""


def quoted(text: str) -> str:
    """A text as grammars write it."""
    return json.dumps(text, ensure_ascii=False)


def name_of(tool: Tool) -> str:
    return tool["function"]["name"]


def schema_of(tool: Tool) -> dict[str, Any]:
    """The parameters' JSON schema. A function takes the arguments that it names, and no others unless its schema speaks of them."""
    schema = {"type": "object"} | (tool["function"].get("parameters") or {"properties": {}})
    named = "properties" in schema and schema.keys().isdisjoint(_SPEAK_OF_OTHERS)
    return schema | {"additionalProperties": False} if named else schema


_SPEAK_OF_OTHERS = frozenset("additionalProperties unevaluatedProperties patternProperties propertyNames $ref allOf anyOf oneOf if".split())
