"""IBM's MLP speculator: a small network that carries the target's last state on from token to token (Wertheimer et al. 2024).

Each position has weights of its own, or all share theirs. Arctic's sum_rnn is the same under other names; its sum_lstm, which
has a cell besides: lstm_speculator.py.
"""

from collections.abc import Sequence

from torch import Tensor

from ..kernels.ops import Activation, ArgMax, Embed, GatherRows, Linear, RMSNorm
from ..kernels.program import Program, row_program
from . import lstm_speculator
from .checkpoint import Checkpoint
from .config import MlpSpeculatorConfig
from .config_entry import SpeculativeConfigError
from .guessing import FEATURE, Drawing
from .last_state import LastStateProposer, RowNetwork
from .loading import LoadedProposer, Opening, Resources
from .mlp_speculator_parts import EPS, MlpSpeculator, read_speculator
from .recurrent_heads import NetworkPerStep, RecurrentHeads

_PARTS = ("emb.weight", "proj.weight", "ln.weight", "ln.bias", "head.weight")


def load(config: MlpSpeculatorConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no such speculator, or one of another target."""
    target = resources.target
    speculator = read_speculator(Checkpoint(resources.find_folder(config.model, config.revision)), target)
    num_tokens = config.num_speculative_tokens or speculator.num_positions
    if num_tokens > speculator.num_positions:
        raise SpeculativeConfigError(
            f"'num_speculative_tokens' is {num_tokens}, but {speculator.checkpoint.folder} was trained for {speculator.num_positions} "
            "(its n_predict): lower it"
        )

    def bind(program: Program, weights: dict[str, Tensor]) -> RowNetwork:
        return RowNetwork(resources.bind(program, weights, config.quantization))

    if speculator.kind == "sum_lstm":
        recurrence = lstm_speculator.Lstm.read(speculator, num_tokens, bind)
    else:
        recurrence = NetworkPerStep([bind(*_position(speculator, position)) for position in range(num_tokens)])
        speculator.ignore(*(_name(speculator, part, i) for part in _PARTS for i in range(speculator.num_positions)))

    def open(opening: Opening) -> LastStateProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        return LastStateProposer(opening.name, num_tokens, RecurrentHeads(recurrence, drawing))

    described = (
        f"{num_tokens} of {speculator.num_positions} positions{', tied' if speculator.is_tied else ''}, "
        f"{'state and LSTM cell' if speculator.kind == 'sum_lstm' else 'state'} of width {speculator.width}",
        *speculator.checkpoint.leftovers(),
    )
    return LoadedProposer("mlp_speculator", open, found=described, is_learned=True)


def _position(speculator: MlpSpeculator, position: int) -> tuple[Program, dict[str, Tensor]]:
    """The network of a position: tied ones are networks of their own that share their weights in memory."""
    width = speculator.width
    shapes = {
        "emb.weight": (speculator.vocab_size, width),
        "proj.weight": (width, speculator.input_width(position)),
        "ln.weight": (width,),
        "ln.bias": (width,),
        "head.weight": (speculator.vocab_size, width),
    }
    names: dict[str, str] = {}
    weights: dict[str, Tensor] = {}
    for part in _PARTS:
        names[part], weight = speculator.take(_copies(speculator, part, position), *shapes[part])
        weights[names[part]] = weight
    return _program(speculator, position, names, {names[part]: shape for part, shape in shapes.items()}), weights


def _copies(speculator: MlpSpeculator, part: str, position: int) -> list[str]:
    """The tensors that may hold a part of a position. The first one reads a wider state and has a projection of its own, tied or not."""
    is_projection = part == "proj.weight"
    positions: Sequence[int] = [position]
    if speculator.is_tied and not (is_projection and position == 0):
        positions = range(1 if is_projection else 0, speculator.num_positions)
    return [_name(speculator, part, i) for i in positions]


def _name(speculator: MlpSpeculator, part: str, position: int) -> str:
    """Arctic's modules but the heads are stacks of layers, of which there is one."""
    module, kind = part.split(".")
    return f"{module}.{position}.{'0.' if speculator.kind == 'sum_rnn' and module != 'head' else ''}{kind}"


def _program(speculator: MlpSpeculator, position: int, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> Program:
    """s' = GELU(LN(proj(s) + scale * emb(token))), scores = head(s'). FEATURE is s, boundary id 0 is s'.

    LN divides by the root mean square and takes no mean off, though it has a bias. names: of the weights, by part.
    """
    ops, state = speculator.input_ops(position)
    best = ArgMax(("logits",), ("best", "top"))
    ops += [
        Embed((), ("embedded",), names["emb.weight"], speculator.embedding_scale),
        Linear((state, "embedded"), ("mixed",), (names["proj.weight"],)),
        RMSNorm(("mixed",), ("normed",), names["ln.weight"], EPS, names["ln.bias"]),
        Activation(("normed",), ("state",), "gelu", gated=False),
        GatherRows(("state",), ("rows",)),
        Linear(("rows",), ("logits",), (names["head.weight"],)),
        best,
    ]
    return row_program(
        ops,
        weights=shapes,
        boundaries=("state",),
        best=best,
        inputs={FEATURE: speculator.input_width(position)},
        shared=frozenset(names.values()) if speculator.is_tied else frozenset(),
    )
