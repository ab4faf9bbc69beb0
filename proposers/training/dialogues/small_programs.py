"""Small Python programs put together from parts: classes, enums, loops, comprehensions, conversions, command lines, snippets.

Each maker draws one question and its answer. Names and numbers of the question stand in the answer.
"""

from collections.abc import Callable
from random import Random

from .common import fenced

CLASSES = (
    "Person", "Dog", "Car", "Book", "Student", "Point", "Product", "Order", "City", "Movie", "Song", "Player", "Animal", "House", "Phone",
    "Employee", "Customer", "Account", "Team", "Recipe", "Event", "Task", "Message", "User", "Ticket", "Course", "Planet", "River",
)
FIELDS = {
    "name": "str", "title": "str", "city": "str", "color": "str", "email": "str", "author": "str", "brand": "str", "owner": "str",
    "kind": "str", "age": "int", "year": "int", "size": "int", "count": "int", "level": "int", "score": "int", "pages": "int",
    "price": "float", "weight": "float", "height": "float", "speed": "float", "rating": "float", "active": "bool", "done": "bool",
}
VALUES = {"str": '""', "int": "0", "float": "0.0", "bool": "False"}
ENUMS = {
    "Color": ("RED", "GREEN", "BLUE", "YELLOW", "BLACK", "WHITE"), "Day": ("MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY"),
    "Status": ("OPEN", "PAID", "SHIPPED", "CLOSED", "FAILED"), "Direction": ("NORTH", "SOUTH", "EAST", "WEST"),
    "Size": ("SMALL", "MEDIUM", "LARGE", "HUGE"), "Season": ("SPRING", "SUMMER", "AUTUMN", "WINTER"),
    "Level": ("LOW", "NORMAL", "HIGH", "URGENT"), "Fruit": ("APPLE", "PEAR", "CHERRY", "BANANA", "PLUM"),
}
THINGS = ("fruits", "colors", "cities", "names", "animals", "words", "books", "songs", "countries", "users", "files", "tasks")
LISTS = {
    "fruits": ("apple", "pear", "cherry", "banana", "plum", "kiwi"), "colors": ("red", "green", "blue", "yellow", "black"),
    "cities": ("Paris", "Rome", "Berlin", "Madrid", "Oslo", "Tokyo"), "names": ("Ann", "Bob", "Carla", "David", "Emma", "Frank"),
    "animals": ("dog", "cat", "horse", "bird", "fish", "lion"), "days": ("Monday", "Tuesday", "Friday", "Sunday"),
}
CONVERSIONS = (
    ("kilometers", "miles", "{} * 0.621371"), ("miles", "kilometers", "{} * 1.609344"), ("celsius", "fahrenheit", "{} * 9 / 5 + 32"),
    ("fahrenheit", "celsius", "({} - 32) * 5 / 9"), ("hours", "minutes", "{} * 60"), ("minutes", "seconds", "{} * 60"),
    ("hours", "seconds", "{} * 3600"), ("days", "hours", "{} * 24"), ("weeks", "days", "{} * 7"), ("meters", "centimeters", "{} * 100"),
    ("kilograms", "pounds", "{} * 2.20462"), ("pounds", "kilograms", "{} * 0.453592"), ("inches", "centimeters", "{} * 2.54"),
    ("centimeters", "inches", "{} / 2.54"), ("feet", "meters", "{} * 0.3048"), ("meters", "feet", "{} / 0.3048"),
    ("seconds", "minutes", "{} / 60"), ("minutes", "hours", "{} / 60"), ("grams", "kilograms", "{} / 1000"),
    ("kilometers", "meters", "{} * 1000"), ("bytes", "kilobytes", "{} / 1024"), ("celsius", "kelvin", "{} + 273.15"),
    ("kelvin", "celsius", "{} - 273.15"), ("degrees", "radians", "{} * 3.14159 / 180"),
)


def listed(names: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _class(chance: Random) -> tuple[str, list[str]]:
    return chance.choice(CLASSES), chance.sample(sorted(FIELDS), k=chance.randint(1, 4))


def plain_class(chance: Random) -> tuple[str, str]:
    name, fields = _class(chance)
    what = "attribute" if len(fields) == 1 else "attributes"
    asks = (
        f"Write a Python class {name} with the {what} {listed(fields)}.", f"Write a class {name} with {listed(fields)}.",
        f"Make a class `{name}` in Python. It has the {what} {listed(fields)}.", f"I need a Python class {name} with {listed(fields)}.",
        f"Define a class called {name} with the {what} {listed(fields)}.",
    )
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):", *(f"        self.{field} = {field}" for field in fields)]
    return chance.choice(asks), fenced("python", "\n".join(lines))


def described_class(chance: Random) -> tuple[str, str]:
    """A class with __str__, __repr__ or __eq__."""
    name, fields = _class(chance)
    method, text = chance.choice((("__str__", "string"), ("__repr__", "repr"), ("__eq__", "comparison")))
    asks = (
        f"Write a Python class {name} with {listed(fields)} and a `{method}` method.",
        f"Write a class {name} with {listed(fields)} and {method}.",
        f"Make a Python class `{name}` that has {listed(fields)}. Add a {method} method.",
    )
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):", *(f"        self.{field} = {field}" for field in fields)]
    if text == "comparison":
        same = " and ".join(f"self.{field} == other.{field}" for field in fields)
        lines += ["", "    def __eq__(self, other):", f"        return {same}"]
    else:
        shown = ", ".join(f"{field}={{self.{field}}}" for field in fields)
        lines += ["", f"    def {method}(self):", f'        return f"{name}({shown})"']
    return chance.choice(asks), fenced("python", "\n".join(lines))


def data_class(chance: Random) -> tuple[str, str]:
    name, fields = _class(chance)
    defaults = chance.random() < 0.3
    asks = (
        f"Write a dataclass {name} with {listed(fields)}", f"Make a Python dataclass `{name}` with the fields {listed(fields)}",
        f"I need a dataclass {name} with {listed(fields)}", f"Define a dataclass called {name} with the fields {listed(fields)}",
    )
    question = chance.choice(asks) + (" and default values." if defaults else ".")
    lines = [f"    {field}: {FIELDS[field]}" + (f" = {VALUES[FIELDS[field]]}" if defaults else "") for field in fields]
    return question, fenced("python", "\n".join(["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:", *lines]))


def subclass(chance: Random) -> tuple[str, str]:
    base, child = chance.choice((("Animal", "Dog"), ("Animal", "Cat"), ("Person", "Student"), ("Person", "Employee"), ("Shape", "Circle"),
                                 ("Vehicle", "Car"), ("Vehicle", "Bicycle"), ("Account", "SavingsAccount"), ("Person", "Teacher")))
    inherited, own = chance.sample(sorted(FIELDS), k=2)
    asks = (
        f"Write a class {child} that inherits from {base}. {base} has {inherited}, {child} also has {own}.",
        f"Write a Python class {base} with {inherited} and a subclass {child} with {own}.",
        f"Show me inheritance in Python: {base} with {inherited}, and {child} with {own}.",
    )
    lines = [
        f"class {base}:", f"    def __init__(self, {inherited}):", f"        self.{inherited} = {inherited}", "", "",
        f"class {child}({base}):", f"    def __init__(self, {inherited}, {own}):", f"        super().__init__({inherited})",
        f"        self.{own} = {own}",
    ]
    return chance.choice(asks), fenced("python", "\n".join(lines))


def enum(chance: Random) -> tuple[str, str]:
    name = chance.choice(sorted(ENUMS))
    members = chance.sample(ENUMS[name], k=chance.randint(2, len(ENUMS[name])))
    asks = (
        f"Write a Python enum {name} with {listed(members)}.", f"Define an enum `{name}` with the members {listed(members)}.",
        f"Make an Enum called {name} with {listed(members)}.",
    )
    lines = ["from enum import Enum", "", "", f"class {name}(Enum):", *(f"    {member} = {n}" for n, member in enumerate(members, 1))]
    return chance.choice(asks), fenced("python", "\n".join(lines))


def counting_loop(chance: Random) -> tuple[str, str]:
    first, last = chance.randint(0, 20), chance.randint(21, 120)
    step = chance.choice((1, 1, 1, 2, 3, 5, 10))
    by = f" in steps of {step}" if step > 1 else ""
    asks = (
        f"Print the numbers from {first} to {last}{by} in Python.", f"Write a loop that prints the numbers from {first} to {last}{by}.",
        f"Write Python code that counts from {first} to {last}{by}.", f"Python loop from {first} to {last}{by}.",
    )
    stop = f"{first}, {last + 1}" + (f", {step}" if step > 1 else "")
    return chance.choice(asks), fenced("python", f"for number in range({stop}):\n    print(number)")


def list_loop(chance: Random) -> tuple[str, str]:
    name = chance.choice(sorted(LISTS))
    items = chance.sample(LISTS[name], k=chance.randint(2, 4))
    asks = (
        f"Make a Python list `{name}` with {listed(items)} and print each item.", f"Write a loop over a list of {name}: {listed(items)}.",
        f"Print each of these {name} in a Python loop: {listed(items)}.",
    )
    shown = ", ".join(f'"{item}"' for item in items)
    return chance.choice(asks), fenced("python", f"{name} = [{shown}]\nfor item in {name}:\n    print(item)")


def comprehension(chance: Random) -> tuple[str, str]:
    what, expression = chance.choice((("numbers", "n"), ("squares", "n ** 2"), ("cubes", "n ** 3"), ("doubles", "n * 2")))
    which, condition = chance.choice((("", ""), ("even ", " if n % 2 == 0"), ("odd ", " if n % 2 == 1")))
    last = chance.choice((5, 10, 15, 20, 25, 30, 50, 100))
    numbers = f"{which}numbers from 1 to {last}"
    whole = numbers if what == "numbers" else f"{what} of the {numbers}"
    asks = (
        f"Write a list comprehension for the {whole}.", f"Make a Python list of the {whole}.", f"List comprehension with the {whole}.",
        f"How do I make a list of the {whole} in Python?",
    )
    return chance.choice(asks), fenced("python", f"{what} = [{expression} for n in range(1, {last + 1}){condition}]")


def conversion(chance: Random) -> tuple[str, str]:
    source, target, formula = chance.choice(CONVERSIONS)
    asks = (
        f"Write a Python function that converts {source} to {target}.", f"Write a function to convert {source} to {target}.",
        f"I need a Python function to turn {source} into {target}.", f"Convert {source} to {target} in Python.",
    )
    hints, docs = chance.random() < 0.2, chance.random() < 0.2
    question = chance.choice(asks) + " Use type hints." * hints + " Add a docstring." * docs
    head = f"def {source}_to_{target}({source}: float) -> float:" if hints else f"def {source}_to_{target}({source}):"
    doc = f'    """Convert {source} to {target}."""\n' if docs else ""
    return question, fenced("python", f"{head}\n{doc}    return {formula.format(source)}")


def formula(chance: Random) -> tuple[str, str]:
    name, x = chance.choice(("f", "g", "h", "compute", "calculate", "apply", "convert", "transform")), chance.choice("xynabk")
    sign, a, b = chance.choice("+-"), chance.randint(2, 20), chance.randint(1, 99)
    expression = chance.choice((f"{a} * {x} {sign} {b}", f"{x} ** 2 {sign} {b}", f"({x} {sign} {b}) / {a}", f"({x} {sign} {b}) * {a}"))
    asks = (
        f"Write a Python function {name}({x}) that returns {expression}.", f"Define `{name}({x})` as `{expression}` in Python.",
        f"Write a function `{name}` of {x} that computes {expression}.",
    )
    return chance.choice(asks), fenced("python", f"def {name}({x}):\n    return {expression}")


def command_line(chance: Random) -> tuple[str, str]:
    options = chance.sample(["name", "count", "path", "output", "size", "port", "host", "limit", "user", "seed"], k=chance.randint(1, 3))
    whole = ("count", "size", "port", "limit", "seed")
    flags = listed([f"--{option}" for option in options])
    asks = (
        f"Write a Python script with argparse that has the options {flags}.", f"Write a command line program in Python with {flags}.",
        f"How do I parse {flags} with argparse?", f"Use argparse to read {flags}.",
    )
    lines = [f'parser.add_argument("--{option}"' + (", type=int)" if option in whole else ")") for option in options]
    shown = ", ".join(f"args.{option}" for option in options)
    code = ["import argparse", "", "parser = argparse.ArgumentParser()", *lines, "args = parser.parse_args()", f"print({shown})"]
    return chance.choice(asks), fenced("python", "\n".join(code))


def dictionary(chance: Random) -> tuple[str, str]:
    fields = chance.sample([field for field in sorted(FIELDS) if FIELDS[field] == "int"], k=chance.randint(2, 4))
    values = [chance.randint(1, 99) for _ in fields]
    name = chance.choice(("data", "settings", "values", "item", "record", "info"))
    told = listed([f"{field} {value}" for field, value in zip(fields, values, strict=True)])
    asks = (
        f"Make a Python dictionary `{name}` with {told}.", f"Write a dict called {name} in Python: {told}.",
        f"Create a dictionary {name} with {told} in Python.",
    )
    pairs = ", ".join(f'"{field}": {value}' for field, value in zip(fields, values, strict=True))
    return chance.choice(asks), fenced("python", f"{name} = {{{pairs}}}")


SNIPPETS = (
    ("reverse a list called {0}", "{0}.reverse()", "This reverses the list in place."),
    ("sort a list called {0}", "{0}.sort()", "This sorts the list in place."),
    ("get the length of a list called {0}", "len({0})", "`len` counts the items."),
    ("get the last item of a list called {0}", "{0}[-1]", "The index -1 is the last item."),
    ("get the first item of a list called {0}", "{0}[0]", "The first index is 0."),
    ("loop over a list called {0} with the index", "for index, item in enumerate({0}):\n    print(index, item)",
     "`enumerate` gives the index and the item."),
    ("check if a list called {0} is empty", 'if not {0}:\n    print("empty")', "An empty list counts as false."),
    ("copy a list called {0}", "copy = list({0})", "The copy is a new list with the same items."),
    ("remove the last item of a list called {0}", "{0}.pop()", "`pop` removes the last item and returns it."),
    ("remove all items of a list called {0}", "{0}.clear()", "The list is empty afterwards."),
    ("add an item to a list called {0}", "{0}.append(item)", "`append` adds the item at the end."),
    ("insert an item at the start of a list called {0}", "{0}.insert(0, item)", "The item goes before the one at index 0."),
    ("remove duplicates from a list called {0}", "unique = list(dict.fromkeys({0}))", "This keeps the first of each."),
    ("pick a random item from a list called {0}", "import random\n\nitem = random.choice({0})", "`random.choice` picks one item."),
    ("shuffle a list called {0}", "import random\n\nrandom.shuffle({0})", "This shuffles the list in place."),
    ("join a list of strings called {0} with commas", 'text = ", ".join({0})', "`join` puts the comma between the strings."),
    ("turn a list called {0} into a set", "unique = set({0})", "A set has each item only once."),
    ("print a list called {0} line by line", "for item in {0}:\n    print(item)", "Each item is printed on its own line."),
    ("write a list called {0} to a file", 'with open("{0}.txt", "w") as file:\n    for item in {0}:\n        file.write(item + "\\n")',
     "Each item is written on its own line."),
    ("save a list called {0} as JSON", 'import json\n\nwith open("{0}.json", "w") as file:\n    json.dump({0}, file)',
     "`json.dump` writes the list to the file."),
)


def snippet(chance: Random) -> tuple[str, str]:
    task, code, remark = chance.choice(SNIPPETS)
    name = chance.choice(THINGS)
    asks = ("How do I {} in Python?", "How can I {} in Python?", "In Python, how do I {}?", "Python: how to {}?",
    "What is the Python code to {}?")
    return chance.choice(asks).format(task.format(name)), f"{fenced('python', code.format(name))}\n\n{remark}"


ACCOUNTS = (
    ("Stack", "push", "pop", "return self.{0}.pop()"), ("Queue", "enqueue", "dequeue", "return self.{0}.pop(0)"),
)


def container(chance: Random) -> tuple[str, str]:
    """A stack or a queue, with the methods asked for."""
    name, add, take, taking = chance.choice(ACCOUNTS)
    items = chance.choice(("items", "values", "data", "elements"))
    more = {
        "is_empty": ("", f"return not self.{items}"), "size": ("", f"return len(self.{items})"),
        "peek": ("", f"return self.{items}[{'-1' if name == 'Stack' else '0'}]"), "clear": ("", f"self.{items}.clear()"),
    }
    extra = chance.sample(sorted(more), k=chance.randint(0, 2))
    methods = listed([add, take, *extra])
    asks = (
        f"Write a Python class {name} with {methods}. Keep the items in `{items}`.",
        f"Implement a {name.lower()} in Python with the methods {methods}. The list is called {items}.",
        f"I need a {name.lower()} class in Python with {methods}. Store everything in `self.{items}`.",
    )
    lines = [
        f"class {name}:", "    def __init__(self):", f"        self.{items} = []", "", f"    def {add}(self, item):",
        f"        self.{items}.append(item)", "", f"    def {take}(self):", f"        {taking.format(items)}",
    ]
    for method in extra:
        lines += ["", f"    def {method}(self):", f"        {more[method][1]}"]
    return chance.choice(asks), fenced("python", "\n".join(lines))


def asking(chance: Random) -> tuple[str, str]:
    """A script that asks for a value and says something about it."""
    what, kind = chance.choice((("name", "str"), ("age", "int"), ("city", "str"), ("price", "float"), ("number", "int"), ("color", "str"),
                                ("height", "float"), ("year", "int"), ("word", "str"), ("email", "str")))
    asks = (
        f"Write a Python script that asks for the {what} and prints it.", f"Ask the user for a {what} in Python and print it.",
        f"How do I read a {what} from the user in Python?", f"Read the {what} with input() and print it.",
    )
    read = f'input("Enter the {what}: ")'
    value = read if kind == "str" else f"{kind}({read})"
    return chance.choice(asks), fenced("python", f'{what} = {value}\nprint(f"The {what} is {{{what}}}.")')


PROGRAMS: tuple[Callable[[Random], tuple[str, str]], ...] = (
    plain_class, described_class, data_class, subclass, enum, counting_loop, list_loop, comprehension, conversion, formula, command_line,
    dictionary, snippet, container, asking,
)
