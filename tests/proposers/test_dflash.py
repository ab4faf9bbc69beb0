"""What block drafters have of their own: a mask for each guess that is asked for, and tables of the target that are scaled or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from block_checkpoints import PUBLISHED, Drafter
from compared_guesses import assert_as_reference, check
from pretended_engine import EXECUTIONS, accept, at_random, text

from foretoken.kernels.execution import Execution

MakeDrafter = Callable[..., Drafter]


@pytest.fixture
def make(tmp_path: Path) -> MakeDrafter:
    def write(name: str, **target: Any) -> Drafter:
        return Drafter.write(PUBLISHED[name], tmp_path, **target)

    return write


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "name",
    [
        *("z-lab, sliding", "z-lab, narrow windows", "lilicorr", "lilicorr, own width", "dspark"),
        *("domino", "domino, masks", "xpress"),
    ],
)
def test_rows_of_one_batch_guess_as_many_as_they_may(make: MakeDrafter, name: str, execution: Execution) -> None:
    """Fewer guesses are fewer masks, whatever others guess."""
    drafter = make(name)
    engine = drafter.run(execution, num_speculative_tokens=5)
    for i, row in enumerate("abcd"):
        engine.add(row, text(i, 5 + 9 * i))
    engine.step(accept(0))
    choose = at_random(0)
    for ceilings in ([2, 5, 1, 3], [0, 1, 4, 9], [5, 5, 2, 1]):
        guesses = engine.step(choose, dict(zip("abcd", ceilings, strict=True)))
        for row, count in zip("abcd", ceilings, strict=True):
            assert_as_reference(drafter, guesses[row], min(count, 5))


@pytest.mark.parametrize("name", ["z-lab", "lilicorr"])
def test_a_shared_embedding_and_head_are_scaled_as_the_target_scales_them(make: MakeDrafter, name: str) -> None:
    drafter = make(name, embed_scale=2.5, logits_scale=0.5, softcap=4.0)
    engine = drafter.begun()
    assert check(drafter, engine.step(accept(2))) == 1


@pytest.mark.parametrize("name", ["speculators, sliding", "domino, speculators, masks"])
def test_speculators_trains_with_the_targets_tables_as_they_are(make: MakeDrafter, name: str) -> None:
    """It copies the numbers and calls nothing of the target, whatever that multiplies by."""
    drafter = make(name, embed_scale=2.5, logits_scale=0.5, softcap=4.0)
    drafter.reference = make(name).reference
    engine = drafter.begun()
    assert check(drafter, engine.step(accept(2))) == 1
