"""A proposer from the user's own code: found, constructed and checked, because nobody has checked it before.

`ChainProposer` is the short way to write one: it needs a single method. The long way is the interface in base.py.
"""

import hashlib
import importlib
import importlib.util
import operator
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsIndex, cast, get_args

from ..kernels.layout import FINAL
from .base import Draft, DraftContext, Feedback, Hears, Needs, Proposer
from .config import CustomConfig
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .loading import LoadedProposer, Opening, Resources, TargetView

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_METHODS = ("propose", "observe", "forget", "check", "close")


@dataclass(frozen=True)
class Setup:
    """What the constructor of a custom proposer is given, as its only argument."""

    num_speculative_tokens: int  # the most that it should guess for a row
    options: Mapping[str, Any]  # "options" of the speculative config, as they are
    target: TargetView  # the model that is served: its folder, tokenizer, vocab_size, max_model_len, ...


class ChainProposer:
    """Implements `Proposer` around one method: derive from it and write `guess`.

    `name` is what requests choose the proposer by. Target states, trees and confidence need `Proposer` itself.
    """

    name = "custom"
    needs = Needs()

    def __init__(self, setup: Setup) -> None:
        self.max_tokens = setup.num_speculative_tokens
        self.options = setup.options
        self.target = setup.target

    def guess(self, token_ids: list[int], k: int) -> Iterable[SupportsIndex]:
        """At most k tokens that may follow token_ids (a copy of prompt and output so far); an empty list is fine."""
        raise NotImplementedError(f"{type(self).__name__} must have a method guess(self, token_ids, k)")

    def propose(self, context: DraftContext) -> Draft:
        asked = [(row.token_ids, min(row.ceiling, self.max_tokens)) for row in context.rows]
        return Draft.chains([self._guessed(list(token_ids), k) if k > 0 else [] for token_ids, k in asked])

    def _guessed(self, token_ids: list[int], k: int) -> list[int]:
        guessed = self.guess(token_ids, k)
        try:
            return [operator.index(token) for token in islice(guessed, k)]
        except TypeError as error:
            raise TypeError(f"guess() must return token ids, not {guessed!r:.100}") from error

    def observe(self, feedback: Feedback) -> None:
        """What became of the guesses, after each step."""

    def forget(self, request_id: str) -> None:
        """A request ended, or starts again."""

    def check(self) -> None:
        """Raise AssertionError if the proposer's state is inconsistent; only tests ask."""

    def close(self) -> None:
        """The process ends."""


def load(config: CustomConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if there is no such class, it cannot be constructed, or it makes no proposer."""
    named = config.custom_class
    place, _, class_name = named.rpartition(":")
    module = _imported_file(Path(place)) if place.endswith(".py") else _imported_module(place)
    made_by = vars(module).get(class_name)
    if not isinstance(made_by, type):
        own = [name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__]
        raise SpeculativeConfigError(f"'custom_class' {named!r}: {place} has no class {class_name!r}; it has {', '.join(own) or 'none'}")
    try:
        made: Any = made_by(Setup(config.num_speculative_tokens, config.options, resources.target))
    except (Exception, SystemExit) as error:
        raise SpeculativeConfigError(f"'custom_class' {named!r} cannot be constructed: {_told(error, module.__file__)}") from error
    _check(named, made, resources.target.num_layers)
    proposer = cast(Proposer, made)

    def open(opening: Opening) -> Proposer:
        proposer.name = opening.name
        return proposer

    return LoadedProposer(proposer.name, open, found=(f"{class_name} of {place}",), is_learned=False)


def _imported_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SpeculativeConfigError(f"'custom_class': {name} cannot be imported: {error}") from error
        raise SpeculativeConfigError(
            f"'custom_class': there is no module {error.name!r}; install it, or name a file: 'path/to/file.py:Class'"
        ) from None
    except (Exception, SystemExit) as error:
        raise SpeculativeConfigError(f"'custom_class': {name} cannot be imported: {_told(error, None)}") from error


def _imported_file(path: Path) -> ModuleType:
    """Under a name of its own, so that it hides no other module. It finds those beside it, behind all that are installed."""
    path = Path(os.path.expanduser(path)).resolve()
    if not path.is_file():
        raise SpeculativeConfigError(f"'custom_class': there is no file {path}")
    name = f"foretoken_custom_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SpeculativeConfigError(f"'custom_class': {path} cannot be imported: {_told(error, str(path))}") from error
    return module


def _told(error: BaseException, file: str | None) -> str:
    """With the last line of the file that it came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def _check(named: str, made: Any, num_layers: int) -> None:
    """The one border where an interface is looked at, because what stands behind it is not ours."""
    complaints: list[str] = []
    name, needs, max_tokens = (getattr(made, attribute, None) for attribute in ("name", "needs", "max_tokens"))
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name in ("off", "auto"):
        complaints.append(f"name must be of up to 64 letters, digits and _.- and neither 'off' nor 'auto', not {name!r}")
    else:
        try:
            made.name = name
        except AttributeError as error:
            complaints.append(f"name must be an attribute that can be set ({error})")
    complaints += _wrong_needs(needs, num_layers) if isinstance(needs, Needs) else [f"needs must be a Needs, not {needs!r}"]
    if type(max_tokens) is not int or not 0 <= max_tokens <= MAX_NUM_SPECULATIVE_TOKENS:
        complaints.append(f"max_tokens must be an integer from 0 to {MAX_NUM_SPECULATIVE_TOKENS}, not {max_tokens!r}")
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        complaints.append(f"it lacks {', '.join(f'{method}()' for method in missing)}")
    if complaints:
        raise SpeculativeConfigError(
            f"'custom_class' {named!r} is no proposer: {'; '.join(complaints)}. Derive it from foretoken.proposers.custom.ChainProposer, "
            "or implement foretoken.proposers.base.Proposer"
        )


def _wrong_needs(needs: Needs, num_layers: int) -> list[str]:
    hidden: object = needs.hidden
    complaints: list[str] = []
    if not isinstance(hidden, tuple | list) or not all(type(layer) is int and FINAL <= layer <= num_layers for layer in hidden):
        complaints.append(f"needs.hidden must be inputs of layers, 0 to {num_layers}, or {FINAL}: behind the final norm; not {hidden!r}")
    if needs.kv_layers:
        complaints.append("needs.kv_layers must be empty: there are caches for networks of the methods alone")
    if type(needs.scratch_slots) is not int or not 0 <= needs.scratch_slots <= MAX_NUM_SPECULATIVE_TOKENS:
        complaints.append(f"needs.scratch_slots must be an integer from 0 to {MAX_NUM_SPECULATIVE_TOKENS}, not {needs.scratch_slots!r}")
    if needs.hears not in get_args(Hears):
        complaints.append(f"needs.hears must be one of {', '.join(map(repr, get_args(Hears)))}, not {needs.hears!r}")
    return complaints
