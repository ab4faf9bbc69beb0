"""A drafter's folder: its config.json, and tensors taken by name, so that what is missing, misshapen or left over can be told.

Only safetensors are read. Knows no method.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..kernels.gguf_files import gguf_files
from ..kernels.model_config import read_model_config
from ..kernels.stored_tensors import WeightError, read_tensors, shape_of
from ..kernels.weights import check_finite
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .detection import nested, read_config
from .pickles import only_pickles

MOST_NAMED = 6  # of the tensors that nobody took

_OF_QUANTISED = re.compile(r"weight_scale(_inv|_2)?$|weight_packed$|qweight$")  # which are still there where config.json does not tell
# A layer behind the first may have a hidden_norm for no use: some publishers make all layers of one class.
_NORM = re.compile(r"(?<!\.hidden_)norms?\.(\d+\.)?weight$")


class Checkpoint:
    """Raises SpeculativeConfigError with what to do, whatever is wrong with the folder."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """tensors: what to read instead of the folder's safetensors files (a part of a larger checkpoint)."""
        self.folder = folder
        self.config: dict[str, Any] = read_config(folder)
        self._tensors = _read(folder) if tensors is None else tensors
        self._taken: set[str] = set()
        self._refuse_quantised()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, for who checks them himself."""
        return self._tensors

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    @property
    def num_speculative_tokens(self) -> int | None:
        """What it was made for: of the default among the proposal methods that `speculators` wrote down, else of the first; None if
        there is none."""
        written = nested(self.config, "speculators_config")
        listed, default = written.get("proposal_methods"), written.get("default_proposal_method")
        methods = [method for method in cast(list[Any], listed) if isinstance(method, dict)] if isinstance(listed, list) else []
        match sorted(methods, key=lambda method: method.get("proposal_type") != default):
            case [{"speculative_tokens": int(count)}, *_] if count > 0:
                return min(count, MAX_NUM_SPECULATIVE_TOKENS)
            case _:
                return None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def find(self, *names: str) -> str | None:
        """The first of these names that is there: layouts differ in prefixes."""
        return next((name for name in names if name in self._tensors), None)

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._tensors, name)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, finite and of this shape (-1 = any size). In the number format of the file."""
        if name not in self._tensors:
            raise SpeculativeConfigError(f"{self.folder} has no tensor {name!r}{self._like(name)}")
        there = self.shape(name)
        if shape and (len(there) != len(shape) or any(n not in (-1, m) for n, m in zip(shape, there, strict=True))):
            wanted = " x ".join("any" if n == -1 else str(n) for n in shape)
            found = " x ".join(map(str, there))
            raise SpeculativeConfigError(f"{name!r} in {self.folder} is {found}, but {wanted} is needed to fit its config and the target")
        try:
            tensor = self._tensors[name]
            if tensor.is_floating_point():
                check_finite({name: tensor})
        except WeightError as error:
            raise SpeculativeConfigError(f"{self.folder}: {error}") from None
        self._taken.add(name)
        return tensor

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._tensors else None

    def ignore(self, *names: str) -> None:
        """Known to be of no use here."""
        self._taken.update(names)

    def leftovers(self) -> tuple[str, ...]:
        """A line on the tensors that nobody took, if there are any: told, because a layout read wrongly only lowers acceptance."""
        names = sorted(set(self._tensors) - self._taken)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return (f"unused tensors: {', '.join(names[:MOST_NAMED])}{more}",) if names else ()

    def refuse_unread_norms(self) -> None:
        """Raise if there are norms that nobody took: without them a network of another kind would run, and its guesses be worthless."""
        if names := sorted(name for name in set(self._tensors) - self._taken if _NORM.search(name)):
            raise SpeculativeConfigError(
                f"{self.folder} has norms that no known drafter of its kind has ({', '.join(names[:MOST_NAMED])}): "
                "it is one of another kind, which is not supported"
            )

    def model_config(self) -> PreTrainedConfig:
        """config.json as a whole model's, read by transformers."""
        try:
            return read_model_config(self.folder, self.config.get("model_type"))
        except Exception as error:  # every config class has checks of its own
            raise SpeculativeConfigError(f"{self.folder}/config.json is no valid config of a model: {error}") from error

    def integer(self, key: str, default: int | None = None, config: Mapping[str, Any] | None = None) -> int:
        """A setting of config.json (or of a part of it)."""
        value = (self.config if config is None else config).get(key, default)
        if type(value) is not int:
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be an integer, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A setting of config.json that is true or false."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise SpeculativeConfigError(f"{self.folder}/config.json: {key!r} must be true or false, not {value!r}")
        return value

    def _refuse_quantised(self) -> None:
        name = next((name for name in sorted(self._tensors) if _OF_QUANTISED.search(name)), None)
        if name is not None:
            raise SpeculativeConfigError(
                f"{self.folder} holds quantised weights ({name}), and its config.json does not say how: take the drafter they were "
                "made of; 'quantization' makes its weights narrow when they are loaded"
            )

    def _like(self, name: str) -> str:
        last = name.rsplit(".", 2)[-2:]
        similar = [n for n in sorted(self._tensors) if n.endswith(".".join(last))][:3]
        return f"; it has {', '.join(similar)}" if similar else ""


def check_token_map(name: str, offsets: Tensor, vocab_size: int) -> Tensor:
    """[n] int64 token ids of a draft vocabulary from its offsets (`d2t`): id + offset. Raises if they are no such map."""
    token_ids = torch.arange(len(offsets)) + offsets.long()
    if len(token_ids) and (int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size or len(token_ids.unique()) != len(token_ids)):
        raise SpeculativeConfigError(f"{name!r} does not map the draft's vocabulary into the target's {vocab_size} tokens, one to one")
    return token_ids


def _read(folder: Path) -> Mapping[str, Tensor]:
    files = sorted(folder.glob("*.safetensors")) or gguf_files(folder)
    if not files:
        raise SpeculativeConfigError(only_pickles(folder) or f"there are no .safetensors files in {folder}")
    try:
        return read_tensors(files)
    except WeightError as error:
        raise SpeculativeConfigError(str(error)) from None
