"""The walk of recurrent heads over a recurrence that can be counted out by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.proposers.base import DraftRow, Draw
from foretoken.proposers.drafting import Feed
from foretoken.proposers.guessing import Drawing
from foretoken.proposers.recurrent_heads import Carried, RecurrentHeads

VOCAB = 100


class Adding:
    """Guesses the sum of the row's number and all tokens it has seen; a second carried tensor counts its steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []  # step, tokens of the rows that were there

    def begin(self, states: Tensor) -> Carried:
        return states, torch.zeros(len(states), 3)

    def step(self, step: int, carried: Carried, token_ids: Sequence[int]) -> tuple[Tensor, Carried]:
        sums, steps = carried
        assert len(sums) == len(steps) == len(token_ids) and bool((steps == step).all())
        self.seen.append((step, list(token_ids)))
        sums = sums + torch.tensor(token_ids)[:, None]
        return torch.nn.functional.one_hot(sums[:, 0].long(), VOCAB).float() * 20, (sums, steps + 1)


def _feed(index: int, tokens: list[int], count: int) -> Feed:
    row = DraftRow(f"r{index}", tokens, len(tokens), len(tokens), count, 0, [], (), Draw(0.0, 0, 0))
    return Feed(index, row, len(tokens), len(tokens), count)


def test_rows_drop_out_when_they_have_their_tokens_and_the_others_keep_what_is_theirs() -> None:
    recurrence = Adding()
    heads = RecurrentHeads(recurrence, Drawing(VOCAB, samples=True, return_probs=True))
    feeds = [_feed(0, [5, 1], 1), _feed(1, [2], 3), _feed(2, [3], 2), _feed(3, [9, 4], 3)]
    guesses = heads.guess(feeds, torch.tensor([[10.0], [20.0], [30.0], [1.0]]))
    assert guesses.token_ids == [[11], [22, 44, 88], [33, 66], [5, 10, 20]]
    assert recurrence.seen == [(0, [1, 2, 3, 4]), (1, [22, 33, 5]), (2, [44, 10])]
    assert guesses.confidence is not None and [len(row) for row in guesses.confidence] == [1, 3, 2, 3]
    assert all(probability > 0.99 for row in guesses.confidence for probability in row)
    assert guesses.probs is not None and guesses.probs.argmax(-1).tolist() == [11, 22, 44, 88, 33, 66, 5, 10, 20], "in the rows' order"


def test_no_step_is_taken_that_nobody_asked_for() -> None:
    recurrence = Adding()
    RecurrentHeads(recurrence, Drawing(VOCAB)).guess([_feed(0, [1], 2), _feed(1, [2], 2)], torch.zeros(2, 1))
    assert [step for step, _ in recurrence.seen] == [0, 1]
