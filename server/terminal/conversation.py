"""The state of a `foretoken chat`: what was said, with which settings, and how both change. Knows no terminal and no server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass
class Conversation:
    """Messages in OpenAI's shape. They end with an answer, or with a question that has none yet."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # fields of the request, such as temperature
    messages: list[Message] = field(default_factory=list)  # without the system message

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def undo(self) -> str | None:
        """Takes back the latest question and its answer, and returns the question; None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    @property
    def request(self) -> dict[str, Any]:
        return {"model": self.model, "messages": self.all_messages} | self.settings

    @property
    def all_messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def save(self, path: Path) -> None:
        """Markdown for *.md, else one line of JSON, as datasets of chats have it. Raises OSError: it writes over no file."""
        with path.open("x", encoding="utf-8") as file:
            if path.suffix == ".md":
                file.write("\n".join(f"**{message['role']}**\n\n{message['content']}\n" for message in self.all_messages))
            else:
                file.write(json.dumps({"messages": self.all_messages, "model": self.model}, ensure_ascii=False) + "\n")


def shown(settings: Mapping[str, Any]) -> str:
    """{"temperature": 0.5, "speculation": {"method": "off"}} -> "temperature 0.5, speculation off"."""
    parts = {name: value["method"] if isinstance(value, dict) else f"{value:g}" for name, value in settings.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in parts.items())
