"""Batches of the device put into those of fixed size by the kernel, against the reference: padding, and what was there before."""

from dataclasses import fields, replace

import pytest
import torch
from decoding import ragged
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.layout import RaggedBatch
from foretoken.kernels.static_batch import BlockTables, Rung, StaticBatch
from foretoken.kernels.triton import static_batch


def batch_of(seed: int, width: int) -> RaggedBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (1 + seed % 4,), generator=generator).tolist()

    def numbers(most: int, count: int) -> list[int]:
        return torch.randint(most, (count,), generator=generator).tolist()

    batch = ragged([(numbers(90, n), n % 3, numbers(9, width)) for n in lengths], all_logits=seed % 2 == 0)
    more = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    firsts, adapters = more % 2 if seed % 3 == 0 else None, more if seed % 5 == 0 else None
    tree_mask = torch.randint(2**40, batch.tree_mask.shape, generator=generator)
    return replace(batch, first_places=firsts, adapters=adapters, tree_mask=tree_mask)


@pytest.mark.parametrize(("has_firsts", "has_adapters"), [(True, False), (True, True)])
def test_the_kernel_takes_what_the_reference_does(has_firsts: bool, has_adapters: bool) -> None:
    rung = Rung(400, 7, 400, has_firsts)
    found, expected = (StaticBatch(rung, BlockTables(9, 3000, torch.device(at)), 16, has_adapters) for at in (DEVICE, "cpu"))
    for seed in range(8):
        batch = batch_of(seed, 64 if seed % 3 else 2500)  # more blocks than a program copies
        values = {f.name: getattr(batch, f.name) for f in fields(batch)}
        there = replace(batch, **{name: value.to(DEVICE) for name, value in values.items() if isinstance(value, Tensor)})
        expected.take_by_ops(batch)
        static_batch.take(found.batch, there)
        for name in (field.name for field in fields(RaggedBatch)):
            value, right = getattr(found.batch, name), getattr(expected.batch, name)
            assert (value.cpu().tolist() == right.tolist()) if isinstance(right, Tensor) else (value == right), name


def test_first_places_are_left_out_where_there_is_no_room_for_them() -> None:
    static = StaticBatch(Rung(8, 2, 8), BlockTables(2, 4, torch.device(DEVICE)), 16)
    static_batch.take(static.batch, StaticBatch(Rung(4, 2, 4), BlockTables(2, 4, torch.device(DEVICE)), 16).batch)
    assert static.batch.first_places is None and static.batch.seq_lens.tolist() == [0, 0] and static.batch.slot_mapping.tolist() == [-1] * 8
