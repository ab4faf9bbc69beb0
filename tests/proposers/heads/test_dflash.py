"""DFlash in training: it learns, and what it exports guesses as it does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_heads import (
    VOCAB,
    Tapped,
    block_states,
    check_documents_apart,
    check_export,
    disturbed,
    document,
    exported,
    made_once,
    rounded,
    texts,
    with_and_without_shift,
)

from foretoken.proposers import dflash
from foretoken.proposers.config import BlockConfig
from foretoken.proposers.training.heads.dflash import DFlash, DFlashSettings, published_taps
from foretoken.proposers.training.packing import Packed

SETTINGS = DFlashSettings(block_size=5, taps=(0, 2), mask_token=VOCAB - 1)
target = made_once(Tapped)


def recomputed(head: DFlash, text: Sequence[int], count: int) -> Tensor:
    """[count, V]: scores of `count` guesses behind a text, the whole text read again."""
    return block_states(head, text, count) @ head.target.head.T


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, causal=True, intermediate_size=32)], ids=["open", "causal"])
def test_its_export_guesses_as_it_does(target: Tapped, tmp_path: Path, settings: DFlashSettings) -> None:
    torch.manual_seed(0)
    head = disturbed(DFlash(target.frozen, settings), norms=0.2)
    rounded(head)
    check_export(head, target, tmp_path / "head", lambda text, path, count: recomputed(head, text, count)[len(path)])


def test_the_loss_is_the_published_one(target: Tapped) -> None:
    """Slot j of a block at token i guesses token i + j from the states before i; it counts exp(-(j - 1) / decay)."""
    head = DFlash(target.frozen, replace(SETTINGS, anchor_share=1.0, decay=3.0))
    text = texts(1, 14, seed=5)[0]
    batch = document(text)
    batch.learn[:4] = False
    losses = head.loss(batch)
    total = weight = 0.0
    for anchor in range(3, 13):
        logs = recomputed(head, text[: anchor + 1], 4).log_softmax(-1)
        for depth in range(1, min(5, 14 - anchor)):
            share = float(torch.exp(torch.tensor((1 - depth) / 3.0)))
            total -= share * float(logs[depth - 1, text[anchor + depth]])
            weight += share
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-4)
    assert losses.weight == pytest.approx(weight, rel=1e-5)
    assert losses.metrics["accuracy_1"][1] == 10 and losses.metrics["accuracy_4"][1] == 7


def test_documents_do_not_see_each_other(target: Tapped) -> None:
    torch.manual_seed(0)
    check_documents_apart(DFlash(target.frozen, replace(SETTINGS, anchor_share=1.0)))


def test_anchors_are_a_share_of_each_document_and_change(target: Tapped) -> None:
    head = DFlash(target.frozen, SETTINGS)
    batch = Packed(torch.zeros(50, dtype=torch.int64), torch.tensor([False] * 10 + [True] * 40), (0, 10, 31, 50))
    one, again, other = (head.anchors(replace(batch, number=number)).places.tolist() for number in (1, 1, 2))
    assert one == again != other
    assert [sum(start <= place < end for place in one) for start, end in ((0, 10), (10, 31), (31, 50))] == [0, 5, 4]
    assert one == sorted(set(one)) and not {30, 49} & set(one)


def test_it_learns_and_a_wrong_shift_is_worse(target: Tapped, tmp_path: Path) -> None:
    right, wrong = with_and_without_shift(lambda: DFlash(target.frozen, SETTINGS), tmp_path, lr=2e-2)
    print(right.before, right.after, wrong.after)
    assert right.after["loss"] < 0.8 * right.before["loss"] and right.after["accuracy_1"] > 0.4
    assert wrong.after["loss"] > 1.1 * right.after["loss"] and wrong.after["accuracy_1"] < right.after["accuracy_1"] - 0.2


def test_defaults_fit_any_target(target: Tapped, tmp_path: Path) -> None:
    _, config = exported(DFlash(target.frozen), tmp_path)
    assert dflash.load(BlockConfig(str(tmp_path), "dflash", quantization="none"), target.resources).found
    assert config["block_size"] == 8 and config["num_hidden_layers"] == 2 and config["rope_theta"] == 10000.0
    assert config["dflash_config"] == {"mask_token_id": 0, "target_layer_ids": [0, 1]}      # the padding token
    assert [published_taps(layers) for layers in (1, 2, 8, 36)] == [(0,), (0, 1), (1, 3, 5), (1, 17, 33)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (DFlashSettings(block_size=1), "at least 2"),
        (DFlashSettings(taps=(0, 99)), "not 99"),
        (DFlashSettings(mask_token=10**6), "mask_token"),
    ],
)
def test_settings_that_the_target_cannot_have(target: Tapped, settings: DFlashSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DFlash(target.frozen, settings)
