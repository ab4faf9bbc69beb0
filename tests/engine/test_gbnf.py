"""GBNF as llama.cpp, SGLang and vLLM write it means here what it means there, and Lark is never taken for it."""

import time

import pytest
from grammars import accepts

from foretoken.engine.gbnf import is_gbnf, lark_of
from foretoken.engine.grammar_spec import MAX_GRAMMAR_BYTES, GrammarSpec


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ('root ::= "a"\n  | "b" # or\n\n  | "c"\n', ["a", "b", "c"], ["ab"]),
        ('root ::= ("a" | # no\n "b")', ["a", "b"], ["c"]),
        (r"root ::= [\u0041-\u0043]+", ["ABC"], ["D", "u"]),
        (r"root ::= [\u00e0-\u00FF]", ["é"], ["e"]),
        (r'root ::= "\u0041\u00e9\U0001F600"', ["Aé😀"], ["A"]),
        (r'root ::= "\\u0041"', [r"\u0041"], ["A"]),
        (r'root ::= "\[x\]" [\]a]+', ["[x]a]"], ["x"]),
        (r"root ::= [a\-c]+", ["a-c"], ["b"]),
        ('root ::= start restart\nstart ::= "start"\nrestart ::= start | "x"', ["startx", "startstart"], ["xx"]),
        ("root ::= .+", ["a\nb"], [""]),
        ('root ::= "#." [.#]', ["#..", "#.#"], ["#.x"]),
        ('root ::= my-rule{2,3}\nmy-rule ::= "x"', ["xx", "xxx"], ["x"]),
    ],
)
def test_what_may_be_said(text: str, right: list[str], wrong: list[str]) -> None:
    assert is_gbnf(text)
    assert [said for said in right if not accepts(GrammarSpec.grammar(text), said)] == []
    assert [said for said in wrong if accepts(GrammarSpec.grammar(text), said)] == []


@pytest.mark.parametrize("text", ['start: "a" | "::="', '?start: "a"\n', '%llguidance {}\nstart: "a"', "start: /[a::=]/"])
def test_lark_is_lark(text: str) -> None:
    assert not is_gbnf(text) and (accepts(GrammarSpec.grammar(text), "a"))


@pytest.mark.parametrize("text", ["root ::= (", r'root ::= "\ud800"', 'main ::= "a"', 'root ::= "a', "root ::= [a", 'root ::= nowhere'])
def test_mistakes_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError):
        lark_of(text)


@pytest.mark.parametrize("part", ["[", '"', "\n", "a", "\\", '["', "[\\", "a ::=\n", "#", " \t"])
def test_no_text_takes_long(part: str) -> None:
    text = (part * MAX_GRAMMAR_BYTES)[:MAX_GRAMMAR_BYTES]
    started = time.thread_time()
    is_gbnf(text)
    with pytest.raises(ValueError):
        lark_of("root ::= " + text + "\n(")
    assert time.thread_time() - started < 1.0
