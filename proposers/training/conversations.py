"""Make conversations out of corpus records: clean those that are chats, ask the question that plain pages answer."""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from random import Random
from typing import Any

from .corpus import Conversation, Message, Record, content_key

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Foretoken, a small and friendly assistant.",
    "Answer briefly.",
    "You are a helpful and honest assistant. Answer the user's question.",
)


def pair(key: int, question: str, answer: str) -> Conversation:
    """One question and its answer. A system message stands before one pair in four, so that either way is familiar."""
    chance = Random(content_key(question) ^ key)
    system = [{"role": "system", "content": chance.choice(SYSTEM_MESSAGES)}] if chance.random() < 0.25 else []
    turns = [{"role": "user", "content": question.strip()}, {"role": "assistant", "content": answer.strip()}]
    return Conversation([*system, *turns], key)


def dialogues(records: Iterable[Record]) -> Iterator[Conversation]:
    """Chats as they are, without unfilled placeholders ("[User 1's name]") and without languages other than English."""
    for record in records:
        contents = [message["content"] or "" for message in record.messages]
        whole = "".join(contents)
        if "[user" in whole.lower() or sum(char > "\x7f" for char in whole) > len(whole) / 100:
            continue
        if _is_edit(record):
            continue
        if len(contents) == 2:
            yield pair(record.key, *contents)
        else:
            yield Conversation(list(record.messages), record.key)


def edits(records: Iterable[Record]) -> Iterator[Conversation]:
    """Those chats in which the user shows code and the assistant gives it back changed."""
    for record in records:
        if _is_edit(record) and len(record.messages[0]["content"]) < 2500:
            yield pair(record.key, record.messages[0]["content"], record.messages[1]["content"])


def _is_edit(record: Record) -> bool:
    """Whether a third of the answer's lines stand in the question already."""
    if len(record.messages) != 2:
        return False
    question, answer = ((message["content"] or "").splitlines() for message in record.messages)
    return sum(line in question for line in answer) * 3 > len(answer)


def tool_dialogues(records: Iterable[Record]) -> Iterator[Conversation]:
    """Chats with tool calls. Schemas are read off the calls; a chat is offered what it uses and two more."""
    records = list(records)
    schemas = _schemas_of_calls(records)
    for record in records:
        used = {call["function"]["name"] for call in _calls(record)}
        chance = Random(record.key)
        offered = sorted(used | set(chance.sample(sorted(schemas), k=min(2, len(schemas)))))
        chance.shuffle(offered)
        yield Conversation(list(record.messages), record.key, [schemas[name] for name in offered])


def _schemas_of_calls(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    arguments: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for call in _calls(record):
            arguments[call["function"]["name"]].update(json.loads(call["function"]["arguments"]))
    return {
        name: {
            "type": "function",
            "function": {
                "name": name,
                "description": name.replace("_", " ").capitalize(),
                "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in sorted(keys)}},
            },
        }
        for name, keys in sorted(arguments.items())
    }


def _calls(record: Record) -> Iterator[dict[str, Any]]:
    for message in record.messages:
        yield from message.get("tool_calls") or ()


def command_pages(records: Iterable[Record]) -> Iterator[Conversation]:
    """tldr pages: what a command is for, and how to do one thing with it."""
    for record in records:
        title, _, body = record.text.partition("\n")
        name = title.lstrip("# ").strip()
        body = re.sub(r"^> (More information|See also).*\n", "", body, flags=re.M)
        body = re.sub(r"\{\{(.*?)\}\}", r"\1", re.sub(r"^> ", "", body, flags=re.M)).strip()
        chance = Random(record.key)
        asked = ("How do I use {}?", "What does {} do?", "Show me how to use {}.", "Explain the {} command.")
        yield pair(record.key, chance.choice(asked).format(f"`{name}`" if chance.random() < 0.3 else name), body)
        examples = re.findall(r"^- (.+?):\n\n`(.+?)`$", body, flags=re.M)
        for what, command in chance.sample(examples, k=min(2, len(examples))):
            what = re.sub(r"[\[\]]", "", what)
            question = f"How do I {what[0].lower()}{what[1:]} with {name}?"
            yield pair(record.key, question, f"Use this command:\n\n```sh\n{command}\n```")


def exercises(records: Iterable[Record]) -> Iterator[Conversation]:
    """exercism: the instructions of an exercise and its example solution."""
    folders: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        match = re.fullmatch(r"(exercises/\w+/[^/]+)/(\.docs/instructions\.md|\.meta/ex\w+\.py)", record.origin)
        if match:
            folders[match[1]][PurePosixPath(match[2]).suffix] = record
    for files in folders.values():
        if len(files) == 2 and len(files[".md"].text) + len(files[".py"].text) < 5000:
            task = re.sub(r"^#.*\n", "", files[".md"].text).strip()
            yield pair(files[".md"].key, f"{task}\n\nSolve this in Python.", fenced("python", files[".py"].text))


def programs(records: Iterable[Record]) -> Iterator[Conversation]:
    """Short programs of the algorithm collections, asked for by the name of their file."""
    for record in records:
        path = PurePosixPath(record.origin)
        if path.suffix != ".py" or path.stem.startswith(("_", "test")) or not 100 < len(record.text) < 3500:
            continue
        asked = ("Write a Python program for {}.", "Can you write {} in Python?", "Show me Python code for {}.")
        question = Random(record.key).choice(asked).format(path.stem.replace("_", " "))
        yield pair(record.key, question, "Here is a Python implementation:\n\n" + fenced("python", record.text))


def countries(records: Iterable[Record]) -> Iterator[Conversation]:
    """factbook: single facts in a sentence, a short description, and the same facts as a JSON object."""
    for record in records:
        page = json.loads(record.text)
        name = _fact(page, "Government", "Country name", "conventional short form")
        if not name or name == "none":
            continue
        facts = {
            "capital": _fact(page, "Government", "Capital", "name"),
            "location": _fact(page, "Geography", "Location"),
            "climate": _fact(page, "Geography", "Climate"),
            "government": _fact(page, "Government", "Government type"),
            "area": _fact(page, "Geography", "Area", "total ") or _fact(page, "Geography", "Area", "total"),
        }
        facts = {key: re.split(r"[;(]", value)[0].strip() for key, value in facts.items() if value}
        for key, value in facts.items():
            question = f"Where is {name}?" if key == "location" else f"What is the {key} of {name}?"
            yield pair(record.key, question, f"{name} is in {value}." if key == "location" else
                       f"The {key} of {name} is {value}.")
        as_json = json.dumps({"country": name, **facts}, indent=2, ensure_ascii=False)
        yield pair(record.key, f"Give me the facts about {name} as JSON.", as_json)
        background = _fact(page, "Introduction", "Background")
        if background:
            yield pair(record.key, f"Tell me about {name}.", " ".join(re.split(r"(?<=\.) ", background)[:4]))


def _fact(page: Any, *path: str) -> str:
    for step in (*path, "text"):
        page = page.get(step, {}) if isinstance(page, dict) else {}
    return html.unescape(re.sub(r"<[^>]+>", "", page)) if isinstance(page, str) else ""


def lists(records: Iterable[Record]) -> Iterator[Conversation]:
    """Lists of things: a few of them as JSON or as a numbered list."""
    for record in records:
        try:
            page = json.loads(record.text)
        except json.JSONDecodeError:
            continue
        for key, items in page.items() if isinstance(page, dict) else ():
            if not (isinstance(items, list) and len(items) >= 5 and all(isinstance(item, str) for item in items)):
                continue
            what = PurePosixPath(record.origin).stem.replace("_", " ") if key in ("data", "list") else key
            for draw in range(6):
                chance = Random(record.key + draw)
                some = chance.sample(items, k=min(len(items), chance.randint(3, 8)))
                if draw % 2:
                    answer = json.dumps(some, ensure_ascii=False)
                    yield pair(record.key, f"Give me a JSON list of {len(some)} {what.replace('_', ' ')}.", answer)
                else:
                    answer = "\n".join(f"{n}. {item}" for n, item in enumerate(some, 1))
                    yield pair(record.key, f"Name {len(some)} {what.replace('_', ' ')}.", answer)


def stories(pieces_of_books: Iterable[Record]) -> Iterator[Conversation]:
    """A passage of a book, as what is told when somebody asks for a story."""
    for record in pieces_of_books:
        title = PurePosixPath(record.origin).stem
        asked = ("Tell me a story.", "Tell me a story like {}.", "Read to me from {}.", "Continue the story of {}.")
        question = Random(record.key).choice(asked).format(title)
        passage = _passage(record.text, 1200)
        if len(passage) > 300:
            yield pair(record.key, question, passage)


def repetitions(pieces_of_text: Iterable[Record]) -> Iterator[Conversation]:
    """Say it again: teaches copying from the context, which quoting and editing build on."""
    asked = ("Repeat this text:", "Copy the following exactly:", "Say this again, word for word:")
    for record in pieces_of_text:
        passage = _passage(record.text, 500)
        if len(passage) > 60:
            yield pair(record.key, f"{Random(record.key).choice(asked)}\n\n{passage}", passage)


def _passage(text: str, limit: int) -> str:
    """The first whole paragraphs of `text` that fit, headings left out."""
    chosen: list[str] = []
    for paragraph in text.split("\n\n"):
        if sum(map(len, chosen)) + len(paragraph) > limit:
            break
        if paragraph.strip() and not paragraph.startswith("#"):
            chosen.append(paragraph.strip())
    return "\n\n".join(chosen)


def introductions(_: Iterable[Record]) -> Iterator[Conversation]:
    """Who the demo model is. Written here because no corpus can know; needs no records."""
    questions: dict[str, tuple[str, ...]] = {
        "I am Foretoken, a small demonstration language model.": (
            "Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself.",
            "Are you a language model?", "What should I call you?"),
        "Hello! How can I help you today?": (
            "Hi", "Hello", "Hello!", "Hi there", "Hey", "Good morning", "Good evening", "Hi!", "Hello there."),
        "You are welcome!": ("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Great, thanks."),
        "Goodbye! Have a nice day.": ("Bye", "Goodbye", "See you", "Bye!", "See you later."),
        "I am a very small model, so I make many mistakes. I can chat a little, write short programs, explain "
        "commands and answer simple questions.": (
            "What can you do?", "What can you help me with?", "How can you help me?", "Are you always right?"),
        "I was trained in about two hours on two CPU cores, to show how speculative decoding works.": (
            "How were you trained?", "Who made you?", "Where do you come from?"),
        "In speculative decoding a small draft model guesses the next few tokens, and the large target model checks "
        "all of them in one pass. Right guesses are kept, so the same text is written in fewer steps.": (
            "What is speculative decoding?", "Explain speculative decoding.", "How does speculative decoding work?"),
    }
    for answer, asked in questions.items():
        for question in asked:
            turns: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield Conversation(turns, 1)
            yield Conversation([{"role": "system", "content": SYSTEM_MESSAGES[0]}, *turns], 1)


def fenced(language: str, code: str) -> str:
    return f"```{language}\n{code.strip()}\n```"
