"""The target's states on their way to a drafter: which are kept, for how long, and where they come from."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from elsewhere import Elsewhere, here, there
from torch import Tensor

from foretoken.proposers.base import Feedback
from foretoken.proposers.features import MOST_NEW_EDGES, MOST_STEPS, Features

BOUNDARIES = (5, 2)  # columns come in this order
BLOCK = 4


def made(max_buffered: int = 256) -> Features:
    return Features(BOUNDARIES, 4, num_blocks=9, block_size=BLOCK, max_buffered=max_buffered)


def state(boundary: int, position: int) -> list[float]:
    return [boundary + position / 100, boundary]


def states(start: int, stop: int) -> Tensor:
    """What the columns of positions start:stop should be."""
    return torch.tensor([state(5, p) + state(2, p) for p in range(start, stop)]).view(-1, 4)


def step(
    features: Features,
    *rows: tuple[str, int, int, int, Sequence[int]],
    finished: Sequence[str] = (),
    put: Callable[[Tensor], Tensor] = lambda states: states,
) -> None:
    """rows: (name, first position, known tokens, draft tokens, accepted nodes). A node's state is that of the position where it ends
    up if it is accepted; others have states that nobody should ever see."""
    hidden: dict[int, list[list[float]]] = {boundary: [] for boundary in BOUNDARIES}
    starts = [0]
    for _, first, known, drafted, accepted in rows:
        positions = [*range(first, first + known), *([-1] * drafted)]
        for depth, node in enumerate(accepted):
            positions[known + node] = first + known + depth
        for boundary, column in hidden.items():
            column.extend(state(boundary, p) if p >= 0 else [torch.nan] * 2 for p in positions)
        starts.append(starts[-1] + known + drafted)
    features.observe(
        Feedback(
            [row[0] for row in rows],
            [first + known + len(accepted) for _, first, known, _, accepted in rows],
            [row[3] for row in rows],
            [row[4] for row in rows],
            [[1] for _ in rows],
            [row[0] in finished for row in rows],
            {boundary: put(torch.tensor(column)) for boundary, column in hidden.items()},
            starts,
            [row[2] for row in rows],
        )
    )
    features.check()


def test_states_of_committed_positions_only_side_by_side() -> None:
    features = made()
    step(features, ("chain", 0, 3, 0, []), ("tree", 0, 2, 0, []))
    step(features, ("chain", 3, 1, 4, [0, 1]), ("tree", 2, 1, 5, [1, 4]))
    step(features, ("chain", 6, 1, 2, []), ("tree", 5, 1, 2, [1]))
    for name, length in (("chain", 7), ("tree", 7)):
        assert features.span(name) == (0, length)
        assert torch.equal(features.rows(name, 0, length), states(0, length))
        assert torch.equal(features.rows(name, 2, 5), states(2, 5))
    assert features.rows("chain", 4, 4).shape == (0, 4)


def test_before_the_text_there_are_zeros() -> None:
    features = made()
    step(features, ("r", 0, 3, 0, []))
    assert torch.equal(features.rows("r", -1, 2), torch.cat([torch.zeros(1, 4), states(0, 2)]))
    assert torch.equal(features.rows("fresh", -1, 0), torch.zeros(1, 4))


def test_what_was_read_is_dropped_and_what_was_not_is_bounded() -> None:
    features = made(max_buffered=6)
    step(features, ("r", 0, 4, 0, []))
    features.drop_before("r", 3)
    assert features.span("r") == (3, 4) and torch.equal(features.rows("r", 3, 4), states(3, 4))
    for position in range(4, 14):
        step(features, ("r", position, 1, 0, []))
    assert features.span("r") == (8, 14) and torch.equal(features.rows("r", 8, 14), states(8, 14))
    with pytest.raises(AssertionError, match="not here"):
        features.rows("r", 7, 9)
    step(features, ("r", 14, 20, 0, []))  # a step's own states are never cut
    start, stop = features.span("r") or (0, 0)
    assert stop == 34 and start <= 14 and torch.equal(features.rows("r", start, stop), states(start, stop))
    features.drop_before("r", 99)
    assert features.span("r") == (34, 34)
    step(features, ("r", 34, 2, 0, []))
    assert features.span("r") == (34, 36)


def test_a_gap_begins_anew_and_finished_rows_are_left_alone() -> None:
    features = made()
    step(features, ("r", 0, 3, 0, []), ("gone", 0, 3, 0, []), finished=["gone"])
    step(features, ("r", 8, 2, 0, []))  # taken back, and found in the prefix cache up to 8
    assert features.span("r") == (8, 10) and features.span("gone") is None
    features.forget("r")
    features.forget("r")
    assert features.span("r") is None
    features.observe(Feedback(["r"], [1], [0], [[]], [[1]], [False]))  # a step for which nobody wanted states
    assert features.span("r") is None


def test_each_blocks_last_state_outlives_its_request() -> None:
    features = made()
    step(features, ("r", 0, 10, 0, []))
    features.keep_edges("r", [7, 3, 5])
    features.forget("r")
    for block, position in ((7, 3), (3, 7)):
        step(features, ("other", position + 1, 3, 0, []))
        features.prepend_edge("other", block)
        assert features.span("other") == (position, position + 4)
        assert torch.equal(features.rows("other", position, position + 4), states(position, position + 4))
        features.forget("other")
    assert Features.bytes_per_block(4) == 16


@pytest.mark.parametrize("drafted", [0, 2])
def test_rows_of_many_requests_of_one_step_come_at_once(drafted: int) -> None:
    """In any order; those whose states lie elsewhere, or before the text, as well."""
    features, names = made(), [f"r{i}" for i in range(8)]
    step(features, *[(name, 0, 3, drafted, [0] * (drafted > 0)) for name in names], put=there)
    stop = 3 + (drafted > 0)
    for order in (names, names[::-1]):
        with Elsewhere() as device:
            found = features.rows_of_all([*[(name, 0, stop) for name in order], ("r0", 1, 1)])
        assert torch.equal(here(found), torch.cat([states(0, stop)] * 8)) and len(device.calls) < 20
    with Elsewhere():
        step(features, ("r0", stop, 1, 0, []), ("r1", stop, 1, 0, []), put=there)
        found = features.rows_of_all([("r0", 1, stop + 1), ("r1", -1, 2), ("r2", 1, 1), ("r3", 0, 2)])
    assert torch.equal(here(found), torch.cat([states(1, stop + 1), torch.zeros(1, 4), states(0, 2), states(0, 2)]))
    assert features.rows_of_all([("r5", 1, 1)]).shape == (0, 4)


def reading(position: int, states: Tensor) -> Feedback:
    """One row's step that has these states, of one boundary, on a device."""
    count = len(states)
    return Feedback(["r"], [position + count], [0], [[]], [[1]], [False], {0: there(states)}, [0, count], [count])


def test_a_small_steps_states_stay_as_they_are() -> None:
    """On a device too: a pass leaves them in memory of their own."""
    features = Features((0,), 2, 9, BLOCK)
    with Elsewhere() as device:
        feedback = reading(0, torch.randn(3, 2))
        features.observe(feedback)
        assert features.span("r") == (0, 3) and features._held["r"].pieces[0].columns[0] is feedback.hidden[0]
        assert not device.to_host and not device.to_device


def test_edges_come_from_a_device_many_at_a_time() -> None:
    """Those that have not come yet are found there."""
    count = MOST_NEW_EDGES - 1
    features = Features((0,), 3, 3 * count, BLOCK, max_buffered=10**6)
    states, table = torch.randn(2 * count * BLOCK, 3), list(reversed(range(2 * count)))
    with Elsewhere() as device:
        for half, part in enumerate(states.chunk(2)):
            features.observe(reading(half * len(part), part))
            features.keep_edges("r", table)
            assert len(device.to_host) == half
            features.drop_before("r", (half + 1) * len(part))
        fresh = torch.randn(BLOCK, 3)
        features.observe(reading(len(states), fresh))
        features.keep_edges("r", [*table, 5])  # a block that had another's
        features.forget("r")
        for block, expected in ((0, states[-1]), (2 * count - 1, states[3]), (5, fresh[-1])):
            features.observe(reading(BLOCK, torch.zeros(2, 3)))
            features.prepend_edge("r", block)
            assert torch.equal(here(features.rows("r", BLOCK - 1, BLOCK))[0], expected)
            features.forget("r")
        assert len(device.to_host) == 1


def test_who_reads_nothing_does_not_hold_everybodys_states_on_a_device() -> None:
    features = Features((0,), 2, 99, BLOCK, max_buffered=50)
    states = torch.randn(90, 2)
    with Elsewhere():
        for position in range(90):
            features.observe(reading(position, states[position : position + 1]))
            features.check()
            shared = [*features._steps, *[piece.columns for held in features._held.values() for piece in held.pieces]]
            assert sum(columns[0].shape[0] for columns in shared) <= 50 + 2 * MOST_STEPS
        assert torch.equal(here(features.rows("r", 40, 90)), states[40:])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_far", [False, True], ids=["here", "there"])
def test_any_rows_in_any_steps_read_now_and_then(is_far: bool, seed: int) -> None:
    """Prompts, chains, trees, gaps; some ask in every step, some seldom, some never."""
    dice, features = random.Random(seed), made(max_buffered=40)
    spans: dict[str, tuple[int, int]] = {}
    with Elsewhere():
        for _ in range(120):
            rows: list[tuple[str, int, int, int, Sequence[int]]] = []
            for name in dice.sample("abcdefgh", dice.choice([1, 7, 8, 8])):
                first = spans.get(name, (0, 0))[1] + 5 * (dice.random() < 0.02)
                drafted = dice.choice([0, 0, 0, 3])
                accepted = dice.choice([[], [0], [0, 1], [0, 2]]) if drafted else []
                rows.append((name, first, dice.choice([1] * 30 + [9, 70, 300]), drafted, accepted))
            gone = [name for name, *_ in rows if dice.random() < 0.01]
            step(features, *rows, finished=gone, put=there if is_far else lambda states: states)
            for name, first, known, _, accepted in rows:
                start, stop = spans.get(name, (first, first))
                count = known + len(accepted)
                spans[name] = (first if stop != first else max(start, stop - max(0, 40 - count)), first + count)
            for name in gone:
                features.forget(name)
                del spans[name]
            for name, (start, stop) in spans.items():
                if dice.random() < {"a": 1, "b": 1, "c": 0.1}.get(name, 0.01):
                    assert features.span(name) == (start, stop)
                    assert torch.equal(here(features.rows(name, start, stop)), states(start, stop))
                    read = dice.randint(start, stop)
                    features.drop_before(name, read)
                    spans[name] = (read, stop)
            features.check()
        for name, (start, stop) in spans.items():
            assert features.span(name) == (start, stop)
            assert torch.equal(here(features.rows(name, start, stop)), states(start, stop))


def test_states_that_nobody_asks_for_cost_a_device_next_to_nothing() -> None:
    """And what is shared does not stay for the few that are left."""
    features, names = made(max_buffered=3 * MOST_STEPS), [f"r{i}" for i in range(40)]
    with Elsewhere() as device:
        for position in range(10 * MOST_STEPS):
            step(features, *[(name, position, 1, 1, []) for name in names], put=there)
        assert len(device.calls) < 10 * MOST_STEPS and len(device.to_device) < 10
        sizes = {id(piece.columns): piece.columns[0].shape[0] for held in features._held.values() for piece in held.pieces}
        assert sum(sizes.values()) <= len(names) * 4 * MOST_STEPS
        for name in names[1:]:
            features.forget(name)
        for position in range(10 * MOST_STEPS, 11 * MOST_STEPS + 1):
            step(features, (names[0], position, 1, 0, []), put=there)
        assert sum(piece.columns[0].shape[0] for piece in features._held[names[0]].pieces) <= 5 * MOST_STEPS
        start, stop = features.span(names[0]) or (0, 0)
        assert stop - start == 3 * MOST_STEPS and stop == 11 * MOST_STEPS + 1
        assert torch.equal(here(features.rows(names[0], start, stop)), states(start, stop))
