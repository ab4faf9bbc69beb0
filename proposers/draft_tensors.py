"""Tensors of a drafter by one set of names: those that programs use, whatever its publisher calls them.

Knows how a name is looked for, not what files call it: each kind of checkpoint has its own spellings.
"""

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from ..kernels.program import Program
from ..kernels.stored_tensors import rows_of
from ..kernels.weights import is_part_of
from .checkpoint import Checkpoint
from .config_entry import SpeculativeConfigError

_IGNORED = re.compile(r"(^|\.)(t2d$|verifier_|rotary_emb\.inv_freq$)")  # left over from training


class DraftTensors:
    """A checkpoint's tensors by the names that programs use.

    spellings: what files call the tensor of a name, the commonest first.
    """

    def __init__(self, checkpoint: Checkpoint, spellings: Callable[[str], Sequence[str]]) -> None:
        self.checkpoint = checkpoint
        self._spellings = spellings
        checkpoint.ignore(*(name for name in checkpoint.names if _IGNORED.search(name)))

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises SpeculativeConfigError if there is no such tensor, as `take` does."""
        found = self._find(name)
        return tuple(self.take(name).shape) if found is None else self.checkpoint.shape(found)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(self._find(name) or self._spellings(name)[0], *shape)

    def num_layers(self) -> int:
        """Counted, because published configs say 40 where the file has one."""
        count = 0
        while any(self.has(f"model.layers.{count}.self_attn.{queries}.weight") for queries in ("q_proj", "q_a_proj")):
            count += 1
        return max(count, 1)

    def _find(self, name: str) -> str | None:
        return self.checkpoint.find(*self._spellings(name))


def program_weights(program: Program, has: Callable[[str], bool], take: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The program's own weights, some of which are rows of a tensor. has, take: of the checkpoint, by the names that programs use."""
    weights: dict[str, Tensor] = {}
    wholes: dict[str, Tensor] = {}  # each is looked through once, however many weights are rows of it
    for name, shape in program.weights.items():
        rows = program.slices.get(name)
        if min(shape, default=1) < 1:  # as config.json says it: no file has such a tensor, and -1 means any size to who takes one
            raise SpeculativeConfigError(f"{name!r} would be {' x '.join(map(str, shape))}: config.json has a size below 1")
        if name in program.shared:
            continue
        if rows is None or not (is_part_of(name, rows) or has(rows.tensor)):
            weights[name] = take(name, *shape)
            continue
        if rows.tensor not in wholes:
            wholes[rows.tensor] = take(rows.tensor, *rows.shape)
        weights[name] = rows_of(wholes[rows.tensor], rows)
    return weights
