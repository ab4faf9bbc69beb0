"""What the everyday functions know: weather, rates, translations, definitions, and the things they are used on. Knows no function."""

SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
IN_DOLLARS = {"USD": 1.0, "EUR": 1.08, "GBP": 1.27, "JPY": 0.0067, "CHF": 1.12, "CAD": 0.73, "INR": 0.012}
MESSAGES = ("I will be late", "call me back", "dinner is ready", "see you soon", "the meeting is cancelled", "happy birthday",
            "I am on my way", "thank you")
CHORES = ("buy milk", "call mom", "water the plants", "pay the rent", "feed the cat", "wash the car", "book a table", "clean the kitchen",
          "take a break")
SENTENCES = ("good morning", "thank you", "where is the station", "I am hungry", "see you tomorrow", "how much is this", "good night",
             "welcome")
TRANSLATIONS = {                     # of SENTENCES
    "French": ("bonjour", "merci", "où est la gare", "j'ai faim", "à demain", "combien ça coûte", "bonne nuit", "bienvenue"),
    "German": ("guten Morgen", "danke", "wo ist der Bahnhof", "ich habe Hunger", "bis morgen", "wie viel kostet das", "gute Nacht",
               "willkommen"),
    "Spanish": ("buenos días", "gracias", "dónde está la estación", "tengo hambre", "hasta mañana", "cuánto cuesta", "buenas noches",
                "bienvenido"),
    "Italian": ("buongiorno", "grazie", "dov'è la stazione", "ho fame", "a domani", "quanto costa", "buonanotte", "benvenuto"),
    "Dutch": ("goedemorgen", "dank je", "waar is het station", "ik heb honger", "tot morgen", "hoeveel kost dit", "goedenacht", "welkom"),
}
FILES = ("report.txt", "notes.md", "budget.csv", "photo.png", "letter.txt", "plan.md", "data.json", "main.py", "invoice.pdf", "todo.txt")
DEFINITIONS = {
    "kettle": "a pot for boiling water", "ladder": "two long bars with steps between them",
    "mirror": "a glass that shows what is before it", "suitcase": "a bag for clothes on a journey", "orchard": "a garden of fruit trees",
    "harbor": "a safe place for ships", "astronomy": "the study of the stars", "budget": "a plan of income and spending",
    "poetry": "writing in verses", "glacier": "a slow river of ice", "lantern": "a lamp that can be carried",
    "meadow": "a field of grass and flowers", "anchor": "a heavy hook that holds a ship", "author": "a person who writes books",
    "desert": "a dry place with little rain", "scarf": "a cloth worn around the neck", "volcano": "a mountain that throws out fire",
    "island": "land with water all around",
}
POPULATIONS = {
    "France": 68000000, "Germany": 84000000, "Italy": 59000000, "Spain": 48000000, "Japan": 123000000, "Canada": 40000000,
    "Brazil": 216000000, "Kenya": 56000000, "Norway": 5500000, "Mexico": 131000000, "Egypt": 111000000, "Greece": 10400000,
    "Poland": 37000000, "Chile": 19000000,
}
ROOMS = ("kitchen", "bedroom", "living room", "bathroom", "office", "garage", "hallway")
SONGS = ("Blue Sky", "Summer Rain", "Night Train", "Golden Days", "Silver Moon", "Dancing Home", "Old River", "First Snow")
CONVERSIONS = {                      # factor between two units
    ("meters", "feet"): 3.281, ("feet", "meters"): 0.3048, ("miles", "kilometers"): 1.609, ("kilometers", "miles"): 0.6214,
    ("kilograms", "pounds"): 2.205, ("pounds", "kilograms"): 0.4536, ("liters", "gallons"): 0.2642, ("gallons", "liters"): 3.785,
    ("inches", "centimeters"): 2.54, ("centimeters", "inches"): 0.3937, ("hours", "minutes"): 60.0, ("days", "hours"): 24.0,
}
SHARES = ("Acme", "Northwind", "Brightway", "Fast Parcel", "Red Rock", "Silver Lake", "Green Leaf")
