"""Grammars of calls that must be made: what they let a model write is what the format's parser reads, with arguments that fit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tiny_models import save_tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import AddedToken

from foretoken.engine.errors import InvalidGrammar
from foretoken.engine.grammar import GrammarState
from foretoken.engine.grammar_compiler import GrammarCompiler
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.server.errors import ApiError
from foretoken.server.reasoning import REASONING_FORMATS, ReasoningFormat
from foretoken.server.reply_grammar import reply_grammar
from foretoken.server.tools.formats import FORMATS
from foretoken.server.tools.parser import Tool, ToolParser, quoted
from foretoken.server.tools.request import Offer
from foretoken.server.tools.scanner import Arguments, CallBegun

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}, "at": {"$ref": "#/$defs/point"}, "note": {"type": "string"},
    },
    "required": ["city", "note"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}},
}
TOOLS: tuple[Tool, ...] = (
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "weather.now"}},
)
FORMAT_NAMES = [
    "deepseek_v3", "deepseek_v31", "kimi_k2", "minimax_m2",
    "functiongemma", "gemma4", "glm45", "granite", "hermes", "lfm2", "llama3_json", "mistral", "mistral_list", "olmo3", "phi4_mini_json",
    "openai", "pythonic", "qwen3_xml",
]


@dataclass(frozen=True)
class Model:
    """What may be written under a grammar."""

    tokenizer: PreTrainedTokenizerBase
    compiler: GrammarCompiler

    def spell(self, marker: str) -> str:
        tokens = {str(entry): token for token, entry in self.tokenizer.added_tokens_decoder.items()}
        return f"<[{tokens[marker]}]>" if marker in tokens else quoted(marker)

    def called(self, name: str, *tools: Tool, parallel: bool = True, by_token: bool = True) -> GrammarSpec | None:
        """The grammar of calls in this format where one must be made. by_token: markers that are tokens are those tokens."""
        spell = self.spell if by_token else quoted
        return reply_grammar(None, FORMATS[name], Offer(tools, required=True, parallel=parallel), None, False, spell)

    def opened(self, spec: GrammarSpec | None) -> tuple[GrammarState, list[int]]:
        """A state and the tokens that it follows."""
        assert spec is not None
        tokens: list[int] = []
        return self.compiler.compile(spec).open(tokens), tokens

    def accepts(self, spec: GrammarSpec | None, text: str) -> bool:
        state, tokens = self.opened(spec)
        for token in [*self.tokenizer.encode(text, add_special_tokens=False), 0]:
            mask = state.mask(())
            if mask is None or not mask.allows(token):
                return False
            tokens.append(token)
        return True

    def written(self, spec: GrammarSpec | None, chance: Random, most: int = 300, words: Sequence[str] = ()) -> str | None:
        """A text at random that the grammar allows, with these words where they may stand; None if it does not end in time."""
        state, tokens = self.opened(spec)
        ends = ('"', "\n", "<", "/", "}", "</arg_value>", "<escape>", '<|"|>')
        closing = {token for token in range(len(self.tokenizer)) if str(self.tokenizer.decode([token])) in ends}
        wished: list[int] = []
        while len(tokens) < most:
            mask = state.mask(())
            assert mask is not None, state.error
            if words and not wished and chance.random() < 0.1:
                wished = [token for char in chance.choice(words) for token in self.tokenizer.encode(char)]
            if wished and mask.allows(wished[0]):
                tokens.append(wished.pop(0))
                continue
            wished = []
            allowed = mask.to_bool(len(self.tokenizer)).nonzero()[0].tolist()
            if 0 in allowed and chance.random() < 0.7:
                return str(self.tokenizer.decode(tokens))
            short = [token for token in allowed if token in closing]
            choice = chance.choice(short if short and chance.random() < 0.5 else [token for token in allowed if token] or [0])
            tokens.append(choice)
            if choice == 0:
                return str(self.tokenizer.decode(tokens[:-1]))
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One with markers among its tokens, as models have them."""
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("marked"))
    marks = dict.fromkeys(("<|channel|>", "<|message|>", "<|constrain|>"), True)
    marks |= {"<tool_call>": False, "[TOOL_CALLS]": True, "</arg_value>": False, "<escape>": False, '<|"|>': False}
    marks |= {"<｜tool▁calls▁begin｜>": True, "<｜tool▁sep｜>": True, "<|tool_calls_section_begin|>": True, "<minimax:tool_call>": False}
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark, special in marks.items()])
    return Model(tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [0]))


def function(parameters: dict[str, Any]) -> Tool:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def calls_of(format: type[ToolParser], text: str, tools: Sequence[Tool] = TOOLS) -> list[tuple[str, Any]]:
    parser = format(tools)
    calls: list[list[str]] = []
    for part in [*parser.feed(text), *parser.finish()]:
        match part:
            case CallBegun(name):
                calls.append([name, ""])
            case Arguments(more):
                calls[-1][1] += more
            case _:
                pytest.fail(f"{part} beside the calls in {text!r}")
    return [(name, json.loads(arguments)) for name, arguments in calls]


def fits(name: str, arguments: dict[str, Any]) -> bool:
    if name == "weather.now":
        return arguments == {}
    return (
        name == "weather"
        and {"city", "note"} <= arguments.keys() <= WEATHER["properties"].keys()
        and arguments["city"] in ("Paris", "Rome")
        and isinstance(arguments["note"], str)
        and type(arguments.get("days", 0)) is int
        and isinstance(arguments.get("at", {"x": True})["x"], bool)
    )


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_a_grammar_lets_through_is_calls(name: str, parallel: bool, model: Model) -> None:
    spec = model.called(name, *TOOLS, parallel=parallel)
    num_calls = []
    for seed in range(12):
        text = model.written(spec, Random(seed))
        if text is not None:
            calls = calls_of(FORMATS[name], text)
            assert calls and all(fits(name, arguments) for name, arguments in calls), text
            num_calls.append(len(calls))
    assert len(num_calls) >= 4 and (parallel or set(num_calls) == {1})


SHAPES: dict[str, Any] = {
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "choice": {"type": ["string", "null"], "enum": ["a", None]},
    "literal": {"enum": [1, "b c"]},
    "always": {"const": "k"},
    "point": {"allOf": [{"$ref": "#/$defs/point"}]},
    "some": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "list": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 12}, "minItems": 1, "maxItems": 2},
    "lists": {"type": "array"},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "fixed": {"const": {"x": [1, "y"]}},
    "first name": {"type": "string", "minLength": 1},
    "size (cm) = 1": {"type": "integer"},
    "it's": {"type": "number", "exclusiveMinimum": 0},
}
HOSTILE = ["</parameter>", "</arg_value>", "<escape>", '<|"|>', "[link](x)", "{a", "null", "'", '"""', "\n", "]", "<function=f>", "\\u00"]


def check_a_call(
    model: Model, name: str, schema: dict[str, Any], seed: int, most: int = 300, words: Sequence[str] = (), by_token: bool = True
) -> None:
    """What is written by the grammar of this format fits the schema, if it comes to an end."""
    tool = function(schema)
    text = model.written(model.called(name, tool, parallel=False, by_token=by_token), Random(seed), most, words)
    if text is not None:
        ((_, arguments),) = calls_of(FORMATS[name], text, [tool])
        assert Draft202012Validator(schema).is_valid(arguments), text


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("by_token", [True, False])
def test_calls_fit_schemas_of_every_shape(name: str, by_token: bool, model: Model) -> None:
    defined = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for seed, (key, shape) in enumerate([*SHAPES.items()] * 4):
        schema = {"type": "object", "properties": {key: shape}, "required": [key], "$defs": defined, "additionalProperties": False}
        check_a_call(model, name, schema, seed, 120, HOSTILE, by_token)


REFERENCES: dict[str, Any] = {
    "size": {"type": "integer"},
    "other size": {"$ref": "#/properties/size"},
    "lists": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}, "maxItems": 2},
    "list": {"type": "array", "items": {"$ref": "#/properties/lists/items"}, "minItems": 1, "maxItems": 2},
    "inner": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "escaped": {"$ref": "#/$defs/a~1%C3%A9"},
    "option": {"$ref": "#/$defs/all/anyOf/1"},
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_reference_may_be_to_any_place_of_the_schema(name: str, model: Model) -> None:
    defined = {"a/é": {"type": "boolean"}, "all": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    for key in REFERENCES:
        schema = {"type": "object", "properties": REFERENCES, "required": [key], "$defs": defined, "additionalProperties": False}
        for seed in range(4):
            check_a_call(model, name, schema, seed)


EXAMPLES = {
    "functiongemma": "<start_function_call>call:weather{city:<escape>Rome<escape>,at:{x:true},note:<escape>a{b<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3,note:<|"|><|"|>}<tool_call|><|tool_call>call:weather.now{}<tool_call|>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>note</arg_key>\n<arg_value>a\nb</arg_value>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "note": ""}}]',
    "phi4_mini_json": '<|tool_call|>[{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "note": ""}}}]'
    "<|/tool_call|>",
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3, "at": {"x": true}, "note": "é\\n"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome", "note": ""}}; {"name": "weather.now", "parameters": {}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "note": ""}[TOOL_CALLS]weather.now[ARGS]{}',
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "note": ""}}]',
    "lfm2": '<|tool_call_start|>[weather(city="Rome", at={"x": true}, note="é\\n"), weather.now()]<|tool_call_end|>',
    "olmo3": '<function_calls>\nweather(city="Rome", at={"x": true}, note="é\\n")\nweather.now()\n</function_calls>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "note": "é\\n"}',
    "pythonic": '[weather(city="Rome", days=-3, note=""), weather.now()]',
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=note>\na\nb\n</parameter>\n"
    "</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n<parameter name="at">{"x": true}'
    '</parameter>\n<parameter name="note">a\nb\n</parameter>\n</invoke>\n<invoke name="weather.now">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome", "note": "```"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather.now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "note": ""}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>weather.now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome", "note": ""}'
    "<|tool_call_end|><|tool_call_begin|>functions.weather.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_model_may_write_as_it_was_taught(name: str, model: Model) -> None:
    spec = model.called(name, *TOOLS)
    assert model.accepts(spec, EXAMPLES[name])
    assert not model.accepts(spec, EXAMPLES[name].replace("Rome", "Oslo"))
    assert not model.accepts(spec, EXAMPLES[name].replace("weather", "whether"))
    assert not model.accepts(spec, "Sure!") and not model.accepts(spec, "")


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_xml", "seed_oss"])
@pytest.mark.parametrize("key", ["a key", "a<b>c", "é\"'=,", " line\nend ", "x" * 100, "</parameter>", "a"])
def test_a_key_may_be_any_text(name: str, key: str, model: Model) -> None:
    parameters = {"properties": {"a": {}, key: {"type": "integer"}}, "required": [key]}
    tool = function(parameters)
    spec = model.called(name, tool, parallel=False)
    texts = [text for seed in range(4) if (text := model.written(spec, Random(seed))) is not None]
    for text in texts:
        ((called, arguments),) = calls_of(FORMATS[name], text, (tool,))
        assert called == "f" and type(arguments[key]) is int and arguments.keys() <= {"a", key}, text
    assert texts


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ("{}", True), ("{a:null,c:[1,2]}", True), ("{a:<escape>x<escape>}", True), ("{a:1}", False), ("{b:7}", True), ("{b:8}", False),
        ("{c:[],d:{e:{e:{}}}}", True), ("{d:{f:1}}", False), ("{d:{}c:[]}", False), ("{,b:7}", False), ("{one:[true]}", True),
        ("{one:[]}", True), ("{one:[true,true]}", False),
    ],
)
def test_gemmas_values_fit_their_schemas(arguments: str, allowed: bool, model: Model) -> None:
    properties = {
        "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "b": {"type": ["integer", "null"], "const": 7},
        "c": {"type": "array", "items": {"type": "integer"}},
        "d": {"$ref": "#/$defs/nested"},
        "one": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    }
    nested = {"type": "object", "properties": {"e": {"$ref": "#/$defs/nested"}}}
    spec = model.called("functiongemma", function({"properties": properties, "$defs": {"nested": nested}}))
    assert model.accepts(spec, f"<start_function_call>call:f{arguments}<end_function_call>") is allowed


def test_a_grammar_grows_no_faster_than_the_schema() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(10):
        schema = {"type": ["array", "array"], "items": schema}
    tool = function({"properties": {"a": schema}})
    assert len(FORMATS["gemma4"].grammar([tool], quoted, True)) < 5_000
    schema = {"properties": {str(i): {"$ref": "#/$defs/a"} for i in range(100)}, "$defs": {"a": {}, "b": {"title": "x" * 9_000}}}
    assert len(FORMATS["pythonic"].grammar([function(schema)], quoted, True)) < 50_000
    schema["$defs"]["a"]["enum"] = [*map(str, range(900))]
    with pytest.raises(InvalidGrammar, match="simplify"):
        FORMATS["pythonic"].grammar([function(schema)], quoted, True)


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        ({"additionalProperties": True}, 'a=[1], b_2={"c": null}', True),
        ({"additionalProperties": True}, "", True),
        ({"additionalProperties": True}, "a=b", False),
        ({"properties": {"a": {"pattern": "^x+$"}, "b": {}}}, 'a="xx", b=1', True),
        ({"properties": {"a": {"pattern": "^x+$"}, "b": {}}}, "b=1", True),
        ({"properties": {"a": {"pattern": "^x+$"}, "b": {}}}, 'a="y"', False),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, "a=1", False),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, "a=1 b=1", False),
    ],
)
def test_pythonic_values_fit_their_schemas(parameters: dict[str, Any], arguments: str, allowed: bool, model: Model) -> None:
    assert model.accepts(model.called("pythonic", function(parameters)), f"[f({arguments})]") is allowed


BARE = {
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{a:<|"|>%s<|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("by_token", [True, False])
def test_bare_texts_have_the_length_that_was_asked_for_or_are_null(name: str, by_token: bool, model: Model) -> None:
    parameters = {"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 3, "nullable": True}}, "required": ["a"]}
    spec = model.called(name, function(parameters), by_token=by_token)
    null = BARE[name].replace('<|"|>', "") % "null"
    for text, fits in ((BARE[name] % "\n<é", True), (BARE[name] % "", False), (BARE[name] % "four", False), (null, True)):
        if by_token:
            assert model.accepts(spec, text) is fits
        else:
            model.compiler.compile(spec or FORM)


THINK = REASONING_FORMATS["qwen3"]
CALL = '<tool_call>\n{"name": "weather.now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("inside", "text", "allowed"),
    [
        (True, f"Hm <b>\n</think>\n\n{CALL}", True), (True, CALL, False), (True, "Hm</think>No", False), (False, CALL, True),
        (False, f"<think>Hm</think>{CALL}", True), (False, f"Hm</think>{CALL}", False),
    ],
)
def test_reasoning_may_come_before_calls(inside: bool, text: str, allowed: bool, model: Model) -> None:
    spec = reply_grammar(None, FORMATS["hermes"], Offer(TOOLS, required=True), THINK, inside, model.spell)
    assert model.accepts(spec, text) is allowed


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", True),
        ("No tool is needed: 2 < 3, <tool_cal", True),
        (CALL, True),
        (f"Let me see.\n{CALL}\n", True),
        (f"{CALL}\n{CALL}", True),
        ('<tool_call>\n{"name": "weather.now", "arguments": {"a": 1}}\n</tool_call>', False),
        ('Sure <tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ("<tool_call> is a word", False),
        ('<tool_call>\n{"name": "weather.now", ', False),
    ],
)
def test_a_strict_call_fits_its_schema_among_free_text(inside: bool, text: str, allowed: bool, model: Model) -> None:
    spec = reply_grammar(None, FORMATS["hermes"], Offer(TOOLS, strict=True), THINK, inside, model.spell)
    thoughts = "Hm</think>\n\n" if inside else ""
    assert model.accepts(spec, thoughts + text) is allowed
    assert inside or model.accepts(spec, "<think>Hm</think>" + text) is allowed


def test_a_marker_is_one_however_it_is_written(model: Model) -> None:
    """Readers look at the text: a model that spells a marker, or leaves the frame out, must not get around the grammar."""
    spell, formats = model.spell, (FORMATS["hermes"], FORMATS["qwen3_xml"])
    hermes, qwen = (reply_grammar(None, format, Offer(TOOLS, strict=True), None, False, spell) for format in formats)
    thinking = reply_grammar(FORM, None, Offer(), ReasoningFormat("<tool_call>", "</arg_value>", call="<calls>"), True, spell)
    marked = [(hermes, "Sure ", "<tool_call>"), (qwen, "Sure ", "<function=")]
    for spec, before, marker in [*marked, (thinking, "Hm", "</arg_value>"), (thinking, "Hm", "<calls>")]:
        state, tokens = model.opened(spec)
        tokens += [token for char in before + marker[:-1] for token in model.tokenizer.encode(char)]
        mask = state.mask(())
        last, other = (model.tokenizer.encode(char)[0] for char in (marker[-1], "x"))
        assert mask is not None and not mask.allows(last) and mask.allows(other)


def test_calls_without_a_token_of_their_own_stay_free(model: Model) -> None:
    for name in ("llama3_json", "qwen3_xml", "mistral"):
        marked = reply_grammar(None, FORMATS[name], Offer(TOOLS, strict=True), None, False, model.spell)
        assert (marked is None) == (name == "llama3_json")
        assert reply_grammar(None, FORMATS[name], Offer(TOOLS, strict=True), None, False, quoted) is None


FORM = GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, param="response_format")


@pytest.mark.parametrize(
    ("wanted", "tools", "inside", "text", "allowed"),
    [
        (FORM, False, True, 'Hm</think>\n{"a": 1}', True),
        (FORM, False, True, '{"a": 1}', False),
        (FORM, False, False, '{"a": 1}', True),
        (FORM, False, False, '<think></think>{"a": "1"}', False),
        (FORM, True, False, '{"a": 1}', True),
        (FORM, True, False, CALL, True),
        (FORM, True, False, "Sure", False),
        (FORM, True, True, f"Hm</think>{CALL}", True),
        (GrammarSpec.choice(["yes", "no"]), True, False, "no", True),
        (GrammarSpec.choice(["yes", "no"]), True, False, "so", False),
        (GrammarSpec.json_object(), False, True, "</think>{}", True),
    ],
)
def test_an_answers_form_stands_beside_calls_and_behind_reasoning(
    wanted: GrammarSpec, tools: bool, inside: bool, text: str, allowed: bool, model: Model
) -> None:
    offer = Offer(TOOLS) if tools else Offer()
    spec = reply_grammar(wanted, FORMATS["hermes"] if tools else None, offer, THINK, inside, model.spell)
    assert model.accepts(spec, text) is allowed


def test_forms_that_stand_alone_do() -> None:
    expression = GrammarSpec.regex("[ab]+", param="structured_outputs.regex")
    assert reply_grammar(expression, None, Offer(), None, False, quoted) == expression
    assert reply_grammar(expression, None, Offer(), THINK, False, quoted) == expression
    assert reply_grammar(None, FORMATS["hermes"], Offer(TOOLS), THINK, True, quoted) is None
    beyond = GrammarSpec.json_schema({"type": "integer", "minimum": 2**64}, param="format")
    with pytest.raises(InvalidGrammar, match="no integer above") as wrong:
        reply_grammar(beyond, None, Offer(), THINK, True, quoted)
    assert wrong.value.param == "format"
    for tools, inside in ((FORMATS["hermes"], False), (None, True)):
        with pytest.raises(ApiError, match="cannot be combined") as refused:
            reply_grammar(expression, tools, Offer(TOOLS if tools else ()), THINK, inside, quoted)
        assert refused.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"pattern": "("}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
        {"properties": {"a": {"enum": []}}, "required": ["a"]},
        {"properties": {'"\n%llguidance {}': {}, "</parameter>": {"type": "integer"}}},
        {"properties": {str(i): {"type": "object"} for i in range(2_000)}},
        {"description": "x" * 100_000},
        {"properties": {"a": {"type": "integer", "minimum": 2**64}}, "required": ["a"]},
        {"properties": {"a": {"type": "object", "properties": ["b"]}}, "required": ["a"]},
    ],
)
def test_odd_parameters_are_refused_or_followed(name: str, parameters: dict[str, Any], model: Model) -> None:
    """They may be refused, by the one error that a client gets; nothing else may come of them."""
    try:
        model.compiler.compile(model.called(name, function(parameters)) or FORM)
    except InvalidGrammar as error:
        assert error.param == "tools"
