"""Names and things that invented dialogues are filled with. Knows no dialogue."""

from collections.abc import Sequence
from random import Random

FIRST_NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Liam Maria Noah Olivia Paul Rosa Sam Tina Will Ahmed Aisha Carlos Chen "
    "Dmitri Elena Fatima Hiro Ingrid Jamal Karin Lars Mei Nadia Omar Priya Quinn Raj Sofia Tomas Uma Victor Wei Yara Zoe Alice Bob "
    "Carol Diego Eva Frank Gina Hugo Irene James Laura Mark Nina Oscar Petra Robert Sarah Theo Vera".split())
LAST_NAMES = tuple(
    "Smith Jones Brown Miller Davis Wilson Moore Taylor Anderson Thomas Jackson White Harris Martin Garcia Clark Lewis Lee Walker Hall "
    "Young King Wright Lopez Hill Scott Green Adams Baker Nelson Carter Mitchell Perez Roberts Turner Phillips Campbell Parker Evans "
    "Edwards Collins Stewart Sanchez Morris Rogers Reed Cook Morgan Bell Murphy Keller Schmidt Weber Meyer Rossi Silva Santos Tanaka "
    "Sato Kim Park Singh Patel Khan Ali Novak Berg Larsen Dubois Moreau".split())
CITIES = (
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Lisbon", "Dublin", "Prague", "Athens", "Warsaw", "Tokyo", "Seoul",
    "Sydney",
    "Toronto", "Chicago", "Boston", "Denver", "Seattle", "Austin", "Miami", "Lima", "Bogota", "Cairo", "Nairobi", "Lagos", "Mumbai",
    "Delhi",
    "Bangkok", "Hanoi", "Jakarta", "Zurich", "Geneva", "Hamburg", "Munich", "Milan", "Naples", "Porto", "Lyon", "New York", "San Francisco",
    "Los Angeles", "Cape Town", "Mexico City", "Buenos Aires", "Hong Kong", "Helsinki", "Stockholm", "Copenhagen")
COUNTRIES = ("France", "Germany", "Italy", "Spain", "Japan", "Canada", "Brazil", "India", "Kenya", "Norway", "Mexico", "Egypt", "Greece",
             "Poland", "Chile")
JOBS = (
    "teacher", "nurse", "engineer", "baker", "farmer", "doctor", "lawyer", "painter", "driver", "cook", "carpenter", "designer", "gardener",
    "plumber", "pilot", "writer", "dentist", "waiter", "librarian", "programmer", "accountant", "electrician", "architect", "singer",
    "actor")
COMPANIES = (
    "Acme", "Northwind", "Bluebird Books", "Green Leaf", "Sunrise Foods", "Red Rock", "Silver Lake", "Hilltop Labs", "Brightway",
    "Stone Bridge",
    "Oak Street Press", "River Tools", "Golden Gate Music", "Mountain Gear", "City Bikes", "Ocean Media", "Happy Home", "Fast Parcel")
PRODUCTS = (
    "lamp", "chair", "table", "backpack", "bicycle", "camera", "keyboard", "headphones", "mug", "notebook", "pen", "phone", "printer",
    "watch",
    "umbrella", "jacket", "sweater", "tent", "guitar", "kettle", "toaster", "blanket", "mirror", "clock", "drill", "ladder", "monitor",
    "mouse",
    "pillow", "radio", "scarf", "speaker", "suitcase", "tablet", "vase", "wallet")
COLORS = ("red", "blue", "green", "black", "white", "yellow", "brown", "gray", "orange", "pink", "purple", "silver")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
STREETS = (
    "Main Street", "Oak Avenue", "Park Road", "Mill Lane", "High Street", "Church Street", "Lake Drive", "Hill Road", "Station Street",
    "Elm Street",
    "River Road", "Garden Lane", "King Street", "Market Square", "Bridge Street", "School Lane")
TOPICS = (
    "music", "cooking", "history", "chess", "painting", "gardening", "photography", "poetry", "robots", "astronomy", "dancing", "climbing",
    "science",
    "jazz", "film", "travel", "health", "design", "budget", "marketing", "safety", "yoga", "math", "art")
HOBBIES = ("reading", "hiking", "swimming", "chess", "cooking", "painting", "running", "cycling", "singing", "fishing", "gaming", "dancing",
           "knitting", "yoga")
FOODS = (
    "pizza", "pasta", "rice", "soup", "salad", "bread", "cheese", "apples", "eggs", "tomatoes", "onions", "chicken", "beans", "carrots",
    "butter",
    "honey", "lemons", "fish", "potatoes", "milk")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Chinese", "Portuguese", "Russian", "Arabic", "Korean", "Dutch",
             "Swedish")

SYLLABLES = ("ba", "bel", "cor", "da", "del", "fen", "gar", "hol", "ka", "lin", "lo", "mar", "mi", "nor", "pa", "ra", "ren", "sa", "sol",
             "ta", "tor",
             "ul", "va", "vel", "wen", "zan")
INVENTED_ONE_IN = 4


def name_of(names: Sequence[str], chance: Random) -> str:
    """One of the names, or one never heard before, so that names are copied and not known by heart."""
    if chance.randrange(INVENTED_ONE_IN):
        return chance.choice(names)
    return "".join(chance.choice(SYLLABLES) for _ in range(chance.randint(2, 3))).capitalize()
