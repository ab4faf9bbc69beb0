"""Records: plain data that nobody changes, made some thirty times a step.

That nobody does is checked by the type checker. A dataclass that is frozen checks it at run time, and takes four times as long to make.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A dataclass with slots whose fields are read-only to the type checker. Hashable if they are."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
