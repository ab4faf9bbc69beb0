"""IBM's MLP speculator: a small network that carries the target's last state on from token to token (Wertheimer et al. 2024).

Each position has weights of its own, or all share theirs. Reads the published layout, and runs the positions one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.layout import Executor
from ..kernels.program import Activation, ArgMax, Embed, GatherRows, Linear, Op, Program, RMSNorm, Scale
from ..kernels.started import to_lists
from ..kernels.upload import upload
from .checkpoint import Checkpoint
from .config import MlpSpeculatorConfig
from .config_entry import SpeculativeConfigError
from .drafting import Feed
from .guessing import FEATURE, Drawing, Guesses, share_of
from .last_state import LastStateProposer, Network
from .loading import LoadedProposer, Opening, Resources, TargetView

EPS = 1e-6
_STATE = 0  # boundary id of what a position hands to the next one


@dataclass(frozen=True)
class _Speculator:
    """What config.json says, checked against the target."""

    checkpoint: Checkpoint
    prefix: str
    vocab_size: int
    emb_dim: int  # width of the target's states
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

    def tensors(self, position: int) -> dict[str, Tensor]:
        """The tensors of a position by part. Raises SpeculativeConfigError."""
        state_width = self.emb_dim if position == 0 else self.width
        shapes = {
            "emb.weight": (self.vocab_size, self.width),
            "proj.weight": (self.width, state_width),
            "ln.weight": (self.width,),
            "ln.bias": (self.width,),
            "head.weight": (self.vocab_size, self.width),
        }
        return {part: self.checkpoint.take(self.name(part, position), *shape) for part, shape in shapes.items()}

    def name(self, part: str, position: int) -> str:
        """The tensor that holds a part of a position.

        Tied positions share theirs, but the first one reads a wider state and has a projection of its own. Files hold all
        copies of a shared tensor, or one of them.
        """
        module, kind = part.split(".")
        copies = [position]
        if self.is_tied and not (module == "proj" and position == 0):
            copies = list(range(1 if module == "proj" else 0, self.num_positions))
        names = [f"{self.prefix}{module}.{copy}.{kind}" for copy in copies]
        return self.checkpoint.find(*names) or names[0]

    def ignore_copies(self) -> None:
        """Positions beyond those used, and copies of tied tensors, are no surprise."""
        for module, kind in (("emb", "weight"), ("proj", "weight"), ("ln", "weight"), ("ln", "bias"), ("head", "weight")):
            self.checkpoint.ignore(*(f"{self.prefix}{module}.{i}.{kind}" for i in range(self.num_positions)))


def load(config: MlpSpeculatorConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no such speculator, or one of another target."""
    target = resources.target
    speculator = _read(Checkpoint(resources.find_folder(config.model, config.revision)), target)
    num_tokens = config.num_speculative_tokens or speculator.num_positions
    if num_tokens > speculator.num_positions:
        raise SpeculativeConfigError(
            f"'num_speculative_tokens' is {num_tokens}, but {speculator.checkpoint.folder} was trained for {speculator.num_positions} "
            "(its n_predict): lower it"
        )
    executors = [_bind(speculator, position, config, resources) for position in range(num_tokens)]
    speculator.ignore_copies()

    def open(opening: Opening) -> LastStateProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        return LastStateProposer(opening.name, num_tokens, _Positions([Network(executor) for executor in executors], drawing))

    described = (
        f"{num_tokens} of {speculator.num_positions} positions{', tied' if speculator.is_tied else ''}, state of width {speculator.width}",
        *speculator.checkpoint.leftovers(),
    )
    return LoadedProposer("mlp_speculator", open, found=described, is_learned=True)


def _read(checkpoint: Checkpoint, target: TargetView) -> _Speculator:
    if checkpoint.config.get("method") == "sum_lstm":
        raise SpeculativeConfigError(
            f"{checkpoint.folder} is an LSTM speculator of Arctic Inference, which is known but not supported: take an MLP speculator"
        )
    prefix = "speculator." if checkpoint.has("speculator.proj.0.weight") else ""
    if not checkpoint.has(f"{prefix}proj.0.weight"):
        raise SpeculativeConfigError(f"{checkpoint.folder} is no MLP speculator: it has no tensor 'speculator.proj.0.weight'")
    emb_dim, vocab_size = checkpoint.integer("emb_dim"), checkpoint.integer("vocab_size")
    num_positions, inner_dim = checkpoint.integer("n_predict"), checkpoint.integer("inner_dim", 0)
    if num_positions < 1:
        raise SpeculativeConfigError(f"{checkpoint.folder}/config.json: 'n_predict' must be at least 1, not {num_positions}")
    for what, ours, theirs in (("states of width", emb_dim, target.hidden_size), ("a vocabulary of", vocab_size, target.vocab_size)):
        if ours != theirs:
            raise SpeculativeConfigError(
                f"the MLP speculator in {checkpoint.folder} was trained for {what} {ours}, the target has {theirs}: take one that was "
                "trained for this model"
            )
    tied, scales = (checkpoint.config.get(key, False) for key in ("tie_weights", "scale_input"))
    return _Speculator(checkpoint, prefix, vocab_size, emb_dim, inner_dim or emb_dim, num_positions, bool(tied), bool(scales))


def _program(speculator: _Speculator, position: int, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> Program:
    """s' = GELU(LN(proj(s) + scale * emb(token))), scores = head(s'). FEATURE is s, boundary id 0 is s'.

    LN divides by the root mean square and takes no mean off, though it has a bias. names: of the weights, by part.
    """
    ops: list[Op] = []
    state = FEATURE
    if position == 0 and speculator.scales_input:
        ops.append(RMSNorm((FEATURE,), ("normed_input",), "", EPS))
        ops.append(Scale(("normed_input",), ("scaled_input",), 1 / math.sqrt(2)))
        state = "scaled_input"
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
    return Program(
        ops=tuple(ops),
        weights={names[part]: shape for part, shape in shapes.items()},
        kv_layers=(),
        ropes={},
        vocab_size=speculator.vocab_size,
        max_model_len=1,
        boundaries=("state",),
        final="",
        logits="logits",
        best=best,
        inputs={FEATURE: speculator.emb_dim if position == 0 else speculator.width},
        shared=frozenset(names.values()) if speculator.is_tied else frozenset(),
    )


def _bind(speculator: _Speculator, position: int, config: MlpSpeculatorConfig, resources: Resources) -> Executor:
    """Tied positions are networks of their own that share their weights in memory: names that begin with the folder are unmistakable."""
    tensors = speculator.tensors(position)
    names = {part: f"{speculator.checkpoint.folder}/{speculator.name(part, position)}" for part in tensors}
    program = _program(speculator, position, names, {part: tuple(tensor.shape) for part, tensor in tensors.items()})
    return resources.bind(program, {names[part]: tensor for part, tensor in tensors.items()}, config.quantization)


class _Positions:
    """One token after the other, all rows in one pass; a row that has its tokens drops out."""

    def __init__(self, networks: Sequence[Network], drawing: Drawing) -> None:
        self._networks, self._drawing = networks, drawing

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        guesses = Guesses([[] for _ in feeds], confidence=[[] for _ in feeds])
        drawn_from: list[list[Tensor]] = [[] for _ in feeds]
        tokens = [feed.row.token_ids[-1] for feed in feeds]
        alive = list(range(len(feeds)))
        likely: list[Tensor] = []  # by step, of the rows that were alive
        whose: list[list[int]] = []
        for step, network in enumerate(self._networks):
            output = network.run(states, tokens, (_STATE,))
            assert output.logits is not None
            rows = [feeds[i].row for i in alive]
            chosen = self._drawing.choose(output.logits, rows, [len(row.token_ids) + step for row in rows])
            likely.append(share_of(output.logits, chosen))
            whose.append(alive)
            tokens: list[int] = chosen.tolist()
            for place, (i, token) in enumerate(zip(alive, tokens, strict=True)):
                guesses.token_ids[i].append(token)
                if self._drawing.return_probs:
                    temperature = feeds[i].row.draw.temperature
                    drawn_from[i].append(self._drawing.probs(temperature, chosen[place, None], output.logits[place, None], None))
            states = output.hidden[_STATE]
            going_on = [place for place, i in enumerate(alive) if feeds[i].count > step + 1]
            if not going_on:
                break
            if len(going_on) < len(alive):
                states = states[upload(torch.tensor(going_on), states.device)]
                tokens, alive = [tokens[place] for place in going_on], [alive[place] for place in going_on]
        assert guesses.confidence is not None
        for rows_alive, probabilities in zip(whose, to_lists(*likely), strict=True):
            for i, probability in zip(rows_alive, probabilities, strict=True):
                guesses.confidence[i].append(probability)
        probs = [row for rows in drawn_from for row in rows]
        return replace(guesses, probs=torch.cat(probs).cpu() if probs else None)
