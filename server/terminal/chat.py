"""`foretoken chat`: a conversation in the terminal with any OpenAI-compatible server, each token in the colour of who said it."""

import argparse
import sys
import time
from collections.abc import Sequence

from ..config import variable
from ..exit_status import UNAVAILABLE, failed
from ..help_format import CommandParser, HelpFormatter
from ..option_forms import count, key, temperature
from .client import ChatClient, ChatError, NoServer
from .colors import WHEN, Painter
from .commands import Commands, Next
from .conversation import Conversation, Message, shown
from .input import Prompt
from .stats import AnswerStats
from .tokens import Piece, TokenPlacer

DESCRIPTION = """\
Talk to a running server. Every token has the colour of who said it: plain text
is the target's own, coloured text was guessed by a proposer and kept.
"""
EXAMPLES = """\
examples:
  foretoken chat
  foretoken chat --system "Answer in one sentence." --temperature 0
  foretoken chat --url http://gpu-box:8000 --api-key KEY --speculation off
  echo "Who wrote Faust?" | foretoken chat --color never

In the chat, /help lists the commands: /system, /temperature, /speculation,
/regenerate, /undo, /reset, /save, /stats, /quit. Ctrl-C stops an answer, Ctrl-D
ends. NO_COLOR=1 in the environment switches colours off.
"""
FAILED = 1  # exit status


def chat(argv: Sequence[str]) -> int:
    """Ask, stream the answer, repeat. Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        client = ChatClient(args.url, args.api_key or variable("FORETOKEN_API_KEY"))
    except ChatError as error:
        return _fail(error)
    try:
        model = client.choose_model(args.model)
        settings = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        conversation = Conversation(model, args.system or "", {name: value for name, value in settings.items() if value is not None})
        if args.speculation:
            conversation.settings["speculation"] = {"method": args.speculation}
        return Chat(client, conversation, Painter(sys.stdout, args.color)).run()
    except ChatError as error:
        return _fail(error)
    finally:
        client.close()


def _fail(error: ChatError) -> int:
    return failed(error, UNAVAILABLE if isinstance(error, NoServer) else FAILED)


class Chat:
    """One session at a terminal, or over pipes: then nothing is prompted for, and a failure is the exit status."""

    def __init__(self, client: ChatClient, conversation: Conversation, painter: Painter) -> None:
        self._client = client
        self._conversation = conversation
        self._painter = painter
        self._total = AnswerStats()
        self._failed = False
        self._commands = Commands(conversation, self._total, painter)
        self._prompt = Prompt([*self._commands.by_name])

    def run(self) -> int:
        """Until the end of the input or /quit. Returns the exit status."""
        settings = shown(self._conversation.settings)
        print(self._painter.bold(self._conversation.model) + self._painter.dim(f" at {self._client.url}{settings and ', ' + settings}"))
        print(self._painter.dim("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."))
        try:
            while self._turn_unless_interrupted():
                pass
        finally:
            self._prompt.close()
        return FAILED if self._failed and not sys.stdin.isatty() else 0

    def _turn_unless_interrupted(self) -> bool:
        """Ctrl-C ends what is going on, and never the chat."""
        try:
            return self._turn()
        except KeyboardInterrupt:
            print("\n" + self._painter.dim("  (Ctrl-D or /quit ends)"))  # below what was being typed
            return True

    def _turn(self) -> bool:
        """Whether to go on."""
        try:
            line = self._prompt.read()
        except EOFError:
            print()
            return False
        before = [*self._conversation.messages]
        after = Next.READ
        if line.startswith("/"):
            after = self._commands.run(line)
        elif line:
            self._conversation.ask(line)
            after = Next.ANSWER
        if after is Next.ANSWER:
            self._answer(before)
        return after is not Next.QUIT

    def _answer(self, before: list[Message]) -> None:
        """Has the latest question answered. What came before Ctrl-C or a failure stays; if nothing came, all is as it was `before`."""
        start, placer, text = time.monotonic(), TokenPlacer(), ""
        usage, metrics, ending = {}, {}, ""
        try:
            for chunk in self._client.stream(self._conversation.request):
                text += chunk.text
                self._show(placer.add(chunk.text, chunk.tokens, chunk.reasoning))
                usage, metrics = chunk.usage or usage, chunk.metrics or metrics
                ending = "cut off by the token limit" if chunk.finish_reason == "length" else ending
        except KeyboardInterrupt:
            ending = "stopped"
        except ChatError as error:
            print(("\n" if text else "") + self._painter.bad(f"foretoken: error: {error}"), file=sys.stderr)
            self._failed = True
            ending = "broken off"
        self._show(placer.finish())
        stats = AnswerStats.of(usage, metrics, placer.counts, time.monotonic() - start)
        if text or usage:
            self._conversation.answered(text)
            self._total.add(stats)
        else:
            self._conversation.messages[:] = before
        if figures := "; ".join(filter(None, (ending, stats.describe(self._painter)))):
            print("\n" + self._painter.dim("[") + figures + self._painter.dim("]"))

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            said = self._painter.token(piece.text, piece.proposer)
            print(self._painter.dim(said) if piece.is_reasoning else said, end="")
        sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="foretoken chat", usage="foretoken chat [flags]", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--url", "--base-url", default="http://127.0.0.1:8000", help="where the server listens [%(default)s]")
    add("--api-key", type=key, metavar="KEY", help="[FORETOKEN_API_KEY of the environment]")
    add("--model", metavar="NAME", help="[the first model of the server]")
    add("--system", metavar="TEXT", help="system message [none]")
    add("--temperature", type=temperature, metavar="T", help="0 is greedy [the server's default]")
    add("--max-tokens", type=count, metavar="N", help="of an answer [what the context has room for]")
    add("--speculation", metavar="NAME", help="off, auto, or one of the server's proposers [auto]")
    add("--color", choices=WHEN, default="auto", metavar="WHEN", help=f"{', '.join(WHEN)} [%(default)s: on a terminal, without NO_COLOR]")
    return parser
