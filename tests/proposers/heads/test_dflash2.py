"""DFlash 2 in training: it begins as a DFlash, learns more than one, and what it exports guesses as it does."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_heads import (
    VOCAB,
    Tapped,
    Training,
    block_states,
    check_documents_apart,
    check_export,
    document,
    exported,
    made_once,
    rounded,
    texts,
)

from foretoken.proposers import dflash
from foretoken.proposers.config import BlockConfig
from foretoken.proposers.training.heads.dflash import DFlash, DFlashSettings
from foretoken.proposers.training.heads.dflash2 import DFlash2, DFlash2Settings

PLAIN = DFlashSettings(block_size=5, taps=(0, 2), mask_token=VOCAB - 1)
SETTINGS = DFlash2Settings(**asdict(PLAIN), conv_group_size=8, selector_rank=6, selector_top_k=5)
target = made_once(Tapped)


def made(target: Tapped, settings: DFlash2Settings = SETTINGS) -> DFlash2:
    """Everything random, so that nothing can be forgotten unnoticed."""
    torch.manual_seed(0)
    head = DFlash2(target.frozen, settings)
    for name, parameter in head.named_parameters():
        parameter.data += (0.2 if "norm" in name else 1.0 if "codebook" in name else 0.1) * torch.randn_like(parameter)
    rounded(head)
    return head


def with_edges(head: DFlash2, text: Sequence[int], path: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """[V] a place's own scores behind a text and the guesses of `path`, and with what each token has in common with the one before."""
    selector, hidden = head.candidate_selector, block_states(head, text, count)[len(path)]
    own = head.target.head @ hidden
    before = path[-1] if path else text[-1]
    with torch.no_grad():
        context = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        return own, own + selector.successor_codebook @ context


def of_the_best(own: Tensor, scores: Tensor, count: int) -> Tensor:
    best = own.topk(count).indices
    return torch.full_like(scores, -torch.inf).index_copy(0, best, scores[best])


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, causal=True, conv_kernel_size=3)], ids=["open", "causal"])
def test_its_export_guesses_as_it_does(target: Tapped, tmp_path: Path, settings: DFlash2Settings) -> None:
    head = made(target, settings)
    check_export(head, target, tmp_path / "head", lambda text, path, count: of_the_best(*with_edges(head, text, path, count), 5))


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_loss_knows_the_true_token_before(target: Tapped, share: float) -> None:
    """Over the whole vocabulary; else as DFlash's. A share of it is that of the scores without the selector."""
    head = made(target, replace(SETTINGS, anchor_share=1.0, decay=3.0, own_share=share))
    text = texts(1, 14, seed=5)[0]
    losses = head.loss(document(text))
    total = 0.0
    for anchor in range(13):
        for depth in range(1, min(5, 14 - anchor)):
            both = with_edges(head, text[: anchor + 1], text[anchor + 1 : anchor + depth], 4)
            own, chosen = (float(scores.log_softmax(-1)[text[anchor + depth]]) for scores in both)
            total -= float(torch.exp(torch.tensor((1 - depth) / 3.0))) * (share * own + (1 - share) * chosen)
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-4)


def test_blocks_do_not_see_each_other(target: Tapped) -> None:
    check_documents_apart(made(target, replace(SETTINGS, anchor_share=1.0)))


def test_it_begins_as_a_dflash_and_learns_more(target: Tapped, tmp_path: Path) -> None:
    runs: list[Training] = []
    for make in (lambda: DFlash(target.frozen, PLAIN), lambda: DFlash2(target.frozen, SETTINGS)):
        torch.manual_seed(0)
        runs.append(Training(make(), tmp_path / str(len(runs)), lr=2e-2))
    plain, more = runs
    print(plain.before, plain.after, more.after)
    assert more.before["loss"] == pytest.approx(plain.before["loss"], rel=1e-4)
    assert more.after["loss"] < 0.95 * plain.after["loss"]


def test_defaults_fit_any_target(target: Tapped, tmp_path: Path) -> None:
    _, config = exported(DFlash2(target.frozen), tmp_path)
    found = dflash.load(BlockConfig(str(tmp_path), "dflash", quantization="none"), target.resources).found
    assert found[0].startswith("DFlash 2 in the layout of z-lab")
    assert config["architectures"] == ["DFlash2DraftModel"]
    more = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16}
    assert config["dflash_config"].items() >= more.items()


@pytest.mark.parametrize(
    ("settings", "words"),
    [(replace(SETTINGS, conv_group_size=24), "conv_group_size must divide"), (replace(SETTINGS, own_share=1.0), "own_share must be")],
)
def test_settings_that_it_cannot_have(target: Tapped, settings: DFlash2Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DFlash2(target.frozen, settings)
