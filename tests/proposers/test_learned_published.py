"""Published drafters with caches of their own, EAGLE, block drafters and MTP layers: each guess is their plain reference's, number by
number, whatever happens in between."""

from collections.abc import Callable, Sequence
from pathlib import Path

import block_checkpoints
import eagle_checkpoints
import mtp_checkpoints
import pretended_target
import pytest
import torch
from compared_guesses import ReferencedDrafter, assert_as_reference, check, check_steps
from elsewhere import compare, drafting
from mtp_checkpoints import CONFIGS, GATED, MtpTarget
from pretended_engine import EXECUTIONS, NATIVE, Guess, accept, at_random, text
from pretended_target import MAX_MODEL_LEN
from variants import slow_but

from foretoken.kernels.execution import Execution
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.proposers.base import Draw
from foretoken.proposers.detection import detect_method

Drafter = eagle_checkpoints.Drafter | block_checkpoints.Drafter
Write = Callable[[str], Drafter]
Make = Callable[[str], ReferencedDrafter]
MTP = slow_but([*CONFIGS, "qwen3_5"], [*CONFIGS, *GATED])


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MtpTarget]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: mtp_checkpoints.write(name, folder / name) for name in (*CONFIGS, *GATED)}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str) -> Drafter:
        if name in eagle_checkpoints.PUBLISHED:
            return eagle_checkpoints.Drafter.write(eagle_checkpoints.PUBLISHED[name], tmp_path)
        return block_checkpoints.Drafter.write(block_checkpoints.PUBLISHED[name], tmp_path)

    return write


@pytest.fixture
def make(layers: dict[str, MtpTarget], write: Write) -> Make:
    return lambda name: layers[name] if name in layers else write(name)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", [*eagle_checkpoints.PUBLISHED, *block_checkpoints.PUBLISHED, *CONFIGS, *GATED])
def test_guesses_are_the_references(make: Make, name: str, execution: Execution) -> None:
    drafter = make(name)
    drafter.bound.clear()
    check_steps(drafter, execution)
    wanted = NativeExecutor if execution is NATIVE else TorchExecutor
    assert {type(network) for network in drafter.bound} == {wanted}


@pytest.mark.parametrize("name", [*eagle_checkpoints.PUBLISHED, *block_checkpoints.PUBLISHED])
def test_every_layout_is_recognised_by_its_content(write: Write, name: str) -> None:
    drafter = write(name)
    assert detect_method(str(drafter.folder)) == drafter.method


@pytest.mark.parametrize("name", ["eagle3", "z-lab"])
def test_a_prompt_of_one_token_is_guessed_from(make: Make, name: str) -> None:
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", [5])
    assert not engine.step(accept(0))["a"].tokens
    assert check(drafter, engine.step(accept(4))) == 1
    assert check(drafter, engine.step(accept(0))) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("eagle", "gumiho", "eagle3", "p-eagle", "z-lab", "speculators", "dflash2", "lilicorr", "dspark, gated", "domino"),
        *("xpress, speculators", *MTP),
    ],
)
def test_probs_are_what_guesses_are_drawn_from(make: Make, name: str) -> None:
    drafter = make(name)
    engine = drafter.run(return_probs=True, num_speculative_tokens=3, draft_sample_method="probabilistic")
    engine.add("a", text(1, 9), draw=Draw(1.0, 1, 0))
    engine.add("b", text(2, 5), draw=Draw(1.0, 2, 0))
    surprises = checked = 0
    for _ in range(5):
        for guess in engine.step(at_random(0)).values():
            if guess.tokens:
                assert len(guess.tokens) == 3
                probs = drafter.probs(guess)
                torch.testing.assert_close(guess.probs, probs, rtol=1e-5, atol=1e-4)
                surprises += sum(token != int(row.argmax()) for token, row in zip(guess.tokens, probs, strict=True))
                checked += 1
    assert checked == 8 and surprises > 3


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3, speculators", "p-eagle", "z-lab", "z-lab, sliding", "lilicorr", "dspark, speculators", *MTP]
)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunked_prefill_changes_nothing(make: Make, name: str, chunk: int) -> None:
    drafter = make(name)
    engine = drafter.run(num_speculative_tokens=4)
    engine.add("a", text(1, 17))
    for _ in range(-(-17 // chunk)):
        check(drafter, engine.step(accept(0), chunk=chunk))  # a last chunk of one token has a guess behind it already
    assert check(drafter, engine.step(accept(1))) == 1
    assert check(drafter, engine.step(accept(4))) == 1


@pytest.mark.parametrize("name", ["eagle", "eagle3", "z-lab"])
def test_a_small_ingestion_budget_only_delays(make: Make, name: str) -> None:
    drafter = make(name)
    engine = drafter.begun(prompt=text(1, 17))
    checked = sum(check(drafter, engine.step(accept(1), ingest=4)) for _ in range(8))
    assert checked == 3  # 17 entries and one more each step, four a step: behind for five steps


@pytest.mark.parametrize(
    "name",
    [*("eagle", "eagle3, NVIDIA", "eagle3, latent attention", "p-eagle"), *("z-lab, sliding", "lilicorr", "dspark, rnn", *MTP)],
)
@pytest.mark.parametrize("asks", [False, True])
def test_prefix_cache_hits_change_nothing(make: Make, name: str, asks: bool) -> None:
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
    assert check(drafter, engine.step(accept(3))) == 3
    assert check(drafter, engine.step(accept(4))) == 3
    engine.proposer.forget("a")
    del engine.requests["a"]
    assert check(drafter, engine.step(accept(0))) == 2


@pytest.mark.parametrize("name", ["eagle3, qwen3", "z-lab, causal", "lilicorr", "dspark", "domino", "xpress", *MTP])
def test_the_order_of_the_batch_changes_nothing(make: Make, name: str) -> None:
    def run(order: Sequence[str]) -> list[dict[str, Guess]]:
        engine = drafter.run(num_speculative_tokens=4)
        for i, row in enumerate("abc"):
            engine.add(row, text(i, 5 + 4 * i))
        return [engine.step(accept(step), order=order) for step in range(4)]

    drafter = make(name)
    for one, two in zip(run("abc"), run("cab"), strict=True):
        assert {row: guess.tokens for row, guess in one.items()} == {row: guess.tokens for row, guess in two.items()}
        for row in one:
            assert one[row].confidence == pytest.approx(two[row].confidence, abs=1e-5)


@pytest.mark.parametrize("name", ["eagle", "gumiho", "eagle3", "speculators, sliding", *MTP])
@pytest.mark.parametrize("asks", [(False,) * 5, (True,) * 5, (True, False, True)], ids=["reading", "not asked", "now and then"])
def test_steps_without_guesses_are_made_up_for(make: Make, name: str, asks: Sequence[bool]) -> None:
    """k = 0 for a while, with the drafter reading along or not asked at all."""
    drafter = make(name)
    engine = drafter.begun()
    check(drafter, engine.step(accept(2)))
    for asked in asks:
        assert not engine.step(accept(0), ceiling=0, asks=asked)["a"].tokens
    assert check(drafter, engine.step(accept(4))) == 1
    assert check(drafter, engine.step(accept(0), ceiling=2), 2) == 1


@pytest.mark.parametrize("name", ["eagle3, speculators", "z-lab"])
@pytest.mark.parametrize("count", [0, 4])
def test_total_rejection_and_full_acceptance(make: Make, name: str, count: int) -> None:
    drafter = make(name)
    engine = drafter.begun(prompt=text(1, 6))
    for step in range(5):
        assert check(drafter, engine.step(accept(count, then=step))) == 1
    assert len(engine.requests["a"].tokens) == 6 + 1 + 5 * (count + 1)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", ["eagle", "gumiho", "eagle3", "z-lab, sliding"])
def test_dropped_states_mean_a_new_start_behind_them(make: Make, name: str, execution: Execution) -> None:
    """A drafter that is not asked keeps 256 states; what it guesses later it guesses from those on."""
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=4)
    engine.add("a", text(1, 300))
    for _ in range(3):
        engine.step(accept(0), chunk=100, asks=False)
    for count in (2, 1):
        assert_as_reference(drafter, engine.step(accept(count))["a"], 4, first=300 - 256)
    assert engine.filled["a"] == 0  # no one else may take these blocks for filled


@pytest.mark.parametrize("name", ["eagle3", "z-lab", "deepseek"])
def test_preempted_requests_start_anew(make: Make, name: str) -> None:
    drafter = make(name)
    engine = drafter.begun()
    engine.step(accept(2))
    engine.proposer.forget("a")
    before = engine.requests.pop("a")
    engine.add("a", before.tokens)
    engine.step(accept(0))
    assert check(drafter, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", ["eagle3", "z-lab"])
def test_positions_reach_as_far_as_the_targets(make: Make, name: str) -> None:
    """All of these drafters say max_position_embeddings 64."""
    assert make(name).load().executors[0].max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *[("eagle3, speculators", 3), ("eagle", 5)],
        *[("speculators", 3), ("z-lab", 5), ("dspark", 6), ("domino", 6), ("domino, masks", 5), ("xpress", 5)],
    ],
)
def test_k_is_the_configs_else_the_checkpoints_else_a_block_or_five(make: Make, name: str, count: int) -> None:
    drafter = make(name)
    assert drafter.open().max_tokens == count
    assert drafter.open(num_speculative_tokens=2).max_tokens == 2


@pytest.mark.parametrize(
    "name",
    ["p-eagle", "eagle3", "z-lab", "z-lab, sliding", "lilicorr", "dspark", "domino", "xpress", "xpress, DFlash 2"],
)
def test_only_what_is_guessed_comes_from_a_device(write: Write, name: str) -> None:
    drafter = write(name)
    play = drafting(drafter, {"a": text(1, 9), "b": text(2, 3)}, lambda: at_random(0))
    copied = compare(play, pretended_target).to_host
    assert max(copied, default=0) < drafter.spec.vocab or name == "dspark", "scores or states came to the host"  # DSpark's heads are there
