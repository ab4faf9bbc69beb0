"""The adapters that a target serves, by name: who has which slot, and which slots are free.

Belongs to who makes the requests; slots are written by the engine's thread, between two steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from ..kernels.adapters import AdapterBank, AdapterRoom
from ..proposers.config import UnoConfig
from .adapter_folder import AdapterWeights, adapter_rank, read_adapter
from .config import AdapterConfig
from .errors import InvalidRequest
from .model_folder import Progress, find_adapter
from .request import Adapter

USUAL_ADAPTERS, USUAL_RANK = 4, 16
_numbers = count(1)


def room_for(
    config: AdapterConfig | None, drafters: Sequence[UnoConfig] = (), progress: Progress = lambda line: None
) -> AdapterRoom | None:
    """What its modules need, at least, and behind their slots one for each drafter's; None: for nobody. Raises ModelLoadError."""
    num_slots, ranks = len(drafters), [adapter_rank(find_adapter(drafter.model, progress, drafter.revision)) for drafter in drafters]
    if config is not None:
        of_modules = [adapter_rank(find_adapter(module.path, progress)) for module in config.modules]
        num_slots += config.max_loras or max(USUAL_ADAPTERS, len(of_modules))
        ranks.append(config.max_lora_rank or max([USUAL_RANK, *of_modules]))
    return AdapterRoom(num_slots, max(ranks)) if ranks else None


class Adapters:
    """Of one engine."""

    def __init__(self, bank: AdapterBank, num_kept: int = 0) -> None:
        """num_kept: of the bank's last slots, which are a drafter's."""
        self.bank = bank
        self.num_slots = bank.num_slots - num_kept
        self._by_name: dict[str, Adapter] = {}  # replaced whole, so that reading needs no lock

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """In the order in which they were loaded."""
        return tuple(self._by_name.values())

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def require(self, name: str) -> Adapter:
        """Raises InvalidRequest with the names there are."""
        if (adapter := self.get(name)) is None:
            there = ", ".join(self._by_name) or "none"
            raise InvalidRequest(f"there is no adapter {name[:100]!r}; loaded: {there}", "model", "model_not_found")
        return adapter

    def read(self, path: str, progress: Progress = lambda line: None) -> AdapterWeights:
        """Slow; may be called from any thread. Raises ModelLoadError."""
        return read_adapter(find_adapter(path, progress), self.bank.shapes, self.bank.rank, self.bank.slices)

    def add(self, name: str, path: str, weights: AdapterWeights) -> Adapter:
        """Load it, in place of one of that name, while nobody uses any. Raises InvalidRequest if all slots are taken."""
        adapter = self.place(name, path, weights.rank)
        self.fill(adapter, weights)
        return adapter

    def place(self, name: str, path: str, rank: int, used: Iterable[int] = ()) -> Adapter:
        """Requests get it from now on, and must not run before `fill`. Those that got one of that name before go on with it.

        used: slots of requests in flight. Raises InvalidRequest if all slots are taken.
        """
        others = {other: adapter for other, adapter in self._by_name.items() if other != name}
        held = {adapter.slot for adapter in others.values()}.union(used) - {0}
        slot = next((slot for slot in range(1, self.num_slots + 1) if slot not in held), None)
        if slot is None:
            leaving = f" and {len(held) - len(others)} that requests still run with" if len(held) > len(others) else ""
            taken = f"all {self.num_slots} places for adapters are taken, by {', '.join(others) or 'none'}{leaving}"
            raise InvalidRequest(f"{taken}: unload one, or start with a greater max_loras", "lora_name")
        adapter = Adapter(name, path, slot, rank, next(_numbers))
        self._by_name = {**others, name: adapter}
        return adapter

    def fill(self, adapter: Adapter, weights: AdapterWeights) -> None:
        self.bank.put(adapter.slot, weights.pairs)

    def ensure(self, wanted: Mapping[str, str]) -> None:
        """Load what is not loaded yet of name -> path, in place of others, the longest loaded first. For who runs the engine by himself.

        Raises ModelLoadError, InvalidRequest.
        """
        if len(wanted) > self.num_slots:
            room = f"there is room for {self.num_slots}: raise max_loras"
            raise InvalidRequest(f"{len(wanted)} adapters at once, but {room}", "lora_request")
        for name, path in wanted.items():
            known = self.get(name)
            if known is not None and known.path == path:
                continue
            weights = self.read(path)
            others = [other for other in self._by_name if other not in wanted]
            if known is None and others and len(self._by_name) == self.num_slots:
                self.remove(others[0])
            self.add(name, path, weights)

    def remove(self, name: str) -> Adapter:
        """No request can ask for it any more; those that have begun go on. Raises InvalidRequest."""
        adapter = self.require(name)
        self._by_name = {other: it for other, it in self._by_name.items() if other != name}
        return adapter

    def describe(self) -> str:
        """`2 of 4: sql (rank 16), chat (rank 8); 39.3 MB`"""
        names = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in self.loaded)
        room = f"{len(self.loaded)} of {self.num_slots}" + (f": {names}" if names else "")
        return f"{room}; rank up to {self.bank.rank}, {self.bank.num_bytes / 1e6:.1f} MB"
