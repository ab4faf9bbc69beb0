"""DSpark's heads beyond the numbers that test_dflash.py compares: where blocks are cut, and that cutting decides nothing else."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter
from pretended_engine import Guess, PretendedEngine

from foretoken.proposers import block_guessing, block_heads
from foretoken.proposers.base import Draw
from foretoken.proposers.config_entry import SpeculativeConfigError

WITH_CONFIDENCE = ["dspark", "dspark, gated", "dspark, rnn", "dspark, confidence only", "dspark, speculators"]
HOT = Draw(1.0, 5, 0)


def start(drafter: Drafter, draw: Draw = HOT, **settings: Any) -> PretendedEngine:
    engine = drafter.run(num_speculative_tokens=5, draft_sample_method="probabilistic", **settings)
    for seed, name in enumerate("ab"):
        engine.add(name, random.Random(seed).choices(range(59), k=9 + seed), draw=draw)
    engine.step(lambda request_id, guess: ((), 7))
    return engine


def step(engine: PretendedEngine, then: int) -> dict[str, Guess]:
    return engine.step(lambda request_id, guess: (range(len(guess.tokens) // 2), then), ceiling=5)


@pytest.mark.parametrize("name", WITH_CONFIDENCE)
def test_a_block_ends_before_the_first_guess_that_is_trusted_less(tmp_path: Path, name: str) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    lengths: set[int] = set()
    for threshold in (0.35, 0.5, 0.65):
        engine = start(drafter, confidence_threshold=threshold)
        for then in range(6):
            for guess in step(engine, then).values():
                trusted = drafter.reference.confidences(guess.text, 5, guess.tokens).tolist()
                assert all(chance >= threshold for chance in trusted[: len(guess.tokens)])
                assert len(guess.tokens) == 5 or trusted[len(guess.tokens)] < threshold
                assert guess.confidence == pytest.approx(trusted[: len(guess.tokens)], abs=1e-4)
                lengths.add(len(guess.tokens))
    assert len(lengths) > 2, "thresholds that cut nothing, or everything"


@pytest.mark.parametrize("return_probs", [False, True])
def test_cutting_changes_no_guess_before(tmp_path: Path, return_probs: bool) -> None:
    drafter = Drafter.write(PUBLISHED["dspark"], tmp_path)
    whole = step(start(drafter, return_probs=return_probs), 1)
    cut = step(start(drafter, return_probs=return_probs, confidence_threshold=0.5), 1)
    assert {len(guess.tokens) for guess in whole.values()} == {5}
    assert min(len(guess.tokens) for guess in cut.values()) < 5
    for name, guess in cut.items():
        count = len(guess.tokens)
        assert guess.tokens == whole[name].tokens[:count]
        if return_probs and count:
            other = whole[name].probs
            assert guess.probs is not None and other is not None
            assert torch.allclose(guess.probs, other[:count], atol=1e-6)


def test_rows_of_different_temperatures_and_counts_share_a_batch(tmp_path: Path) -> None:
    """What a row guesses is what it guesses alone."""
    drafter = Drafter.write(PUBLISHED["dspark, rnn"], tmp_path)
    both = start(drafter)
    both.requests["a"].draw = Draw(0.0, 0, 0)
    together = step(both, 1)
    for name in "ab":
        alone = start(drafter)
        alone.requests["a"].draw = Draw(0.0, 0, 0)
        alone.requests = {name: alone.requests[name]}
        assert step(alone, 1)[name].tokens == together[name].tokens


@pytest.mark.parametrize("return_probs", [False, True])
@pytest.mark.parametrize("name", WITH_CONFIDENCE)
def test_who_waits_for_no_trust_guesses_the_same(tmp_path: Path, name: str, return_probs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    settings: dict[str, Any] = {"confidence_threshold": 0.5, "return_probs": return_probs}
    expected = step(start(drafter, **settings), 1)
    monkeypatch.setattr(block_guessing, "draw", lambda *given, waits: block_heads.draw(*given, waits=not waits))
    for request, guess in step(start(drafter, **settings), 1).items():
        assert guess.tokens == expected[request].tokens
        assert guess.confidence == pytest.approx(expected[request].confidence, abs=1e-5)
        if return_probs and guess.tokens:
            probs = expected[request].probs
            assert guess.probs is not None and probs is not None and torch.allclose(guess.probs, probs, atol=1e-6)


def test_greedy_rows_have_one_hot_probs(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["dspark"], tmp_path)
    guess = step(start(drafter, Draw(0.0, 0, 0), return_probs=True), 1)["a"]
    assert guess.probs is not None
    assert torch.equal(guess.probs, torch.nn.functional.one_hot(torch.tensor(guess.tokens), drafter.spec.vocab).float())


@pytest.mark.parametrize("name", ["z-lab", "dspark, no heads"])
def test_a_threshold_needs_a_confidence_head(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpeculativeConfigError, match="no confidence head"):
        Drafter.write(PUBLISHED[name], tmp_path).load(confidence_threshold=0.5)
