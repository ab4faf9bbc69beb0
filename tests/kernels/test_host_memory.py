from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch

from foretoken.kernels.host_memory import MOST_NUMBERS, SLOT_NUMBERS, HostMemory

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_launch_reads_what_it_is_lent_and_is_heard(is_in_place: bool) -> None:
    with torch.inference_mode():
        memory = HostMemory(CPU, is_in_place=is_in_place)
    slot = memory.slot(4)
    with memory.lent(np.arange(4, dtype=np.int32)) as (numbers, _):
        slot.numbers[:4] = numbers[:4] + 5
    slot.sent()
    assert slot.said(2, 2).get().tolist() == [[5, 6], [7, 8]]


def test_arrays_stand_one_behind_the_other() -> None:
    memory = HostMemory(CPU)
    first, second = np.arange(6, dtype=np.int32).reshape(2, 3), np.array([9, 8], np.int32)
    with memory.lent(first, second[:0], second) as (numbers, starts):
        assert starts == [0, 6, 6] and numbers[:8].tolist() == [0, 1, 2, 3, 4, 5, 9, 8]


def test_very_many_are_lent_in_memory_of_their_own() -> None:
    memory = HostMemory(CPU, num_slots=1)
    many, few = np.arange(MOST_NUMBERS, dtype=np.int32), np.array([7, 8], np.int32)
    with memory.lent(few, many) as (numbers, starts):
        assert starts == [0, 2] and numbers[:2].tolist() == [7, 8] and numbers[2:].tolist() == many.tolist()
    assert len(memory.slot(1).array) < MOST_NUMBERS


def test_what_is_lent_stays_while_others_are() -> None:
    memory = HostMemory(CPU, num_slots=3)
    lent: list[torch.Tensor] = []
    for turn in range(3):
        with memory.lent(np.full(4, turn, np.int32)) as (numbers, _):
            lent.append(numbers)
    assert [numbers[:4].tolist() for numbers in lent] == [[turn] * 4 for turn in range(3)]


def test_a_slot_grows_with_what_it_holds() -> None:
    memory = HostMemory(CPU, num_slots=1)
    many = np.arange(3 * SLOT_NUMBERS, dtype=np.int32)
    with memory.lent(many) as (numbers, _):
        assert numbers[: len(many)].tolist() == many.tolist()
    large = memory.slot(2).numbers
    assert len(large) >= len(many), "it would be made anew each time"


def test_threads_never_have_the_same_slot() -> None:
    """Two engines of one process on one device."""
    memory = HostMemory(CPU, num_slots=4000)
    found: list[list[int]] = [[], []]

    def use(own: list[int]) -> None:
        own += [id(memory.slot(1)) for _ in range(2000)]

    threads = [Thread(target=use, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found[0], *found[1]}) == 4000


def test_what_was_said_is_read_once_others_may_write() -> None:
    memory = HostMemory(CPU, num_slots=2)
    slot = memory.slot(6)
    slot.numbers[:6] = torch.arange(6)
    said = slot.said(2, 3)
    found = said.get()
    slot.numbers.zero_()
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
    for _ in range(2):
        memory.slot(1)
    with pytest.raises(RuntimeError, match="too late"):
        said.get()
