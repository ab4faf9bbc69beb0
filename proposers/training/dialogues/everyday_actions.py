"""The everyday functions: what each takes, how people ask for it, what it returns and how that is told."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .everyday_facts import (
    CHORES,
    CONVERSIONS,
    DEFINITIONS,
    FILES,
    IN_DOLLARS,
    MESSAGES,
    POPULATIONS,
    ROOMS,
    SENTENCES,
    SHARES,
    SKIES,
    SONGS,
    TRANSLATIONS,
)
from .vocabulary import CITIES, COLORS, COMPANIES, DAYS, FIRST_NAMES, FOODS, PRODUCTS, TOPICS, name_of

Draw = Callable[[Random], Any]


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str                        # JSON Schema's name
    draw: Draw
    required: bool = True


@dataclass(frozen=True)
class Action:
    name: str
    purpose: str                     # as in "I have no function to ..."
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]       # parameters in braces; those not named are left out of the call
    result: Callable[[dict[str, Any], Random], dict[str, Any]]
    answers: tuple[str, ...]         # parameters and keys of the result in braces
    vague: tuple[str, ...] = ()      # ways to ask without the one required parameter
    ask: str = ""                    # how the assistant asks for it


def words(name: str, choices: tuple[str, ...], required: bool = True) -> Parameter:
    return Parameter(name, "string", lambda chance: chance.choice(choices), required)


def named(name: str, choices: tuple[str, ...]) -> Parameter:
    """As `words`, but names nobody has heard before come, too."""
    return Parameter(name, "string", lambda chance: name_of(choices, chance))


def whole(name: str, low: int, high: int) -> Parameter:
    return Parameter(name, "integer", lambda chance: chance.randint(low, high))


def drawn(name: str, draw: Draw) -> Parameter:
    return Parameter(name, "string", draw)


def done(values: dict[str, Any], chance: Random) -> dict[str, Any]:
    return {"success": True}


def clock(chance: Random) -> str:
    return f"{chance.randint(6, 22):02}:{chance.choice(('00', '15', '30', '45'))}"


def _expression(chance: Random) -> str:
    return f"{chance.randint(2, 99)} {chance.choice('+-*')} {chance.randint(2, 99)}"


def _calculated(values: dict[str, Any], chance: Random) -> dict[str, Any]:
    left, sign, right = values["expression"].split()
    a, b = int(left), int(right)
    return {"result": a + b if sign == "+" else a - b if sign == "-" else a * b}


def _converted(values: dict[str, Any], chance: Random) -> dict[str, Any]:
    start, goal = values["units"].split(" to ")
    return {"result": round(values["value"] * CONVERSIONS[start, goal], 1)}


def _code(chance: Random) -> str:
    return f"{chance.choice('ABCDEFGH')}{chance.randint(100, 9999)}"


ACTIONS = (
    Action("get_weather", "look up the weather", ("Get the weather of a city", "Current weather", "Returns the weather for a city"),
           (named("city", CITIES),),
           ("What is the weather in {city}?", "How is the weather in {city}?", "Is it raining in {city}?", "Weather in {city}",
            "What's the weather like in {city} today?",
            "Tell me the weather in {city}.", "How warm is it in {city}?", "Check the weather for {city}."),
           lambda values, chance: {"temperature": chance.randint(-9, 38), "condition": chance.choice(SKIES)},
           ("It is {condition} in {city}, and the temperature is {temperature} degrees.",),
           ("What is the weather?", "How is the weather today?", "Check the weather."), "For which city?"),
    Action("get_forecast", "look up the forecast", ("Weather forecast for a city and a day", "Get the forecast"),
           (named("city", CITIES), words("day", DAYS)),
           ("What will the weather be in {city} on {day}?", "Forecast for {city} on {day}", "Will it rain in {city} on {day}?",
            "How will the weather be on {day} in {city}?"),
           lambda values, chance: {"high": chance.randint(10, 35), "low": chance.randint(-5, 9), "condition": chance.choice(SKIES)},
           ("On {day} it will be {condition} in {city}, between {low} and {high} degrees.",)),
    Action("convert_currency", "convert money", ("Convert an amount of money", "Convert between currencies"),
           (whole("amount", 1, 900), words("from", tuple(IN_DOLLARS)[:3]), words("to", tuple(IN_DOLLARS)[3:])),
           ("Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "What are {amount} {from} in {to}?",
            "{amount} {from} to {to}", "Change {amount} {from} into {to}."),
           lambda values, chance: {"result": round(values["amount"] * IN_DOLLARS[values["from"]] / IN_DOLLARS[values["to"]], 2)},
           ("{amount} {from} are {result} {to}.",)),
    Action("set_timer", "set a timer", ("Set a timer", "Start a timer in minutes"), (whole("minutes", 1, 90),),
           ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes", "Timer: {minutes} minutes",
            "Wake me in {minutes} minutes.", "Can you set a {minutes} minute timer?"),
           done, ("The timer is set for {minutes} minutes.",)),
    Action("set_alarm", "set an alarm", ("Set an alarm", "Set the alarm clock"), (drawn("time", clock),),
           ("Set an alarm for {time}.", "Wake me up at {time}.", "Alarm at {time} please", "I need to get up at {time}.",
            "Please set the alarm to {time}."),
           done, ("The alarm is set for {time}.",), ("Set an alarm.", "Wake me up, please."), "At what time?"),
    Action("search_files", "search files", ("Search files by a word", "Find files that contain a word"), (words("query", TOPICS),),
           ("Search my files for {query}.", "Find files about {query}.", "Which files are about {query}?", "Look for {query} in my files.",
            "Do I have any files on {query}?"),
           lambda values, chance: {"files": chance.choice(FILES), "count": 1}, ("I found {count} file: {files}.",),
           ("Search my files.", "Find a file for me."), "What should I look for?"),
    Action("read_file", "read a file", ("Read a file", "Returns the text of a file"), (words("path", FILES),),
           ("Read {path}.", "What is in {path}?", "Show me {path}.", "Open the file {path}.", "Print the content of {path}"),
           lambda values, chance: {"text": chance.choice(CHORES)}, ("The file {path} says: {text}",), ("Read a file.", "Open a file."),
           "Which file?"),
    Action("delete_file", "delete a file", ("Delete a file", "Remove a file"), (words("path", FILES),),
           ("Delete {path}.", "Remove the file {path}.", "Please delete {path}", "I do not need {path} any more, delete it."), done,
           ("I deleted {path}.",)),
    Action("send_email", "send an email", ("Send an email", "Write an email to somebody"),
           (named("to", FIRST_NAMES), words("body", MESSAGES)),
           ("Send an email to {to}: {body}", "Email {to} that {body}.", "Write an email to {to} saying {body}.", "Mail {to}: {body}"), done,
           ("I sent the email to {to}.",)),
    Action("send_message", "send a message", ("Send a text message", "Text a contact"),
           (named("contact", FIRST_NAMES), words("text", MESSAGES)),
           ("Text {contact}: {text}", "Tell {contact} that {text}.", "Send {contact} a message: {text}", "Message {contact} {text}"), done,
           ("I sent your message to {contact}.",)),
    Action("call_contact", "make a phone call", ("Call a contact", "Start a phone call"), (named("name", FIRST_NAMES),),
           ("Call {name}.", "Phone {name}", "I want to talk to {name}.", "Please call {name} for me.", "Ring {name}."), done,
           ("Calling {name} now.",),
           ("Make a call.", "Call somebody for me."), "Whom should I call?"),
    Action("calculator", "calculate", ("Calculate an expression", "Evaluate arithmetic"), (drawn("expression", _expression),),
           ("What is {expression}?", "Calculate {expression}.", "How much is {expression}?", "{expression}",
            "Compute {expression} for me."), _calculated,
           ("{expression} = {result}",)),
    Action("translate", "translate", ("Translate a text", "Translate text to another language"),
           (words("text", SENTENCES), words("language", tuple(TRANSLATIONS))),
           ('Translate "{text}" to {language}.', 'How do you say "{text}" in {language}?', 'What is "{text}" in {language}?',
            "Translate to {language}: {text}"),
           lambda values, chance: {"translation": TRANSLATIONS[values["language"]][SENTENCES.index(values["text"])]},
           ('"{text}" in {language} is "{translation}".',)),
    Action("create_event", "add events to a calendar", ("Create a calendar event", "Add an event to the calendar"),
           (words("title", TOPICS), words("day", DAYS), drawn("time", clock)),
           ("Add {title} to my calendar on {day} at {time}.", "Create an event: {title}, {day} at {time}.",
            "Put {title} on {day} at {time} in my calendar.", "Schedule {title} for {day} at {time}."),
           done, ("I added {title} on {day} at {time}.",)),
    Action("list_events", "read a calendar", ("List the events of a day", "Read the calendar"), (words("day", DAYS),),
           ("What do I have on {day}?", "What is on my calendar for {day}?", "Show my events on {day}.", "Am I free on {day}?"),
           lambda values, chance: {"event": chance.choice(TOPICS), "time": clock(chance)}, ("On {day} you have {event} at {time}.",),
           ("What is on my calendar?", "Show my events."), "For which day?"),
    Action("add_reminder", "set reminders", ("Add a reminder", "Remind the user of something"),
           (words("text", CHORES), drawn("time", clock)),
           ("Remind me to {text} at {time}.", "At {time} remind me to {text}.", "Set a reminder for {time}: {text}",
            "I must {text} at {time}, remind me."), done,
           ("I will remind you at {time} to {text}.",)),
    Action("add_to_list", "change the shopping list", ("Add an item to the shopping list", "Put something on the shopping list"),
           (words("item", FOODS),),
           ("Add {item} to my shopping list.", "Put {item} on the list.", "We need {item}.", "I have to buy {item}, add it to the list."),
           done, ("I added {item} to your shopping list.",),
           ("Add something to my shopping list.",), "What should I add?"),
    Action("play_music", "play music", ("Play a song", "Start music"), (named("song", SONGS),),
           ("Play {song}.", "I want to hear {song}.", "Play the song {song}", "Put on {song}, please.", "Start {song}."), done,
           ("Now playing {song}.",),
           ("Play some music.", "Play a song."), "Which song?"),
    Action("turn_on_light", "switch lights on", ("Turn on the light of a room", "Switch a light on"), (words("room", ROOMS),),
           ("Turn on the light in the {room}.", "Light on in the {room}", "Switch on the {room} light.", "It is dark in the {room}."), done,
           ("The light in the {room} is on.",),
           ("Turn on the light.",), "In which room?"),
    Action("set_temperature", "set the heating", ("Set the temperature of a room", "Set the thermostat"),
           (words("room", ROOMS), whole("degrees", 15, 26)),
           ("Set the {room} to {degrees} degrees.", "Heat the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}.",
            "I want {degrees} degrees in the {room}."), done,
           ("The {room} is set to {degrees} degrees.",)),
    Action("get_stock_price", "look up stock prices", ("Get a stock price", "Price of a share"), (named("company", SHARES),),
           ("What is the stock price of {company}?", "How is the {company} stock?", "Price of {company} shares?",
            "How much is a share of {company}?"),
           lambda values, chance: {"price": round(chance.uniform(5, 500), 2)}, ("A share of {company} costs {price} dollars.",)),
    Action("get_time", "tell the time", ("Current time in a city", "Get the local time"), (named("city", CITIES),),
           ("What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}", "How late is it in {city}?"),
           lambda values, chance: {"time": clock(chance)}, ("It is {time} in {city}.",), ("What time is it?", "Tell me the time."),
           "In which city?"),
    Action("book_table", "book tables", ("Book a table in a restaurant", "Reserve a table"),
           (whole("people", 2, 12), words("day", DAYS), drawn("time", clock)),
           ("Book a table for {people} on {day} at {time}.", "I need a table for {people} people on {day} at {time}.",
            "Reserve a table: {day}, {time}, {people} people."),
           lambda values, chance: {"booking": _code(chance)},
           ("Your table for {people} on {day} at {time} is booked. The booking number is {booking}.",)),
    Action("find_restaurant", "find restaurants", ("Find a restaurant", "Search restaurants by city and dish"),
           (named("city", CITIES), words("dish", FOODS, False)),
           ("Find a restaurant in {city}.", "Where can I eat {dish} in {city}?", "I want {dish} in {city}.",
            "Any good place for {dish} in {city}?"),
           lambda values, chance: {"name": f"{chance.choice(COLORS).capitalize()} {chance.choice(('Lion', 'Garden', 'Kitchen', 'Mill'))}"},
           ("Try {name} in {city}.",)),
    Action("search_flights", "search flights", ("Search flights", "Find flights between two cities"),
           (named("origin", CITIES[:25]), named("destination", CITIES[25:])),
           ("Find a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}.",
            "Flights from {origin} to {destination}", "How do I fly to {destination} from {origin}?"),
           lambda values, chance: {"flight": _code(chance), "price": chance.randint(49, 900)},
           ("Flight {flight} from {origin} to {destination} costs {price} dollars.",)),
    Action("track_package", "track packages", ("Track a package", "Find out where a package is"), (drawn("number", _code),),
           ("Where is my package {number}?", "Track {number}.", "Track the package {number}, please.",
            "What is the status of package {number}?"),
           lambda values, chance: {"status": chance.choice(("on its way", "delivered", "delayed", "in the warehouse")),
                                   "city": chance.choice(CITIES)},
           ("Package {number} is {status}. It was last seen in {city}.",), ("Where is my package?", "Track my package."),
           "What is the number of the package?"),
    Action("search_products", "search a shop", ("Search products", "Find a product in the shop"),
           (words("query", PRODUCTS), whole("max_price", 10, 300)),
           ("Find a {query} under {max_price} dollars.", "I need a {query} for at most {max_price} dollars.",
            "Search for a {query} below {max_price} dollars.", "Show me a {query} for less than {max_price} dollars."),
           lambda values, chance: {"brand": chance.choice(COMPANIES), "price": chance.randint(5, values["max_price"])},
           ("There is a {query} by {brand} for {price} dollars.",)),
    Action("get_population", "look up populations", ("Population of a country", "How many people live in a country"),
           (words("country", tuple(POPULATIONS)),),
           ("How many people live in {country}?", "What is the population of {country}?", "Population of {country}",
            "Look up how many people {country} has."),
           lambda values, chance: {"population": POPULATIONS[values["country"]]}, ("{country} has {population} people.",)),
    Action("define_word", "look up words", ("Look up a word in the dictionary", "Definition of a word"),
           (words("word", tuple(DEFINITIONS)),),
           ("What does {word} mean?", "Define {word}.", "Look up the word {word}.", "What is the meaning of {word}?"),
           lambda values, chance: {"definition": DEFINITIONS[values["word"]]}, ("The word {word} means: {definition}.",)),
    Action("convert_units", "convert units", ("Convert a value between units", "Convert units"),
           (whole("value", 1, 500), drawn("units", lambda chance: " to ".join(chance.choice(tuple(CONVERSIONS))))),
           ("Convert {value} {units}.", "What is {value} {units}?", "{value} {units}", "Please change {value} {units}."),
           _converted,
           ("{value} {units} is {result}.",)),
)
