"""Every format of tool calls: what it reads, and that it reads the same however the text is cut into pieces."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.server.tools.formats import FORMATS
from foretoken.server.tools.gemma import FunctionGemma, Gemma4
from foretoken.server.tools.json_list import Granite, Hermes, Hunyuan, Nemotron, Phi4Mini
from foretoken.server.tools.llama3_json import Llama3Json
from foretoken.server.tools.mistral import Mistral, MistralList
from foretoken.server.tools.openai import OpenAI
from foretoken.server.tools.parser import Tool, ToolParser
from foretoken.server.tools.pythonic import Lfm2, Olmo3, Pythonic
from foretoken.server.tools.qwen3_xml import GlmXml, MiniMaxM2, Qwen3Xml, SeedXml
from foretoken.server.tools.scanner import MAX_HELD, MAX_SPACE, Arguments, CallBegun, Content
from foretoken.server.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2

PROPERTIES = {
    "text": {"type": "string"}, "number": {"type": "integer"}, "list": {"type": "array"}, "object": {"$ref": "#/$defs/point"},
    "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "some": {"anyOf": [{"type": "string"}, {"type": "array"}]}, "unknown": {},
}
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES, "$defs": {"point": {"type": "object"}}}},
    }
    for name in ("f", "g.h")
]
ALL: list[type[ToolParser]] = sorted(set(FORMATS.values()), key=lambda format: format.__name__)
Told = list[str | tuple[str, str]]  # content, and calls as (name, arguments)


def told(format: type[ToolParser], pieces: list[str]) -> Told:
    parser = format(TOOLS)
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    said: Told = []
    for part in found:
        match part, said:
            case CallBegun(name), _:
                said.append((name, ""))
            case Arguments(text), [*_, (name, before)]:
                said[-1] = (str(name), before + text)
            case Content(text), [*_, str(before)]:
                said[-1] = before + text
            case Content(text), _:
                said.append(text)
            case _:
                pytest.fail(f"{part} behind {said}")
    return said


def cut(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]


CALLS, CALL, SEP, END_CALL, END_CALLS = DeepSeekV3.markers
KIMIS, KIMI, KIMI_SEP, END_KIMI, END_KIMIS = KimiK2.markers
CASES: list[tuple[type[ToolParser], str, Told]] = [
    (Hermes, "", []),
    (Hermes, "just text < <tool", ["just text < <tool"]),
    (Hermes, ' <tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>\n', [("f", '{"a": "}\\"{"}')]),
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {"b": [1, {}]}}</tool_call>', [("f", '{"b": [1, {}]}')]),
    (
        Hermes,
        'Two:\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"arguments": {"x":1} , "name" : "g.h"}</tool_call> done',
        ["Two:", ("f", "{}"), ("g.h", '{"x":1}'), "done"],
    ),
    (Hermes, '<tool_call>{"name": "unknown", "parameters": {}}</tool_call>', [("unknown", "{}")]),
    (Hermes, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>', [("f", '{"a": "é"}')]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": "so"}</tool_call>.', [("f", '{"a": 1}'), "."]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>.', [("f", '{"a": 1}'), "."]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}}.', [("f", '{"a": 1}'), "."]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}, oops}', [("f", '{"a": 1}'), ", oops}"]),
    # Several in one frame.
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g.h"}\n</tool_call>.', [("f", "{}"), ("g.h", "{}"), "."]),
    (Hermes, '<tool_call>[{"name": "f"}, {"name": "g.h", "arguments": {"a": 1}}]</tool_call>', [("f", "{}"), ("g.h", '{"a": 1}')]),
    # Cut by the token limit.
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    (Hermes, '<tool_call>{"name": "f", "argu', [("f", "")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_', [("f", "{}")]),
    (Hermes, 'Hm <tool_call>{"na', ['Hm <tool_call>{"na']),
    # No calls.
    (Hermes, "a <tool_call> b", ["a <tool_call> b"]),
    (Hermes, '<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
    (Hermes, '<tool_call>{"city": "f"}</tool_call>', ['<tool_call>{"city": "f"}</tool_call>']),
    (Hermes, '<tool_call><tool_call>{"name": "f"}</tool_call>', ["<tool_call>", ("f", "{}")]),
    (Hermes, '<tool_call>{"<tool_call>{"name": "f"}', ['<tool_call>{"', ("f", "{}")]),
    (Llama3Json, '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    (Llama3Json, ' <|python_tag|>{"type": "function", "name": "f", "arguments": {"a": 1}}\n', [("f", '{"a": 1}')]),
    (Llama3Json, '{"name": "f", "parameters": {}}; {"name": "g.h", "parameters": {"a": []}} z', [("f", "{}"), ("g.h", '{"a": []}'), "z"]),
    (Llama3Json, '{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    (Llama3Json, '{"city": "Paris", "name": "f"}', ['{"city": "Paris", "name": "f"}']),
    (Llama3Json, 'Like {"name": "f", "parameters": {}}', ['Like {"name": "f", "parameters": {}}']),
    (Llama3Json, 'Hi <|python_tag|>print(1) <|python_tag|>{"name": "f"}', ["Hi <|python_tag|>print(1)", ("f", "{}")]),
    (MistralList, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "x"}]', [("f", '{"a": "]"}'), ("x", "{}")]),
    (MistralList, 'Well [TOOL_CALLS][{"name": "f"}, 3] so', ["Well", ("f", "{}"), ", 3] so"]),
    (Mistral, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]x{"b": 2}', [("f", '{"a": 1}'), ("x", '{"b": 2}')]),
    (Mistral, 'Hm\n[TOOL_CALLS]f[CALL_ID]012345678[ARGS]{"a": {"b": [2]}} x', ["Hm", ("f", '{"a": {"b": [2]}}'), "x"]),
    (OpenAI, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', [("f", '{"a": 1}')]),
    (OpenAI, 'Hm <|start|>assistant to=functions.g.h<|channel|>commentary json<|message|>{}', ["Hm", ("g.h", "{}")]),
    (
        OpenAI,
        '<|channel|>commentary to=functions.f<|message|>{}\n<|end|><|start|>assistant to=g.h<|channel|>commentary<|message|> <|call|>.',
        [("f", '{}'), ("g.h", "{}"), "."],
    ),
    (OpenAI, "<|channel|>commentary to=functions.f<|message|>", [("f", "{}")]),
    (OpenAI, "<|channel|>final<|message|>Two", ["<|channel|>final<|message|>Two"]),
    (OpenAI, "<|start|>" + 600 * "x", ["<|start|>" + 600 * "x"]),
    (Mistral, "[TOOL_CALLS] none [TOOL_CALLS][] [TOOL_CALLS]f(1)", ["[TOOL_CALLS] none [TOOL_CALLS][] [TOOL_CALLS]f(1)"]),
    (
        Qwen3Xml,
        "Sure.\n<tool_call>\n<function=f>\n<parameter=text>\nif a < b:\n  \"c\"\n\n</parameter>\n<parameter=number>\n3\n</parameter>\n"
        "<parameter=maybe>True</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g.h>\n</function>\n</tool_call>",
        ["Sure.", ("f", '{"text": "if a < b:\\n  \\"c\\"\\n", "number": 3, "maybe": true}'), ("g.h", "{}")],
    ),
    (
        Qwen3Xml,
        '<function=f><parameter=list>[1, "]"]</parameter><parameter=object>{"a": 1}</parameter>\n'
        "<parameter=unknown>7</parameter></function>.",
        [("f", '{"list": [1, "]"], "object": {"a": 1}, "unknown": "7"}'), "."],
    ),
    (Qwen3Xml, "<function=f><parameter=number>three</parameter></function>", [("f", '{"number": "three"}')]),
    (
        Qwen3Xml,  # as Python would write it
        "<function=f><parameter=object>{'a': [True, None], 'b': 'it\\'s \"'}</parameter>"
        r"<parameter=list>[['\d'], (1,)]</parameter></function>",
        [("f", '{"object": {"a": [true, null], "b": "it\'s \\""}, "list": [["\\\\d"], [1]]}')],
    ),
    (
        Qwen3Xml,
        r"""<function=f><parameter=list>[1, 'a', None, {"b": False, "c": true,}, "\/\n"]</parameter></function>""",
        [("f", '{"list": [1, "a", null, {"b": false, "c": true}, "/\\n"]}')],
    ),
    (Qwen3Xml, "<function=f><parameter=list>[[]2] </parameter><parameter=text>a</parameter>", [("f", '{"list": [[]2], "text": "a"')]),
    (Qwen3Xml, "<function=f><parameter=object>{'a'</parameter></function>", [("f", '{"object": {"a"}')]),
    (Qwen3Xml, "<function=f><parameter=object>{'a': 1", [("f", '{"object": {"a": ')]),
    (Qwen3Xml, "<function=f><parameter=list>[1]</param", [("f", '{"list": [1]')]),
    (Qwen3Xml, "<function=f><parameter=first = name>a</parameter></function>", [("f", '{"first = name": "a"}')]),
    (Qwen3Xml, "<function=f><parameter=some>[a](b)</parameter></function>", [("f", '{"some": "[a](b)"}')]),
    (Qwen3Xml, '<function=f><parameter=some>["a"]</parameter></function>', [("f", '{"some": ["a"]}')]),
    (Qwen3Xml, "<function=f><parameter=text>cut", [("f", '{"text": "cut')]),
    (Qwen3Xml, "<function=f><parameter=number>4", [("f", '{"number": ')]),
    (Qwen3Xml, "<tool_call>x <function=> <function=a b>", ["<tool_call>x <function=> <function=a b>"]),
    (SeedXml, "<seed:tool_call>\n<function=f>\n<parameter=text>\na\n</parameter></function>\n</seed:tool_call>", [("f", '{"text": "a"}')]),
    (Granite, '<|tool_call|>[{"name": "f", "arguments": {"a": "]"}}, {"name": "g.h"}]', [("f", '{"a": "]"}'), ("g.h", "{}")]),
    (Granite, 'So <tool_call> [{"name": "f", "arguments": {}}] <|tool_call|> it', ["So", ("f", "{}"), "<|tool_call|> it"]),
    (Hunyuan, '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls> x', [("f", "{}"), "x"]),
    (Nemotron, 'Hm\n<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>', ["Hm", ("f", '{"a": 1}')]),
    (
        Phi4Mini,
        '<|tool_call|>[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, '
        '{"function": {"name": "g.h"}, "id": 1}]<|/tool_call|>',
        [("f", '{"a": 1}'), ("g.h", "{}")],
    ),
    (Phi4Mini, 'functools[{"name": "f", "arguments": {}}] of functools [see]', [("f", "{}"), "of functools [see]"]),
    (Phi4Mini, '<|tool_call|>{"name": "f", "parameters": {"a": 1}}<|/tool_call|>.', [("f", '{"a": 1}'), "."]),
    (Phi4Mini, 'functools[{"function": {"function": {"name": "f"}}}]', ['functools[{"function": {"function": {"name": "f"}}}]']),
    (Phi4Mini, 'functools[{"function": {"name": "f", "arguments": {"a": 1', [("f", '{"a": 1')]),
    (
        GlmXml,
        "Hm\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>\na <b> \"c\"\n</arg_value>\n"
        "<arg_key>number</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>object</arg_key>\n<arg_value>{"a": 1}</arg_value>\n</tool_call>\n<tool_call>g.h\n</tool_call>',
        ["Hm", ("f", '{"text": "\\na <b> \\"c\\"\\n", "number": 3, "object": {"a": 1}}'), ("g.h", "{}")],
    ),
    (
        FunctionGemma,
        'Hm <start_function_call>call:f{text:<escape>a "b", {c}: d<escape>,number:-3.5,maybe:true,list:[<escape>x<escape>,[1,{}]],'
        "object:{a:{b:<escape><escape>}}}<end_function_call><start_function_call>call:g.h{}<end_function_call>.",
        ["Hm", ("f", '{"text": "a \\"b\\", {c}: d", "number": -3.5, "maybe": true, "list": ["x", [1, {}]], "object": {"a": {"b": ""}}}'),
         ("g.h", "{}"), "."],
    ),
    (FunctionGemma, "<start_function_call>call:f{ text : <escape>a<escape> , number: 2, }", [("f", '{"text": "a", "number": 2}')]),
    (FunctionGemma, "<start_function_call>call:f{text:<escape>a<esc", [("f", '{"text": "a<esc')]),
    (FunctionGemma, "<start_function_call>call:f{number:4", [("f", '{"number": ')]),
    (FunctionGemma, "<start_function_call>call:f{when:12 May}<end_function_call>", [("f", '{"when": "12 May"}')]),
    (FunctionGemma, "<start_function_call>f{} <start_function_call>call:{}", ["<start_function_call>f{} <start_function_call>call:{}"]),
    (Gemma4, '<|tool_call>call:f{text:<|"|>a|b<|"|>,object:{<|"|>k<|"|>:1}}<tool_call|>', [("f", '{"text": "a|b", "object": {"k": 1}}')]),
    (FunctionGemma, "<start_function_call>call:f{list:[1]2}", [("f", '{"list": [1]'), "2}"]),
    (
        Pythonic,
        """[f(text="a, \\"b\\" [c]", number = -2, maybe=None,
          list=['it\\'s', (1.5, .5,), {'a': {"b": True}, 2: false}], object={}), g.h()]""",
        [("f", '{"text": "a, \\"b\\" [c]", "number": -2, "maybe": null, '
               '"list": ["it\'s", [1.5, 0.5], {"a": {"b": true}, "2": false}], "object": {}}'), ("g.h", "{}")],
    ),
    (
        Pythonic,
        r"""<|python_start|>[f(a='\n\x41\d\u00e9\101\ud83d\ude00C:\users', b="''x", c='What's up?', """
        r"""d="", e=Paris, x:g='''r'"x\n''', h=r'\d')]<|python_end|> x""",
        [("f", r"""{"a": "\nA\\d\u00e9A\ud83d\ude00C:\\users", "b": "''x", "c": "What's up?", """
               r""""d": "", "e": "Paris", "x:g": "r'\"x\n", "h": "\\d"}"""), "x"],
    ),
    (Pythonic, "Hm <|python_start|>[f(a=1), g.h(", ["Hm", ("f", '{"a": 1}'), ("g.h", "{")]),
    (Pythonic, "[f(text='a", [("f", '{"text": "a')]),
    (Pythonic, "[f(number=4", [("f", '{"number": ')]),
    (Pythonic, "[f(", [("f", "{")]),
    (Pythonic, "[f(a='b' c)] x", [("f", '{"a": "b"'), "c)] x"]),
    (Pythonic, "[f(a=g.h(b=1))]", [("f", '{"a": "g.h"'), "(b=1))]"]),
    (Lfm2, '<|tool_call_start|>[f(a="b"), new(b=[True])]<|tool_call_end|>Yes.', [("f", '{"a": "b"}'), ("new", '{"b": [true]}'), "Yes."]),
    (Lfm2, "So <|tool_call_start|>[g.h(a=1)", ["So", ("g.h", '{"a": 1}')]),
    (Olmo3, "<function_calls>\nf(a='b')\nnew(b=[true])\n</function_calls>.", [("f", '{"a": "b"}'), ("new", '{"b": [true]}'), "."]),
    (Olmo3, "So <function_calls>f()</function_calls>\n<function_calls>g.h(a=1)</function_", ["So", ("f", "{}"), ("g.h", '{"a": 1}')]),
    *((Pythonic, text, [text]) for text in (
        "[f](http://x) is", "[1, 2]", '["f"]', ' [{"f": 1}]', "[", "[f", "[]", "[f('x')]", "[f(x) for x in y]", "[new(a=1)]", "Or [f(a=1)]",
        "f(a=1)",
    )),
    (Olmo3, "<function_calls>f('x')</function_calls> [f(a=1)]", ["<function_calls>f('x')</function_calls> [f(a=1)]"]),
    (GlmXml, "<tool_call>f<arg_key>text</arg_key><arg_value>a</arg_value></tool_call> b", [("f", '{"text": "a"}'), "b"]),
    (GlmXml, "<tool_call>new<arg_key>a</arg_key><arg_value>1", [("new", '{"a": "1')]),
    (GlmXml, "<tool_call>is a word, <tool_call>\n</tool_call>", ["<tool_call>is a word, <tool_call>\n</tool_call>"]),
    (
        MiniMaxM2,
        'Sure.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">if a < b:\n  "c"\n</parameter>\n'
        '<parameter name="number">3</parameter>\n<parameter name="list">["a", [1]]</parameter>\n</invoke>\n'
        '<invoke name="g.h">\n</invoke>\n</minimax:tool_call> x',
        ["Sure.", ("f", '{"text": "if a < b:\\n  \\"c\\"\\n", "number": 3, "list": ["a", [1]]}'), ("g.h", "{}"), "x"],
    ),
    (MiniMaxM2, '<invoke name="new"><parameter name="a">1', [("new", '{"a": "1')]),
    *((MiniMaxM2, text, [text]) for text in ('<minimax:tool_call>x <invoke name="">', '<invoke name="f" x>', '<invoke name="a b">')),
    (
        DeepSeekV3,
        f'Hm\n{CALLS}{CALL}function{SEP}f\n```json\n{{"a": "```"}}\n```{END_CALL}\n'
        f"{CALL}function{SEP}g.h\n```json\n{{}}\n```{END_CALL}{END_CALLS} x",
        ["Hm", ("f", '{"a": "```"}'), ("g.h", "{}"), "x"],
    ),
    (DeepSeekV3, f'{CALL}function{SEP}f\n{{"a": 1}}{END_CALL}', [("f", '{"a": 1}')]),
    (DeepSeekV3, f'{CALLS}{CALL}function{SEP}f\n```json\n{{"a": [', [("f", '{"a": [')]),
    (DeepSeekV3, f"{CALLS}{CALL}function{SEP}a<b\n```json\n{{}}", [f"{CALLS}{CALL}function{SEP}a<b\n```json\n{{}}"]),
    (
        DeepSeekV31,
        f'Hm {CALLS}{CALL}f{SEP}{{"a": [1, {{}}]}}{END_CALL}{CALL}function{SEP}{{}}{END_CALL}{END_CALLS}',
        ["Hm", ("f", '{"a": [1, {}]}'), ("function", "{}")],
    ),
    (DeepSeekV31, f'{CALLS}{CALL}f{SEP}{{"a": 1}} or{END_CALL}', [("f", '{"a": 1}'), f"or{END_CALL}"]),
    *((DeepSeekV31, text, [text]) for text in (f"a {CALLS} b {CALL}f", f"{CALLS}{CALL}f{SEP}[1]", f"{CALLS}{CALL}{SEP}{{}}")),
    (
        KimiK2,
        f'Hm{KIMIS}{KIMI}functions.f:0{KIMI_SEP}{{"a": "}}"}}{END_KIMI}{KIMI}functions.ns:1:1{KIMI_SEP}{{}}{END_KIMI}{END_KIMIS}x',
        ["Hm", ("f", '{"a": "}"}'), ("ns:1", "{}"), "x"],
    ),
    (KimiK2, f"{KIMI} functions.g.h:12 {KIMI_SEP}\n{{}}\n{END_KIMI}{KIMI}f{KIMI_SEP}{{", [("g.h", "{}"), ("f", "{")]),
    *((KimiK2, text, [text]) for text in (f"a {KIMIS} b", f"{KIMIS}{KIMI}functions.f:0{KIMI_SEP}1", f"{KIMI}functions.{KIMI_SEP}{{}}")),
]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_what_is_read_does_not_depend_on_the_pieces(format: type[ToolParser], text: str, expected: Told) -> None:
    assert told(format, [text]) == expected
    for length in range(1, len(text)):
        assert told(format, cut(text, length)) == expected, length


@pytest.mark.parametrize(
    ("format", "text", "left"),
    [
        (Hermes, 'a <tool_call>\n{"name": "f', "a"),
        (Qwen3Xml, "a <tool_call>\n<func", "a"),
        (Qwen3Xml, "a <tool_call>b", "a <tool_call>b"),
        (GlmXml, "<tool_call>x", ""),
        (MistralList, '[TOOL_CALLS] [{"na', ""),
        (Mistral, "[TOOL_CALLS]f[AR", ""),
        (OpenAI, "Hm <|channel|>commentary to=f", "Hm"),
        (Gemma4, "<|tool_call>call:f", ""),
        (Olmo3, "<function_calls>f", ""),
        (Phi4Mini, '<|tool_call|>[{"type": "function", "func', ""),
        (Phi4Mini, "Python has functools", "Python has functools"),
        (Llama3Json, "<|python_tag|>{", ""),
        (Llama3Json, '{"name": "f', '{"name": "f'),
        (Pythonic, "[f", "[f"),
        (MiniMaxM2, 'a <minimax:tool_call>\n<invoke name="f', "a"),
        (DeepSeekV3, f"a {CALLS}{CALL}function{SEP}f\n```js", "a"),
        (DeepSeekV31, f"{CALLS}{CALL}f<", ""),
        (KimiK2, f"a{KIMI}functions.f:1{KIMI_SEP}", "a"),
    ],
)
def test_a_call_that_is_cut_is_none(format: type[ToolParser], text: str, left: str) -> None:
    """Nothing is told of a frame that was cut before the name of a function; what may be an answer is one."""
    for length in range(1, len(text)):
        parser = format(TOOLS)
        found = [part for piece in cut(text, length) for part in parser.feed(piece)] + parser.finish(cut=True)
        assert "".join(part.text for part in found if isinstance(part, Content)) == left
        assert all(isinstance(part, Content) for part in found)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (Qwen3Xml, "<tool_call><function=f>\n<parameter=text>\na\n</parameter>\n<parameter=number>\n1\n</parameter>\n</function>"),
        (GlmXml, "<tool_call>f\n<arg_key>text</arg_key><arg_value>a</arg_value>\n<arg_key>number</arg_key>\n<arg_value>1</arg_value>"),
        (Hermes, '<tool_call>[{"name": "f", "arguments": {"text": "a"}}, {"name": "f", "arguments": {}}]</tool_call>'),
        (Llama3Json, '{"name": "f", "parameters": {"text": "a"}}; {"name": "f", "parameters": {}}'),
        (Olmo3, '<function_calls>f(text="a", number=1)\nf(text="b")</function_calls>'),
        (Pythonic, '[f(text="a", number=1), f(text="b")]'),
        (MiniMaxM2, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a</parameter>\n</invoke>\n<invoke name="f">\n'),
        (DeepSeekV3, f'{CALLS}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END_CALL}\n{CALL}function{SEP}f\n```json\n{{}}\n```'),
        (KimiK2, f'{KIMIS}{KIMI}functions.f:0{KIMI_SEP}{{"a": 1}}{END_KIMI}{KIMI}functions.f:1{KIMI_SEP}{{}}{END_KIMI}{END_KIMIS}'),
    ],
)
def test_nothing_comes_of_what_is_cut_behind_a_part_of_a_call(format: type[ToolParser], text: str) -> None:
    for end in range(len(text)):
        parser = format(TOOLS)
        found = parser.feed(text[:end]) + parser.finish(cut=True)
        called = any(isinstance(part, CallBegun) for part in found)
        assert not (called and any(isinstance(part, Content) for part in found)), text[:end]


SNIPPETS = [
    "<tool_call>", "</tool_call>", "<function=f>", "<parameter=text>", "<parameter=number>", "</parameter>", "</function>",
    "<start_function_call>", "call:f{", "<escape>", "text:",
    "<function_calls>", "f(text=", "'", "(", ")", "=", "\"\"\"", "\\u00", "True",
    "<|tool_call|>", "<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "functools", '"function": ',
    "<|start|>", "<|channel|>", " to=f", "<|message|>", "<|call|>",
    "<invoke name=\"", '">', '<parameter name="text', *DeepSeekV3.markers, "function", "```json", *KimiK2.markers, "functions.f:0",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "f"', '"name"', '"arguments": ', '"parameters": {',
    *'{}[]"\\,:; \n<f1é🦊', "null", " " * (MAX_SPACE + 1),
]
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=30).map("".join)


@pytest.mark.parametrize("format", ALL)
@given(text=texts, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_the_same_in_any_pieces(format: type[ToolParser], text: str, cuts: list[int]) -> None:
    pieces, start = [], 0
    while start < len(text):
        length = cuts[len(pieces) % len(cuts)]
        pieces.append(text[start : start + length])
        start += length
    whole = told(format, [text])
    assert told(format, pieces) == whole
    if all(isinstance(part, str) for part in whole):
        assert "".join(map(str, whole)) == text, "a text without calls comes out as it is"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)


@given(
    arguments=st.dictionaries(st.text(), json_values), ascii=st.booleans(), indent=st.sampled_from([None, 2]), length=st.integers(1, 40)
)
@settings(max_examples=60, deadline=None)
def test_arguments_come_out_as_they_were_written(arguments: dict[str, Any], ascii: bool, indent: int | None, length: int) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    call = f'{{"name": "f", "arguments": {written}}}'
    for format, text in [
        (Hermes, f"<tool_call>{call}</tool_call>"),
        (Llama3Json, call),
        (MistralList, f"[TOOL_CALLS][{call}]"),
        (Mistral, f"[TOOL_CALLS]f[ARGS]{written}"),
        (DeepSeekV3, f"{CALLS}{CALL}function{SEP}f\n```json\n{written}\n```{END_CALL}{END_CALLS}"),
        (KimiK2, f"{KIMIS}{KIMI}functions.f:0{KIMI_SEP}{written}{END_KIMI}{END_KIMIS}"),
    ]:
        assert told(format, cut(text, length)) == [("f", written)]


@given(value=st.text(), number=st.integers(), length=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_bare_values_become_json(value: str, number: int, length: int) -> None:
    text = f"<function=f><parameter=text>\n{value}\n</parameter><parameter=number>\n{number}\n</parameter></function>"
    ((name, arguments),) = told(Qwen3Xml, cut(text, length))
    assert json.loads(arguments) == {"text": value, "number": number}


@given(arguments=st.dictionaries(st.text("abc_", min_size=1), json_values), length=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_pythons_literals_become_json(arguments: dict[str, Any], length: int) -> None:
    for spelled in (repr, json.dumps):
        written = ", ".join(f"{key}={spelled(value)}" for key, value in arguments.items())
        for format, text in ((Pythonic, f"[f({written})]"), (Olmo3, f"<function_calls>f({written})</function_calls>")):
            ((name, read),) = told(format, cut(text, length))
            assert name == "f" and json.loads(read) == arguments
        values = f"<parameter=object>{spelled(arguments)}</parameter><parameter=list>\n{spelled([arguments])}\n</parameter>"
        text = f"<function=f>{values}</function>"
        ((name, read),) = told(Qwen3Xml, cut(text, length))
        assert name == "f" and json.loads(read) == {"object": arguments, "list": [arguments]}


def test_content_and_arguments_come_at_once() -> None:
    """Only what may be a marker waits."""
    parser = Hermes(TOOLS)
    assert parser.feed("Hello <") == [Content("Hello")]
    assert parser.feed("b") == [Content(" <b")]
    assert parser.feed('> <tool_call>{"name": "f", ') == [Content(">"), CallBegun("f")]
    assert parser.feed('"arguments": {"a') == [Arguments('{"a')]
    assert parser.feed('": "<') == [Arguments('": "<')]
    assert parser.feed('"}') == [Arguments('"}')]
    assert parser.feed("}</tool_call>") == [] and parser.finish() == []


def test_an_answer_in_json_waits_for_its_first_key_only() -> None:
    parser = Llama3Json(TOOLS)
    assert parser.feed('{"summ') == []
    assert parser.feed('ary": "') == [Content('{"summary": "')]


HOSTILE = [
    "<tool_call>" * 1_000,
    '<tool_call>{"' * 1_000,
    '<tool_call>{"arguments":"' * 600,
    '<tool_call>{"arguments":{' * 600,
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 4_000,
    '<tool_call>{"name": "f", "arguments": ' + "[" * 20_000,
    '<tool_call>{"name": "' + "f" * 20_000,
    '<tool_call>{"name": "f", "arguments": "' + "\\" * 20_001,
    "<tool_call>" + " " * 20_000 + "{",
    " " * 20_000,
    "[TOOL_CALLS]" * 1_600,
    "[TOOL_CALLS][" * 1_600,
    "[TOOL_CALLS]" + "f" * 20_000,
    "<|python_tag|>{" * 1_000,
    "<|start|>" * 2_000,
    "<|channel|> to=f<|message|>" * 800,
    '{"name": "f", "parameters": {}};' * 600,
    "<function=f>" * 1_000,
    "<function=f>" + "<parameter=text>" * 1_000,
    "<function=f><parameter=number>" + "1" * 20_000,
    "<function=f>" + "<parameter=number>1</parameter>" * 600,
    "<function=f><parameter=list>" + "[" * 2_000 + "'" * 20_000,
    "<function=f><parameter=list>['" + "[" * 3_000 + "</parameter>",
    "<start_function_call>call:" * 700,
    "<start_function_call>call:f{" + "[" * 20_000,
    "<start_function_call>call:f{" + "a:{" * 5_000,
    "<start_function_call>call:f{" + "a" * 20_000,
    "<start_function_call>call:f{" + "," * 20_000,
    "<start_function_call>call:f{" + " " * 20_000,
    "<start_function_call>call:f{a:" + "1" * 20_000,
    "<tool_call>" + "f" * 20_000,
    "<tool_call>f<arg_key>" * 600,
    "<tool_call>f" + "<arg_key>number</arg_key><arg_value>1</arg_value>" * 600,
    "[f(" * 5_000,
    "[f(a=" + "[" * 20_000,
    "[f(a='" + "\\u" * 10_000,
    "[f(a='" + "'x" * 10_000,
    "<function_calls>f(" * 1_000,
    "<function_calls>f(a=" + "f" * 20_000,
    "<function_calls>" + "f" * 20_000,
    "<function_calls>" + "f(a='')" * 2_000,
    'functools[{"function": ' * 600,
    '<|tool_call|>[' + '{"name": "f"},' * 600,
    '<invoke name="f">' * 1_000,
    '<invoke name="' + "f" * 20_000,
    (CALLS + CALL) * 500,
    (CALL + "function" + SEP) * 400,
    CALLS + f"{CALL}f{SEP}{{}}{END_CALL}" * 300,
    CALL + "f" * 20_000,
    (KIMIS + KIMI + "functions.f:0") * 200,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
@pytest.mark.parametrize("format", ALL)
def test_no_text_takes_long_or_is_held_for_long(format: type[ToolParser], text: str) -> None:
    parser, num_in, num_out, start = format(TOOLS), 0, 0, time.process_time()
    for piece in cut(text, 16):
        num_in += len(piece)
        num_out += sum(len(part.text) for part in parser.feed(piece) if not isinstance(part, CallBegun))
        held = len(parser._text) - parser._mark
        assert held <= 2 * MAX_HELD + 4 * MAX_SPACE, held
    parser.finish()
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("character", ['"', "\\", "{", "\ud800", "\x00"])
def test_what_is_no_text_is_no_name(character: str) -> None:
    name = json.dumps(character)
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    named = told(Hermes, [text])
    assert named == ([(character, "{}")] if character.isprintable() else [text])


@pytest.mark.parametrize("format", ALL)
def test_ids_differ(format: type[ToolParser]) -> None:
    assert len({format.new_id() for _ in range(100)}) == 100


def test_mistral_takes_no_other_ids() -> None:
    assert all(len(made) == 9 and made.isalnum() for made in (Mistral.new_id(), MistralList.new_id()))
