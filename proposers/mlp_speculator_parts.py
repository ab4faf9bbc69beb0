"""What IBM's and Arctic's speculators have in common: settings, read from two forms of config.json, and the weighting of what they add.

IBM: Wertheimer et al. 2024. Arctic: "Fastest Speculative Decoding in vLLM with Arctic Inference and Arctic Training", Snowflake 2025.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..kernels.ops import Op, RMSNorm, Scale
from .checkpoint import Checkpoint
from .config_entry import MAX_NUM_SPECULATIVE_TOKENS, SpeculativeConfigError
from .guessing import FEATURE
from .loading import TargetView

EPS = 1e-6

_FIRST = {"ibm": "proj.0.weight", "sum_rnn": "proj.0.0.weight", "sum_lstm": "forget_proj.0.weight"}  # tensors that none of a kind lacks


@dataclass(frozen=True)
class MlpSpeculator:
    """What config.json says, checked against the target."""

    checkpoint: Checkpoint
    prefix: str
    kind: Literal["ibm", "sum_rnn", "sum_lstm"]  # Arctic's sum_rnn is IBM's network under other names
    vocab_size: int
    state_width: int  # of the target's states
    width: int  # of its own
    num_positions: int
    is_tied: bool
    scales_input: bool

    @property
    def embedding_scale(self) -> float:
        """emb_w / state_w: the state decays so that after all positions half its variance is left, embeddings fill up the rest.

        Both belong to the number of positions that it was trained with, however many are used.
        """
        state_weight = 0.5 ** (0.5 / self.num_positions)
        return math.sqrt((1 - state_weight**2) * self.width / 2) / state_weight

    def input_width(self, position: int) -> int:
        """Of the state that a position reads: the first one reads the target's."""
        return self.state_width if position == 0 else self.width

    def input_ops(self, position: int) -> tuple[list[Op], str]:
        """What happens to FEATURE before a position reads it, and the buffer that it then is."""
        if position > 0 or not self.scales_input:
            return [], FEATURE
        normed = RMSNorm((FEATURE,), ("normed_input",), "", EPS)
        return [normed, Scale(normed.outputs, ("scaled_input",), 1 / math.sqrt(2))], "scaled_input"

    def take(self, copies: list[str], *shape: int) -> tuple[str, Tensor]:
        """A tensor that goes by several names, and a name for programs. Files hold all copies of a shared tensor, or one of them.

        Names of programs begin with the folder: so they are unmistakable where networks share weights. Raises SpeculativeConfigError.
        """
        names = [self.prefix + copy for copy in copies]
        name = self.checkpoint.find(*names) or names[0]
        return f"{self.checkpoint.folder}/{name}", self.checkpoint.take(name, *shape)

    def ignore(self, *names: str) -> None:
        """Positions beyond those used, and copies of tied tensors, are no surprise."""
        self.checkpoint.ignore(*(self.prefix + name for name in names))


def read_speculator(checkpoint: Checkpoint, target: TargetView) -> MlpSpeculator:
    """Raises SpeculativeConfigError if the folder holds no such speculator, or one of another target."""
    kind = _kind(checkpoint)
    prefix = "speculator." if any(name.startswith("speculator.") for name in checkpoint.names) else ""
    if not checkpoint.has(prefix + _FIRST[kind]):
        raise SpeculativeConfigError(f"{checkpoint.folder} is no MLP speculator: it has no tensor '{prefix}{_FIRST[kind]}'")
    state_width, width = _ibm_widths(checkpoint) if kind == "ibm" else _arctic_widths(checkpoint)
    vocab_size, num_positions = checkpoint.integer("vocab_size"), checkpoint.integer("n_predict")
    if not 1 <= num_positions <= MAX_NUM_SPECULATIVE_TOKENS:
        raise SpeculativeConfigError(
            f"{checkpoint.folder}/config.json: 'n_predict' must be from 1 to {MAX_NUM_SPECULATIVE_TOKENS}, not {num_positions}"
        )
    for what, ours, theirs in (("states of width", state_width, target.hidden_size), ("a vocabulary of", vocab_size, target.vocab_size)):
        if ours != theirs:
            raise SpeculativeConfigError(
                f"the MLP speculator in {checkpoint.folder} was trained for {what} {ours}, the target has {theirs}: take one that was "
                "trained for this model"
            )
    tied, scales = (checkpoint.flag(key, False) for key in ("tie_weights", "scale_input"))
    return MlpSpeculator(checkpoint, prefix, kind, vocab_size, state_width, width, num_positions, tied, scales)


def _kind(checkpoint: Checkpoint) -> Literal["ibm", "sum_rnn", "sum_lstm"]:
    """IBM's configs have no method, and call the target's width emb_dim. Arctic's without a method mean its first one."""
    if not {"method", "input_hidden_dim"} & checkpoint.config.keys():
        return "ibm"
    match checkpoint.config.get("method", "sum_rnn"):
        case "sum_rnn":
            return "sum_rnn"
        case "sum_lstm":
            return "sum_lstm"
        case method:
            raise SpeculativeConfigError(
                f"{checkpoint.folder}/config.json: 'method' is {method!r}, but Arctic's speculators that are known are 'sum_rnn' and "
                "'sum_lstm': take one of these"
            )


def _ibm_widths(checkpoint: Checkpoint) -> tuple[int, int]:
    """(the target's, its own)"""
    emb_dim, inner_dim = checkpoint.integer("emb_dim"), checkpoint.integer("inner_dim", 0)
    if inner_dim < 0:
        raise SpeculativeConfigError(f"{checkpoint.folder}/config.json: 'inner_dim' must be a width, 0 = 'emb_dim', not {inner_dim}")
    return emb_dim, inner_dim or emb_dim


def _arctic_widths(checkpoint: Checkpoint) -> tuple[int, int]:
    """(the target's, its own). Projections and embeddings are added, and normed as states: all three have one width."""
    widths = {key: _single_width(checkpoint, key) for key in ("inner_dim", "emb_dim", "proj_dim")}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"'{key}' {width}" for key, width in widths.items())
        raise SpeculativeConfigError(f"{checkpoint.folder}/config.json: {told} must be the same, because what has these widths is added")
    return checkpoint.integer("input_hidden_dim"), widths["inner_dim"]


def _single_width(checkpoint: Checkpoint, key: str) -> int:
    value = checkpoint.config.get(key)
    text = str(value) if type(value) in (int, str) else ""
    if re.fullmatch(r"[1-9][0-9]*(\.[1-9][0-9]*)+", text):
        raise SpeculativeConfigError(
            f"{checkpoint.folder}/config.json: {key!r} is {value!r}, a stack of layers of these widths, which is not supported, and "
            "which no published speculator has: take one with a single width"
        )
    if not re.fullmatch(r"[1-9][0-9]{0,7}", text):
        raise SpeculativeConfigError(f"{checkpoint.folder}/config.json: {key!r} must be a width such as \"4096\", not {value!r}")
    return int(text)
