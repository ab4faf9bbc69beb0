"""Domino's correction beyond the numbers that test_dflash.py compares: its GRU is torch's, and a head that says nothing changes nothing."""

from pathlib import Path

import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter
from pretended_engine import accept

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


@pytest.mark.parametrize("name", ["domino", "domino, masks"])
def test_embeddings_are_scaled_as_the_block_has_them(tmp_path: Path, name: str) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path, embed_scale=2.5)
    engine = drafter.begun()
    guess = engine.step(accept(0))["a"]
    probs = drafter.reference.probs(guess.text, 4, guess.tokens[:3])
    assert guess.tokens == probs.argmax(-1).tolist()
    assert guess.confidence == pytest.approx([float(row[token]) for row, token in zip(probs, guess.tokens, strict=True)], abs=1e-4)
