"""The overhead bench measures what it says: real steps with real drafts, and no forward pass."""

import pytest

from foretoken.engine.bench.overhead import CASES, measure, weighed
from foretoken.engine.request import SamplingParams


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case[0])
def test_drafts_are_right_and_all_tokens_counted(case: tuple) -> None:
    name, rows, k, params = case
    result = measure(name, rows, k, params, steps=20)
    assert result.tokens_per_step == k + 1, "the instant network counts in a circle: every guess of a full draft is right"
    # The promise is 0.3 ms; a busy machine may be much slower, but not by this much.
    assert 0 < result.median_ms < 15


@pytest.mark.parametrize("rows", [1, 128])
def test_deciding_and_learning_are_a_small_part_of_a_step(rows: int) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    results = [measure("adaptive", rows, 5, greedy, steps=20, costs=weighed(rows)) for _ in range(3)]
    assert results[0].tokens_per_step > 3, "every guess is right and pays"
    # The promise is 0.05 ms at one row and 0.5 ms at 128; a busy machine may be much slower, but not by this much.
    assert 0 < min(result.controller_ms for result in results) < (1.0 if rows == 1 else 6.0)
