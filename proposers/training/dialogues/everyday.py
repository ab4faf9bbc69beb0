"""Short dialogues with everyday functions: call, result, and the sentence made of it; or plain words where no function fits.

Arguments are always words of the user. Names are partly fixed, partly composed of a verb and a noun,
so that a call must be copied from the tools.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from ..corpus import Conversation, Message, Record, content_key
from .common import SYSTEM_MESSAGES
from .everyday_actions import ACTIONS, Action, Parameter, clock, drawn, named, whole, words
from .functions_on_offer import Tool, result
from .naming import Naming, naming_of
from .vocabulary import CITIES, COLORS, COMPANIES, DAYS, FIRST_NAMES, LANGUAGES, PRODUCTS, TOPICS

NUM_DIALOGUES = 9000

VERBS = ("get", "find", "list", "show", "check", "count", "open", "start", "stop", "add", "delete", "update", "lookup", "fetch",
         "create", "order", "book", "print", "archive", "track")
NOUNS = ("invoice", "room", "user", "recipe", "ticket", "photo", "song", "price", "route", "device", "report", "customer", "task",
         "contract", "lesson", "shipment", "member", "printer", "project", "playlist", "vehicle", "course", "folder", "account",
         "sensor")

DETAILS: tuple[tuple[Parameter, str], ...] = (         # a parameter and how it is said
    (words("name", PRODUCTS + TOPICS), "named {name}"), (named("city", CITIES), "in {city}"), (named("owner", FIRST_NAMES), "of {owner}"),
    (whole("number", 1, 99), "number {number}"), (words("topic", TOPICS), "about {topic}"), (words("day", DAYS), "for {day}"),
    (drawn("id", lambda chance: f"{chance.choice('ABCDEFGH')}{chance.randint(10, 999)}"), "with the id {id}"),
    (words("color", COLORS), "in {color}"), (named("company", COMPANIES), "from {company}"), (drawn("time", clock), "at {time}"),
    (whole("year", 1990, 2026), "of the year {year}"), (words("language", LANGUAGES), "in {language}"),
)
PLAIN = (
    ("Hello!", "Hello! How can I help you today?"), ("Hi there", "Hello! How can I help you today?"), ("Thank you!", "You are welcome!"),
    ("Thanks, that is all.", "You are welcome!"), ("Who are you?", "I am Foretoken, a small demonstration language model."),
    ("How are you?", "I am fine, thank you. How can I help you?"), ("Bye", "Goodbye! Have a nice day."),
    ("Can you help me?", "Of course. What do you need?"), ("Are you there?", "Yes, I am here. What do you need?"),
)


def everyday_tools(records: Iterable[Record]) -> Iterator[Conversation]:
    """Of ten dialogues six call a fixed function, two a composed one, one asks for what is missing, one needs no function or has none."""
    del records
    for number in range(NUM_DIALOGUES):
        chance = Random(f"everyday {number}")
        action = ACTIONS[number % len(ACTIONS)]
        draw = chance.random()
        if draw < 0.62:
            yield _calling(action, chance)
        elif draw < 0.84:
            yield _calling(_composed(chance), chance)
        elif draw < 0.91:
            yield _asking(action, chance)
        elif draw < 0.96:
            yield _without_a_fitting_tool(action, chance)
        else:
            question, answer = chance.choice(PLAIN)
            yield _conversation([_user(question), _assistant(answer)], _offered([], chance, 3), chance)


def _calling(action: Action, chance: Random) -> Conversation:
    naming = naming_of(action, chance)
    messages = _turns(action, naming, chance, 1)
    if chance.random() < 0.15:
        messages += _turns(action, naming, chance, 2)
    return _conversation(messages, _offered([naming.tool(action, chance)], chance, chance.choice((0, 0, 1, 1, 2, 3))), chance)


def _turns(action: Action, naming: Naming, chance: Random, number: int) -> list[Message]:
    question, values = _asked(action, chance)
    found = action.result(values, chance)
    said = chance.choice(action.answers).format(**{**values, **found})
    return [_user(question), naming.call(values, number), result(found, number), _assistant(said)]


def _asked(action: Action, chance: Random) -> tuple[str, dict[str, Any]]:
    """A wording, and as arguments those of the parameters that it names, in the order of the schema."""
    wording = chance.choice(action.questions)
    values = {one.name: one.draw(chance) for one in action.parameters if f"{{{one.name}}}" in wording}
    question = wording.format(**values)
    if chance.random() < 0.12:
        opening = chance.choice(("Please ", "Hi, ", "Hello! ", "Hey, "))
        question = opening + (question if opening[-2] == "!" or question.startswith("I ") else question[0].lower() + question[1:])
    return question, values


def _asking(action: Action, chance: Random) -> Conversation:
    """A required argument is missing: the assistant asks, the user tells, the call follows."""
    required = [one for one in action.parameters if one.required]
    if not action.vague or len(required) != 1:
        return _calling(action, chance)
    values = {required[0].name: required[0].draw(chance)}
    found = action.result(values, chance)
    said = chance.choice(action.answers).format(**{**values, **found})
    told = chance.choice(("{}", "{} please", "{}, please.", "It is {}.")).format(values[required[0].name])
    naming = naming_of(action, chance)
    messages = [
        _user(chance.choice(action.vague)), _assistant(action.ask), _user(told), naming.call(values), result(found), _assistant(said),
    ]
    return _conversation(messages, _offered([naming.tool(action, chance)], chance, chance.choice((0, 1, 2))), chance)


def _without_a_fitting_tool(action: Action, chance: Random) -> Conversation:
    question, _ = _asked(action, chance)
    answer = f"I am sorry, I have no function to {action.purpose}."
    return _conversation([_user(question), _assistant(answer)], _offered([], chance, chance.choice((1, 2)), unwanted=action.name), chance)


def _composed(chance: Random) -> Action:
    """A function nobody has seen, with one or two parameters: the user says what its name says."""
    verb, noun = chance.choice(VERBS), chance.choice(NOUNS)
    chosen = chance.sample(DETAILS, k=chance.choice((1, 1, 2)))
    spoken = verb.replace("lookup", "look up")
    question = f"{spoken} the {noun} {' '.join(told for _, told in chosen)}"
    status = chance.choice(("ok", "done", "open", "closed", "ready", "waiting", "not found"))
    return Action(
        f"{verb}_{noun}", f"{spoken} the {noun}",
        (f"{spoken.capitalize()} a {noun}", f"{spoken.capitalize()} a {noun} by its {' and '.join(one.name for one, _ in chosen)}"),
        tuple(one for one, _ in chosen),
        (f"{question[0].upper()}{question[1:]}.", f"Can you {question}?", question, f"I need you to {question}.",
         f"Could you {question}, please?"),
        lambda values, chance: {"status": status},
        (f"The status of the {noun} is: {status}.",),
    )


def _offered(needed: list[Tool], chance: Random, others: int, unwanted: str = "") -> list[Tool]:
    """The needed functions among `others` more, in any order; at least one in all, and none that does what is `unwanted`."""
    offered = {tool["function"]["name"]: tool for tool in needed}
    descriptions = {tool["function"]["description"] for tool in needed}
    actions = [action for action in ACTIONS if action.name != unwanted and not descriptions & set(action.descriptions)]
    for action in chance.sample(actions, k=max(others, 1 - len(needed))):
        other = action if chance.random() < 0.6 else _composed(chance)
        tool = naming_of(other, chance).tool(other, chance)
        offered.setdefault(tool["function"]["name"], tool)
    shuffled = list(offered.values())
    chance.shuffle(shuffled)
    return shuffled


def _conversation(messages: list[Message], tools: list[Tool], chance: Random) -> Conversation:
    key = content_key("\n".join(str(message["content"]) for message in messages if message["role"] == "user"))
    if chance.random() < 0.2:
        messages = [{"role": "system", "content": chance.choice(SYSTEM_MESSAGES)}, *messages]
    return Conversation(messages, key, tools)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
