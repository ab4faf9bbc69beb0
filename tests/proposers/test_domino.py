"""Domino's correction beyond the numbers that test_dflash.py compares: its GRU is torch's, and a head that says nothing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter
from pretended_engine import accept

from foretoken.proposers.block_heads import Block
from foretoken.proposers.domino import Domino


def test_its_states_are_those_of_torchs_gru() -> None:
    torch.manual_seed(0)
    embedding = torch.randn(9, 5)
    gru = torch.nn.GRU(5, 4, bias=False, batch_first=True).requires_grad_(False)
    read, kept = gru.all_weights[0]
    domino = Domino(lambda t: embedding[t] @ read.T, lambda s: s @ kept.T, torch.zeros(3, 6), torch.zeros(3, 4), lambda x: x, 0)
    tokens = torch.randint(9, (2, 7))
    state = torch.zeros(2, 4)
    for step, expected in enumerate(gru(embedding[tokens])[0].unbind(1)):
        state = domino.step(tokens[:, step], state)
        assert torch.allclose(state, expected, atol=1e-6)


def test_a_row_that_has_ended_leaves_the_others_states_alone() -> None:
    ones = torch.ones(2, 1)
    domino = Domino(lambda t: t[:, None].float().repeat(1, 3), lambda s: s.repeat(1, 3), torch.zeros(2, 3), ones, lambda x: x, 1)
    block = Block(torch.zeros(6, 2), torch.zeros(6, 3), [0, 1, 3], [1, 2, 3], torch.tensor([4, 5, 6]))
    walk = domino.begin(block)
    alone = domino.begin(Block(torch.zeros(3, 2), torch.zeros(3, 3), [0], [3], torch.tensor([6])))
    for step, (rows, previous) in enumerate([([0, 1, 2], [4, 5, 6]), ([1, 2], [1, -2]), ([2], [-3])]):
        at = torch.tensor([[0, 1, 3][row] + step for row in rows])
        found = walk.scores(torch.tensor(rows), at, step, torch.tensor(previous))
        expected = alone.scores(torch.tensor([0]), torch.tensor([step]), step, torch.tensor(previous[-1:]))
        assert torch.equal(found[-1:], expected) and bool(expected.any()) == (step >= 1)


@pytest.mark.parametrize("name", ["domino", "domino, masks"])
def test_embeddings_are_scaled_as_the_block_has_them(tmp_path: Path, name: str) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path, embed_scale=2.5)
    engine = drafter.begun()
    guess = engine.step(accept(0))["a"]
    probs = drafter.reference.probs(guess.text, 4, guess.tokens[:3])
    assert guess.tokens == probs.argmax(-1).tolist()
    assert guess.confidence == pytest.approx([float(row[token]) for row, token in zip(probs, guess.tokens, strict=True)], abs=1e-4)
