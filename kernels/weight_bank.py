"""The prepared weights of networks by name, so that another network made of some of them keeps those once.

Knows no executor: what "prepared" means is the business of those who put weights in.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

Prepared = TypeVar("Prepared")


@dataclass
class WeightBank:
    """Entries are found by the names of the weights that they were made of, what they are for, and their format."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # as they are, where a model holds its weights itself
    _entries: dict[tuple[tuple[str, ...], str], dict[Hashable, Any]] = field(default_factory=dict)

    def get(self, names: tuple[str, ...], purpose: str, form: Hashable, make: Callable[[], Prepared], any_form: bool = False) -> Prepared:
        """The entry in this format, made if there is none. any_form: one in another format will do."""
        forms = self._entries.setdefault((names, purpose), {})
        if form not in forms:
            if any_form and forms:
                return next(iter(forms.values()))
            forms[form] = make()
        return forms[form]

    def completes(
        self, needed: Iterable[tuple[str, ...]], purpose: str, shared: Collection[str], tensors: Mapping[str, Tensor]
    ) -> bool:
        """Whether for each of `needed` that is shared there is an entry in some format, or all tensors are here or there."""
        return all(
            self._entries.get((names, purpose)) or all(name in tensors or name in self.tensors for name in names)
            for names in needed
            if all(name in shared for name in names)
        )


class NetworkWeights:
    """The weights of one network: its own tensors, and the bank's entries for those in `shared`.

    Without a bank the network fills one of its own, which others may then be given. With one, only what is in `shared` is looked
    for there: names like "fc.weight" mean something else in every drafter. What has no tensor is taken in whatever format the bank
    has it; KeyError if it has none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shared: Collection[str], bank: WeightBank | None) -> None:
        self.bank = WeightBank() if bank is None else bank
        self._own = self.bank if bank is None else WeightBank()
        self._tensors, self._shared = tensors, frozenset(shared)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self.bank.tensors[name]

    def is_own(self, name: str) -> bool:
        """Whether it is among the network's own tensors, which may be views of files that change or go away."""
        return name in self._tensors

    def get(self, names: tuple[str, ...], purpose: str, form: Hashable, make: Callable[[], Prepared], one_form: bool = False) -> Prepared:
        """What is made of these weights, once for all networks that share them all. one_form: no other format will do."""
        bank = self.bank if self._shared.issuperset(names) else self._own
        return bank.get(names, purpose, form, make, any_form=not one_form and not any(map(self.is_own, names)))
