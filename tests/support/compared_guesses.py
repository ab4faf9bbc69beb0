"""Guesses of drafters that have a plain reference, compared with it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pytest
from pretended_engine import TORCH, Guess, PretendedEngine, accept, at_random, block_size, chosen, opened, text
from torch import Tensor

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.loading import LoadedProposer


class ReferencedDrafter(Protocol):
    """A drafter on disk beside a pretended target."""

    target: Any
    bound: list[Executor]  # every network that was loaded

    def load(self, execution: Execution = ..., **settings: Any) -> LoadedProposer: ...

    def probs(self, guess: Guess, first: int = 0) -> Tensor:
        """[guesses, V] of each guess, given those before it, from the text's states from `first` on."""
        ...

    def confidences(self, guess: Guess, probs: Tensor) -> Sequence[float]:
        """What the drafter thinks of each guess."""
        return chosen(guess, probs)

    def open(self, execution: Execution = TORCH, return_probs: bool = False, **settings: Any) -> LearnedProposer:
        return opened(self.load(execution, **settings), execution, return_probs)

    def run(self, execution: Execution = TORCH, return_probs: bool = False, **settings: Any) -> PretendedEngine:
        return PretendedEngine(self.open(execution, return_probs, **settings), self.target, block_size(execution))

    def begun(
        self, execution: Execution = TORCH, prompt: Sequence[int] | None = None, num_speculative_tokens: int = 4, **settings: Any
    ) -> PretendedEngine:
        """`run`, with a request "a" whose prompt the target has read."""
        engine = self.run(execution, num_speculative_tokens=num_speculative_tokens, **settings)
        engine.add("a", prompt or text(1, 9))
        engine.step(accept(0))
        return engine


def assert_as_reference(drafter: ReferencedDrafter, guess: Guess, count: int, first: int = 0) -> None:
    """A chain of so many tokens, each the best given those before, and what the drafter thinks of them."""
    assert len(guess.tokens) == count and guess.parents == list(range(-1, count - 1))
    if count:
        probs = drafter.probs(guess, first)
        assert guess.tokens == probs.argmax(-1).tolist()
        assert guess.confidence == pytest.approx(drafter.confidences(guess, probs), abs=1e-4)


def check(drafter: ReferencedDrafter, guesses: Mapping[str, Guess], count: int = 4) -> int:
    """All rows that could guess; returns how many there were."""
    able = [guess for guess in guesses.values() if guess.tokens]
    for guess in able:
        assert_as_reference(drafter, guess, count)
    return len(able)


def check_steps(drafter: ReferencedDrafter, execution: Execution) -> None:
    """Some steps of three requests, of whose guesses random parts are accepted."""
    engine = drafter.run(execution, num_speculative_tokens=4)
    choose = at_random(0)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 2))
    checked = 0
    for step in range(6):
        if step == 2:
            engine.add("c", text(3, 14))
        checked += check(drafter, engine.step(choose))
    assert checked == 5 + 5 + 3
