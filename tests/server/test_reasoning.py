import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.server.harmony import HarmonyParser
from foretoken.server.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, ReasoningTokens, detected
from foretoken.server.tools.scanner import Content, Reasoning

THINK = REASONING_FORMATS["qwen3"]


def told(pieces: list[str], inside: bool, format: ReasoningFormat = THINK) -> tuple[str, str]:
    """(reasoning, content)"""
    parser = ReasoningParser(format, inside)
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    assert not inside or not parser.inside or "</think>" not in "".join(pieces)
    reasoning = [part for part in found if isinstance(part, Reasoning)]
    content = [part for part in found if isinstance(part, Content)]
    assert found == reasoning + content, "reasoning comes first"
    return "".join(part.text for part in reasoning), "".join(part.text for part in content)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm, 2.\n</think>\n\nTwo", False, ("Hm, 2.", "Two")),
        ("Hm, 2.\n</think>\n\nTwo", True, ("Hm, 2.", "Two")),
        ("<think>Hm</think>Two", True, ("Hm", "Two")),  # it writes what the prompt has already
        ("\n<think></think> Two", False, ("", "Two")),
        ("Two </think> <think>", False, ("", "Two </think> <think>")),
        (" Two", False, ("", " Two")),
        ("<thin", False, ("", "<thin")),
        ("still thinking </thin", True, ("still thinking </thin", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for length in range(1, len(text) + 2):
        assert told([text[start : start + length] for start in range(0, len(text), length)], inside) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("granite", "Here is my thought process:\n\nHm\n\nHere is my response:\n\nTwo", ("Hm", "Two")),
        ("granite", "Here is my house", ("", "Here is my house")),
        ("granite3_3", "<think>Hm</think>\n<response>Two <b>\n</response>\n", ("Hm", "Two <b>\n")),
        ("granite3_3", "<think>Hm</think>Two <response>", ("Hm", "Two <response>")),
        ("granite3_3", "<think>Hm</think><resp", ("Hm", "<resp")),
        ("hunyuan_a13b", "<think>\nHm\n</think>\n<answer>\nTwo </ans", ("Hm", "Two </ans")),
        ("hunyuan_a13b", "<answer>\nTwo\n</answer> x", ("", "Two x")),
        ("hunyuan_a13b", " Two", ("", " Two")),
        ("gemma4", "<|channel>thought\nHm\n<channel|>Two", ("Hm", "Two")),
        ("kimi_k2", "<think>Hm</think>Two<|tool_calls_section_begin|>", ("Hm", "Two<|tool_calls_section_begin|>")),
        ("kimi_k2", "<think>Hm <|tool_calls_section_begin|><|tool", ("Hm", "<|tool_calls_section_begin|><|tool")),
        ("gemma4", "<|channel>thought\n<channel|>Two", ("", "Two")),
    ],
)
def test_an_answer_may_have_markers_too(name: str, text: str, expected: tuple[str, str]) -> None:
    for length in range(1, len(text) + 2):
        pieces = [text[start : start + length] for start in range(0, len(text), length)]
        assert told(pieces, False, REASONING_FORMATS[name]) == expected


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
AGAIN = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        (f"{ANALYSIS}Hm{AGAIN}{FINAL}Two", False, ("Hm", "Two")),
        (f"Hm{AGAIN}{FINAL}Two<|end|>", True, ("Hm", "Two")),
        (f"{FINAL} Two\n", False, ("", " Two\n")),
        (f"{ANALYSIS}Hm{AGAIN}{ANALYSIS}2{AGAIN}<|channel|>commentary<|message|>One{AGAIN}{FINAL}Two", False, ("Hm\n2", "One\nTwo")),
        (f"{ANALYSIS}Hm{AGAIN}{CALL}", False, ("Hm", f"<|start|>assistant{CALL}")),
        (f"{ANALYSIS}Hm{AGAIN} to=functions.f{ANALYSIS}{{}}", False, ("Hm", f"<|start|>assistant to=functions.f{ANALYSIS}{{}}")),
        (f"{ANALYSIS}Hm", False, ("Hm", "")),
        (f"{ANALYSIS}Hm{AGAIN}<|channel|>fin", False, ("Hm", "")),
        (" Two", False, ("", " Two")),  # goes on with a message of the prompt's
        (f"Two{AGAIN}", False, ("", "Two")),
        ("<|channel|>" + 600 * "x", False, ("", "<|channel|>" + 600 * "x")),
    ],
)
def test_messages_are_told_apart(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for length in (1, 2, 7, len(text)):
        parser = HarmonyParser(inside)
        found = [part for start in range(0, len(text), length) for part in parser.feed(text[start : start + length])] + parser.finish()
        kinds = (Reasoning, Content)
        assert tuple("".join(part.text for part in found if isinstance(part, kind)) for kind in kinds) == expected


snippets = st.sampled_from(["<think>", "</think>", "<", ">", " ", "\n", "think", "x"])


@given(st.lists(snippets, max_size=20), st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_do_not_matter(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    assert told(pieces, inside) == told(list(text), inside) == told([text], inside)


def test_reasoning_streams() -> None:
    parser = ReasoningParser(THINK, inside=True)
    assert parser.feed("Let me") == [Reasoning("Let me")] and parser.inside
    assert parser.feed(" see.\n</th") == [Reasoning(" see.")]
    assert parser.feed("ink>\n") == [] and parser.feed("Two") == [Content("Two")] and not parser.inside
    assert parser.feed("</think>") == [Content("</think>")]


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", None, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", None, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("qwen3", "user: <think> what is this?<|im_start|>assistant\n", None, False),
        ("deepseek_r1", "<|Assistant|>", None, True),
        ("deepseek_r1", "<|Assistant|><think>\n", None, True),
        ("deepseek_r1", "<|Assistant|></think>", None, False),
        ("qwen3", "... <think>\nHm", "<think>\nHm", True),
        ("qwen3", "... <think>\nHm</think> so", "<think>\nHm</think> so", False),
        ("deepseek_r1", "... so", "so", False),
        ("mistral", "[/INST]", None, False),
        ("deepseek_v3", "<｜Assistant｜>", None, False),
        ("deepseek_v3", "<｜Assistant｜><think>", None, True),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|>", None, False),
        ("minimax_m2", "]~b]ai\n<think>\n", None, True),
        ("ernie45", "assistant\n<think>\n</think>", None, False),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", None, False),
    ],
)
def test_where_a_reply_begins(name: str, prompt: str, continued: str | None, inside: bool) -> None:
    assert REASONING_FORMATS[name].inside(prompt, continued) is inside


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\n\n</think>\n\n' }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}", "qwen3"),  # Nemotron: it thinks if the system says so
        ("after 'Here is my thought process:' and after 'Here is my response:'", "granite"),
        ("between <think></think> and write your response between <response></response>", "granite3_3"),
        ("{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}", "openai_gptoss"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("<seed:think></seed:think>", "seed_oss"),
        ("<|tool_calls_section_begin|><think></think>", "kimi_k2"),
        ("'</think>' in content; {{'<think>'}} <｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{- '<|channel>thought\n<channel|>' -}}", "gemma4"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_what_the_template_says(template: str, name: str | None) -> None:
    assert detected(template) == (None if name is None else REASONING_FORMATS[name])


@pytest.mark.parametrize(
    ("said", "inside", "count"),
    [
        (["Hm", ", 2", "</think>", "\n\n", "Two"], True, 3), (["Hm", "</", "thi", "nk>Two", " it", " is"], True, 4),
        ([" \n", "<thi", "nk>", "Hm", "</think>", "Two"], False, 5), (["<think></think>Two", " it", " is"], False, 1),
        (["<", "think", " Two", "</think>"], False, 0), (["Two", "</think>"], False, 0), (["Hm", ", ", "2"], True, 3),
    ],
)
def test_tokens_of_reasoning_are_counted_alike_however_many_come_at_once(said: list[str], inside: bool, count: int) -> None:
    for length in range(1, len(said) + 1):
        tokens = ReasoningTokens(THINK, inside, lambda token: said[token].encode())
        for start in range(0, len(said), length):
            tokens.feed(range(len(said))[start : start + length])
        assert tokens.count == count


def test_calls_end_the_counting_of_reasoning() -> None:
    said = ["Hm", ", 2", "<|tool_calls_section_", "begin|>", "<|tool_call_begin|>"]
    tokens = ReasoningTokens(REASONING_FORMATS["kimi_k2"], True, lambda token: said[token].encode())
    tokens.feed(range(len(said)))
    assert tokens.count == 4
