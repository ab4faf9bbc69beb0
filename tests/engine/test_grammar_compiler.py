"""What compiles means what it should, what does not is refused with its reason, and neither time nor memory runs away."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grammars import accepts, compiled, compiler, encode, end_id, fresh_mask, opened, tokenizer, vocab_size

from foretoken.engine import grammar_compiler
from foretoken.engine.errors import InvalidGrammar, QueueFull
from foretoken.engine.grammar_compiler import GrammarCompiler
from foretoken.engine.grammar_spec import GrammarSpec

json_schema, grammar, choice = GrammarSpec.json_schema, GrammarSpec.grammar, GrammarSpec.choice
PROPERTIES = {"name": {"type": "string"}, "é": {"type": "integer"}}
PERSON = json_schema({"type": "object", "properties": PROPERTIES, "required": ["é"]})


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (PERSON, ['{"é": 3}', '{"name": "x", "é": -3}', '{"é": 3, "b": [1]}'], ['{"name": "x"}', '{"é": 3.5}', '{"é": 3} ', "3"]),
        (PERSON, ['{"é":3}', '{\n    "é": 3\n}', '{ "é" :\n\t3 }'], ['{"é":  3}', '{"é":\n' + " " * 40 + "3}"]),
        (GrammarSpec.json_object(), ["{}", '{"a": {"b": [null, 1.5]}}'], ["[]", "null", '{"a"}']),
        (GrammarSpec.regex("(ab)+c?"), ["ab", "ababc"], ["abb", "c", "xab"]),
        (choice(["größer 😀", 'with "quotes"\n', "yes", "yes"]), ["größer 😀", 'with "quotes"\n', "yes"], ["ye", "yesyes"]),
        (grammar('root ::= "a" item+\nitem ::= [0-9] | "x"\n'), ["a1x2"], ["a", "ab"]),
        (grammar('start: "a" ITEM+\nITEM: /[0-9]/ | "x"\n'), ["a1x2"], ["a", "ab"]),
    ],
)
def test_what_may_be_said(spec: GrammarSpec, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(spec, text)] == []
    assert [text for text in wrong if accepts(spec, text)] == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (json_schema({"type": "strin"}), "Invalid type"),
        (json_schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (json_schema({"$ref": "https://example.com/x.json"}), "example.com"),
        (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_schema({"allOf": [{"type": "integer"}, {"type": "string"}]}), "Unsatisfiable"),
        (json_schema({"type": "string", "pattern": "(?=x)y"}), "cannot be enforced"),
        (GrammarSpec.regex("[a-"), "unclosed"),
        (GrammarSpec.regex(r"(a)\1"), "regular expression"),
        (GrammarSpec.regex("[^\\x00-\\U0010ffff]"), "regular expression"),
        (grammar("start: nowhere"), "nowhere"),
        (grammar("no grammar at all"), "grammar"),
        (grammar("root ::= ("), "grammar is not valid"),
        (grammar("start: <|im_start|>"), r'unknown special token: "<\|im_start\|>" 1'),
        (grammar("start: start"), "grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.kind} {value.text[:30]}",
)
def test_what_is_refused(spec: GrammarSpec, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        compiler().compile(spec)
    assert isinstance(caught.value, InvalidGrammar) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_lenient_schemas_lose_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert accepts(json_schema(schema, strict=False), "[1, 1]")


def test_special_tokens_come_only_where_the_server_itself_wants_them() -> None:
    marker = tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert isinstance(marker, int)
    inside = grammar(f'start: "a" <[{marker}]> "b"', trusted=True)
    assert fresh_mask(compiled(inside), encode("a")) == [marker]
    state, tokens = opened(grammar(f'start: "a" <[{marker}]> "b"'))
    tokens += encode("a")
    assert state.mask(()) is None and "no text" in str(state.error)


def test_a_text_that_looks_like_a_special_token_is_text() -> None:
    marker = tokenizer().convert_tokens_to_ids("<|im_start|>")
    for spec in (choice(["<|im_start|>"]), GrammarSpec.regex(r"<\|im_start\|>"), grammar('start: "<|im_start|>"')):
        state, tokens = opened(spec)
        tokens += state.forced(100)
        assert tokenizer().decode(tokens[2:-1]) == "<|im_start|>" and marker not in tokens and state.error is None


def test_the_same_grammar_is_compiled_once_and_the_oldest_are_forgotten() -> None:
    made = GrammarCompiler(tokenizer(), vocab_size(), [end_id()], deadline_s=60.0, num_kept=4)
    first = made.compile(choice(["0"]))
    assert made.compile(choice(["0"])) is first
    for i in range(1, 40):
        made.compile(choice([str(i)]))
        assert made.compile(choice(["0"])) is first, "what is in use is kept"
        assert len(made._kept) <= 4, "each may grow to megabytes while outputs follow it"
    for i in range(1, 5):
        made.compile(choice([f"other {i}"]))
    assert made.compile(choice(["0"])) is not first


def test_what_is_not_kept_works_all_the_same() -> None:
    made = GrammarCompiler(tokenizer(), vocab_size(), [end_id()], deadline_s=60.0, num_kept=0)
    state = made.compile(choice(["yes"])).open([])
    assert state.forced(1) and not made._kept


def test_a_deadline() -> None:
    made = GrammarCompiler(tokenizer(), vocab_size(), [end_id()], deadline_s=60.0)
    made.compile(choice(["yes"]))
    made.deadline_s = 1e-4
    started = time.monotonic()
    properties = {f"p{i}": {"enum": [f"{i}-{j}" for j in range(5)]} for i in range(500)}
    with pytest.raises(InvalidGrammar, match="within 0.0001 s; simplify it"):
        made.compile(json_schema({"type": "object", "properties": properties}))
    assert time.monotonic() - started < 30


def test_the_deadline_is_of_a_grammar_not_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, really = compiler(), grammar_compiler._compiled
    made.compile(choice(["yes"]))
    monkeypatch.setattr(made, "deadline_s", 2.0)
    monkeypatch.setattr(grammar_compiler, "_compiled", lambda *args: (time.sleep(0.9), really(*args))[1])
    with ThreadPoolExecutor(6) as threads:
        assert len([*threads.map(lambda i: made.compile(choice([f"{i}"])), range(6))]) == 6
        monkeypatch.setattr(grammar_compiler, "QUEUE_S", 0.5)
        waiting = [threads.submit(made.compile, choice([f"later {i}"])) for i in range(3)]
        time.sleep(0.2)  # both threads have one
        with pytest.raises(QueueFull):  # it has waited for so long elsewhere
            made.compile(choice(["late"]), asked_at=time.monotonic() - 0.5)
        assert made.has(choice(["yes"])) and not made.has(choice(["late"]))
        assert sorted(type(one.exception()).__name__ for one in waiting) == ["NoneType", "NoneType", "QueueFull"]


def chained(length: int, link: str) -> str:
    """A schema whose parts refer to each other in one long row."""
    links = ",".join(f'"{i}":' + link % f'{{"$ref":"#/$defs/{i + 1}"}}' for i in range(length))
    return f'{{"$ref":"#/$defs/0","$defs":{{{links},"{length}":true}}}}'


HOSTILE: list[tuple[str, Any]] = [
    ("regex", "(a+)+b"),
    ("regex", "(.*a.{200}){3}"),
    ("regex", "((a{0,1000}){0,1000}){0,1000}"),
    ("regex", "(a|aa|aaa){1,100000}"),
    ("regex", "(?:" + "|".join(f"[a-z]{{{i}}}x" for i in range(250)) + ")*y"),
    ("json_schema", '{"type": "object", "properties": {' + ",".join(f'"p{i}": {{"type": "integer"}}' for i in range(1500)) + "}}"),
    ("json_schema", '{"type": "array", "maxItems": 1000000, "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 1000}}'),
    ("json_schema", '{"type": "string", "minLength": 10000, "maxLength": 1000000000}'),
    ("json_schema", '{"anyOf": [' + ",".join(f'{{"type": "string", "pattern": "^(.*{i}.{{20}}){{3}}$"}}' for i in range(100)) + "]}"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
    ("json_schema", '{"allOf": [' + ",".join('{"anyOf": [{"minimum": 1}, {"maximum": 9}]}' for _ in range(12)) + "]}"),
    ("grammar", 'start: e\ne: e e | "a" | e e e'),
    ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    ("grammar", "start: " + "A " * 7000 + "\nA: /a*/"),
    ("grammar", "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(1300)) + 'a1300: "x"'),
    ("json_schema", chained(1600, '{"items":%s}')),
    ("json_schema", chained(1400, '{"allOf":[%s]}')),
    ("json_schema", chained(200, '{"properties":{"a":' * 14 + "%s" + "}}" * 14)),
    ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    ("grammar", "root ::= " + '"a" ' * 4_000),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=lambda value: str(value)[:40])
def test_hostile_grammars_are_refused_or_served_in_bounded_time(kind: Any, text: str) -> None:
    started = time.thread_time()
    try:
        grammar = compiler().compile(GrammarSpec(kind, text))
    except InvalidGrammar:
        return
    tokens: list[int] = []
    state = grammar.open(tokens)
    slowest = 0.0
    for _ in range(20):
        before = time.thread_time()
        mask = state.mask(())
        slowest = max(slowest, time.thread_time() - before)
        if mask is None:
            break
        tokens.append(int(mask.to_bool(vocab_size()).nonzero()[0][-1]))
    assert slowest < 0.25, f"one mask took {slowest:.3f} s"
    assert time.thread_time() - started < 5


def test_many_threads_may_ask_at_once() -> None:
    made = GrammarCompiler(tokenizer(), vocab_size(), [end_id()], deadline_s=60.0, num_kept=4)
    barrier = threading.Barrier(4)

    def ask(number: int) -> list[list[int]]:
        barrier.wait()
        return [made.compile(choice([f"{i % 7} is it"])).open([]).forced(9) for i in range(number, number + 30)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for number, said in enumerate(answers):
        for i, run in enumerate(said, number):
            assert tokenizer().decode(run[:-1]) == f"{i % 7} is it" and run[-1] == end_id()


def test_models_that_cannot_have_grammars() -> None:
    with pytest.raises(InvalidGrammar, match="no token that ends"):
        GrammarCompiler(tokenizer(), vocab_size(), []).compile(GrammarSpec.json_object())
