"""MLP speculators as folders, of IBM's kind or Arctic's, with the formula written out; what they guess for a few rows in many steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from last_state_runs import VOCAB, WIDTH, Run, opened, resources, save, state_of
from pretended_engine import TORCH, Guess
from torch import Tensor
from torch.nn.functional import gelu

from foretoken.kernels import noise
from foretoken.kernels.execution import Execution
from foretoken.proposers import mlp_speculator
from foretoken.proposers.base import Draw
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.loading import LoadedProposer

POSITIONS, INNER = 4, 40
GATES = ("input", "forget", "cell", "output")


class Published(Protocol):
    """What a folder holds, and the formula written out."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def steps(self, state: Tensor, tokens: list[int]) -> list[Tensor]:
        """Logits [VOCAB] of each position; tokens: the last known token and the guesses."""
        ...


@dataclass(frozen=True)
class Ibms:
    """IBM's, in the published layout."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def steps(self, state: Tensor, tokens: list[int]) -> list[Tensor]:
        n, d = self.config["n_predict"], self.config["inner_dim"] or self.config["emb_dim"]
        state_weight = 0.5 ** (0.5 / n)
        embedding_weight = math.sqrt((1 - state_weight**2) * (d / 2))
        s = state.double()
        if self.config["scale_input"]:
            s = s * torch.rsqrt(s.square().mean() + 1e-6) / math.sqrt(2)
        found = []
        for i, token in enumerate(tokens):
            emb, proj, head, weight, bias = (
                self.tensors[f"speculator.{part}".format(i)].double()
                for part in ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
            )
            s = proj @ s + (embedding_weight / state_weight) * emb[token]
            s = gelu(s * torch.rsqrt(s.square().mean() + 1e-6) * weight + bias, approximate="none")
            found.append((head @ s).float())
        return found


def ibms(tied: bool = False, scaled: bool = False, inner: int = INNER, n: int = POSITIONS) -> Ibms:
    torch.manual_seed(11)
    d = inner or WIDTH
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": VOCAB, "emb_dim": WIDTH,
        "inner_dim": inner, "n_predict": n, "top_k_tokens_per_head": [4] * n, "n_candidates": 5, "tie_weights": tied, "scale_input": scaled,
    }
    tensors: dict[str, Tensor] = {}
    for i in range(n):
        fresh = {
            "emb.{}.weight": torch.randn(VOCAB, d) / 2, "ln.{}.weight": 1 + torch.rand(d), "ln.{}.bias": torch.randn(d) / 2,
            "head.{}.weight": torch.randn(VOCAB, d) / d**0.5,
        }
        for part, tensor in fresh.items():
            name = f"speculator.{part}"
            tensors[name.format(i)] = tensors[name.format(i - 1)].clone() if tied and i else tensor
        columns = d if i else WIDTH
        proj = torch.randn(d, columns) / columns**0.5
        tensors[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone() if tied and i > 1 else proj
    return Ibms(config, tensors)


@dataclass(frozen=True)
class Arctics:
    """Arctic's, with a cell (sum_lstm) and without (sum_rnn)."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def steps(self, state: Tensor, tokens: list[int]) -> list[Tensor]:
        n, width = self.config["n_predict"], int(self.config["emb_dim"])
        share = 0.5 ** (1 / n)  # of the state's variance that a step keeps
        weight_of_embedding = math.sqrt((1 - share) * width / 2) / math.sqrt(share)
        h = state.double()
        if self.config["scale_input"]:
            h = _normed(h) / math.sqrt(2)
        memory = torch.zeros(int(self.config["inner_dim"]), dtype=torch.float64)
        found: list[Tensor] = []
        for i, token in enumerate(tokens):
            own, after_first = (0, min(i, 1)) if self.config["tie_weights"] else (i, i)

            def added(gate: str, h: Tensor = h, token: int = token, table: int = own, matrix: int = after_first) -> Tensor:
                middle = ".0" if not gate else ""  # without gates, modules are sequences of one layer
                embedding = self._tensor(f"{gate}emb.{table}{middle}.weight")[token]
                return h @ self._tensor(f"{gate}proj.{matrix}{middle}.weight").T + embedding * weight_of_embedding

            if self.config["method"] == "sum_rnn":
                h = gelu(self._norm(f"ln.{own}.0", added("")))
            else:
                opened = {gate: 1 / (1 + torch.exp(-added(f"{gate}_"))) for gate in GATES if gate != "cell"}
                fresh = gelu(self._norm(f"cell_ln.{own}", added("cell_")))
                memory = opened["forget"] * memory + opened["input"] * fresh
                h = opened["output"] * gelu(self._norm(f"state_ln.{own}", memory))
            found.append((self._tensor(f"head.{i}.weight") @ h).float())
        return found

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _normed(x) * self._tensor(f"{name}.weight") + self._tensor(f"{name}.bias")


def _normed(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6)


def arctics(
    method: str, tied: bool = True, tied_embeddings: bool = False, scaled: bool = False, inner: int = INNER, n: int = POSITIONS
) -> Arctics:
    """As Arctic's training writes it: of a tensor that several modules share, all copies but those of tied positions."""
    torch.manual_seed(13)
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "base_model_name_or_path": "target", "model_type": "mlp_speculator",
        "input_hidden_dim": WIDTH, "inner_dim": str(inner), "proj_dim": str(inner), "emb_dim": str(inner), "vocab_size": VOCAB,
        "n_candidates": n, "n_predict": n, "top_k_tokens_per_head": [1] * n, "tie_weights": tied, "tie_lstm_embs": tied_embeddings,
        "scale_input": scaled, "method": method,
    }
    is_lstm = method == "sum_lstm"
    middle, copies = "" if is_lstm else ".0", 1 if tied else n
    tensors: dict[str, Tensor] = {}
    table = torch.randn(VOCAB, inner) / 2
    for gate in [f"{gate}_" for gate in GATES] if is_lstm else [""]:
        for i in range(copies):
            tensors[f"{gate}emb.{i}{middle}.weight"] = table.clone() if tied_embeddings else torch.randn(VOCAB, inner) / 2
        for i in range(min(n, 2) if tied else n):
            columns = inner if i else WIDTH
            tensors[f"{gate}proj.{i}{middle}.weight"] = torch.randn(inner, columns) / columns**0.5
    for norm in ("cell_ln", "state_ln") if is_lstm else ("ln",):
        for i in range(copies):
            tensors[f"{norm}.{i}{middle}.weight"] = 1 + torch.rand(inner)
            tensors[f"{norm}.{i}{middle}.bias"] = torch.randn(inner) / 2
    for i in range(n):
        head = torch.randn(VOCAB, inner) / inner**0.5
        tensors[f"head.{i}.weight"] = tensors["head.0.weight"].clone() if tied and i else head
    return Arctics(config, tensors)


IBMS = {
    "untied": ibms(), "tied": ibms(tied=True), "tied, scaled": ibms(tied=True, scaled=True), "inner_dim 0": ibms(scaled=True, inner=0),
    "one position": ibms(tied=True, n=1),
}


ARCTICS = {
    "lstm": arctics("sum_lstm"), "lstm, tied embeddings, scaled": arctics("sum_lstm", tied_embeddings=True, scaled=True),
    "lstm, tied embeddings, wide": arctics("sum_lstm", tied_embeddings=True, inner=WIDTH),
    "lstm, one position": arctics("sum_lstm", scaled=True, n=1), "rnn": arctics("sum_rnn", tied=False),
    "rnn, scaled": arctics("sum_rnn", tied=False, scaled=True), "rnn, tied": arctics("sum_rnn"),
    "rnn, tied, scaled": arctics("sum_rnn", scaled=True, inner=WIDTH),
}


def expected(published: Published, guess: Guess) -> list[Tensor]:
    """What each guess is made from, given those before."""
    return published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])


def load(folder: Path, published: Published, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
    saved = save(folder / "speculator", published.config, published.tensors)
    return mlp_speculator.load(MlpSpeculatorConfig(str(saved), quantization="none", **settings), resources(folder, execution))


def started(loaded: LoadedProposer, temperatures: tuple[float, ...] = (0.0, 0.0, 0.0), return_probs: bool = False) -> Run:
    run = Run(loaded.open(opened(return_probs=return_probs)), seed=4)
    for i, temperature in enumerate(temperatures):
        run.add(f"r{i}", 4 + i, Draw(temperature, 7 + i, i))
    return run


def guesses_of(run: Run, steps: int = 12) -> list[tuple[str, Guess]]:
    """Of all rows over many steps, with ceilings that change."""
    found: list[tuple[str, Guess]] = []
    for step in range(steps):
        found += run.step({name: 1 + (step + i) % 5 for i, name in enumerate(run.texts)}).items()
    return [(name, guess) for name, guess in found if guess.tokens]


def is_drawn_as_the_target_would(guess: Guess, draw: Draw, j: int, logits: Tensor) -> bool:
    """Guess number j from these scores [V]: the best, or under the target's own noise; near ties may fall either way."""
    if not draw.temperature:
        return guess.tokens[j] == int(logits.argmax())
    scaled, key = logits[None] / draw.temperature, noise.keys([noise.stream(draw.seed, draw.choice)], [len(guess.text) + j])
    return bool(noise.margin(scaled, key)[0] <= 1e-3) or guess.tokens[j] == int(noise.sample(scaled, key)[0])


def forms_held(folder: Path, published: Published, part: str = "") -> list[int]:
    """How many forms of weights with this in their names are kept in memory once the first network is bound, the second, ..."""
    given, held = resources(folder), list[int]()

    def bind(program: Any, weights: Any, quantization: Any) -> Any:
        executor = given.bind(program, weights, quantization)
        held.append(sum(len(forms) for names, forms in executor.bank._entries.items() if part in str(names)))
        return executor

    saved = save(folder / "speculator", published.config, published.tensors)
    mlp_speculator.load(MlpSpeculatorConfig(str(saved)), replace(given, bind=bind))
    return held
