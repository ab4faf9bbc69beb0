"""The commands of `foretoken chat`: lines that begin with a slash. Each changes the conversation or tells something."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..option_forms import temperature
from .colors import Painter
from .conversation import Conversation
from .stats import AnswerStats


class Next(Enum):
    """What the chat does after a command."""

    READ = "read on"
    ANSWER = "have the latest question answered"
    QUIT = "end"


@dataclass(frozen=True)
class Command:
    argument: str  # as /help shows it; "" = none
    help: str
    run: Callable[[str], Next]


class Commands:
    """What can be said to the chat itself."""

    def __init__(self, conversation: Conversation, total: AnswerStats, painter: Painter) -> None:
        self._conversation = conversation
        self._total = total
        self._painter = painter
        self.by_name = {
            "/system": Command("[TEXT]", 'tell or set the system message ("" for none)', self._system),
            "/temperature": Command("[T]", "0 is greedy; no number: the server's default", self._temperature),
            "/speculation": Command("[off|auto|NAME]", "who guesses: nobody, whoever pays, or this one", self._speculation),
            "/regenerate": Command("", "answer the latest question again", self._regenerate),
            "/undo": Command("", "take back the latest question and answer", self._undo),
            "/reset": Command("", "begin a new conversation; settings stay", self._reset),
            "/save": Command("FILE", "write it all: Markdown for .md, else JSON", self._save),
            "/stats": Command("", "tokens, speed, who guessed, over the session", self._stats),
            "/help": Command("", "this list", self._help),
            "/quit": Command("", "end, as Ctrl-D does", lambda _: Next.QUIT),
        }

    def run(self, line: str) -> Next:
        """line: begins with a slash. Mistakes are told and change nothing."""
        name, _, argument = line.partition(" ")
        command = self.by_name.get(name)
        if command is None:
            found = [known for known in self.by_name if known.startswith(name)]
            if len(found) != 1:
                if "\n" not in line:
                    return self._refuse(f"there is no {name}; /help lists what there is")
                self._conversation.ask(line)  # code that begins with a comment, a log
                return Next.ANSWER
            command = self.by_name[found[0]]
        return command.run(argument.strip())

    def _system(self, text: str) -> Next:
        if text:
            self._conversation.system = "" if text in ('""', "''") else text
        return self._say(f"system message: {self._conversation.system or '(none)'}")

    def _temperature(self, text: str) -> Next:
        settings = self._conversation.settings
        if not text:
            settings.pop("temperature", None)
            return self._say("temperature: the server's default")
        try:
            settings["temperature"] = temperature(text)
        except ArgumentTypeError as error:
            return self._refuse(str(error))
        return self._say(f"temperature: {settings['temperature']:g}")

    def _speculation(self, text: str) -> Next:
        settings = self._conversation.settings
        if text:
            settings["speculation"] = {"method": text}
        return self._say(f"speculation: {settings.get('speculation', {'method': 'auto'})['method']}")

    def _regenerate(self, _: str) -> Next:
        question = self._conversation.undo()
        if question is None:
            return self._refuse("there is no question yet")
        self._conversation.ask(question)
        return Next.ANSWER

    def _undo(self, _: str) -> Next:
        question = self._conversation.undo()
        return self._refuse("there is nothing to take back") if question is None else self._say(f"taken back: {_short(question)}")

    def _reset(self, _: str) -> Next:
        self._conversation.messages.clear()
        return self._say("a new conversation")

    def _save(self, text: str) -> Next:
        if not text:
            return self._refuse("/save needs a file: /save chat.md")
        path = Path(os.path.expanduser(text))
        try:
            self._conversation.save(path)
        except FileExistsError:
            return self._refuse(f"{path} is there already; name another file")
        except OSError as error:
            return self._refuse(f"{path} cannot be written: {error.strerror}")
        return self._say(f"{len(self._conversation.all_messages)} messages written to {path}")

    def _stats(self, _: str) -> Next:
        if not self._total.answers:
            return self._say("no answer yet")
        answers = "1 answer" if self._total.answers == 1 else f"{self._total.answers} answers"
        return self._say(f"{answers}: {self._total.describe(self._painter)}")

    def _help(self, _: str) -> Next:
        width = max(len(f"{name} {command.argument}") for name, command in self.by_name.items())
        for name, command in self.by_name.items():
            print(f"  {f'{name} {command.argument}':<{width}}  {command.help}")
        print(self._painter.dim('""" begins and ends a message of several lines; a backslash at the end goes on.'))
        return self._say("Ctrl-C stops an answer.")

    def _say(self, text: str) -> Next:
        print(self._painter.dim(text))
        return Next.READ

    def _refuse(self, text: str) -> Next:
        print(self._painter.bad(text))
        return Next.READ


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
