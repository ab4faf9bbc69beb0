"""Every published kind of block drafter against its plain reference, number by number, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pretended_target
import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter
from block_reference import Reference
from elsewhere import compare, drafting
from pretended_engine import EXECUTIONS, Guess, PretendedEngine, Request, accept, at_random, text
from pretended_target import MAX_MODEL_LEN

from foretoken.kernels.execution import Execution
from foretoken.proposers.base import Draw

MakeDrafter = Callable[..., Drafter]


@pytest.fixture
def make(tmp_path: Path) -> MakeDrafter:
    def write(name: str, **target: Any) -> Drafter:
        return Drafter.write(PUBLISHED[name], tmp_path, **target)

    return write


def assert_as_reference(guess: Guess, reference: Reference, count: int, first: int = 0) -> None:
    """Tokens, each the best given those before, and what the drafter thinks of them."""
    assert len(guess.tokens) == count and guess.parents == list(range(-1, count - 1))
    if not count:
        return
    probs = reference.probs(guess.text, count, guess.tokens[: count - 1], first)
    trusted = reference.confidences(guess.text, count, guess.tokens) if reference.spec.confidence else None
    for i, token in enumerate(guess.tokens):
        assert token == int(probs[i].argmax())
        expected = probs[i, token] if trusted is None else trusted[i]
        assert guess.confidence[i] == pytest.approx(float(expected), abs=1e-4)


def check(engine: PretendedEngine, drafter: Drafter, guesses: dict[str, Guess], count: int = 4) -> int:
    """All rows that could guess; returns how many there were."""
    able = [guess for guess in guesses.values() if guess.tokens]
    for guess in able:
        assert_as_reference(guess, drafter.reference, count)
    return len(able)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_guesses_are_the_references(make: MakeDrafter, name: str, execution: Execution) -> None:
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=4)
    choose = at_random(0)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 2))
    checked = 0
    for step in range(6):
        if step == 2:
            engine.add("c", text(3, 14))
        checked += check(engine, drafter, engine.step(choose))
    assert checked == 5 + 5 + 3


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "name",
    [
        *("z-lab, sliding", "z-lab, narrow windows", "lilicorr", "lilicorr, own width", "dspark"),
        *("domino", "domino, masks", "xpress"),
    ],
)
def test_rows_of_different_lengths_ask_for_different_counts(make: MakeDrafter, name: str, execution: Execution) -> None:
    """Fewer guesses are fewer masks."""
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=5)
    engine.add("a", text(1, 40))
    engine.step(accept(0))
    for ceiling in (5, 1, 3, 9, 2):
        assert check(engine, drafter, engine.step(at_random(ceiling), ceiling), min(ceiling, 5)) == 1


def test_a_prompt_of_one_token_is_guessed_from(make: MakeDrafter) -> None:
    drafter = make("z-lab")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", [5])
    assert not engine.step(accept(0))["a"].tokens
    assert check(engine, drafter, engine.step(accept(4))) == 1
    assert check(engine, drafter, engine.step(accept(0))) == 1


@pytest.mark.parametrize("name", ["z-lab", "lilicorr"])
def test_a_shared_embedding_and_head_are_scaled_as_the_target_scales_them(make: MakeDrafter, name: str) -> None:
    drafter = make(name, embed_scale=2.5, logits_scale=0.5, softcap=4.0)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    assert check(engine, drafter, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", ["speculators, sliding", "domino, speculators, masks"])
def test_speculators_trains_with_the_targets_tables_as_they_are(make: MakeDrafter, name: str) -> None:
    """It copies the numbers and calls nothing of the target, whatever that multiplies by."""
    drafter = make(name, embed_scale=2.5, logits_scale=0.5, softcap=4.0)
    drafter.reference = make(name).reference
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    assert check(engine, drafter, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", ["z-lab", "speculators", "dflash2", "lilicorr", "dspark, gated", "domino", "xpress, speculators"])
def test_probs_are_what_guesses_are_drawn_from(make: MakeDrafter, name: str) -> None:
    drafter = make(name)
    engine = drafter.run(return_probs=True, num_speculative_tokens=3, draft_sample_method="probabilistic")
    engine.add("a", text(1, 9), draw=Draw(1.0, 1, 0))
    engine.add("b", text(2, 5), draw=Draw(1.0, 2, 0))
    surprises = 0
    for _ in range(5):
        for guess in engine.step(at_random(0)).values():
            if guess.tokens:
                assert guess.probs is not None and guess.probs.shape == (3, drafter.spec.vocab)
                probs = drafter.reference.probs(guess.text, 3, guess.tokens[:2])
                assert torch.allclose(guess.probs, probs, atol=1e-4)
                surprises += sum(token != int(row.argmax()) for token, row in zip(guess.tokens, probs, strict=True))
    assert surprises > 3


@pytest.mark.parametrize("name", ["z-lab", "z-lab, sliding", "lilicorr", "dspark, speculators"])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunked_prefill_changes_nothing(make: MakeDrafter, name: str, chunk: int) -> None:
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 17))
    for _ in range(-(-17 // chunk)):
        check(engine, drafter, engine.step(accept(0), chunk=chunk))  # a last chunk of one token has a guess behind it already
    assert check(engine, drafter, engine.step(accept(1))) == 1
    assert check(engine, drafter, engine.step(accept(4))) == 1


def test_a_small_ingestion_budget_only_delays(make: MakeDrafter) -> None:
    drafter = make("z-lab")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 17))
    engine.step(accept(0))
    checked = sum(check(engine, drafter, engine.step(accept(1), ingest=4)) for _ in range(16))
    assert checked > 3


@pytest.mark.parametrize("name", ["z-lab, sliding", "lilicorr", "dspark, rnn"])
@pytest.mark.parametrize("asks", [False, True])
def test_prefix_cache_hits_change_nothing(make: MakeDrafter, name: str, asks: bool) -> None:
    """A second request takes over three blocks of a first one, whatever follows them, while both live."""
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    first = engine.add("a", text(1, 14))
    engine.step(accept(0))
    engine.step(accept(2))  # the drafter reads the prompt
    assert engine.filled["a"] >= 12
    second = engine.add("b", text(1, 12) + [33, 34, 35, 36], shared=first.table[:3])
    third = engine.add("c", text(1, 12) + [41], shared=first.table[:3])
    assert (second.computed, third.computed) == (12, 12)
    engine.step(accept(1), asks=asks)
    assert check(engine, drafter, engine.step(accept(3))) == 3
    assert check(engine, drafter, engine.step(accept(4))) == 3
    engine.proposer.forget("a")
    del engine.requests["a"]
    assert check(engine, drafter, engine.step(accept(0))) == 2


@pytest.mark.parametrize("name", ["z-lab, causal", "lilicorr", "dspark", "domino", "xpress"])
def test_the_order_of_the_batch_changes_nothing(make: MakeDrafter, name: str) -> None:
    def run(order: Sequence[str]) -> list[dict[str, Guess]]:
        engine = drafter.run(num_speculative_tokens=4)
        for i, name in enumerate("abc"):
            engine.add(name, text(i, 5 + 4 * i))
        return [engine.step(accept(step), order=order) for step in range(4)]

    drafter = make(name)
    for one, two in zip(run("abc"), run("cab"), strict=True):
        assert {name: guess.tokens for name, guess in one.items()} == {name: guess.tokens for name, guess in two.items()}
        for row in one:
            assert one[row].confidence == pytest.approx(two[row].confidence, abs=1e-5)


@pytest.mark.parametrize("asks", [False, True])
def test_steps_without_guesses_are_made_up_for(make: MakeDrafter, asks: bool) -> None:
    """k = 0 for a while, with the drafter reading along or not asked at all."""
    drafter = make("speculators, sliding")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    check(engine, drafter, engine.step(accept(2)))
    for _ in range(5):
        assert not engine.step(accept(0), ceiling=0, asks=asks)["a"].tokens
    assert check(engine, drafter, engine.step(accept(4))) == 1
    assert check(engine, drafter, engine.step(accept(0), ceiling=2), 2) == 1


@pytest.mark.parametrize("count", [0, 4])
def test_total_rejection_and_full_acceptance(make: MakeDrafter, count: int) -> None:
    drafter = make("z-lab")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 6))
    engine.step(accept(0))
    for step in range(5):
        assert check(engine, drafter, engine.step(accept(count, then=step))) == 1
    assert len(engine.requests["a"].tokens) == 6 + 1 + 5 * (count + 1)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_dropped_states_mean_a_new_start_behind_them(make: MakeDrafter, execution: Execution) -> None:
    """A drafter that is not asked keeps 256 states; what it guesses later it guesses from those on."""
    drafter = make("z-lab, sliding")
    engine = drafter.run(execution, num_speculative_tokens=4)
    engine.add("a", text(1, 300))
    for _ in range(3):
        engine.step(accept(0), chunk=100, asks=False)
    dropped = 300 - 256
    assert_as_reference(engine.step(accept(2))["a"], drafter.reference, 4, first=dropped)
    assert_as_reference(engine.step(accept(1))["a"], drafter.reference, 4, first=dropped)
    assert engine.filled["a"] == 0  # no one else may take these blocks for filled


def test_preempted_requests_start_anew(make: MakeDrafter) -> None:
    drafter = make("z-lab")
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.step(accept(0))
    engine.step(accept(2))
    engine.proposer.forget("a")
    before: Request = engine.requests.pop("a")
    engine.add("a", before.tokens)
    engine.step(accept(0))
    assert check(engine, drafter, engine.step(accept(2))) == 1


def test_positions_reach_as_far_as_the_targets(make: MakeDrafter) -> None:
    """All of these drafters say max_position_embeddings 64."""
    assert make("z-lab").load().executors[0].max_model_len == MAX_MODEL_LEN


def test_k_is_the_configs_else_the_checkpoints_else_a_block(make: MakeDrafter) -> None:
    speculators = make("speculators")
    assert speculators.open().max_tokens == 3
    assert speculators.open(num_speculative_tokens=2).max_tokens == 2
    assert make("z-lab").open().max_tokens == 5
    assert make("dspark").open().max_tokens == 6
    assert make("domino").open().max_tokens == 6
    assert make("domino, masks").open().max_tokens == 5
    assert make("xpress").open().max_tokens == 5


@pytest.mark.parametrize("name", ["z-lab", "z-lab, sliding", "lilicorr", "dspark", "domino", "xpress", "xpress, DFlash 2"])
def test_only_what_is_guessed_comes_from_a_device(make: MakeDrafter, name: str) -> None:
    drafter = make(name)

    play = drafting(drafter, {"a": text(1, 9), "b": text(2, 3)}, lambda: at_random(0))
    copied = compare(play, pretended_target).to_host
    assert max(copied) < drafter.spec.vocab or name == "dspark", "scores or states came to the host"  # DSpark's heads are there
