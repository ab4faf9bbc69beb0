"""Plain knowledge in one sentence: opposites, young animals, colours, legs, plurals, past tenses, letters, days and months."""

from random import Random

OPPOSITES: dict[str, str] = dict(zip(
    "hot big up day old fast happy light open early good hard rich strong full wet high long loud inside clean near buy push begin win "
    "love true first right young thick wide empty always before above laugh remember".split(),
    "cold small down night new slow sad dark closed late bad soft poor weak empty dry low short quiet outside dirty far sell pull end lose "
    "hate false last left old thin narrow full never after below cry forget".split(), strict=True))
YOUNG = {"dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "hen": "chick", "duck": "duckling",
         "lion": "cub",
         "frog": "tadpole", "pig": "piglet", "goat": "kid", "bear": "cub", "deer": "fawn", "goose": "gosling", "swan": "cygnet",
         "kangaroo": "joey"}
COLOURS = {"the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red", "coal": "black",
           "a carrot": "orange",
           "a lemon": "yellow", "milk": "white", "a strawberry": "red", "the sun": "yellow", "a leaf": "green", "chocolate": "brown",
           "a tomato": "red", "an elephant": "gray", "a frog": "green", "a swan": "white", "a crow": "black"}
SOUNDS = {"dog": "barks", "cat": "meows", "cow": "moos", "sheep": "bleats", "duck": "quacks", "lion": "roars", "horse": "neighs",
          "pig": "oinks", "bee": "buzzes", "snake": "hisses", "frog": "croaks", "wolf": "howls", "owl": "hoots", "bird": "sings"}
LEGS = {"a spider": 8, "a dog": 4, "a cat": 4, "a bird": 2, "an ant": 6, "a bee": 6, "a horse": 4, "a human": 2, "a snake": 0, "a fly": 6,
        "a cow": 4}
PLURALS = {"child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women", "goose": "geese",
           "leaf": "leaves",
           "wolf": "wolves", "city": "cities", "baby": "babies", "box": "boxes", "sheep": "sheep", "fish": "fish", "knife": "knives"}
PAST = {"go": "went", "eat": "ate", "see": "saw", "run": "ran", "write": "wrote", "take": "took", "come": "came", "give": "gave",
        "drink": "drank",
        "sing": "sang", "swim": "swam", "buy": "bought", "think": "thought", "fly": "flew", "know": "knew", "speak": "spoke",
        "walk": "walked"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def fact(chance: Random) -> tuple[str, str]:
    """A question about one entry of the tables above, and its answer."""
    kind = chance.randrange(10)
    if kind == 0:
        word = chance.choice(list(OPPOSITES))
        asked = ("What is the opposite of {}?", 'What is the opposite of "{}"?', "Give me the opposite of {}.", "Opposite of {}?")
        return chance.choice(asked).format(word), f"The opposite of {word} is {OPPOSITES[word]}."
    if kind == 1:
        animal = chance.choice(list(YOUNG))
        asked = ("What is a young {} called?", "What do you call a baby {}?", "What is the young of a {}?", "What is a baby {} called?")
        return chance.choice(asked).format(animal), f"A young {animal} is called a {YOUNG[animal]}."
    if kind == 2:
        thing = chance.choice(list(COLOURS))
        asked = ("What color is {}?", "Which color is {}?", "What is the color of {}?", "Tell me the color of {}.")
        return chance.choice(asked).format(thing), f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}."
    if kind == 3:
        animal = chance.choice(list(SOUNDS))
        return chance.choice(("What sound does a {} make?", "What does a {} do to make noise?", "How does a {} sound?")).format(animal), (
            f"A {animal} {SOUNDS[animal]}.").replace("A owl", "An owl")
    if kind == 4:
        animal = chance.choice(list(LEGS))
        return chance.choice(("How many legs does {} have?", "How many legs has {}?")).format(animal), (
            f"{animal[0].upper()}{animal[1:]} has {LEGS[animal] or 'no'} legs.")
    if kind == 5:
        word = chance.choice(list(PLURALS))
        asked = ("What is the plural of {}?", 'Plural of "{}"?', "How do you write the plural of {}?")
        return chance.choice(asked).format(word), f'The plural of "{word}" is "{PLURALS[word]}".'
    if kind == 6:
        word = chance.choice(list(PAST))
        asked = ("What is the past tense of {}?", 'Past tense of "{}"?', "Put {} into the past tense.")
        return chance.choice(asked).format(word), f'The past tense of "{word}" is "{PAST[word]}".'
    if kind == 7:
        index = chance.randrange(26 - 1)
        if chance.random() < 0.5:
            return f"Which letter comes after {ALPHABET[index]}?", f"{ALPHABET[index + 1]} comes after {ALPHABET[index]}."
        return f"Which letter comes before {ALPHABET[index + 1]}?", f"{ALPHABET[index]} comes before {ALPHABET[index + 1]}."
    table, what = (DAYS, "day") if kind == 8 else (MONTHS, "month")
    index = chance.randrange(len(table))
    if chance.random() < 0.2:
        asked = ("Name the {}s of the {}.", "List the {}s of the {}.", "What are the {}s of the {}?", "Tell me all {}s of the {}.")
        return chance.choice(asked).format(what, "week" if what == "day" else "year"), (
            "\n".join(f"{number}. {name}" for number, name in enumerate(table, 1)))
    if chance.random() < 0.5:
        asked = ("Which {} comes after {}?", "What {} follows {}?", "What is the {} after {}?")
        return chance.choice(asked).format(what, table[index]), f"{table[(index + 1) % len(table)]} comes after {table[index]}."
    asked = ("Which {} comes before {}?", "What is the {} before {}?")
    return chance.choice(asked).format(what, table[index]), f"{table[index - 1]} comes before {table[index]}."
