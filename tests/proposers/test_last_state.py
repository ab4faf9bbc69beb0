"""Which state a drafter without a cache is given, and when a row is ready."""

from collections.abc import Sequence

import torch
from elsewhere import Elsewhere, there
from last_state_runs import Run, state_of
from torch import Tensor

from foretoken.kernels.layout import FINAL
from foretoken.proposers.base import Feedback
from foretoken.proposers.drafting import Feed
from foretoken.proposers.guessing import Guesses
from foretoken.proposers.last_state import LastStateProposer


class Watching:
    """Heads that guess a small tree and check the states that they are given against the texts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        for feed, state in zip(feeds, states, strict=True):
            assert torch.equal(state, state_of(list(feed.row.token_ids)[:-1]))
            self.seen.append(feed.row.request_id)
        tree = ([3, 4, 5, 6], [-1, -1, 0, 1])
        return Guesses([tree[0][: f.count] for f in feeds], [tree[1][: f.count] for f in feeds], [[0.5] * f.count for f in feeds])


def test_states_are_those_of_the_last_accepted_node_whatever_was_accepted() -> None:
    heads = Watching()
    run = Run(LastStateProposer("x", 4, heads), seed=1)
    for i in range(4):
        run.add(f"r{i}", 3 + 4 * i)
    for step in range(25):
        run.step({f"r{i}": (step + i) % 6 for i in range(4)}, order=[f"r{i}" for i in range(4) if (step + i) % 5])
    assert min(heads.seen.count(f"r{i}") for i in range(4)) > 5


def test_a_row_guesses_from_its_first_sampled_token_on() -> None:
    heads = Watching()
    run = Run(LastStateProposer("x", 4, heads), chunk=5)
    run.add("r", 8)
    assert not run.step({"r": 4})["r"].tokens  # reads 5 of 8
    assert not run.step({"r": 4})["r"].tokens  # reads the rest: its first token comes with this step
    assert run.step({"r": 9})["r"].tokens == [3, 4, 5, 6]
    assert run.step({"r": 1})["r"].tokens == [3]


def test_forgotten_rows_start_anew() -> None:
    run = Run(LastStateProposer("x", 4, Watching()), chunk=50)
    run.add("r", 8)
    run.step({})
    run.proposer.forget("r")
    run.proposer.forget("never seen")
    assert not run.step({"r": 4})["r"].tokens
    assert run.step({"r": 4})["r"].tokens


def test_a_state_that_is_not_finite_costs_its_own_row_only() -> None:
    run = Run(LastStateProposer("x", 4, Watching()), chunk=50)
    for name in ("good", "bad"):
        run.add(name, 8)
    run.spoiled = {"bad"}
    run.step({})
    for _ in range(3):
        guesses = run.step({"good": 4, "bad": 4})
        assert guesses["good"].tokens and not guesses["bad"].tokens


def test_a_small_steps_states_stay_as_they_are() -> None:
    """On a device too: a pass leaves them in memory of their own."""
    proposer = LastStateProposer("x", 4, Watching())
    with Elsewhere() as device:
        hidden = {FINAL: there(torch.randn(3, 2))}
        proposer.observe(Feedback(["a", "b"], [5, 7], [1, 0], [[0], []], [[1, 2], [3]], [False, False], hidden, [0, 2, 3], [1, 1]))
        assert [states is hidden[FINAL] for _, states, _ in proposer._states.values()] == [True, True]
        assert not device.to_host and not device.to_device
