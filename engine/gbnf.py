"""GBNF, the EBNF of llama.cpp, which SGLang and vLLM (xgrammar) take too: told from Lark, and spelled so that llguidance reads all of it.

Owns what differs between those dialects and llguidance's own reader of GBNF, which knows neither \\u of few digits, nor brackets that are
escaped in a literal, nor a dash in a set, nor alternatives that begin a line, nor a rule `start`, and whose `.` is no newline.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PARTS = re.compile(  # each alternative fits wherever it begins, closed or not, so that no text takes long
    r'(?P<literal>"(?:\\.|[^"\\])*\\?"?)|(?P<set>\[(?:\\.|[^\]\\])*\\?\]?)|(?P<comment>#[^\r\n]*)|(?P<any>\.)|(?P<space>\s+\|?)'
    r"|(?P<start>(?<![\w-])start(?![\w-]))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"


def is_gbnf(text: str) -> bool:
    """Whether its rules are written `name ::= ...`; Lark's are `name: ...`."""
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """A GBNF grammar with a rule `root`, in Lark as llguidance has it. Raises ValueError."""
    try:
        return gbnf_to_lark(_PARTS.sub(_respelled, text))
    except Exception as error:  # what it raises is no narrower
        raise ValueError(str(error)) from error


def _respelled(part: re.Match[str]) -> str:
    match part.lastgroup:
        case "literal":
            return _ESCAPE.sub(lambda escape: escape[3] if escape[3] in ("[", "]") else _character(escape), part[0])
        case "set":
            return _ESCAPE.sub(lambda escape: r"\x2d" if escape[3] == "-" else _character(escape), part[0])
        case "comment":
            return ""
        case "any":
            return _ANY
        case "start":
            return "start-itself"
        case _:
            return " |" if part[0].endswith("|") else part[0]


def _character(escape: re.Match[str]) -> str:
    """A character that no notation has a meaning for stands for itself, and the others are two digits."""
    if (digits := escape[1] or escape[2]) is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
