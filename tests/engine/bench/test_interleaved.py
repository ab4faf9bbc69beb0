from types import SimpleNamespace

import pytest

from foretoken.engine.bench import interleaved
from foretoken.engine.bench.interleaved import Series, Spread, seconds_of, take_turns, timed


def test_ratios_hold_on_a_machine_that_slows_down() -> None:
    speed = 1.0

    def case(cost: float) -> float:
        nonlocal speed
        return cost * speed

    def slow() -> None:
        nonlocal speed
        speed *= 1.1

    found = take_turns({"one": lambda: case(1.0), "three": lambda: case(3.0)}, rounds=9, on_turn=lambda: None)
    assert found["three"].over(found["one"]).median == 3.0
    drifting = take_turns({"one": lambda: case(1.0), "three": lambda: case(3.0)}, rounds=9, on_turn=slow)
    assert drifting["one"].values[-1] > 3 * drifting["one"].values[0]  # absolute figures say nothing ...
    assert drifting["three"].over(drifting["one"]).median == pytest.approx(3.0, rel=0.11)  # ... the ratio does


def test_everybody_has_a_turn_in_each_round_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def case(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = take_turns({name: lambda name=name: case(name) for name in "abc"}, rounds=2)
    assert "".join(order) == "cbaabccba"
    assert {name: series.values for name, series in found.items()} == {"a": (4.0, 9.0), "b": (5.0, 8.0), "c": (6.0, 7.0)}


def test_spreads_and_rates() -> None:
    assert Spread.of((4.0,)) == Spread(4.0, 4.0, 4.0)
    assert Spread.of((1.0, 2.0, 3.0, 4.0, 5.0)) == Spread(3.0, 2.0, 4.0)
    assert Series((0.5, 0.25)).rate(2.0).values == (4.0, 8.0)
    assert Series((0.5, 0.25)).scaled(2.0).values == (1.0, 0.5)
    assert Series((1.0, 9.0, 4.0)).over(Series((1.0, 3.0, 2.0))).median == 2.0


def test_a_slot_is_filled_and_its_first_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, now = 0, 0.0
    monkeypatch.setattr(interleaved, "time", SimpleNamespace(perf_counter=lambda: now))

    def run() -> None:
        nonlocal runs, now
        now += 0.125 if runs else 9.0
        runs += 1

    assert seconds_of(run, at_least_s=0.5) == 0.125 and runs == 1 + 4
    assert timed(run) == 0.125
