"""The flags of `foretoken generate`: its own, and those of `serve` that say how the model runs."""

from .option_forms import count, share, temperature
from .serve_parser import NETWORK, SECURITY, ServeParser
from .terminal.colors import WHEN

DESCRIPTION = """\
Answer one prompt without a server: load the model, write the answer to stdout
as it comes and a line of figures to stderr.

PROMPT is a text, or - for stdin. MODEL and the flags below are those of serve.
Defaults stand in brackets.
"""
EXAMPLES = """\
examples:
  foretoken generate "How do I list the files of a folder?"
  foretoken generate --show-steps "Once upon a time" --max-tokens 40
  foretoken generate --raw "def fibonacci(n):" ./my-model --speculation off
  cat question.txt | foretoken generate - ./my-model --system "Be brief."
  foretoken generate "Name a colour" --temperature 1 --seed 7 --json

A prompt that begins with a dash goes behind all flags and --.
"""


class GenerateParser(ServeParser):
    """All flags of `foretoken generate`."""

    operands = ("prompt", "model")

    def __init__(self) -> None:
        super().__init__("generate", "PROMPT [MODEL] [flags]", DESCRIPTION, EXAMPLES, hidden=(NETWORK, SECURITY, "API"))

    def add_own_flags(self) -> None:
        add = self.section("answer").add
        add("--chat", action="store_true", help="the prompt is a question to a chat model [if it has a chat template]")
        add("--raw", action="store_false", dest="chat", help="the prompt is continued as it is")
        add("--system", metavar="TEXT", help="system message of a chat [none]")
        add("--max-tokens", type=count, metavar="N", help="of the answer [what the context has room for]")
        add("--temperature", type=temperature, metavar="T", help="0 is greedy, 1 the model's own distribution [0]")
        add("--top-p", type=share, metavar="P", help="only the likeliest tokens up to this probability [1]")
        add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated [none]")
        add("--adapter", metavar="NAME", help="which of --lora-modules answers [none: the model itself]")
        add("--speculation", metavar="NAME", help="off, auto, or one of the configured proposers [auto]")
        add("--show-steps", action="store_true", help="a line for each step instead of the text [off]")
        add("--json", action="store_true", help="one JSON object on stdout, once all is there [off]")
        add("--color", choices=WHEN, metavar="WHEN", help="auto, always or never: tokens in the colour of who said them [auto]")
