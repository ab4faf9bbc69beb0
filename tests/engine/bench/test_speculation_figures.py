import pytest
from speculation_figures import USUAL

from foretoken.engine.bench.speculation_figures import Setting, compare
from foretoken.engine.bench.speculation_turn import Answer, Step, Turn


def plain_turn(slowness: float = 1.0) -> Turn:
    """Two answers of 9 tokens one after the other: a prompt step and 8 decode steps each."""
    prompt = Step(False, 1, 1, 1, 0, 0, 0.004, 0.004, 0.0)
    decode = Step(True, 1, 1, 1, 0, 0, 0.0011 * slowness, 0.001 * slowness, 0.0)
    answer = Answer(list(range(9)), passes=9, first_s=0.004, seconds=0.004 + 8 * decode.seconds)
    return Turn(2 * answer.seconds, (prompt, *[decode] * 8) * 2, (answer, answer))


def speculative_turn(slowness: float = 1.0) -> Turn:
    """The same in 4 decode steps of 2 tokens, with 3 guesses each of which 1 is right."""
    prompt = Step(False, 1, 1, 1, 0, 0, 0.004, 0.004, 0.0)
    decode = Step(True, 1, 1, 2, 3, 1, 0.0017 * slowness, 0.0012 * slowness, 0.0003 * slowness)
    answer = Answer(
        list(range(9)), passes=5, drafts=4, drafted=12, accepted=4, kept=4, histogram=[0, 4],
        first_s=0.004, seconds=0.004 + 4 * decode.seconds,
    )
    return Turn(2 * answer.seconds, (prompt, *[decode] * 4) * 2, (answer, answer))


def test_costs_acceptance_and_speed_of_turns_side_by_side() -> None:
    slow = [1.0, 2.0, 1.0]
    f = compare(Setting("ngram", 3), 1, [plain_turn(s) for s in slow], [speculative_turn(s) for s in slow])
    assert f.mu == pytest.approx(1.0) and f.mean_accepted_length == pytest.approx(2.0) and f.guesses == pytest.approx(3.0)
    assert f.acceptance_rate == pytest.approx(1 / 3) and f.acceptance_per_position == (1.0,)
    assert f.draft_cost_ratio == pytest.approx(0.3) and f.verify_cost_ratio == pytest.approx(1.2)
    assert f.bookkeeping_ratio == pytest.approx(0.2) and f.plain_bookkeeping_ratio == pytest.approx(0.1)
    assert f.speedup.median == pytest.approx((0.004 + 8 * 0.0011) / (0.004 + 4 * 0.0017))
    assert f.decode_share == pytest.approx(8 * 0.0011 / (0.004 + 8 * 0.0011))
    assert f.same_answers == 1.0 and f.rounds == 3
    assert [r.tokens for r in f.requests] == [9, 9] and f.requests[0].speedup == pytest.approx(f.speedup.median)
    assert f.requests[0].mean_accepted_length == pytest.approx(9 / 5)


def test_the_factors_multiply_to_the_measured_speedup() -> None:
    f = compare(Setting("ngram", 3), 1, [plain_turn()], [speculative_turn()])
    factors = f.drafting_factor * f.verification_factor * f.bookkeeping_factor * f.rest_factor
    assert f.mean_accepted_length * factors == pytest.approx(f.speedup.median)
    of_steps = f.mean_accepted_length * f.drafting_factor * f.verification_factor * f.bookkeeping_factor
    assert of_steps == pytest.approx(2 * 0.0011 / 0.0017), "what steps alone would give"
    assert f.rest_factor < 1, "prompts are as slow as ever"


def test_costs_are_those_of_a_pass_where_a_step_has_several() -> None:
    one, rounds = speculative_turn(), speculative_turn()
    prompt, *decodes = rounds.steps[:5]
    several = Step(True, 4, 4, 8, 12, 4, *(sum(getattr(step, name) for step in decodes) for name in ("seconds", "target_s", "draft_s")))
    rounds = Turn(rounds.seconds, (prompt, several) * 2, rounds.answers)
    by_step, in_rounds = (compare(Setting("ngram", 3), 1, [plain_turn()], [turn]) for turn in (one, rounds))
    for name in ("draft_cost_ratio", "verify_cost_ratio", "bookkeeping_ratio", "predicted", "rest_factor"):
        assert getattr(in_rounds, name) == pytest.approx(getattr(by_step, name)), name


def test_formulas() -> None:
    assert USUAL.published == pytest.approx(3.4 / (3.4 * 0.1 + 1)), "a guess costs a tenth of a pass"
    assert USUAL.predicted == pytest.approx(3.4 / (0.3 + 1.2))
    free = compare(Setting("ngram", 3), 1, [plain_turn()], [plain_turn()])
    assert free.published == free.predicted == 1.0 and free.acceptance_rate is None and free.acceptance_per_position == ()


def test_other_answers_are_seen() -> None:
    other = speculative_turn()
    other.answers[0].token_ids[-1] += 1
    assert compare(Setting("ngram", 3), 1, [plain_turn()], [other]).same_answers == 0.0, "both answers are one object here"


def test_labels() -> None:
    assert Setting("ngram", 3).label == "ngram, k=3" and Setting("ngram", 7, adaptive=True).label == "ngram, adaptive"
