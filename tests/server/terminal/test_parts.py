"""Colours, pieces, input and state of the chat, each by itself."""

import io
import json
import pwd
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.server.terminal.colors import FIXED, FREE, PALETTE, RESET, Painter
from foretoken.server.terminal.commands import Commands, Next
from foretoken.server.terminal.conversation import Conversation
from foretoken.server.terminal.input import Prompt
from foretoken.server.terminal.stats import AnswerStats
from foretoken.server.terminal.tokens import Token, TokenPlacer

STATIC = Path(__file__).parents[3] / "server" / "static"
WORDS = st.lists(st.tuples(st.text("ab \n", min_size=1, max_size=4), st.sampled_from([None, "ngram", "draft_model"])), max_size=12)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_the_colours_are_the_pages() -> None:
    css, script = (STATIC / "palette.css").read_text(), (STATIC / "sources.js").read_text()
    assert PALETTE == tuple(re.findall(r"--line-\d: light-dark\((#[0-9a-f]{6})", css))
    fixed, free = re.search(r"FIXED = \{ (.*?) \}", script), re.search(r"FREE = \[(.*?)\]", script)
    assert fixed and free
    assert {name: int(i) for name, i in re.findall(r"(\w+): (\d)", fixed[1])} == FIXED and tuple(map(int, free[1].split(","))) == FREE


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Painter(Screen()).token("x", "ngram") == f"\x1b[38;5;130mx{RESET}"
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert Painter(Screen()).token("x", "ngram") == f"\x1b[38;2;194;84;0mx{RESET}"
    assert Painter(Screen()).token("x", None) == "x"
    assert Painter(io.StringIO()).token("x", "ngram") == "x" and Painter(Screen(), "never").token("x", "ngram") == "x"
    assert Painter(io.StringIO(), "always").token("x", "ngram") != "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Painter(Screen()).token("x", "ngram") == "x"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert Painter(Screen()).dim("x") == "x"


def test_what_a_model_says_cannot_command_a_terminal() -> None:
    painter = Painter(Screen())
    assert painter.token("a\x1b[2J\tb\n\x9b1m\x07", None) == "a\\x1b[2J\tb\n\\x9b1m\\x07"
    assert Painter(io.StringIO()).token("\x1b[2J", None) == "\x1b[2J", "a file gets what was said"


def test_proposers_keep_their_colours_and_share_a_legend() -> None:
    painter = Painter(Screen(), "never")
    assert [painter.colour(name) for name in ("eagle3", "ngram", "medusa", "eagle3")] == [PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[0]]
    assert painter.legend({"ngram": 1, None: 1, "eagle3": 2}) == "target 25%, eagle3 50%, ngram 25%"


@given(WORDS, st.data())
@settings(deadline=None)
def test_every_character_is_shown_once_with_its_token(tokens: list[Token], data: st.DataObject) -> None:
    """However the stream is cut: a step's text may come with its tokens or later."""
    text, placer, shown, ready = "".join(word for word, _ in tokens), TokenPlacer(), [], ""
    wanted = [(character, proposer) for word, proposer in tokens for character in word]
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        step, tokens = tokens[:count], tokens[count:]
        ready += "".join(word for word, _ in step)
        size = data.draw(st.integers(0, len(ready)))
        shown += placer.add(ready[:size], step)
        ready = ready[size:]
    shown += placer.add(ready, []) + placer.finish()
    assert "".join(piece.text for piece in shown) == text
    assert [(character, piece.proposer) for piece in shown for character in piece.text] == wanted


def test_tokens_keep_their_proposers() -> None:
    placer = TokenPlacer()
    said = [(" one", None), (" two", "ngram"), ("<end>", "ngram"), (" three", "eagle3")]
    first = placer.add("one tw", said[:2])  # the space at the start was dropped, the end is held back
    rest = placer.add("o", []) + placer.add(" three", said[2:]) + placer.finish()
    assert [(piece.text, piece.proposer) for piece in first + rest] == [("one", None), (" two", "ngram"), (" three", "eagle3")]
    assert placer.counts == Counter({None: 1, "ngram": 2, "eagle3": 1})
    thought = TokenPlacer().add(" yes", [("hm", None), (" yes", "ngram")], reasoning="hm")
    assert [(piece.text, piece.is_reasoning) for piece in thought] == [("hm", True), (" yes", False)]


def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = 'one\nfirst \\\nsecond\n"""def f():\n    pass\n"""\n"""short"""\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    prompt = Prompt([])
    assert [prompt.read() for _ in range(4)] == ["one", "first \nsecond", "def f():\n    pass", "short"]
    with pytest.raises(EOFError):
        prompt.read()


def test_who_has_no_home_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number that a container was given as its user
    monkeypatch.setattr(sys, "stdin", Screen("hello\n"))
    prompt = Prompt(["/quit"])
    assert prompt.read() == "hello"
    prompt.close()


def test_commands_change_the_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, total = Conversation("m"), AnswerStats()
    commands = Commands(chat, total, Painter(io.StringIO()))
    assert commands.run("/regenerate") is Next.READ and "no question yet" in capsys.readouterr().out
    chat.ask("why?")
    chat.answered("because")
    for line in ("/system Be kind.", "/temperature 0.5", "/spec off"):  # a beginning is enough
        assert commands.run(line) is Next.READ
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    assert chat.request == {"model": "m", "messages": messages, "temperature": 0.5, "speculation": {"method": "off"}}
    file = tmp_path / "chat.jsonl"
    commands.run(f"/save {file}")
    assert json.loads(file.read_text()) == {"messages": messages, "model": "m"}
    capsys.readouterr()
    for line, words in {
        f"/save {file}": "is there already", f"/save {tmp_path}/no/where": "cannot be written", "/save": "needs a file",
        "/save ~nobody-of-this-name/x": "cannot be written",
        "/temperature hot": "'hot' is not a temperature", "/temperature -1": "is not a temperature", "/s": "there is no /s",
        "/stats": "no answer yet",
    }.items():
        assert commands.run(line) is Next.READ and words in capsys.readouterr().out
    assert commands.run("/regenerate") is Next.ANSWER and chat.messages == messages[1:2]
    commands.run("/undo")
    commands.run('/system ""')
    commands.run("/temperature")
    assert chat.all_messages == [] and chat.settings == {"speculation": {"method": "off"}}
    assert commands.run("/quit") is Next.QUIT


def test_figures_of_an_answer() -> None:
    metrics = {"tokens_per_second": 100.0, "speculative_decoding": {"num_draft_tokens": 40, "num_accepted_draft_tokens": 10}}
    stats = AnswerStats.of({"completion_tokens": 20}, metrics, Counter({None: 10, "ngram": 10}), seconds=9.0)
    painter = Painter(io.StringIO())
    assert stats.describe(painter) == "20 tokens, 100 tokens/s; 2.00 a pass, 25% of guesses accepted; target 50%, ngram 50%"
    stats.add(AnswerStats.of({}, {}, Counter(), seconds=1.8))  # of a server that tells nothing
    assert stats.describe(painter).startswith("20 tokens, 10 tokens/s; 2.00 a pass") and stats.answers == 2
