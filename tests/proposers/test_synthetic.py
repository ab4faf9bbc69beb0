"""Guesses that mean nothing are legal all the same."""

from last_state_runs import Run

from foretoken.proposers.base import DraftContext
from foretoken.proposers.config import SyntheticConfig
from foretoken.proposers.synthetic import SyntheticProposer


def test_guesses_are_legal_ids_for_every_position_and_never_more_than_wanted() -> None:
    run = Run(SyntheticProposer(SyntheticConfig(4), "synthetic", 7), vocab_size=7)
    run.add("a", 5)
    run.add("b", 12)
    draft = run.proposer.propose(DraftContext([run.row("a", 5, 9), run.row("b", 12, 2), run.row("b", 12, 0)], 0, 4))
    assert draft.token_ids == [5, 6, 0, 1, 5, 6]
    assert draft.start_loc == [0, 4, 6, 6] and draft.parents == [-1, 0, 1, 2, -1, 0]
