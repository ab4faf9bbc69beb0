"""Pretended targets for drafters without a cache: texts grow by random acceptance, states are random but belong to the text."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pretended_engine import GREEDY, TORCH, Guess
from safetensors.torch import save_file
from target_views import a_view, tables_alone
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import FINAL, Executor
from foretoken.kernels.program import Program
from foretoken.kernels.weights import bind_program
from foretoken.proposers.base import Draft, DraftContext, DraftRow, Draw, Ended, Feedback, Proposer
from foretoken.proposers.loading import Opening, Resources

WIDTH, VOCAB = 24, 50


def resources(folder: Path, execution: Execution = TORCH, hidden_size: int = WIDTH, vocab_size: int = VOCAB, **view: Any) -> Resources:
    """A target in `folder` with random embedding and head, of which drafters may have the head."""
    torch.manual_seed(99)
    weights = {"embed": torch.randn(vocab_size, hidden_size), "lm_head.weight": torch.randn(vocab_size, hidden_size) / 4}
    network = tables_alone(weights, execution)

    def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
        return bind_program(program, weights, execution, network.bank)

    sizes = {"num_layers": 8, "hidden_size": hidden_size, "vocab_size": vocab_size, "max_model_len": 1000}
    target = a_view(folder=folder, embedding="embed", **sizes | view)
    return Resources(target, lambda name, _: Path(name), bind, cast(Any, None))


def target_head(hidden_size: int = WIDTH, vocab_size: int = VOCAB) -> Tensor:
    """The head of `resources`."""
    torch.manual_seed(99)
    torch.randn(vocab_size, hidden_size)
    return torch.randn(vocab_size, hidden_size) / 4


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def opened(name: str = "drafter", return_probs: bool = False) -> Opening:
    return Opening(name, [], 16, 4, return_probs)


def state_of(text: Sequence[int], boundary: int = FINAL, width: int = WIDTH) -> Tensor:
    """[width] the target's state at the last token of a text."""
    generator = torch.Generator().manual_seed(hash((boundary, *text)) % 2**31)
    return torch.randn(width, generator=generator)


@dataclass
class Text:
    tokens: list[int]
    computed: int = 0
    draw: Draw = GREEDY


class Run:
    """Steps over texts; which guesses are accepted is up to chance, and the prompt comes in chunks."""

    def __init__(self, proposer: Proposer, seed: int = 0, vocab_size: int = VOCAB, chunk: int = 5) -> None:
        self.proposer, self.vocab_size, self.chunk = proposer, vocab_size, chunk
        self.texts: dict[str, Text] = {}
        self._random = random.Random(seed)
        self.spoiled: set[str] = set()  # requests whose states are NaN

    def add(self, request_id: str, length: int, draw: Draw = GREEDY, cached: int = 0) -> None:
        self.texts[request_id] = Text([self._random.randrange(self.vocab_size) for _ in range(length)], cached, draw)

    def step(self, ceilings: Mapping[str, int], order: Sequence[str] | None = None, end: Sequence[str] = ()) -> dict[str, Guess]:
        """One step over the rows of `order`, or all. ceilings: of the rows that are asked for. end: rows that stop with this step."""
        names = list(self.texts) if order is None else list(order)
        asked = [name for name in names if ceilings.get(name)]
        after = {name: min(len(self.texts[name].tokens), self.texts[name].computed + self.chunk) for name in names}
        rows = [self.row(name, after[name], ceilings[name]) for name in asked]
        draft = self.proposer.propose(DraftContext(rows, 0, 4)) if rows else Draft.empty(0)
        guesses = {name: Guess.of(draft, i, self.texts[name].tokens) for i, name in enumerate(asked)}
        self._finish(names, after, guesses, end)
        self.proposer.check()
        return guesses

    def row(self, name: str, after: int, ceiling: int) -> DraftRow:
        text = self.texts[name]
        return DraftRow(name, text.tokens, len(text.tokens), after, ceiling, 0, [], (), text.draw)

    def _finish(self, names: Sequence[str], after: Mapping[str, int], guesses: Mapping[str, Guess], end: Sequence[str]) -> None:
        states: dict[int, list[Tensor]] = {boundary: [] for boundary in self.proposer.needs.hidden}
        accepted: list[list[int]] = []
        emitted: list[list[int]] = []
        scheduled: list[int] = []
        starts = [0]
        for name in names:
            text, guess = self.texts[name], guesses.get(name)
            samples = after[name] == len(text.tokens)
            read = [text.tokens[: i + 1] for i in range(text.computed, after[name])]
            nodes = [text.tokens + [guess.tokens[n] for n in guess.path(node)] for node in range(len(guess.tokens))] if guess else []
            for boundary, parts in states.items():
                parts += [state_of(t, boundary) * (torch.nan if name in self.spoiled else 1.0) for t in read + nodes]
            starts.append(starts[-1] + len(read) + len(nodes))
            scheduled.append(len(read))
            path = guess.path(self._random.randrange(-1, len(guess.tokens))) if guess and guess.tokens and samples else []
            accepted.append(path)
            new = [guess.tokens[node] for node in path] if guess else []
            emitted.append([*new, self._random.randrange(self.vocab_size)] if samples else [])
            text.tokens += emitted[-1]
            text.computed = after[name] + len(path)
        self.proposer.observe(
            Feedback(
                request_ids=names, num_committed=[self.texts[name].computed for name in names],
                num_drafted=[len(guesses[name].tokens) if name in guesses else 0 for name in names], accepted=accepted, emitted=emitted,
                finished=[name in end for name in names], hidden={boundary: torch.stack(parts) for boundary, parts in states.items()},
                query_start_loc=starts, num_scheduled=scheduled, token_ids=[self.texts[name].tokens for name in names],
                ended=[Ended(name, "", []) for name in names if name in end],
            )
        )
        for name in end:
            self.proposer.forget(name)


def check_batches(start: Callable[[], Run], ceilings: Mapping[str, int]) -> None:
    """A row's guesses are the same in every order of the batch, and alone."""
    whole, reverse, alone = start(), start(), start()
    for run in (whole, reverse, alone):
        run.step({})
        run.step({})
    guesses = {name: guess.tokens for name, guess in whole.step(ceilings).items()}
    assert {name: len(tokens) for name, tokens in guesses.items()} == ceilings
    assert {name: guess.tokens for name, guess in reverse.step(ceilings, order=[*ceilings][::-1]).items()} == guesses
    last = [*ceilings][-1]
    assert alone.step({last: ceilings[last]})[last].tokens == guesses[last]
