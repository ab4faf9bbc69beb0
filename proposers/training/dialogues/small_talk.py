"""Small talk: short chats between two people or with an assistant from published corpora, and everyday exchanges made by rule."""

import re
from collections.abc import Iterable, Iterator
from random import Random

from ..corpus import Conversation, Message, Record, content_key
from .common import SYSTEM_MESSAGES, pair

LONGEST_ANSWER = 900                 # characters, some 250 tokens
NUM_EXCHANGES = 4000

PLAIN_TOPICS = frozenset({"greetings", "food", "trivia", "money", "health", "history"})
NOT_FOR_A_CHAT = re.compile(r"\[?\(?\buser\b.{0,6}name|\[|as an ai|openassistant|open assistant|chatgpt|https?://|<\w+>", re.I)
# How an answer to something begins: no first turn of a chat.
MIDST = re.compile(
    r"(Oh|You|That|It|They|Thanks?|Mine|True|Haha|Absolutely|Definitely|What about|How about|Yes|Yeah|No|Not|Me|"
    r"Really|Wow|Nice|Cool|Same|Okay|OK|Sure|Great|And|But|So|Well|Sounds|Of course|He|She)\b")


def assistant_chats(records: Iterable[Record]) -> Iterator[Conversation]:
    """Open Assistant: English questions with short answers in prose, long answers cut where a paragraph ends a thought."""
    for record in records:
        question, answer = (str(message["content"]).strip() for message in record.messages[:2])
        answer = _shortened(answer)
        if answer and len(question) < 300 and _is_english(question + answer) and not NOT_FOR_A_CHAT.search(question + answer):
            if "```" not in question + answer and not re.search(r"[{};]$", question + "\n" + answer, flags=re.M):
                yield pair(record.key, question, answer)


def personas(records: Iterable[Record]) -> Iterator[Conversation]:
    """Two people getting to know each other: windows of two to six turns, the first of them the user's."""
    for record in records:
        chance = Random(record.key)
        start = 0
        while start + 1 < len(record.messages):
            end = start + 2 * chance.randint(1, 3)
            window = [{"role": role, "content": _tidy(str(message["content"]))} for role, message in zip(
                ("user", "assistant") * 3, record.messages[start:end], strict=False)]
            window = window[: len(window) // 2 * 2]
            whole = " ".join(turn["content"] for turn in window)
            start = end
            if not window or MIDST.match(window[0]["content"]):
                continue
            if not NOT_FOR_A_CHAT.search(whole) and _is_english(whole) and all(8 < len(turn["content"]) < 220 for turn in window):
                yield Conversation(_sometimes_led(window, chance), record.key)


def trivia(records: Iterable[Record]) -> Iterator[Conversation]:
    """Chatterbot's plain topics: one question, one short answer in a sentence of its own."""
    for record in records:
        topic = record.origin.rpartition("/")[2].partition(".")[0]
        question, answer = (_tidy(str(message["content"])) for message in record.messages[:2])
        if topic in PLAIN_TOPICS and len(answer) < 200 and _is_english(question + answer):
            yield pair(record.key, question[:1].upper() + question[1:], _sentence(answer))


def small_talk(_: Iterable[Record]) -> Iterator[Conversation]:
    """Greetings, feelings, weather, hobbies, food, thanks and jokes, in chats of one to three exchanges."""
    seen: set[str] = set()
    for number in range(NUM_EXCHANGES):
        chance = Random(number)
        turns = [turn for exchange in _chat(chance) for turn in exchange]
        text = "\n".join(turns)
        if text not in seen:
            seen.add(text)
            messages = [{"role": "assistant" if index % 2 else "user", "content": turn} for index, turn in enumerate(turns)]
            yield Conversation(_sometimes_led(messages, chance), content_key(text))


def _shortened(answer: str) -> str:
    """The first paragraphs of `answer` that fit, if they end with a sentence; lists are kept whole or not at all."""
    if len(answer) <= LONGEST_ANSWER:
        return answer
    cut = answer[:LONGEST_ANSWER].rpartition("\n\n")[0]
    return cut if cut.endswith((".", "!")) and not re.search(r"^\s*(\d+[.)]|[-*]) ", answer, flags=re.M) and "following" not in cut else ""


def _is_english(text: str) -> bool:
    common = re.findall(r"\b(?:the|is|a|to|you|what|of|in|and|how|i|it|my)\b", text.lower())
    return sum(char > "\x7f" for char in text) <= len(text) / 100 and len(common) * 14 >= len(text.split())


def _tidy(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("’", "'")).strip()


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _sometimes_led(messages: list[Message], chance: Random) -> list[Message]:
    return [{"role": "system", "content": chance.choice(SYSTEM_MESSAGES)}, *messages] if chance.random() < 0.25 else messages


Exchange = tuple[str, str]           # what the user says, what is answered

HOBBIES = {
    "reading": "What kind of books do you like?", "cooking": "What do you like to cook?", "hiking": "Where do you like to hike?",
    "painting": "What do you like to paint?", "swimming": "How often do you swim?", "gardening": "What do you grow in your garden?",
    "playing the piano": "How long have you played?", "playing chess": "Do you play with friends?",
    "dancing": "What kind of dance do you like?",
    "taking photos": "What do you like to photograph?", "fishing": "What do you like to catch?", "running": "How far do you usually run?",
    "baking": "What do you like to bake?", "cycling": "Where do you like to ride?", "singing": "What kind of songs do you like?",
    "writing stories": "What are your stories about?", "knitting": "What are you knitting now?",
    "watching films": "Which film do you like best?",
    "playing football": "Do you play in a team?", "learning languages": "Which language are you learning?",
    "travelling": "Where would you like to go next?",
    "drawing": "What do you like to draw?", "playing the guitar": "What kind of music do you play?",
    "watching birds": "Which bird do you like best?",
}
FOODS = ("pizza", "pasta", "soup", "salad", "rice", "curry", "bread", "cheese", "chocolate", "ice cream", "apples", "pancakes", "noodles",
         "sushi", "tacos", "strawberries", "potatoes", "fish", "cake", "cookies")
ANIMALS = ("a dog", "a cat", "two cats", "a rabbit", "a horse", "a parrot", "three fish", "a hamster", "a puppy", "a kitten", "two dogs")
PLACES = ("London", "Paris", "Berlin", "Rome", "Madrid", "Boston", "Chicago", "Tokyo", "Sydney", "Toronto", "Dublin", "Vienna", "the sea",
          "the mountains", "the zoo", "the park", "the museum")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Jack", "Kate", "Liam", "Maria", "Noah", "Olivia", "Paul",
         "Sam")
JOBS = ("teacher", "nurse", "doctor", "student", "cook", "driver", "writer", "programmer", "gardener", "musician", "farmer", "baker",
        "engineer")
GOOD = ("happy", "great", "excited", "glad", "wonderful", "cheerful", "proud")
BAD = ("sad", "tired", "lonely", "worried", "stressed", "nervous", "bored", "angry", "upset", "sick")
WEATHER = {"sunny": "That is a good day to go outside.", "raining": "Do not forget your umbrella.",
           "snowing": "Keep warm and be careful on the road.",
           "very hot": "Remember to drink enough water.", "very cold": "Keep warm and drink some hot tea.", "windy": "Hold on to your hat.",
           "foggy": "Be careful on the road.", "cloudy": "Perhaps the sun comes out later."}
JOKES = (
    "Why did the bicycle fall over? Because it was two tired.", "What do you call a bear with no teeth? A gummy bear.",
    "Why do bees have sticky hair? Because they use honeycombs.", "What do you call cheese that is not yours? Nacho cheese.",
    "Why was six afraid of seven? Because seven ate nine.", "What do you call a fish without an eye? A fsh.",
    "Why did the chicken cross the road? To get to the other side.", "What has four wheels and flies? A garbage truck.",
    "Why can't your nose be twelve inches long? Because then it would be a foot.", "What gets wetter the more it dries? A towel.")
OPENINGS: dict[str, tuple[str, ...]] = {
    "Hello! How can I help you today?": ("Hi", "Hello", "Hello!", "Hi there!", "Hey", "hi", "hello there", "Hi!", "Hey there!",
                                         "Greetings!"),
    "Good morning! How can I help you today?": ("Good morning", "Good morning!", "good morning"),
    "Good evening! How can I help you today?": ("Good evening", "Good evening!", "good evening"),
    "Good afternoon! How can I help you today?": ("Good afternoon", "Good afternoon!", "good afternoon"),
    "I am doing well, thank you. How are you?": ("How are you?", "How are you doing?", "How are you today?", "Hi, how are you?",
                                                 "how are you",
                                               "Hello! How are you?", "How is it going?", "How do you do?", "Are you well?"),
    "Not much. I am here to help you. What is new with you?": ("What's up?", "What is new?", "whats up", "What are you doing?"),
}
CLOSINGS: dict[str, tuple[str, ...]] = {
    "You are welcome!": ("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Great, thanks.", "Thanks for your help.",
                         "thank you very much"),
    "Goodbye! Have a nice day.": ("Bye", "Goodbye", "See you later.", "Bye!", "I have to go now.", "See you!", "Goodbye!"),
    "Good night! Sleep well.": ("Good night", "Good night!", "I am going to bed.", "good night"),
    "I am glad to hear that!": ("That was helpful.", "You are very nice.", "I like talking to you.", "That is great!", "Good answer!"),
    "I am sorry about that. I am a small model and make mistakes.": ("That is wrong.", "You made a mistake.", "That is not right.",
                                                                     "No, that is wrong."),
}


def _chat(chance: Random) -> list[Exchange]:
    topics = [_feeling, _hobby, _food, _weather, _animal, _place, _name, _job, _joke, _choice]
    exchanges = [chance.choice(topics)(chance)]
    if chance.random() < 0.35:
        exchanges.insert(0, _from(OPENINGS, chance))
    if chance.random() < 0.35:
        exchanges.append(_from(CLOSINGS, chance))
    return exchanges if chance.random() < 0.9 else [_from(OPENINGS if chance.random() < 0.5 else CLOSINGS, chance)]


def _from(table: dict[str, tuple[str, ...]], chance: Random) -> Exchange:
    answer = chance.choice(list(table))
    return chance.choice(table[answer]), answer


def _feeling(chance: Random) -> Exchange:
    said = chance.choice(("I am {} today.", "I feel {}.", "I'm {} right now.", "I feel very {} today.", "I am so {}!"))
    if chance.random() < 0.5:
        word = chance.choice(GOOD)
        return said.format(word), f"I am glad that you feel {word}! What happened?"
    word = chance.choice(BAD)
    return said.format(word), f"I am sorry that you feel {word}. Do you want to talk about it?"


def _hobby(chance: Random) -> Exchange:
    hobby = chance.choice(list(HOBBIES))
    said = chance.choice(("I like {}.", "My hobby is {}.", "I love {}!", "In my free time I enjoy {}.", "I spend my weekends {}.",
                          "I really enjoy {}."))
    return said.format(hobby), f"{hobby.capitalize()} sounds like fun! {HOBBIES[hobby]}"


def _food(chance: Random) -> Exchange:
    food = chance.choice(FOODS)
    if chance.random() < 0.5:
        said = chance.choice(("I love {}.", "My favorite food is {}.", "I had {} for dinner.", "I am going to eat {}.", "I want some {}."))
        return said.format(food), f"That sounds good! Do you often eat {food}?"
    asked = chance.choice(("Do you like {}?", "Do you eat {}?", "Have you ever tried {}?", "What do you think of {}?"))
    return asked.format(food), f"I am a language model, so I cannot eat {food}. Do you like {food}?"


def _weather(chance: Random) -> Exchange:
    weather = chance.choice(list(WEATHER))
    said = chance.choice(("It is {} today.", "It is {} here.", "It's {} outside.", "The weather: it is {}.", "Today it is {}."))
    return said.format(weather), WEATHER[weather]


def _animal(chance: Random) -> Exchange:
    animal = chance.choice(ANIMALS)
    said = chance.choice(("I have {}.", "I got {} for my birthday.", "We have {} at home.", "My sister has {}.", "My family has {}."))
    plural = not animal.startswith("a ")
    return said.format(animal), f"{animal.capitalize()}! What {'are their names' if plural else 'is its name'}?"


def _place(chance: Random) -> Exchange:
    place = chance.choice(PLACES)
    said = chance.choice(("I am going to {}.", "I was in {} last week.", "I want to visit {}.", "We are going to {} tomorrow."))
    said = said.replace("was in", "went to").format(place)
    return said, f"{place[0].upper()}{place[1:]} sounds interesting! What {'did you do' if 'went' in said else 'do you want to do'} there?"


def _name(chance: Random) -> Exchange:
    name = chance.choice(NAMES)
    said = chance.choice(("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}.", "Call me {}."))
    return said.format(name), f"Nice to meet you, {name}! How can I help you today?"


def _job(chance: Random) -> Exchange:
    job = chance.choice(JOBS)
    article = "an" if job[0] in "aeiou" else "a"
    said = chance.choice(("I am {} {}.", "I work as {} {}.", "My brother is {} {}.", "I want to become {} {}.", "My mother is {} {}."))
    return said.format(article, job), f"It must be interesting to be {article} {job}. What is the best part of it?"


def _joke(chance: Random) -> Exchange:
    asked = ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Can you tell me a joke?", "Say something funny.",
             "tell me a joke", "I want to hear a joke.", "Another joke, please.")
    return chance.choice(asked), chance.choice(JOKES)


def _choice(chance: Random) -> Exchange:
    one, other = chance.sample(FOODS if chance.random() < 0.5 else sorted(HOBBIES), k=2)
    asked = chance.choice(("Which do you like better, {} or {}?", "{} or {}?", "Do you prefer {} or {}?", "Should I choose {} or {}?"))
    said = asked.format(one, other)
    return said[0].upper() + said[1:], f"Both are good, but I would choose {one}. What about you?"
