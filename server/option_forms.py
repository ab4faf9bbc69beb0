"""Forms of a flag's value: how a word of the command line becomes a number, a name, a key. Knows no flag.

argparse turns their ArgumentTypeError into "argument --port: ...".
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from ..engine.config import AdapterModule

T = TypeVar("T")


def count(text: str) -> int:
    """A positive integer. As in vLLM 1k is 1000 and 1K is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    number = float(match[1]) * scale[match[2]] if match else 0.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(number)


def key(text: str) -> str:
    """One that a header can carry. An empty one, from a variable that is not set, would let everybody in."""
    if not re.fullmatch(r"[!-~]+", text):
        raise argparse.ArgumentTypeError("must be printable ASCII without spaces, and not empty")
    return text


def name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def is_adapter_name(text: str) -> bool:
    """One that a list of names can hold, too."""
    return bool(text.strip()) and text.isprintable() and "," not in text


def adapters(text: str) -> tuple[AdapterModule, ...]:
    """`NAME=FOLDER`, or as JSON {"name": ..., "path": ...}, or a list of such objects."""
    if not text.lstrip().startswith(("{", "[")):
        name, equals, path = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER (a MODEL stands before the flag)")
        return (_adapter(text, name, path),)
    try:
        listed = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    entries = listed if isinstance(listed, list) else [listed]
    for entry in entries:
        if not (isinstance(entry, dict) and {"name", "path"} <= entry.keys() <= {"name", "path", "base_model_name"}):
            raise argparse.ArgumentTypeError(f'{json.dumps(entry)} is not {{"name": NAME, "path": FOLDER}}')
    return tuple(_adapter(json.dumps(entry), str(entry["name"]), str(entry["path"])) for entry in entries)


def _adapter(text: str, name: str, path: str) -> AdapterModule:
    if not (is_adapter_name(name) and path.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER, with a name that is printable and has no commas")
    return AdapterModule(name, path)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def prefix(text: str) -> str:
    """Of a path, without a slash at its end."""
    if not re.fullmatch(r"(?!/v1/?$)(/[^/?#\s]+)*/?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no path such as /name; /v1 is the API's own")
    return text.rstrip("/")


def positive(text: str) -> float:
    number = seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return cast(dict[str, Any], found)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature: 0 is greedy, 1 the model's own distribution")
    return value


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return number


def new_file(text: str) -> Path:
    """One to be written at the end of something long: that it cannot be is said before."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def new_picture(text: str) -> Path:
    """The same for one that matplotlib, which not everybody has installed, will draw."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'foretoken[bench]', or leave it out")
    return new_file(text)


def origins(text: str) -> tuple[str, ...]:
    """`["https://a.example"]`, `https://a.example,https://b.example` or `*`: each as browsers send it, for any other would never match."""
    listed = [origin.strip() for origin in text.split(",") if origin.strip()]
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"not a JSON list: {error}") from None
    for origin in listed:
        if not (isinstance(origin, str) and re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*@\sA-Z]+", origin)):
            raise argparse.ArgumentTypeError(f"{json.dumps(origin)} is not * or an origin such as https://a.example, without a path")
    return tuple(listed)


def several(form: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A form for `1,8`: some of another form."""
    return lambda text: tuple(form(part) for part in text.split(","))


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A form for `a,c`: several of these names, each once, in the order given."""

    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(filter(None, text.split(","))))
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(names)}")
        return chosen

    return read
