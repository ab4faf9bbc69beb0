"""Arctic's LSTM speculator: carries the target's last state on from token to token, and a cell that remembers what the state drops.

"Fastest Speculative Decoding in vLLM with Arctic Inference and Arctic Training", Snowflake 2025; the base: Wertheimer et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

from ..kernels.ops import ArgMax, Concat, Embed, GatherRows, Linear
from ..kernels.program import Program, row_program
from .config_entry import SpeculativeConfigError
from .guessing import FEATURE
from .last_state import RowNetwork
from .mlp_speculator_parts import EPS, MlpSpeculator
from .recurrent_heads import Carried

_GATES = ("forget", "input", "output", "cell")


class Lstm:
    """Implements `Recurrence`. With g = proj_g(s) + scale * emb_g(token) for each of the four gates, s the state and c the cell:

    c' = sigmoid(forget) * c + sigmoid(input) * GELU(cell_ln(cell)), s' = sigmoid(output) * GELU(state_ln(c')), scores = head(s').
    c begins at 0. The first step reads the target's state by projections of its own, all others share theirs, and all share the rest.
    """

    def __init__(self, gates: Sequence[RowNetwork], head: RowNetwork, cell: Cell) -> None:
        """gates: of the first step, and of all others, if there are any."""
        self._gates, self._head, self._cell = gates, head, cell

    @classmethod
    def read(cls, speculator: MlpSpeculator, num_tokens: int, bind: Callable[[Program, dict[str, Tensor]], RowNetwork]) -> Lstm:
        """Raises SpeculativeConfigError."""
        if not speculator.is_tied:
            raise SpeculativeConfigError(
                f"{speculator.checkpoint.folder}/config.json: Arctic's LSTM speculators share their weights between positions, so "
                "'tie_weights' must be true"
            )
        gates = [bind(*_gates(speculator, position)) for position in range(min(num_tokens, 2))]
        head = bind(*_head(speculator))
        norms = [_norm(speculator, name) for name in ("cell_ln", "state_ln")]
        speculator.ignore(*(f"{gate}_{kind}.weight" for gate in _GATES for kind in ("emb.0", "proj.1")), *_heads(speculator))
        return cls(gates, head, Cell(*norms[0], *norms[1]))

    def begin(self, states: Tensor) -> Carried:
        return states, torch.zeros(len(states), self._cell.width, dtype=torch.float32, device=states.device)

    def step(self, step: int, carried: Carried, token_ids: Sequence[int]) -> tuple[Tensor, Carried]:
        state, cell = carried
        gates = self._gates[min(step, 1)].final(state, token_ids).float()
        self._cell = self._cell.on(gates.device)  # nobody knows before the first of them comes
        state, cell = self._cell.step(gates, cell)
        return self._head.logits(state), (state, cell)


@dataclass(frozen=True)
class Cell:
    """What is made of the gates, in float32: sums of many steps live in it. Both norms take no mean off, though they have biases."""

    norm: Tensor  # [d], all four
    bias: Tensor
    state_norm: Tensor
    state_bias: Tensor

    @property
    def width(self) -> int:
        return len(self.norm)

    def on(self, device: torch.device) -> Cell:
        if self.norm.device == device:
            return self
        return Cell(*(x.to(device) for x in (self.norm, self.bias, self.state_norm, self.state_bias)))

    def step(self, gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """gates [R, 4 d] in the order of _GATES, cell [R, d] -> (state [R, d], cell [R, d])."""
        forget, take, output, candidate = gates.chunk(4, -1)
        shape = self.norm.shape
        taken = gelu(rms_norm(candidate, shape, self.norm, EPS) + self.bias)
        cell = forget.sigmoid() * cell + take.sigmoid() * taken
        return output.sigmoid() * gelu(rms_norm(cell, shape, self.state_norm, EPS) + self.state_bias), cell


def _gates(speculator: MlpSpeculator, position: int) -> tuple[Program, dict[str, Tensor]]:
    """FEATURE [T, state] and tokens -> FINAL [T, 4 d]: the four projections as one product, embeddings added.

    The tables are nearly all of it, and the same at all positions, so they are kept once.
    """
    width = speculator.width
    weights: dict[str, Tensor] = {}
    tables: list[str] = []
    projections: list[str] = []
    is_tied = speculator.checkpoint.flag("tie_lstm_embs", False)
    for gate in _GATES:
        owners = _GATES if is_tied else (gate,)
        table, rows = speculator.take([f"{owner}_emb.0.weight" for owner in owners], speculator.vocab_size, width)
        projection, matrix = speculator.take([f"{gate}_proj.{min(position, 1)}.weight"], width, speculator.input_width(position))
        weights |= {table: rows, projection: matrix}
        tables.append(table)
        projections.append(projection)
    embedded = {table: f"embedded.{i}" for i, table in enumerate(dict.fromkeys(tables))}
    ops, state = speculator.input_ops(position)
    ops += [Embed((), (buffer,), table, speculator.embedding_scale) for table, buffer in embedded.items()]
    ops.append(Concat(tuple(embedded[table] for table in tables), ("embeddings",)))
    ops.append(Linear((state, "embeddings"), ("gates",), tuple(projections)))
    program = row_program(
        ops,
        weights={name: tuple(weight.shape) for name, weight in weights.items()},
        final="gates",
        inputs={FEATURE: speculator.input_width(position)},
        shared=frozenset(tables),
    )
    return program, weights


def _head(speculator: MlpSpeculator) -> tuple[Program, dict[str, Tensor]]:
    """FEATURE [T, d] -> scores [T, V]."""
    name, weight = speculator.take(_heads(speculator), speculator.vocab_size, speculator.width)
    best = ArgMax(("logits",), ("best", "top"))
    ops = GatherRows((FEATURE,), ("rows",)), Linear(("rows",), ("logits",), (name,)), best
    return row_program(ops, {name: tuple(weight.shape)}, {FEATURE: speculator.width}, best=best), {name: weight}


def _heads(speculator: MlpSpeculator) -> list[str]:
    return [f"head.{i}.weight" for i in range(speculator.num_positions)]


def _norm(speculator: MlpSpeculator, name: str) -> tuple[Tensor, Tensor]:
    """(weight [d], bias [d]) float32, no views of a file that might change."""
    weight, bias = (speculator.take([f"{name}.0.{part}"], speculator.width)[1] for part in ("weight", "bias"))
    return weight.float().clone(), bias.float().clone()
