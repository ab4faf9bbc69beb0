"""Which network a request means: the served model or one of its adapters, by `model` or by other servers' fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..engine.request import Adapter
from .errors import ApiError, unsupported
from .schemas import GenerationRequest, LoraScale

if TYPE_CHECKING:
    from ..engine.adapters import Adapters


class ModelNames:
    """Of one engine. own: the model's, the first one first. Adapters come and go; None = none are served."""

    def __init__(self, own: Sequence[str], adapters: Adapters | None) -> None:
        self.own = tuple(own)
        self._adapters = adapters

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return () if self._adapters is None else self._adapters.loaded

    @property
    def listed(self) -> tuple[str, ...]:
        return (*self.own, *(adapter.name for adapter in self.adapters))

    def adapter_of(self, name: str | None) -> Adapter | None:
        """What NAME, or MODEL:NAME as SGLang has it, means; None is the model itself. Raises ApiError with the names there are."""
        if name is None or name in self.own:
            return None
        spellings = (name, *(name.removeprefix(f"{own}:") for own in self.own))
        found = next((adapter for adapter in self.adapters if adapter.name in spellings), None)
        if found is None:
            message = f"The model {name[:100]!r} does not exist. Served here: {', '.join(self.listed)}"
            raise ApiError(404, message, type="not_found_error", param="model", code="model_not_found")
        return found

    def chosen(self, body: GenerationRequest) -> Adapter | None:
        """By all fields that can name one. Raises ApiError."""
        found = self.adapter_of(body.model)
        for param, other in (("lora_path", self._of_path(body.lora_path)), ("lora", self._of_scales(body.lora or ()))):
            if other is not None and found not in (None, other):
                raise ApiError(400, f"{param} asks for another adapter than the fields before it; name one of them", param=param)
            found = other or found
        return found

    def _of_path(self, name: str | None) -> Adapter | None:
        """As SGLang names one that is loaded."""
        there = {adapter.name: adapter for adapter in self.adapters}
        if name and name not in there:
            raise no_adapter("lora_path", name, there)
        return there[name] if name else None

    def _of_scales(self, scales: Sequence[LoraScale]) -> Adapter | None:
        """As llama.cpp does, by their numbers in /lora-adapters."""
        asked = [entry for entry in scales if entry.scale]
        if len(asked) > 1 or (asked and asked[0].scale != 1):
            raise unsupported("lora", "lora with other than one adapter and the scale 1", "the adapter's name as model")
        there = {number_of(adapter): adapter for adapter in self.adapters}
        if asked and asked[0].id not in there:
            raise no_adapter("lora", asked[0].id, there)
        return there[asked[0].id] if asked else None


def no_adapter(param: str, asked: object, there: Iterable[object]) -> ApiError:
    message = f"{param}: there is no adapter {str(asked)[:100]!r}; loaded: {', '.join(map(str, there)) or 'none'}"
    return ApiError(404, message, type="not_found_error", param=param, code="model_not_found")


def number_of(adapter: Adapter) -> int:
    """By which llama.cpp's clients know it while it is loaded; the first one is 0."""
    return adapter.slot - 1
