"""Small tasks on what the question shows: sort, list, replace, spell, change case, find who did it; among them plain facts."""

import re
from collections.abc import Callable, Iterable, Iterator
from random import Random

from ..corpus import Conversation, Record, content_key
from .common import pair
from .knowledge import fact

NUM_TASKS = 9000

Task = tuple[str, str]               # question, answer

WORDS = """apple table river garden window yellow summer winter mountain bread horse paper stone school kitchen letter music orange
market planet bottle forest island castle doctor friend street pocket silver basket butter carpet candle pencil blanket bridge
camera chicken circle coffee corner cotton dinner dragon engine farmer finger flower guitar hammer honey jacket jungle ladder lemon
lion mirror monkey morning needle night ocean onion palace parrot pepper pillow pirate potato rabbit robot rocket sailor salad shadow
soldier spider spoon storm sugar teacher thunder tiger tomato tractor train turtle village violin wagon water whale wheel wizard zebra
book ball tree house cloud chair shoe clock plate grass snow boat bird fish cake king queen road door lamp rain ring rose sand ship
star wind wolf wood milk moon nest coat drum duck frog gold kite leaf""".split()
NOT_ONE = frozenset("""yellow summer winter paper stone school kitchen music market silver butter cotton dinner friend street corner
coffee honey jungle morning needle night ocean palace pepper storm sugar thunder village water cloud plate grass snow road rain sand wind
wood milk gold bread river forest island mountain winter planet farmer doctor teacher""".split())       # "a water" is no thing to find
THINGS = tuple(word for word in WORDS if word not in NOT_ONE)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Liam", "Maria", "Noah", "Olivia",
         "Paul")
SUBJECTS = (*NAMES, "the teacher", "my brother", "the old man", "a small dog", "the farmer", "the king", "our neighbor", "the doctor")
ACTIONS = ("bought {} in the market", "found {} under the bed", "put {} on the table", "painted {} last week", "carried {} to the house",
           "saw {} near the river", "gave {} to a friend", "lost {} in the forest", "dreamed of {} at night", "wrote a story about {}",
           "looked at {} for an hour", "forgot {} in the train")


def text_tasks(_: Iterable[Record]) -> Iterator[Conversation]:
    """Tasks whose answer stands in the question or follows from it by a rule, each question once."""
    asked: set[str] = set()
    for number in range(NUM_TASKS):
        chance = Random(number)
        question, answer = TASKS[number % len(TASKS)](chance)
        if question not in asked:
            asked.add(question)
            yield pair(content_key(question), question, answer)


def _some_words(chance: Random, least: int = 3, most: int = 7) -> list[str]:
    return chance.sample(WORDS, k=chance.randint(least, most))


def _statement(chance: Random) -> str:
    """A plain sentence: "The farmer found a kite under the bed."."""
    subject, thing = chance.choice(SUBJECTS), chance.choice(THINGS)
    action = chance.choice(ACTIONS).format(f"{'an' if thing[0] in 'aeio' else 'a'} {thing}")
    return f"{subject[0].upper()}{subject[1:]} {action}."


def _text(chance: Random, sentences: int = 2) -> str:
    return " ".join(_statement(chance) for _ in range(sentences))


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))


def _bulleted(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _sort_words(chance: Random) -> Task:
    words = _some_words(chance)
    asked = chance.choice(("Sort these words: {}", "Put these words in alphabetical order: {}", "Sort alphabetically: {}",
                           "Please sort this list: {}", "Order these words from A to Z: {}"))
    return asked.format(", ".join(words)), ", ".join(sorted(words))


def _sort_numbers(chance: Random) -> Task:
    numbers = chance.sample(range(1, 100), k=chance.randint(3, 6))
    shown = ", ".join(map(str, numbers))
    if chance.random() < 0.7:
        asked = chance.choice(("Sort these numbers: {}", "Put these numbers in order: {}", "Order from smallest to largest: {}"))
        return asked.format(shown), ", ".join(map(str, sorted(numbers)))
    asked = chance.choice(("Sort these numbers from largest to smallest: {}", "Put these numbers in descending order: {}"))
    return asked.format(shown), ", ".join(map(str, sorted(numbers, reverse=True)))


def _make_list(chance: Random) -> Task:
    words = _some_words(chance)
    shown = f"{', '.join(words[:-1])} and {words[-1]}"
    if chance.random() < 0.5:
        asked = chance.choice(("Make a bulleted list of {}.", "Write {} as a list with bullet points.",
                               "Turn this into a bulleted list: {}"))
        return asked.format(shown), _bulleted(words)
    asked = chance.choice(("Make a numbered list of {}.", "Number these: {}", "Turn this into a numbered list: {}",
                           "Write {} as a numbered list."))
    return asked.format(shown), _numbered(words)


def _join_list(chance: Random) -> Task:
    words = _some_words(chance)
    asked = chance.choice(("Write this list on one line, with commas:\n\n{}", "Join these items with commas:\n\n{}"))
    return asked.format(_bulleted(words)), ", ".join(words)


def _reverse_list(chance: Random) -> Task:
    words = _some_words(chance, 3, 5)
    asked = chance.choice(("Reverse this list: {}", "Write these words in reverse order: {}", "Turn this list around: {}"))
    return asked.format(", ".join(words)), ", ".join(reversed(words))


def _case(chance: Random) -> Task:
    text = _statement(chance)
    if chance.random() < 0.5:
        asked = chance.choice(("Put this into upper case: {}", "Write this in capital letters: {}", "Convert to uppercase: {}"))
        return asked.format(text), text.upper()
    asked = chance.choice(("Put this into lower case: {}", "Write this in small letters: {}", "Convert to lowercase: {}"))
    return asked.format(text), text.lower()


def _replace(chance: Random) -> Task:
    text = _text(chance, chance.randint(1, 3))
    old = chance.choice(sorted({word for word in re.findall(r"[a-z]+", text) if word in THINGS}))
    new = chance.choice([word for word in THINGS if word != old and (word[0] in "aeio") == (old[0] in "aeio")])
    asked = chance.choice(('Replace "{old}" by "{new}" in this text: {text}', 'Change the word "{old}" to "{new}": {text}',
                           '{text}\n\nReplace {old} with {new}.', 'In this text, write "{new}" instead of "{old}": {text}'))
    return asked.format(old=old, new=new, text=text), re.sub(rf"\b{old}\b", new, text)


def _punctuation(chance: Random) -> Task:
    text = _statement(chance)
    asked = chance.choice(("Fix the punctuation: {}", "Correct this sentence: {}", "Write this correctly: {}", "Fix this text: {}"))
    return asked.format(text.removesuffix(".").lower()), text


def _remove(chance: Random) -> Task:
    words = _some_words(chance, 4, 6)
    gone = chance.choice(words)
    asked = chance.choice(("Remove {gone} from this list: {shown}", "Take {gone} out of this list: {shown}", "{shown}\n\nDelete {gone}."))
    return asked.format(gone=gone, shown=", ".join(words)), ", ".join(word for word in words if word != gone)


def _append(chance: Random) -> Task:
    *words, new = _some_words(chance, 4, 6)
    asked = chance.choice(("Add {new} to this list: {shown}", "Append {new}: {shown}", "{shown}\n\nAdd {new} at the end."))
    return asked.format(new=new, shown=", ".join(words)), ", ".join([*words, new])


def _pick(chance: Random) -> Task:
    words = _some_words(chance, 3, 6)
    which = chance.choice(("first", "second", "third", "last"))
    word = words[{"first": 0, "second": 1, "third": 2, "last": -1}[which]]
    asked = chance.choice(("What is the {} word in this list: {}?", "Which word is the {} one: {}?", "Tell me the {} of these words: {}."))
    return asked.format(which, ", ".join(words)), f"The {which} word is {word}."


def _spell(chance: Random) -> Task:
    word = chance.choice(WORDS)
    asked = chance.choice(("Spell {}.", "How do you spell {}?", 'Spell the word "{}".', "Can you spell {}?"))
    return asked.format(word), "-".join(word.upper())


def _longer(chance: Random) -> Task:
    one, other = chance.sample(WORDS, k=2)
    while len(one) == len(other):
        one, other = chance.sample(WORDS, k=2)
    asked = chance.choice(("Which word is longer, {} or {}?", "Which is longer: {} or {}?", "Is {} or {} the longer word?"))
    longest, shortest = sorted((one, other), key=len, reverse=True)
    return asked.format(one, other), f"{longest} has {len(longest)} letters and {shortest} has {len(shortest)}, so {longest} is longer."


def _first_letter(chance: Random) -> Task:
    word = chance.choice(WORDS)
    if chance.random() < 0.5:
        return f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0].upper()}.'
    return f'What is the last letter of "{word}"?', f'The last letter of "{word}" is {word[-1].upper()}.'


def _count(chance: Random) -> Task:
    words = _some_words(chance, 2, 8)
    asked = chance.choice(("How many words are in this list: {}?", "Count these words: {}", "How many items are there: {}?"))
    return asked.format(", ".join(words)), f"{_numbered(words)}\n\nThere are {len(words)}."


def _counting(chance: Random) -> Task:
    start, size = chance.randint(1, 30), chance.randint(4, 10)
    numbers = [str(number) for number in range(start, start + size + 1)]
    if chance.random() < 0.7:
        return chance.choice(("Count from {} to {}.", "Write the numbers from {} to {}.")).format(start, start + size), ", ".join(numbers)
    return f"Count backwards from {start + size} to {start}.", ", ".join(reversed(numbers))


def _who(chance: Random) -> Task:
    """Find the one who did it among three sentences."""
    names, things, actions = chance.sample(NAMES, k=3), chance.sample(THINGS, k=3), chance.sample(ACTIONS, k=3)
    done = [action.format(f"the {thing}") for action, thing in zip(actions, things, strict=True)]
    text = " ".join(f"{name} {act}." for name, act in zip(names, done, strict=True))
    chosen = chance.randrange(3)
    asked = chance.choice(("{text} Who {act}?", "{text}\n\nWho {act}?", "Read this: {text}\n\nWho {act}?"))
    return asked.format(text=text, act=done[chosen]), f"{names[chosen]} {done[chosen]}."


TASKS: tuple[Callable[[Random], Task], ...] = (
    _sort_words, _sort_numbers, _make_list, _make_list, _join_list, _reverse_list, _case, _replace, _replace, _punctuation, _remove,
    _append,
    _pick, _spell, _longer, _first_letter, _count, _counting, _who, _who, fact, fact, fact, fact)
