"""LiLiCorr's lattice where rows differ in what they know of the target."""

from dataclasses import replace
from pathlib import Path

import pytest
from block_checkpoints import PUBLISHED, Drafter
from block_reference import Reference
from pretended_engine import EXECUTIONS, Guess, accept, text

from foretoken.kernels.execution import Execution
from foretoken.proposers.base import Draft, DraftContext

NAMES = ["lilicorr", "lilicorr, own width"]


def assert_as_reference(guess: Guess, reference: Reference, count: int, has_anchor: bool = True) -> None:
    assert len(guess.tokens) == count
    probs = reference.probs(guess.text, count, guess.tokens[: count - 1], has_anchor=has_anchor)
    assert guess.tokens == probs.argmax(-1).tolist()
    assert guess.confidence == pytest.approx(probs.amax(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("without", [1, 2])
def test_a_row_that_reads_nothing_has_no_anchor(tmp_path: Path, name: str, execution: Execution, without: int) -> None:
    """Asked a second time before anything new was committed, alone or beside a row that reads."""
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    engine = drafter.run(execution, num_speculative_tokens=4)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 6))
    engine.step(accept(0))
    propose = engine.proposer.propose

    def twice(context: DraftContext) -> Draft:
        propose(replace(context, rows=context.rows[:without]))
        return propose(context)

    engine.proposer.propose = twice  # type: ignore[method-assign]
    guesses = engine.step(accept(1))
    assert_as_reference(guesses["a"], drafter.reference, 4, has_anchor=False)
    assert_as_reference(guesses["b"], drafter.reference, 4, has_anchor=without < 2)
    engine.proposer.propose = propose  # type: ignore[method-assign]
    for guess in engine.step(accept(0)).values():
        assert_as_reference(guess, drafter.reference, 4)


def test_the_anchor_shows(tmp_path: Path) -> None:
    """Else the tests above would say little."""
    reference = Drafter.write(PUBLISHED["lilicorr"], tmp_path).reference
    one, two = (reference.probs(text(1, 9), 4, (1, 2, 3), has_anchor=has_anchor) for has_anchor in (True, False))
    assert (one[0] - two[0]).abs().max() > 0.05
