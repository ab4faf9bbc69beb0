"""Grade-school arithmetic with its steps: word problems of GSM8K, and sums, percentages, units and small stories made by rule."""

import re
from collections.abc import Callable, Iterable, Iterator
from random import Random

from ..corpus import Conversation, Record, content_key
from .common import pair

Exercise = tuple[str, str]           # question, answer

LONGEST = 360                        # characters; longer problems and solutions are beyond a small model
NUM_EXERCISES = 8000

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Liam", "Maria", "Noah", "Olivia",
         "Paul", "Rosa", "Sam", "Tina", "Will")
THINGS = ("apples", "books", "pencils", "marbles", "stickers", "coins", "cookies", "cards", "flowers", "shells", "stamps", "eggs",
          "balloons", "oranges", "candles", "buttons", "toys", "photos")
BOXES = ("boxes", "bags", "baskets", "jars", "packs")


def word_problems(records: Iterable[Record]) -> Iterator[Conversation]:
    """GSM8K without calculator marks. "#### 18" becomes a last sentence: "The answer is 18."."""
    for record in records:
        question, solution = (str(message["content"]) for message in record.messages[:2])
        steps, mark, result = re.sub(r"<<.*?>>", "", solution).partition("####")
        lines = [_sentence(line) for line in steps.splitlines() if line.strip()]
        answer = "\n".join([*lines, f"The answer is {result.strip()}."])
        if mark and len(answer) <= LONGEST and len(question) <= LONGEST:
            yield pair(record.key, re.sub(r"\s+", " ", question), answer)


def arithmetic(_: Iterable[Record]) -> Iterator[Conversation]:
    """Exercises made by rule, each question once. Reads no records."""
    asked: set[str] = set()
    for number in range(NUM_EXERCISES):
        chance = Random(number)
        question, answer = EXERCISES[number % len(EXERCISES)](chance)
        if question not in asked:
            asked.add(question)
            yield pair(content_key(question), question, answer)


def _sentence(line: str) -> str:
    line = re.sub(r"\s+", " ", line).strip()
    return line if line[-1] in ".!?:" else f"{line}."


def _number(chance: Random) -> int:
    """Mostly small: one to three digits."""
    return chance.randint(2, chance.choice((9, 20, 50, 100, 100, 500)))


def _sum(chance: Random) -> Exercise:
    a, b = _number(chance), _number(chance)
    asked = chance.choice(("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.", "{a} + {b} = ?",
                           "How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "{a}+{b}"))
    return asked.format(a=a, b=b), f"{a} + {b} = {a + b}."


def _difference(chance: Random) -> Exercise:
    b, a = sorted((_number(chance), _number(chance)))
    asked = chance.choice(("What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}.",
                           "{a} - {b} = ?", "How much is {a} minus {b}?", "What is the difference of {a} and {b}?"))
    return asked.format(a=a, b=b), f"{a} - {b} = {a - b}."


def _product(chance: Random) -> Exercise:
    a, b = chance.randint(2, 12), chance.randint(2, chance.choice((10, 10, 12, 40)))
    asked = chance.choice(("What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "Calculate {a} * {b}.", "{a} x {b} = ?",
                           "How much is {a} times {b}?", "What is the product of {a} and {b}?")).format(a=a, b=b)
    if b <= 12:
        return asked, f"{a} * {b} = {a * b}."
    tens, ones = b // 10 * 10, b % 10
    if not ones:
        return asked, f"{a} * {b // 10} = {a * (b // 10)}, so {a} * {b} = {a * b}."
    return asked, f"{a} * {tens} = {a * tens} and {a} * {ones} = {a * ones}. {a * tens} + {a * ones} = {a * b}, so {a} * {b} = {a * b}."


def _quotient(chance: Random) -> Exercise:
    a, b = chance.randint(2, 12), chance.randint(2, 12)
    asked = chance.choice(("What is {c} / {a}?", "What is {c} divided by {a}?", "Divide {c} by {a}.", "Calculate {c} / {a}.",
                           "{c} / {a} = ?", "How many times does {a} go into {c}?"))
    return asked.format(a=a, c=a * b), f"{a * b} / {a} = {b}, because {a} * {b} = {a * b}."


def _three_numbers(chance: Random) -> Exercise:
    a, b, c = (chance.randint(2, 40) for _ in range(3))
    asked = chance.choice(("What is {a} + {b} + {c}?", "Add {a}, {b} and {c}.", "Calculate {a} + {b} + {c}.",
                           "What is the sum of {a}, {b} and {c}?"))
    return asked.format(a=a, b=b, c=c), f"{a} + {b} = {a + b}.\n{a + b} + {c} = {a + b + c}.\nThe answer is {a + b + c}."


def _percentage(chance: Random) -> Exercise:
    share, whole = chance.choice((5, 10, 20, 25, 30, 40, 50, 60, 75, 80)), chance.randint(1, 20) * 20
    asked = chance.choice(("What is {share}% of {whole}?", "How much is {share} percent of {whole}?", "Calculate {share}% of {whole}.",
                           "What is {share} percent of {whole}?", "Find {share}% of {whole}."))
    return asked.format(share=share, whole=whole), (
        f"1% of {whole} is {_plain(whole / 100)}.\n{share} * {_plain(whole / 100)} = {_plain(share * whole / 100)}.\n"
        f"The answer is {_plain(share * whole / 100)}.")


UNITS = (("meters", "centimeters", 100), ("kilometers", "meters", 1000), ("kilograms", "grams", 1000), ("hours", "minutes", 60),
         ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7), ("years", "months", 12), ("feet", "inches", 12),
         ("yards", "feet", 3), ("liters", "milliliters", 1000), ("centimeters", "millimeters", 10), ("dollars", "cents", 100),
         ("dozens", "pieces", 12))


def _units(chance: Random) -> Exercise:
    large, small, factor = chance.choice(UNITS)
    amount = chance.randint(2, 15)
    one = f"There are {factor} {small} in one {'foot' if large == 'feet' else large[:-1]}."
    if chance.random() < 0.6:
        asked = chance.choice(("How many {small} are {amount} {large}?", "Convert {amount} {large} to {small}.",
                               "How many {small} are there in {amount} {large}?", "{amount} {large} in {small}?",
                               "What is {amount} {large} in {small}?"))
        return asked.format(small=small, large=large, amount=amount), (
            f"{one}\n{amount} * {factor} = {amount * factor}.\nThe answer is {amount * factor} {small}.")
    asked = chance.choice(("How many {large} are {total} {small}?", "Convert {total} {small} to {large}.",
                           "What is {total} {small} in {large}?"))
    return asked.format(small=small, large=large, total=amount * factor), (
        f"{one}\n{amount * factor} / {factor} = {amount}.\nThe answer is {amount} {large}.")


def _average(chance: Random) -> Exercise:
    mean, step = chance.randint(5, 40), chance.randint(1, 4)
    numbers = [mean - step, mean, mean + step]
    chance.shuffle(numbers)
    a, b, c = numbers
    asked = chance.choice(("What is the average of {a}, {b} and {c}?", "Find the mean of {a}, {b} and {c}.",
                           "Calculate the average of {a}, {b} and {c}."))
    return asked.format(a=a, b=b, c=c), f"{a} + {b} + {c} = {3 * mean}.\n{3 * mean} / 3 = {mean}.\nThe answer is {mean}."


def _comparison(chance: Random) -> Exercise:
    a, b = chance.sample(range(2, 1000), k=2)
    if chance.random() < 0.5:
        asked = chance.choice(("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Is {a} or {b} the greater number?"))
        return asked.format(a=a, b=b), f"{max(a, b)} is larger than {min(a, b)}."
    asked = chance.choice(("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?"))
    return asked.format(a=a, b=b), f"{min(a, b)} is smaller than {max(a, b)}."


def _sequence(chance: Random) -> Exercise:
    start, step = chance.randint(0, 30), chance.choice((1, 2, 2, 3, 4, 5, 5, 10, 10))
    shown = ", ".join(str(start + step * n) for n in range(4))
    asked = chance.choice(("What comes next: {shown}?", "Continue: {shown}", "What is the next number in {shown}?"))
    last = start + 3 * step
    return asked.format(shown=shown), (
        f"Each number is {step} more than the one before. {last} + {step} = {last + step}, so the next number is {last + step}.")


def _double_half(chance: Random) -> Exercise:
    number = chance.randint(2, 60)
    if chance.random() < 0.5:
        return chance.choice(("What is double {n}?", "Double {n}.", "What is twice {n}?")).format(n=number), f"2 * {number} = {2 * number}."
    asked = chance.choice(("What is half of {n}?", "Halve {n}.", "How much is half of {n}?"))
    return asked.format(n=2 * number), f"{2 * number} / 2 = {number}."


def _gets_more(chance: Random) -> Exercise:
    name, friend, thing = *chance.sample(NAMES, k=2), chance.choice(THINGS)
    a, b = chance.randint(2, 60), chance.randint(2, 60)
    story = chance.choice((f"{name} has {a} {thing}. {friend} gives {name} {b} more.", f"{name} has {a} {thing} and finds {b} more.",
                           f"{name} had {a} {thing} and bought {b} more."))
    return f"{story} How many {thing} does {name} have now?", f"{name} has {a} + {b} = {a + b} {thing}.\nThe answer is {a + b}."


def _gives_away(chance: Random) -> Exercise:
    name, friend, thing = *chance.sample(NAMES, k=2), chance.choice(THINGS)
    a = chance.randint(5, 90)
    b = chance.randint(2, a - 1)
    story = chance.choice((f"{name} has {a} {thing}. {name} gives {b} to {friend}.", f"{name} had {a} {thing} and lost {b} of them.",
                           f"There were {a} {thing} on the table. {name} took {b} away."))
    return f"{story} How many {thing} are left?", f"There are {a} - {b} = {a - b} {thing} left.\nThe answer is {a - b}."


def _groups(chance: Random) -> Exercise:
    name, thing, box = chance.choice(NAMES), chance.choice(THINGS), chance.choice(BOXES)
    a, b = chance.randint(2, 12), chance.randint(2, 12)
    if chance.random() < 0.5:
        return (f"{name} has {a} {box} with {b} {thing} in each. How many {thing} does {name} have?",
                f"{name} has {a} * {b} = {a * b} {thing}.\nThe answer is {a * b}.")
    return (f"{name} puts {a * b} {thing} into {a} {box}, the same number in each. How many {thing} are in each?",
            f"Each has {a * b} / {a} = {b} {thing}.\nThe answer is {b}.")


def _shopping(chance: Random) -> Exercise:
    name, thing = chance.choice(NAMES), chance.choice(THINGS)
    count, price = chance.randint(2, 10), chance.randint(2, 9)
    cost = count * price
    if chance.random() < 0.5:
        return (f"{name} buys {count} {thing} for ${price} each. How much does {name} pay?",
                f"{name} pays {count} * ${price} = ${cost}.\nThe answer is ${cost}.")
    money = cost + chance.randint(1, 30)
    return (f"{name} has ${money} and buys {count} {thing} for ${price} each. How much money is left?",
            f"The {thing} cost {count} * ${price} = ${cost}.\n"
            f"{name} has ${money} - ${cost} = ${money - cost} left.\nThe answer is ${money - cost}.")


def _two_steps(chance: Random) -> Exercise:
    name, friend, thing = *chance.sample(NAMES, k=2), chance.choice(THINGS)
    a, b = chance.randint(10, 40), chance.randint(2, 20)
    c = chance.randint(2, a + b - 1)
    if chance.random() < 0.5:
        return (f"{name} has {a} {thing}. {name} finds {b} more and then gives {c} to {friend}. How many {thing} does {name} have now?",
                f"{name} first has {a} + {b} = {a + b} {thing}.\n"
                f"Then {name} has {a + b} - {c} = {a + b - c} {thing}.\nThe answer is {a + b - c}.")
    return (f"{name} has {a} {thing}. {friend} has {b} more {thing} than {name}. How many {thing} do they have together?",
            f"{friend} has {a} + {b} = {a + b} {thing}.\n"
            f"Together they have {a} + {a + b} = {2 * a + b} {thing}.\nThe answer is {2 * a + b}.")


def _speed(chance: Random) -> Exercise:
    speed, hours = chance.choice((4, 5, 10, 12, 20, 30, 40, 50, 60, 80, 90)), chance.randint(2, 8)
    who = chance.choice(("A train", "A car", "A bus", "A cyclist", *NAMES[:6]))
    if chance.random() < 0.5:
        return (f"{who} travels at {speed} miles per hour for {hours} hours. How far is that?",
                f"The distance is {speed} * {hours} = {speed * hours} miles.\nThe answer is {speed * hours} miles.")
    return (f"{who} travels {speed * hours} miles in {hours} hours. What is the speed?",
            f"The speed is {speed * hours} / {hours} = {speed} miles per hour.\nThe answer is {speed} miles per hour.")


def _plain(value: float) -> str:
    """Without needless decimals: 4.0 -> 4, 0.60 -> 0.6."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


EXERCISES: tuple[Callable[[Random], Exercise], ...] = (
    _sum, _sum, _sum, _difference, _difference, _product, _product, _quotient, _three_numbers, _percentage, _units, _units, _average,
    _comparison, _sequence, _double_half, _gets_more, _gives_away, _groups, _shopping, _two_steps, _speed)
