"""Real engines on a tiny model: what turns count is what happened, and cores that share weights and caches do not disturb each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken.engine.bench.speculation import Bench, Effort, Method
from foretoken.engine.bench.speculation_figures import OFF, Setting
from foretoken.engine.bench.speculation_turn import Step
from foretoken.engine.errors import ConfigError

OPTIONS = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": 64}
SAYS = [[{"role": "user", "content": text}] for text in ("one two one two one", "red, green, blue", "The quick brown fox")]
EFFORT = Effort(max_tokens=12, rounds=1, ignore_eos=True)


@pytest.fixture(scope="module")
def bench(tiny_target: Path) -> Iterator[Bench]:
    draft = {"method": "draft_model", "model": str(tiny_target), "quantization": "none"}
    with Bench(str(tiny_target), Method("draft_model", (draft,)), (1, 3), 2, OPTIONS) as opened:
        yield opened
        opened.engine.core.check()


def test_every_length_and_adaptive_can_be_tried(bench: Bench) -> None:
    assert bench.settings == (Setting("draft_model", 1), Setting("draft_model", 3), Setting("draft_model", 3, adaptive=True))


def test_a_turn_counts_what_happened(bench: Bench) -> None:
    prompts = bench.read(SAYS, EFFORT.max_tokens)
    shown: list[Step] = []
    turn = bench.turn(Setting("draft_model", 3), prompts, 2, EFFORT, shown.append)
    assert tuple(shown) == turn.steps
    assert turn.tokens == 36 and [len(answer.token_ids) for answer in turn.answers] == [12] * 3
    assert sum(step.tokens for step in turn.steps) == 36
    assert sum(step.passes for step in turn.steps) == sum(answer.passes for answer in turn.answers)
    assert sum(step.drafted for step in turn.steps) == sum(answer.drafted for answer in turn.answers) > 0
    assert sum(step.accepted for step in turn.steps) == sum(answer.accepted for answer in turn.answers)
    assert max(step.passes for step in turn.steps) == 2, "never more than were allowed at a time"
    assert not turn.steps[0].decodes and turn.decoding and all(step.decodes for step in turn.decoding)
    assert all(0 < answer.first_s < answer.seconds <= turn.seconds for answer in turn.answers)
    assert 0 < turn.decode_share < 1
    for step in turn.steps:
        assert step.target_s > 0 and step.draft_s >= 0 and step.bookkeeping_s > 0
    assert any(f"accepted {step.accepted}/{step.drafted}" in step.describe() for step in turn.decoding if step.drafted)
    assert turn.steps[0].describe().endswith("(prompt)")


def test_a_perfect_draft_is_accepted_and_no_answer_changes(bench: Bench) -> None:
    """The draft is the target itself."""
    prompts = bench.read(SAYS, EFFORT.max_tokens)
    turns: list[None] = []
    found = bench.measure(bench.settings, prompts, 2, EFFORT, lambda: turns.append(None))
    assert len(turns) == 2 * (1 + len(bench.settings)), "no speculation has its turns, too"
    assert [f.setting for f in found] == list(bench.settings) and all(f.concurrency == 2 and f.same_answers == 1.0 for f in found)
    one, three, _ = found
    assert one.acceptance_rate == three.acceptance_rate == 1.0
    assert one.mu == pytest.approx(1.0, abs=0.2) and three.mu > 1.5 and three.acceptance_per_position == (1.0, 1.0, 1.0)
    assert one.guesses < three.guesses <= 3
    assert one.draft_cost_ratio > 0 and one.verify_cost_ratio > 0


def test_sampled_answers_do_not_change_either(bench: Bench) -> None:
    prompts = bench.read(SAYS, EFFORT.max_tokens)
    (found,) = bench.measure(bench.settings[1:2], prompts, 1, Effort(12, 2, temperature=1.0, ignore_eos=True))
    assert found.same_answers == 1.0 and found.rounds == 2


def test_no_turn_learns_from_another_one(tiny_target: Path) -> None:
    """Suffix decoding would find the whole answer of the turn before."""
    with Bench(str(tiny_target), Method("suffix", ({"method": "suffix"},)), (4,), 1, OPTIONS) as bench:
        prompts = bench.read(SAYS[:1], EFFORT.max_tokens)
        first, second = (bench.turn(bench.settings[0], prompts, 1, EFFORT) for _ in range(2))
        assert first.answers[0].drafted == second.answers[0].drafted
        plain = bench.turn(OFF, prompts, 1, EFFORT)
        assert plain.answers[0].drafted == 0 and plain.answers[0].token_ids == first.answers[0].token_ids
        assert bench.fault is None


def test_prompts_that_do_not_fit_are_left_out(bench: Bench) -> None:
    long = [{"role": "user", "content": "word " * 600}]
    assert len(bench.read([*SAYS, long], 12)) == 3
    with pytest.raises(ConfigError, match="lower --max-tokens"):
        bench.read([long], 12)


@pytest.mark.parametrize(
    ("entries", "config", "one_length"),
    [
        (({"method": "ngram"},), [{"method": "ngram", "num_speculative_tokens": 5}], False),
        (({"method": "medusa"},), [{"method": "medusa"}], False),
        (({"method": "ngram", "num_branches": 2},), [{"method": "ngram", "num_branches": 2}], True),
        (({"method": "suffix"}, {"method": "ngram"}), [{"method": m, "num_speculative_tokens": 5} for m in ("suffix", "ngram")], True),
    ],
)
def test_what_the_engine_is_told(entries: tuple[dict[str, Any], ...], config: list[dict[str, Any]], one_length: bool) -> None:
    method = Method("it", entries)
    assert method.config(5) == config and method.has_one_length == one_length
